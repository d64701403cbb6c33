"""``fsdptool.prove`` on models that Trainer, TRL's SFTTrainer and accelerate sharded over two ranks."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from prove_launch import launch

from fsdptool.files.values import load_schema

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what both ranks of one launch saw in every case."""
    return launch(tmp_path_factory.mktemp("prove"))


def test_the_callback_proves_what_trainer_sharded(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        record = rank["trainer"]["record"]
        assert record["proven"]
        assert (record["units"], record["parameters"], record["mesh"]) == (5, 21, {"dp_shard": 2})
        assert record["steps"] == 3
        assert all(peak > record["local_bytes"][0] for peak in record["measured_peak_bytes"])
        # Trainer holds more than the loop that is planned: its batches and the fp32 logits.
        assert abs(record["error_percent"]) < 25
        assert "sharded as planned: 5 FSDP units (accelerate layout)" in rank["trainer"]["shown"]


def test_every_kind_of_difference_is_one_line_that_says_what_to_do(seen: list[dict[str, Any]]) -> None:
    wanted = {
        "unit": (
            "  unit: root: planned its parameters in a unit",
            "found them in units model",
            "layer_cls_to_wrap",
        ),
        "reshard": (
            "  reshard: model.embed_tokens and 2 more: ",
            "planned kept after",
            "fsdp_reshard_after_forward",
        ),
        "dtype": ("  compute dtype: ", "compute in bfloat16, found compute in the stored", "mixed_precision"),
        "ranks": ("  ranks: ", "planned 4 processes, found 2 processes", "start as many processes"),
        "mesh": ("  placement: ", "replicated and sharded by rows over 2 x 1 ranks", "parallelism_config"),
        "offload": ("  offload: ", "planned host memory, found device memory", "fsdp_offload_params"),
        "stored": ("  stored dtype: ", "planned float32, found bfloat16", "load the model in the planned"),
    }
    for rank in seen:
        refused = rank["trainer"]["refused"]
        assert set(refused) == set(wanted)
        for name, words in wanted.items():
            message, advice = refused[name]
            assert message.startswith("the model is not sharded as planned: ")
            assert len(message.splitlines()) < 6, "alike differences are one line"
            assert all(word in f"{message}\n{advice}" for word in words), (name, message, advice)


def test_trl_with_adapters_is_proven(seen: list[dict[str, Any]]) -> None:
    if seen[0]["trl"] is None:
        pytest.skip("trl is not installed")
    for rank in seen:
        assert rank["trl"]["proven"]
        assert rank["trl"]["parameters"] == 25, "two adapter matrices per block"


def test_a_plain_loop_writes_the_document_through_the_tracker(seen: list[dict[str, Any]]) -> None:
    document = seen[0]["accelerate"]
    jsonschema.validate(document, load_schema("proof"))
    assert document["proven"]
    assert document["predicted_peak_bytes"] is not None
    assert len(document["measured_peak_bytes"]) == 2


def test_an_unsharded_model_is_said_to_be_one_on_every_rank(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        message = rank["unsharded"]["message"]
        assert "not sharded: LlamaForCausalLM: planned 5 FSDP units, found no FSDP unit" in message
        assert "accelerate 1.15 does not shard on the CPU" in message
