"""Lengths of samples: their files, the lengths that are traced, and the plan they give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from fsdptool.cli.app import run
from fsdptool.errors import ConfigError
from fsdptool.files.lengths import read_lengths
from fsdptool.files.values import load_schema
from fsdptool.planning import make_plan, plan_document, read_request
from fsdptool.planning.lengths import LongestSample, padded_length
from fsdptool.records.lengths import LengthCount, SampleLengths
from fsdptool.records.plan import Plan
from fsdptool.records.recipe import Data, ModelChoice, Recipe
from fsdptool.training.data.loader import TrimmedStack

MODEL = {
    **{"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 352, "vocab_size": 1000},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "3\n5\n\n3\n"),
        ("a.csv", "length,count\n5,1\n3,2\n0,9\n"),
        ("a.tsv", "3\t2\n5\t1\n"),
        ("a.json", '{"5": 1, "3": 2}'),
        ("b.json", "[3, 5, 3]"),
        ("a.jsonl", '{"input_ids": [1, 2, 3]}\n{"length": 5}\n{"input_ids": [4, 5, 6], "labels": [0]}\n'),
    ],
)
def test_lengths_are_read_from_what_people_have(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert list(read_lengths(file).items()) == [(3, 2), (5, 1)]


def test_lengths_are_read_from_a_folder_of_tokenised_text(tmp_path: Path) -> None:
    np.save(tmp_path / "input_ids.ends.npy", np.asarray([3, 6, 11], dtype=np.int64))
    assert read_lengths(tmp_path) == {3: 2, 5: 1}


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.txt", "3\nfive\n", "a.txt:2: 'five' is not a whole number"),
        ("a.txt", "-3\n", "a.txt:1: '-3' is not a whole number"),
        ("a.csv", "3,4,5\n", "a.csv:1: 3 columns"),
        ("a.csv", "99999999999,4\n", "a.csv:1: 99999999999 is not a length"),
        ("a.jsonl", '{"length": 3}\n{"text": "x"}\n', "a.jsonl:2: the row has neither"),
        ("a.jsonl", '{"length": 3}\n{\n', "a.jsonl:2: not JSON"),
        ("a.jsonl", '{"length": true}\n', "a.jsonl:1: 'True' is not a whole number"),
        ("a.json", "{\n  3: 4}", "double quotes (line 2, column 3)"),
        ("a.json", "7", "a.json: neither an object"),
        ("a.txt", "", "a.txt has no lengths"),
    ],
)
def test_bad_files_are_one_line_that_says_where(tmp_path: Path, name: str, text: str, place: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as failure:
        read_lengths(tmp_path / name)
    assert place in failure.value.message
    assert "\n" not in failure.value.message


def test_a_missing_file_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama3:8b", "--gpu", "H100-80GB-SXM", "--lengths", str(tmp_path / "none.csv")]
    assert run(command) == 2
    assert "none.csv: the file cannot be read" in " ".join(capsys.readouterr().err.split())


def test_percentiles_are_those_of_the_longest_of_several_samples() -> None:
    assert [padded_length(n, 100) for n in (1, 8, 9, 97, 500)] == [8, 8, 16, 100, 100]
    lengths = SampleLengths(tuple(LengthCount(length, 1) for length in range(1, 101)))
    one, four = (LongestSample(lengths, 100) for _ in range(2))
    assert [one.percentile(share, 1) for share in (0.4, 0.41, 0.96, 1)] == [40, 48, 96, 100]
    # Four samples are no longer than 80 with probability 0.8 ** 4.
    assert [four.percentile(share, 4) for share in (0.4, 0.41)] == [80, 88]
    found = dict(four.probabilities(4))
    assert sum(found.values()) == pytest.approx(1)
    assert found[8] == pytest.approx(0.08**4)
    assert found[100] == pytest.approx(1 - 0.96**4)


def made(file: Path, **options: Any) -> Plan:
    """The plan of a small model on two GPUs."""
    chosen = {"gpu": "RTX4090-24GB", "gpus": 2, "micro_batch": 4, "search": False, **options}
    if "recipe" not in chosen:
        chosen |= {"reference": "llama3:8b", "overrides": MODEL}
    return make_plan(read_request({**chosen, "lengths": file}))


def histogram(path: Path, *, tail: int = 0) -> Path:
    """Samples of 20 to 64 tokens, and one in a hundred of ``tail``."""
    file = path / f"tail-{tail}.csv"
    file.write_text("20,500\n60,480\n" + (f"{tail},10\n" if tail else ""))
    return file


@pytest.mark.slow
def test_one_length_is_the_plan_without_lengths(tmp_path: Path) -> None:
    """The same figures."""
    file = tmp_path / "constant.txt"
    file.write_text("64\n" * 30)
    plan = made(file, sequence_length=64)
    unpacked = Recipe(ModelChoice("llama3:8b", overrides=MODEL), data=Data(packing=False, padding="longest"))
    options: Any = {"recipe": unpacked, "sequence_length": 64, "gpu": "RTX4090-24GB", "gpus": 2}
    without = make_plan(read_request({**options, "micro_batch": 4, "search": False}))
    assert plan.candidates == without.candidates
    assert plan.lengths is not None
    assert plan.lengths.padding_share == 0
    assert plan.lengths.worst_allocated_bytes == without.candidates[0].allocated_peak_bytes
    assert [item.length for item in plan.lengths.traced] == [64]
    assert plan.lengths.traced[0].reserved_peak_bytes == without.candidates[0].reserved_peak_bytes
    assert plan.lengths.tokens_per_second == pytest.approx(without.candidates[0].tokens_per_second)


@pytest.mark.slow
def test_a_longer_tail_is_a_larger_worst_step_and_equal_inputs_are_equal_plans(tmp_path: Path) -> None:
    short, long = made(histogram(tmp_path, tail=128)), made(histogram(tmp_path, tail=512))
    assert short.lengths is not None and long.lengths is not None
    assert (long.lengths.worst_allocated_bytes or 0) > (short.lengths.worst_allocated_bytes or 0)
    assert long.lengths.worst_length == 512
    assert sum(item.share for item in long.lengths.traced) == pytest.approx(1)
    assert 0 < short.lengths.padding_share < long.lengths.padding_share < 1
    again = made(histogram(tmp_path, tail=512))
    assert again.lengths == long.lengths
    document = plan_document(long)
    jsonschema.validate(document, load_schema("plan"))
    assert [item["length"] for item in document["lengths"]["traced"]] == [64, 512]


def test_segments_of_fixed_size_are_a_finding_where_lengths_vary(tmp_path: Path) -> None:
    clusters = tmp_path / "clusters.yaml"
    clusters.write_text(
        "{gpus_per_node: 2, gpu: RTX4090-24GB,"
        " environment: {PYTORCH_ALLOC_CONF: 'expandable_segments:False'}}"
    )
    options: dict[str, Any] = {"gpu": None, "gpus": None, "clusters": (clusters,)}
    file = histogram(tmp_path, tail=128)
    fixed, growing = made(file, **options), made(file)
    assert [item.code for item in fixed.diagnostics if item.code == "PLN014"] == ["PLN014"]
    assert not [item for item in growing.diagnostics if item.code == "PLN014"]


def test_packed_samples_have_one_shape_and_change_nothing(tmp_path: Path) -> None:
    recipe = Recipe(ModelChoice("llama3:8b", overrides=MODEL))
    plan = made(histogram(tmp_path), recipe=recipe, sequence_length=64)
    assert plan.lengths is not None
    assert plan.lengths.padding == "packed"
    assert plan.lengths.traced == ()
    padded = dataclasses.replace(recipe, data=Data(packing=False))
    plan = made(histogram(tmp_path), recipe=padded, sequence_length=64)
    assert plan.lengths is not None
    assert plan.lengths.padding == "length"
    assert plan.lengths.padding_share == pytest.approx(1 - (500 * 20 + 480 * 60) / (980 * 64))


def test_training_pads_to_the_longest_sample_of_a_micro_batch() -> None:
    def sample(size: int) -> dict[str, Any]:
        mask = (np.arange(32) < size).astype(np.int64)
        return {"input_ids": mask * 7, "labels": np.where(mask, 7, -100), "attention_mask": mask}

    stack = TrimmedStack(only={"input_ids", "labels"})
    batch = stack([sample(3), sample(11)])
    assert {name: value.shape for name, value in batch.items()} == {"input_ids": (2, 16), "labels": (2, 16)}
    assert int(batch["input_ids"].sum()) == 7 * 14
    assert stack([sample(32), sample(1)])["labels"].shape == (2, 32)
    assert stack([sample(30)])["labels"].shape == (1, 32)
