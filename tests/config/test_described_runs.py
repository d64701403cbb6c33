"""Runs that files of other programs describe: facts, defaults, and what becomes of every key."""

from __future__ import annotations

import pytest
import training_corpus as corpus

from fsdptool.config.described import describe_run
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import DescribedRun


def described(text: str) -> DescribedRun:
    """Return the run of a text, which is one."""
    run = describe_run(SourceText(text))
    assert run is not None
    return run


@pytest.mark.skipif(corpus.folder() is None, reason="FSDPTOOL_TRAINING_CORPUS is not set")
@pytest.mark.parametrize("entry", corpus.entries(), ids=lambda entry: entry["file"])
def test_a_real_file_is_read_as_the_index_has_it(entry: dict[str, object]) -> None:
    assert list(corpus.differences(entry)) == []


AXOLOTL = """
base_model: org/Llama-3.1-8B-Instruct-mine
adapter: qlora
load_in_4bit: true
lora_r: 16
lora_target_linear: true
datasets: [{path: a, type: alpaca}]
micro_batch_size: 4
sample_packing: true
liger_rope: true
neftune_noise_alpha: 5
learning_rate: 2e-4
lr: 3
"""


def test_every_key_is_used_or_told() -> None:
    run = described(AXOLOTL)
    assert (run.program, run.family, run.method, run.lora_targets) == (
        "axolotl", "llama3.1:8b", "qlora", "all-linear",
    )  # fmt: skip
    assert (run.sequence_length, run.micro_batch, run.accumulation) == (512, 4, 1)
    assert {item.key: (item.changes, item.side) for item in run.keys.not_modelled} == {
        "liger_rope": ("memory", "less"),
        "neftune_noise_alpha": ("numbers", None),
    }
    assert "learning_rate" in run.keys.no_effect
    assert "axolotl 0.19.0 drops unknown keys: lr" in run.notes
    assert any(item.key == "sequence_len" and item.value == 512 for item in run.defaults)
    told = {*run.keys.used, *run.keys.no_effect, *(item.key for item in run.keys.not_modelled)}
    assert told == {line.partition(":")[0] for line in AXOLOTL.split("\n") if line}


def test_a_value_of_the_wrong_type_is_a_problem_and_no_fact() -> None:
    run = described(AXOLOTL.replace("micro_batch_size: 4", "micro_batch_size: many"))
    assert run.micro_batch is None
    assert run.problems == ("micro_batch_size must be a whole number, not 'many'",)
