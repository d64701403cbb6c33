"""Which candidate is chosen, and why nothing fits."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from fsdptool.api.emit_config import emit_config
from fsdptool.cli.app import run
from fsdptool.errors import PlanError
from fsdptool.files.values import load_schema
from fsdptool.planning import Options, make_plan, plan_document, read_request
from fsdptool.planning.search.choice import choose
from fsdptool.planning.search.search import _calls_for_dividing
from fsdptool.planning.sweep import read_sweep
from fsdptool.records.advice import ShortfallKind, SuggestionKind
from fsdptool.records.plan import Candidate, Plan, Rejection, RejectionKind, SearchPoint
from fsdptool.report import plan_words

GIB = 2**30
POINT = SearchPoint(
    cluster=0,
    layout="native",
    wrap_policy="transformer",
    wrap_classes=(),
    micro_batch=1,
    accumulation=1,
    checkpointing="full",
    reshard_after_forward=True,
    dp_replicate=1,
    dp_shard=8,
    cp=1,
    cpu_offload=False,
    optimizer_implementation="auto",
    prefetch=1,
    reduce_dtype="float32",
    gradients="sharded",
)


def candidate(
    name: str, memory: float, speed: float, *, offload: bool = False, fits: bool = True
) -> Candidate:
    """A candidate of ``memory`` GiB at ``speed`` samples per second, on GPUs of 80 GiB."""
    total = int(memory * GIB)
    return Candidate(
        id=name,
        settings=dataclasses.replace(POINT, cpu_offload=offload),
        allocated_peak_bytes=total,
        reserved_peak_bytes=None,
        device_total_bytes=total,
        usable_bytes=80 * GIB,
        slack_bytes=80 * GIB - total,
        host_bytes_per_node=0,
        components=(),
        peak=None,
        timeline=(),
        step_seconds=1 / speed,
        tokens_per_second=None,
        rejected_by=None if fits else Rejection(RejectionKind.DEVICE_MEMORY, "too large"),
        samples_per_second=speed,
    )


@pytest.mark.parametrize(
    ("resident", "offloaded", "chosen"),
    [
        ({"memory": 71.8, "speed": 1.006}, {"memory": 40, "speed": 1.0}, "resident"),
        ({"memory": 71.8, "speed": 1.0}, {"memory": 40, "speed": 1.015}, "resident"),
        ({"memory": 71.8, "speed": 1.0}, {"memory": 40, "speed": 1.1}, "offloaded"),
        ({"memory": 90, "speed": 1.5, "fits": False}, {"memory": 40, "speed": 1.0}, "offloaded"),
    ],
)
def test_cpu_offload_is_chosen_only_where_nothing_else_fits_or_it_is_really_faster(
    resident: dict[str, Any], offloaded: dict[str, Any], chosen: str
) -> None:
    both = [candidate("resident", **resident), candidate("offloaded", **offloaded, offload=True)]
    result = choose(both, ["resident"])
    assert result.chosen == chosen
    rejected = {item.id: item.rejected_by for item in result.candidates}
    if chosen == "resident" and offloaded["speed"] > resident["speed"]:
        reason = rejected["offloaded"]
        assert reason is not None
        assert reason.kind is RejectionKind.CPU_OFFLOAD
        assert reason.detail == "at most 2% faster than resident, which runs the optimizer on the GPUs"


def test_of_equal_candidates_the_one_with_fewer_changes_is_chosen() -> None:
    same = [candidate("requested", 40, 1.0), candidate("other", 40, 1.0), candidate("larger", 41, 1.0)]
    result = choose(same, ["requested"])
    kinds = [item.rejected_by and item.rejected_by.kind for item in result.candidates]
    assert result.chosen == "requested"
    assert kinds == [None, RejectionKind.MORE_CHANGES, RejectionKind.MEMORY_FOR_SPEED]


TINY = "gpus: [{name: Tiny, memory_bytes: %d, flops: {float32: 1.0e13, bfloat16: 1.0e14},"
TINY += " memory_bandwidth: 1.0e12, link_bandwidth: 1.0e10, source: test}]\n"
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 96,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}


def planned(folder: Path, config: dict[str, Any], memory: int, **options: Any) -> Plan:
    """A plan of a model on GPUs of ``memory`` bytes."""
    (folder / "config.json").write_text(json.dumps(config))
    card = folder / "gpus.yaml"
    card.write_text(TINY % memory)
    given = {"search": False, "sequence_length": 64, "gpu": "Tiny", "gpus": 2, **options}
    return make_plan(read_request(Options(reference=str(folder), gpus_file=card, **given)))


@pytest.mark.parametrize(
    ("offload", "fixed", "calls"), [(False, (), False), (True, (), True), (True, ("cpu_offload",), False)]
)
def test_layers_are_divided_before_the_optimizer_goes_to_the_host(
    tmp_path: Path, offload: bool, fixed: tuple[str, ...], calls: bool
) -> None:
    """Another configuration fits without CPU offload, but it is much slower."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = Options(reference=str(tmp_path), gpu="H100-80GB-SXM", gpus=8, sequence_length=64)
    inputs = dataclasses.replace(read_request(given).inputs, fixed=fixed)
    both = [candidate("slow", 40, 0.5), candidate("fast", 40, 1.0, offload=offload)]
    assert _calls_for_dividing(both, inputs) is calls


