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
    lengths.write_text(f"{LENGTH - 1},13\n")
    assert masked_shape(tmp_path, line, model, lengths=str(lengths)) is None, "shorter, but all alike"
    lengths.write_text(f"{LENGTH + 9},10\n{LENGTH - 1},3\n")
    assert masked_shape(tmp_path, line, model, lengths=str(lengths)) == (3, LENGTH)


AXOLOTL = "base_model: org/model\nsequence_len: 64\nmicro_batch_size: {rows}\nsample_packing: false\n"
AXOLOTL += "adapter: lora\nlora_r: 8\nlora_target_linear: true\nbf16: true\n"
AXOLOTL += "datasets: [{{path: org/data, type: alpaca}}]\n"


@pytest.mark.parametrize(
    ("rows", "key", "from_rows"),
    [(1, "", 1), (1, "pad_to_sequence_len: false\n", 2), (1, "pad_to_sequence_len: true\n", 1)],
)
def test_only_a_collator_that_fills_up_masks_a_row_alone(
    model: str, tmp_path: Path, rows: int, key: str, from_rows: int
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(AXOLOTL.format(rows=rows) + key)
    chosen = {"reference": str(path), "model": model, "gpu": "A100-80GB-SXM", "gpus": 1}
    assert read_request(cast("Options", chosen)).inputs.loop.masked_from_rows == from_rows


SCRIPT = """\
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from torch.distributed.fsdp import fully_shard

model = AutoModelForCausalLM.from_pretrained("org/model", torch_dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained("org/model")
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())

def collate(rows):
    batch = tokenizer([row["text"] for row in rows], padding="max_length", max_length=64, return_tensors="pt")
    batch["labels"] = batch["input_ids"].clone()
    return batch

loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate)
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
UNSLOTH = """\
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer

model, tokenizer = FastLanguageModel.from_pretrained("org/model", max_seq_length=64, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj", "v_proj"])
SFTTrainer(model, args=SFTConfig(output_dir="o", per_device_train_batch_size=4), train_dataset=rows).train()
"""


@pytest.mark.parametrize(("text", "from_rows"), [(SCRIPT, 1), (UNSLOTH, 0)])
def test_scripts_that_pad_have_a_mask_unless_their_model_ignores_it(
    model: str, tmp_path: Path, text: str, from_rows: int
) -> None:
    path = tmp_path / "run.py"
    path.write_text(text)
    chosen = {"reference": str(path), "model": model, "gpu": "A100-80GB-SXM", "gpus": 1}
    assert read_request(cast("Options", chosen)).inputs.loop.masked_from_rows == from_rows


def test_notes_are_those_of_the_configuration_that_is_shown(model: str, tmp_path: Path) -> None:
    """Larger micro-batches, which have a mask, are traced for advice only."""
    plan = make_plan(read_request(options(tmp_path, f"trl sft {ROWS} 1", model, search=None)))
    assert plan.chosen is not None
    assert not any("mask hides" in note for note in plan.details.notes)


@pytest.mark.slow
def test_every_layer_keeps_a_mask_and_repeated_keys_and_values(model: str, tmp_path: Path) -> None:
    """Where rows are packed, keys have the heads of their groups, and the kernel of SDPA needs no mask."""
    rows = 4
    # With these the peak is not in the loss.
    adapters = "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj"
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
