"""transformers, peft and diffusers load what a run leaves, and compute what the trained model computes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import CONFIG, MODEL
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from fsdptool.launch.prepare import prepare
from fsdptool.launch.start import write_run
from fsdptool.runs.events import read_lines
from fsdptool.runs.manifest import list_checkpoints
from fsdptool.training.export.api import export_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COMMON = """\
model: {{reference: {model}}}
data: {{source: synthetic}}
batch: {{micro_batch: 2, {sizes}}}
optimizer: {{learning_rate: 0.02}}
schedule: {{name: constant}}
steps: 3
{more}
"""

LORA = "method: {name: lora, lora: {rank: 4, alpha: 12.0}}"


def trained(folder: Path, model: Path, *, sizes: str = "sequence_length: 16", more: str = "") -> Path:
    """Train three steps in one process, without a launcher, and return the run folder."""
    recipe, config, run = folder / "recipe.yaml", folder / "a.yaml", folder / "run"
    recipe.write_text(COMMON.format(model=model, sizes=sizes, more=more))
    wrapped = "  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
    config.write_text(CONFIG.replace("num_processes: 2", "num_processes: 1").replace(wrapped, ""))
    prepared = prepare(recipe, config, with_prediction=False)
    write_run(run, prepared, resume=None, number=0, argv=[], force=False)
    worker = [sys.executable, "-m", "fsdptool.training.worker", str(run)]
    done = subprocess.run(
        worker, env={**os.environ}, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return run


def checkpoint_of(run: Path) -> Path:
    return list_checkpoints(run / "checkpoints")[0]


def put_trained_values(run: Path, model: Any) -> None:
    """Let torch read the checkpoint into a model of the library's own making."""
    wanted = {f"model/{name}": torch.empty_like(p) for name, p in model.named_parameters()}
    load(wanted, storage_reader=HuggingFaceStorageReader(str(checkpoint_of(run))), no_dist=True)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(wanted[f"model/{name}"])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    tokens = torch.arange(24).reshape(2, 12)
    result: torch.Tensor = model.eval()(input_ids=tokens).logits
    return result


def moe_config() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=96,
        max_position_embeddings=64,
    )