@pytest.mark.slow
def test_a_unit_that_every_gpu_gathers_whole_is_named(tmp_path: Path) -> None:
    plan = planned(tmp_path, MOE, 950_000_000, gpus=8, nodes=16, layout="accelerate")
    document = plan_document(plan)
    jsonschema.validate(document, load_schema("plan"))
    cause = plan.shortfall
    assert cause is not None
    assert cause.unit is not None
    assert (cause.kind, cause.more_gpus_help) == (ShortfallKind.GATHERED_UNITS, False)
    assert (cause.unit.id, cause.unit.class_name) == ("model.layers.0", "Qwen3MoeDecoderLayer")
    assert cause.unit.parameter == "model.layers.0.mlp.experts.gate_up_proj"
    # 64 experts over 128 ranks are padded to 128 rows of bfloat16.
    assert cause.unit.parameter_bytes == 128 * 2 * 512 * 512 * 2
    experts = 128 * 3 * 512 * 512 * 2
    assert experts < cause.unit.bytes < 1.01 * experts
    assert experts // 2 < cause.unit.padding_bytes < 1.01 * experts // 2
    lines = plan_words.shortfall(plan)
    assert lines[-2:] == [
        "more GPUs of this kind cannot help: every GPU gathers whole units",
        "only this configuration was planned; a search tries others",
    ]


@pytest.mark.slow
def test_activations_and_states_are_told_apart(tmp_path: Path) -> None:
    batch = planned(tmp_path, LLAMA, 600_000_000, micro_batch=512).shortfall
    assert batch is not None
    assert (batch.kind, batch.more_gpus_help, batch.unit) == (ShortfallKind.ACTIVATIONS, False, None)
    deep = {**LLAMA, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 24}
    states = planned(tmp_path, deep, 1_150_000_000).shortfall
    assert states is not None
    assert (states.kind, states.more_gpus_help) == (ShortfallKind.STATES, True)


