"""Snapshots of real steps: FSDP2 on one rank of four, beside the plan of the same run and of a real run."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recorded_steps import recorded
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from fsdptool.cli.app import run as fsdptool
from fsdptool.runs.recordings.snapshots import describe_snapshot, rounded

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 5,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
RANKS, BATCH, LENGTH = 4, 2, 64


@pytest.fixture
def ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def model(ranks: None) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def record(model: LlamaForCausalLM, path: Path, *, backward: bool) -> Path:
    """Record the forward pass after a step of AdamW, and its backward pass if asked to."""
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)

    def first() -> object:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.init_device_mesh("cpu", (RANKS,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters())
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def second() -> object:
        output = model(input_ids=ids, labels=ids)
        if backward:
            output.loss.backward()
        return output

    path.write_bytes(pickle.dumps(recorded(first, second)))
    for module in (*model.model.layers, model):
        module.reshard()
    return path


def sharded(model: LlamaForCausalLM) -> int:
    """Return the bytes of one rank's parts of the parameters, as the allocator rounds them."""
    return sum(rounded(each.to_local().numel() * 4) for each in model.parameters())


@pytest.mark.slow
def test_components_and_blocks_of_a_forward_pass(model: LlamaForCausalLM, tmp_path: Path) -> None:
    found = describe_snapshot(record(model, tmp_path / "snapshot.pickle", backward=False))
    held = {item.name: item for item in found.components if item.bytes}
    assert held["parameters"].bytes == pytest.approx(sharded(model), rel=0.05)
    # Two moments of each parameter, and its step.
    assert held["optimizer"].bytes == 2 * sharded(model) + 512 * len(list(model.parameters()))
    assert held["unsharded parameters"].bytes > held["all-gather buffers"].bytes
    blocks = [item for item in found.activations if item.part == "block"]
    assert [item.call for item in blocks] == list(range(CONFIG["num_hidden_layers"]))
    assert len({item.bytes for item in blocks[:-1]}) == 1
    assert sum(item.bytes for item in found.activations) == held["activations"].bytes
    after = {item.line: item.bytes for item in found.activations if item.part == "after"}
    logits = BATCH * LENGTH * CONFIG["vocab_size"] * 2
    assert logits in after.values()


@pytest.mark.slow
def test_gradients_of_a_backward_pass(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = record(model, tmp_path / "snapshot.pickle", backward=True)
    value = pickle.loads(path.read_bytes())
    # What is left at the end is what a snapshot without history would hold.
    path.write_bytes(pickle.dumps({"segments": value["segments"]}))
    held = {item.name: item.bytes for item in describe_snapshot(path).components}
    assert held["gradients"] == pytest.approx(sharded(model), rel=0.05), held


@pytest.mark.slow
def test_a_plan_stands_beside_the_recording(
    model: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(model, tmp_path / "snapshot.pickle", backward=False)
    plan = tmp_path / "plan.json"
    model.config.architectures = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    batch = ["--micro-batch", str(BATCH), "--sequence-length", str(LENGTH), "--accumulation", "1"]
    machine = ["--gpu", "RTX-4090-24GB", "--gpus", str(RANKS), "--precision", "bf16", "--no-search"]
    kept = ["--checkpointing", "none", "-o", str(plan)]
    assert fsdptool(["plan", str(tmp_path), *batch, *machine, *kept]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert fsdptool(["diagnose", str(path), "--plan", str(plan), "--format", "json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["components"]}
    for name in ("parameters", "optimizer"):
        assert rows[name]["bytes"] == pytest.approx(rows[name]["planned_bytes"], rel=0.1), name
    assert rows["activations"]["planned_bytes"]
    assert (
        document["planned_peak_bytes"]
        == json.loads(plan.read_text())["candidates"][0]["allocated_peak_bytes"]
    )
    assert fsdptool(["diagnose", str(path), "--plan", str(plan)]) == 0
    assert "than the plan's allocated peak of" in capsys.readouterr().out
