"""Plans of other programs whose rows are padded, and not packed: a mask hides the padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from fsdptool.inspection.micro_batch import batch_spec
from fsdptool.memory.tracing.make_trace import with_padding_mask
from fsdptool.modeling.objective import objective_for
from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning import Options, make_plan, read_request
from fsdptool.planning.request.followed_loop import suited
from fsdptool.records.plan import Plan
from fsdptool.source import resolve

HEADS, KEY_HEADS, SIZE, LAYERS, LENGTH = 4, 2, 16, 2, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "config.json"
    sizes = {"vocab_size": 512, "hidden_size": HEADS * SIZE, "intermediate_size": 128}
    further = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "num_hidden_layers": LAYERS}
    path.write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes, **further})
    )
    return str(path)


def options(folder: Path, line: str, model: str, **more: Any) -> Options:
    """Return the options of a plan of a command line on one GPU."""
    path = folder / "run.sh"
    path.write_text(f"{line} --bf16 true --output_dir o --model_name_or_path org/model\n")
    chosen = {"gpu": "A100-80GB-SXM", "gpus": 1, "search": False, **more}
    return cast("Options", {"reference": str(path), "model": model, **chosen})


def masked_shape(folder: Path, line: str, model: str, **more: Any) -> tuple[int, ...] | None:
    """Return the shape of the mask of the micro-batch that is traced, or None without one."""
    inputs = read_request(options(folder, line, model, **more)).inputs
    spec = resolve(model)
    inputs = suited(spec, inputs)
    run = resolve_run(inputs.recipe, inputs.settings, ranks=1, loop=inputs.loop)
    specs = with_padding_mask(batch_spec(spec, run.recipe), run, objective_for(run.recipe, spec))
    return next((item.shape for item in specs if item.name == "attention_mask"), None)


ROWS = f"--max_length {LENGTH} --per_device_train_batch_size"


@pytest.mark.parametrize(
    ("line", "shape"),
    [
        (f"trl sft {ROWS} 3", (3, LENGTH)),
        (f"trl sft {ROWS} 1", None),  # a row alone has no padding
        (f"trl sft {ROWS} 3 --packing true --packing_strategy wrapped", None),
        (f"trl sft {ROWS} 3 --attn_implementation flash_attention_2", None),
        (f"trl dpo {ROWS} 1", (1, 2, LENGTH)),  # the two answers of a pair
        (f"trl kto {ROWS} 2", (2, LENGTH)),
        # Its collator fills rows up to a multiple of 8.
        (
            f"llamafactory-cli train --stage sft --cutoff_len {LENGTH} --per_device_train_batch_size 1",
            (1, LENGTH),
        ),
    ],
)
def test_rows_of_several_lengths_have_a_mask(
    model: str, tmp_path: Path, line: str, shape: tuple[int, ...] | None
) -> None:
    assert masked_shape(tmp_path, line, model) == shape


def test_rows_that_are_known_to_have_one_length_have_none(model: str, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text(f"{LENGTH + 9},10\n{LENGTH},3\n")
    line = f"trl sft {ROWS} 3"
    assert masked_shape(tmp_path, line, model, lengths=str(lengths)) is None
    lengths.write_text(f"{LENGTH + 9},10\n{LENGTH - 1},3\n")
    assert masked_shape(tmp_path, line, model, lengths=str(lengths)) == (3, LENGTH)


@pytest.mark.slow
def test_every_layer_keeps_a_mask_and_repeated_keys_and_values(model: str, tmp_path: Path) -> None:
    """Where rows are packed, keys have the heads of their groups, and the kernel of SDPA needs no mask."""
    rows = 4
    adapters = "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj"  # of which the loss is no peak
    adapters += " --gradient_checkpointing false --dtype bfloat16"
    joined = "--packing true --packing_strategy wrapped"

    def planned(more: str) -> Plan:
        return make_plan(read_request(options(tmp_path, f"trl sft {ROWS} {rows} {adapters} {more}", model)))

    padded, packed = planned(""), planned(joined)
    mask = rows * LENGTH * LENGTH
    repeated = 2 * rows * (HEADS - KEY_HEADS) * LENGTH * SIZE
    before, after = (plan.candidates[0].allocated_peak_bytes for plan in (packed, padded))
    assert before is not None and after is not None
    assert after - before == LAYERS * 2 * (mask + repeated) + rows * LENGTH * 8
    assert any("memory-efficient kernel" in note for note in padded.details.notes)
    assert not any("mask hides" in note for note in packed.details.notes)