@pytest.mark.slow
def test_a_plan_that_fits_says_what_its_spare_memory_would_buy(tmp_path: Path) -> None:
    fixed = {"checkpointing": "none", "reshard": "true", "offload": False, "prefetch": 1, "micro_batch": 1}
    plan = planned(tmp_path, LLAMA, 1_200_000_000, search=None, **fixed)
    chosen = plan.candidates[0]
    assert plan.verdict == "fits"
    (larger,) = plan.next_steps
    assert larger.kind is SuggestionKind.LARGER_BATCH
    assert larger.fits
    size = larger.settings["micro_batch"]
    assert larger.settings == {"micro_batch": size}
    assert larger.change == f"micro-batch {size} (global batch {2 * size})"
    assert size.bit_count() == 1
    assert (larger.tokens_per_second or 0) > 1.02 * (chosen.tokens_per_second or 0)
    assert (larger.device_total_bytes or 0) <= 0.95 * 1_200_000_000
    (line,) = plan_words.spare_memory(plan)
    assert line.startswith(f"spare memory: micro-batch {size} (global batch {2 * size}) needs ")
    again = planned(tmp_path, LLAMA, 1_200_000_000, **{**fixed, "micro_batch": size})
    assert again.candidates[0].device_total_bytes == larger.device_total_bytes


@pytest.mark.slow
def test_the_largest_batch_is_found_with_checkpointing_and_accumulation(tmp_path: Path) -> None:
    options = {"max_batch": True, "global_batch": 256, "reshard": "true", "search": None}
    plan = planned(tmp_path, LLAMA, 1_000_000_000, sequence_length=512, **options)
    (tried,) = plan.details.max_batch
    by_mode = {item.checkpointing: item for item in tried.settings}
    assert set(by_mode) == {"none", "selective", "full"}
    assert by_mode["full"].micro_batch > by_mode["none"].micro_batch
    for item in by_mode.values():
        assert item.micro_batch * item.accumulation == 128
    settings = plan.candidates[0].settings
    assert settings.global_batch == 256
    assert tried.micro_batch == settings.micro_batch == by_mode[settings.checkpointing].micro_batch
    speeds = {mode: item.samples_per_second or 0.0 for mode, item in by_mode.items()}
    assert speeds[settings.checkpointing] >= 0.98 * max(speeds.values()) > 0


def test_host_memory_that_was_not_given_is_said_to_be_unchecked(tmp_path: Path) -> None:
    unchecked = planned(tmp_path, LLAMA, 2_000_000_000, offload=True)
    (told,) = [item for item in unchecked.diagnostics if item.code == "PLN006"]
    assert told.severity == "warning"
    assert "which is not checked: its size is not given" in told.message
    checked = planned(tmp_path, LLAMA, 2_000_000_000, offload=True, host_memory="1 TiB")
    assert "PLN006" not in [item.code for item in checked.diagnostics]


@pytest.mark.slow
def test_expandable_segments_are_suggested_where_fragmentation_decides(tmp_path: Path) -> None:
    """The replayed peak fits and the upper end of its range does not: a warning, and what avoids it."""
    point = {"checkpointing": "none", "reshard": "true", "offload": False, "micro_batch": 64}
    # torch's own default. ``fsdptool train`` changes it where nothing configures the allocator.
    segments = tmp_path / "cluster.yaml"
    segments.write_text(
        "{gpu: Tiny, gpus_per_node: 2, environment: {PYTORCH_ALLOC_CONF: 'expandable_segments:False'}}"
    )
    fixed = {**point, "clusters": (segments,), "gpu": None, "gpus": None}
    roomy = planned(tmp_path, LLAMA, 8_000_000_000, **fixed).candidates[0]
    assert roomy.reserved_range_bytes is not None
    low, high = roomy.reserved_range_bytes
    assert roomy.allocated_peak_bytes is not None
    assert roomy.reserved_peak_bytes is not None
    assert roomy.device_total_bytes is not None
    assert low < roomy.reserved_peak_bytes < high
    memory = roomy.device_total_bytes + (high - roomy.reserved_peak_bytes) // 2
    tight = planned(tmp_path, LLAMA, memory, **fixed)
    assert tight.verdict == "fits"
    assert "PLN007" in [item.code for item in tight.diagnostics]
    first = tight.next_steps[0]
    assert first.kind is SuggestionKind.EXPANDABLE_SEGMENTS
    assert first.environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert (first.device_total_bytes or 0) <= roomy.device_total_bytes
    assert first.fits
    growing = planned(tmp_path, LLAMA, memory, **fixed, expandable_segments=True)
    assert growing.candidates[0].device_total_bytes == first.device_total_bytes
    assert not growing.next_steps
    assert "export it first" in emit_config(plan=growing)
    document = plan_document(tight)
    jsonschema.validate(document, load_schema("plan"))
    asked = tight.candidates[0]
    assert ", by 54 published runs, " in plan_words.reserved_range(asked)
    assert asked.fit_share is not None
    assert 0.5 < asked.fit_share < 0.95
    assert f"probably fits ({round(10 * asked.fit_share)} of 10)" in plan_words.headline(tight)
    # With less memory the planned peak does not fit, and the peaks of some published runs do.
    short = planned(tmp_path, LLAMA, roomy.device_total_bytes - 1, **fixed).candidates[0]
    assert short.rejected_by is not None
    assert 0 < (short.fit_share or 0) < asked.fit_share < roomy.fit_share == 1
    assert "of 10)" in plan_words.verdict("does_not_fit", short.fit_share)
    assert plan_words.verdict("does_not_fit", 0.0) == "does not fit"


