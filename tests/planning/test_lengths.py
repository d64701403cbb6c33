"""Lengths of samples: their files, the lengths that are traced, and the plan they give."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
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
from fsdptool.planning.lengths import choose_grid, padded_length
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


def test_few_lengths_are_traced_as_they_are_and_many_are_rounded_up() -> None:
    assert choose_grid(Counter({8: 5, 64: 1}), 128, 10) == [8, 64, 128]
    drawn = Counter({length: 1 + length % 5 for length in range(8, 4096, 8)})
    grid = choose_grid(drawn, 4096, 10)
    assert len(grid) == 10
    assert grid[-1] == 4096
    assert all(length % 8 == 0 for length in grid)
    # Two narrow groups take the lengths; the gap between them takes none.
    split = choose_grid(Counter({**dict.fromkeys(range(8, 108, 8), 9), 1000: 1, 1008: 1}), 1008, 4)
    assert split[-2] <= 104 and split[-1] == 1008
    assert [padded_length(n, 100) for n in (1, 8, 9, 97, 500)] == [8, 8, 16, 100, 100]


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


def test_one_length_is_the_plan_without_lengths(tmp_path: Path) -> None:
    """The same figures, and nothing grows after the second step."""
    file = tmp_path / "constant.txt"
    file.write_text("64\n" * 30)
    plan = made(file, sequence_length=64)
    unpacked = Recipe(ModelChoice("llama3:8b", overrides=MODEL), data=Data(packing=False, padding="longest"))
    options: Any = {"recipe": unpacked, "sequence_length": 64, "gpu": "RTX4090-24GB", "gpus": 2}
    without = make_plan(read_request({**options, "micro_batch": 4, "search": False}))
    assert plan.candidates == without.candidates
    assert plan.lengths is not None
    assert not plan.lengths.rounded
    assert plan.lengths.padding_share == 0
    assert plan.lengths.worst_allocated_bytes == without.candidates[0].allocated_peak_bytes
    # fsdptool's own loop has expandable segments.
    growing = plan.lengths.replays[1]
    assert growing.last_step_bytes == without.candidates[0].reserved_peak_bytes
    assert growing.last_growth_step <= 2
    assert (growing.retried_orders, growing.failed_orders) == (0, 0)


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
    assert json.loads(json.dumps(document))["lengths"]["replays"][1]["expandable"]


def test_packed_samples_have_one_shape_and_change_nothing(tmp_path: Path) -> None:
    recipe = Recipe(ModelChoice("llama3:8b", overrides=MODEL))
    plan = made(histogram(tmp_path), recipe=recipe, sequence_length=64)
    assert plan.lengths is not None
    assert plan.lengths.padding == "packed"
    assert plan.lengths.replays == ()
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