def test_fused_experts_are_written_as_the_models_own_checkpoints_have_them(tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(moe_config()).save_pretrained(tmp_path / "base")
    run = trained(tmp_path, tmp_path / "base")
    exported = export_run(run)
    with (
        safe_open(str(exported.folder / "model.safetensors"), "pt") as ours,
        safe_open(str(tmp_path / "base" / "model.safetensors"), "pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys()), "the same names as transformers writes"
    loaded, report = AutoModelForCausalLM.from_pretrained(exported.folder, output_loading_info=True)
    assert not report["missing_keys"]
    reference = Qwen3MoeForCausalLM(moe_config())
    put_trained_values(run, reference)
    assert torch.equal(logits(loaded), logits(reference))


def test_frozen_weights_are_exported_from_the_files_that_the_library_loads(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in MODEL.items() if k != "architectures"})
    base = tmp_path / "base"
    LlamaForCausalLM(config).save_pretrained(base)
    stale = {name: torch.zeros_like(value) for name, value in load_file(base / "model.safetensors").items()}
    save_file(stale, base / "model_old.safetensors", metadata={"format": "pt"})
    save_file(stale, base / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    (base / "pytorch_model.bin").write_bytes(b"not read")
    recipe = tmp_path / "recipe.yaml"
    run = trained(tmp_path, base, more=LORA)
    (note,) = prepare(recipe, tmp_path / "a.yaml", with_prediction=False).notes
    assert "model-00001-of-00001.safetensors, model_old.safetensors, pytorch_model.bin are not read" in note
    merged = load_file(export_run(run, merge=True).folder / "model.safetensors")
    theirs = dict(AutoModelForCausalLM.from_pretrained(base).named_parameters())
    frozen = [name for name in merged if "proj" not in name]
    assert len(frozen) > 3
    for name in frozen:
        assert torch.equal(merged[name], theirs[name]), name


@pytest.fixture(scope="module")
def llama_lora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama-lora")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{k: v for k, v in MODEL.items() if k != "architectures"})).save_pretrained(
        folder / "base"
    )
    return folder / "base", trained(folder, folder / "base", more=LORA)


def test_peft_loads_the_adapters_and_merging_gives_the_same(
    llama_lora: tuple[Path, Path], tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, run = llama_lora
    adapters = export_run(run, tmp_path / "adapters")
    assert adapters.kind == "adapter"
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain)
    adapted = logits(PeftModel.from_pretrained(plain, str(adapters.folder)))
    assert (adapted - before).abs().max() > 1e-3, "three steps changed something"
    merged = export_run(run, tmp_path / "merged", merge=True)
    assert torch.allclose(
        logits(AutoModelForCausalLM.from_pretrained(merged.folder)), adapted, atol=1e-5, rtol=1e-5
    )


def test_peft_finds_the_base_of_a_relative_path_from_any_folder(
    llama_lora: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM

    base, run = llama_lora
    moved = shutil.copytree(run, tmp_path / "run")
    spec = json.loads((moved / "spec.json").read_text())
    spec["folder"] = base.name
    (moved / "spec.json").write_text(json.dumps(spec))
    monkeypatch.chdir(base.parent)
    folder = str(export_run(moved, tmp_path / "adapters").folder)
    monkeypatch.chdir(tmp_path)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained(folder)), logits(adapted))


def sd3(folder: Path) -> Callable[[Any], torch.Tensor]:
    """Write a tiny SD3 denoiser; returns how to run one."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=16,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    ).save_pretrained(folder)
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(1, 5, 16, generator=generator),
        "pooled_projections": torch.randn(1, 16, generator=generator),
        "timestep": torch.tensor([500]),
    }

    @torch.no_grad()
    def call(model: Any) -> torch.Tensor:
        result: torch.Tensor = model.eval()(**inputs).sample
        return result

    return call


def test_diffusers_loads_the_adapters_and_the_merged_denoiser(tmp_path: Path) -> None:
    from diffusers import SD3Transformer2DModel

    call = sd3(tmp_path / "base")
    run = trained(tmp_path, tmp_path / "base", sizes="height: 64, width: 64", more=LORA)
    adapters = export_run(run, tmp_path / "adapters")
    assert {"pytorch_lora_weights.safetensors", "peft/adapter_model.safetensors"} < set(adapters.files)
    plain = SD3Transformer2DModel.from_pretrained(tmp_path / "base")
    before = call(plain)
    # Offline, diffusers 0.42 wants the file named even in a local folder.
    plain.load_lora_adapter(
        str(adapters.folder), prefix="transformer", weight_name="pytorch_lora_weights.safetensors"
    )
    adapted = call(plain)
    assert (adapted - before).abs().max() > 1e-4, "three steps changed something"
    merged = export_run(run, tmp_path / "merged", merge=True)
    assert merged.kind == "diffusers"
    loaded = SD3Transformer2DModel.from_pretrained(merged.folder)
    assert torch.allclose(call(loaded), adapted, atol=1e-5, rtol=1e-5)


def test_the_average_is_exported_and_tensorboard_reads_the_steps_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{k: v for k, v in MODEL.items() if k != "architectures"})).save_pretrained(
        tmp_path / "base"
    )
    run = trained(tmp_path, tmp_path / "base", more="ema: {decay: 0.5}\ntracking: {backends: [tensorboard]}")
    lines = list(read_lines(run / "metrics.jsonl"))
    written = EventAccumulator(str(run / "tensorboard"))
    written.Reload()
    assert [event.step for event in written.Scalars("loss")] == [1, 2, 3]
    assert [event.value for event in written.Scalars("loss")] == pytest.approx([x["loss"] for x in lines])
    last = AutoModelForCausalLM.from_pretrained(export_run(run, tmp_path / "last").folder)
    averaged = AutoModelForCausalLM.from_pretrained(export_run(run, tmp_path / "ema", average=True).folder)
    wanted = {f"ema/{name}": torch.empty_like(p) for name, p in averaged.named_parameters()}
    load(wanted, storage_reader=HuggingFaceStorageReader(str(checkpoint_of(run))), no_dist=True)
    for name, parameter in averaged.named_parameters():
        assert torch.equal(parameter.data, wanted[f"ema/{name}"]), name
    assert (logits(averaged) - logits(last)).abs().max() > 1e-4