@pytest.mark.slow
def test_bf16_weights_with_8_bit_adam_are_suggested_where_states_are_too_large(tmp_path: Path) -> None:
    deep = {**LLAMA, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 24}
    plan = planned(tmp_path, deep, 1_150_000_000)
    (step,) = [item for item in plan.next_steps if item.kind is SuggestionKind.LOW_PRECISION_STATES]
    assert step.settings == {"precision": "no", "dtype": "bfloat16", "optimizer": "adamw8bit"}
    same = planned(tmp_path, deep, 1_150_000_000, **step.settings)
    assert same.candidates[0].device_total_bytes == step.device_total_bytes


@pytest.mark.slow
def test_a_sweep_has_a_row_per_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 128}))
    (tmp_path / "gpus.yaml").write_text(TINY % 1_000_000_000)
    base = ["plan", str(tmp_path), "--gpus-file", str(tmp_path / "gpus.yaml"), "--gpu", "Tiny", "--gpus", "2"]
    base += ["--no-search", "--price", "2", "--sweep", "micro-batch=1,2", "--sweep", "seq-len=64,128,256"]
    chart = tmp_path / "sweep.svg"
    assert run([*base, "--format", "json", "-o", str(chart)]) == 1
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, load_schema("sweep"))
    assert document["options"] == ["micro_batch", "sequence_length"]
    rows = {(row["values"]["micro_batch"], row["values"]["sequence_length"]): row for row in document["rows"]}
    assert list(rows) == [(size, length) for size in (1, 2) for length in (64, 128, 256)]
    assert [row["verdict"] for row in rows.values()] == ["fits", "fits", None] * 2
    assert "beyond the 128 positions" in rows[1, 256]["reason"]
    assert rows[1, 64]["device_total_bytes"] < rows[1, 128]["device_total_bytes"]
    per_token = 2 * 2 / 3600 / rows[1, 64]["tokens_per_second"]
    assert rows[1, 64]["price_per_million_tokens"] == pytest.approx(1e6 * per_token)
    ElementTree.fromstring(chart.read_text())
    assert run([*base, "--format", "csv"]) == 1
    table = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["verdict"] for row in table[:3]] == ["fits", "fits", ""]
    assert int(table[0]["device_total_bytes"]) == rows[1, 64]["device_total_bytes"]
    assert run(base) == 1
    assert "beyond the 128 positions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seq-len", "is not OPTION=VALUES"),
        ("seq-lenn=1", "is not a numeric option of plan"),
        ("method=lora", "is not a numeric option of plan"),
        ("seq-len=1,x", "'x' is not a whole number"),
        ("seq-len=" + ",".join(map(str, range(1, 1200))), "more than 1000 combinations"),
    ],
)
def test_a_sweep_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_sweep([text])
