"""Exports of LoRA runs on a quantised base load in peft and bitsandbytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import MODEL
from test_exports import logits, trained

from fsdptool.modeling.methods.quantised_formats import decode, encode
from fsdptool.training.export.api import export_run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

WIDE = {**MODEL, "hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": False}
QLORA = "method: {name: lora, lora: {rank: 4, alpha: 12.0, base: nf4}}\n"


@pytest.fixture(scope="module")
def qlora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("qlora")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{k: v for k, v in WIDE.items() if k != "architectures"})).save_pretrained(
        folder / "base"
    )
    return folder / "base", trained(folder, folder / "base", more=QLORA)


def rounded(base: Path) -> Any:
    """Return the published model with its blocks' weights rounded to nf4, by plain transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for layer in model.model.layers.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.copy_(decode("nf4", *encode("nf4", layer.weight), layer.weight.dtype))
    return model


def test_peft_loads_the_adapters_on_the_published_base(qlora: tuple[Path, Path], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, run = qlora
    adapters = export_run(run, tmp_path / "adapters")
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain)
    adapted = logits(PeftModel.from_pretrained(plain, str(adapters.folder)))
    assert (adapted - before).abs().max() > 1e-3, "three steps changed something"


def test_the_merged_model_computes_what_was_trained(qlora: tuple[Path, Path], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, run = qlora
    adapters = export_run(run, tmp_path / "adapters")
    trained_model = logits(PeftModel.from_pretrained(rounded(base), str(adapters.folder)))
    merged = export_run(run, tmp_path / "merged", merge=True)
    loaded = logits(AutoModelForCausalLM.from_pretrained(merged.folder))
    assert torch.allclose(loaded, trained_model, atol=1e-5, rtol=1e-5)
    other = logits(
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapters.folder))
    )
    assert (other - trained_model).abs().max() > 1e-3, "the published base is another one"


def test_bitsandbytes_makes_the_very_same_base(qlora: tuple[Path, Path], tmp_path: Path) -> None:
    """transformers' own 4-bit loading gives, bit for bit, the base the adapters were trained on."""
    from bitsandbytes.functional import dequantize_4bit
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base, run = qlora
    fourbit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    loaded = AutoModelForCausalLM.from_pretrained(base, quantization_config=fourbit, device_map={"": "cpu"})
    ours = rounded(base)
    layers = [n for n, m in ours.model.layers.named_modules() if isinstance(m, torch.nn.Linear)]
    assert len(layers) == 14
    for name in layers:
        packed = loaded.model.layers.get_submodule(name).weight
        theirs = dequantize_4bit(packed.data, packed.quant_state)
        assert torch.equal(theirs, ours.model.layers.get_submodule(name).weight), name
    adapters = export_run(run, tmp_path / "adapters")
    served = logits(PeftModel.from_pretrained(loaded, str(adapters.folder)))
    wanted = logits(PeftModel.from_pretrained(ours, str(adapters.folder)))
    # bitsandbytes 0.50 computes 4-bit products in bf16 on CPUs that can.
    assert (served - wanted).abs().max() < 0.02 * wanted.abs().max()
