"""A PEFT adapter is the model that peft makes of it: what it holds, what is trained, how it is grouped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_table import CASES, LLAMA, QV, TABLES, TIED, library_model, write_adapter

from fsdptool.errors import ConfigError, ReferenceError  # noqa: A004 - a reference names a model here
from fsdptool.inspection import inspect
from fsdptool.modeling.units import TrainedModel, plan_units, with_adapter
from fsdptool.records.recipe import Lora, Method, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings, UnitPlan
from fsdptool.source import adapted, check_continues, resolve

PREFIX = "base_model.model."


def ours(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> TrainedModel:
    spec = resolve(str(write_adapter(folder, config, settings)))
    return with_adapter(inspect(spec, use_cache=False), use_cache=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_an_adapter_has_the_parameters_that_peft_gives_it(name: str, tmp_path: Path) -> None:
    """Names, shapes and what is trained equal those of ``get_peft_model``."""
    from peft import PeftConfig, get_peft_model

    config, settings = CASES[name]
    found = ours(tmp_path, config, settings).anatomy
    with torch.device("meta"):
        model = library_model(config)
        peft_model: Any = get_peft_model(model, PeftConfig.from_pretrained(str(tmp_path / "adapter")))
    theirs = {n.removeprefix(PREFIX): p for n, p in peft_model.named_parameters()}
    if "_class_name" in config:
        theirs = {n: p for n, p in theirs.items() if n in {q.fqn for q in found.parameters} or p.requires_grad}
    assert {p.fqn: p.shape for p in found.parameters} == {n: tuple(p.shape) for n, p in theirs.items()}
    trained = {p.fqn for p in found.parameters if p.trainable}
    assert trained == {n for n, p in theirs.items() if p.requires_grad}
    assert trained
    assert found.total_parameters == sum(p.numel() for p in theirs.values())
