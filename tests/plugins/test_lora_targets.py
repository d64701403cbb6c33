"""peft takes every kind of LoRA target we name, fused experts included, and adapters learn."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from fsdptool.families.registry import load_registry
from fsdptool.testing.families import small_model


@pytest.mark.parametrize(
    "name",
    [
        *("llama3", "gpt2", "mixtral", "gpt-oss", "deepseek-v3", "t5", "bert", "mamba2", "llava", "whisper"),
        *("flux.1", "sdxl", "wan2.1", "z-image"),
    ],
)
def test_adapters_learn(name: str) -> None:
    family = load_registry().get(name)
    flavour = next(iter(family.flavours().values()))
    small = small_model(family, flavour)
    targets = family.lora_targets(flavour.config)
    named = [
        suffix
        for suffix in targets.modules
        if any(path.endswith(f".{suffix}") for path, _ in small.model.named_modules())
    ]
    assert named
    config = LoraConfig(r=2, target_modules=named, target_parameters=list(targets.parameters) or None)
    model = inject_adapter_in_model(config, small.model)
    small.objective.loss(small.objective.predict(model, small.batch), small.batch).backward()
    untouched = family.untouched(small.spec.config)
    outputs = {
        path: parameter.grad
        for path, parameter in model.named_parameters()
        if "lora_B" in path and not path.startswith(untouched or ("\0",))
    }
    assert outputs
    assert all(grad is not None for grad in outputs.values())
    # The first factor starts at zero, so only the second one moves in the first step.
    assert sum(float(grad.abs().sum()) for grad in outputs.values() if grad is not None) > 0
    if targets.parameters:
        assert any("experts" in path for path in outputs)
    trained = {path for path, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in path for path in trained)
    assert all(torch.isfinite(grad).all() for grad in outputs.values() if grad is not None)
