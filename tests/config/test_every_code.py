"""Nothing is emitted without a page, and accelerate and torch do what rules on models say of them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_rules_against_accelerate import GOOD, change

import fsdptool
from fsdptool.cli.rule import all_rules
from fsdptool.config import read_settings
from fsdptool.config.rules import RULES
from fsdptool.files.text import SourceText
from fsdptool.inspection import inspect
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.source import resolve


def found(text: str, **options: Any) -> set[str]:
    """Return the codes of a text's findings."""
    return {item.code for item in read_settings(text, **options).diagnostics}


def tiny(folder: Path, model_type: str, architecture: str, **sizes: Any) -> str:
    """Write a small configuration; return the reference."""
    folder.mkdir()
    config = {"model_type": model_type, "architectures": [architecture], **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


LLAMA = {
    "hidden_size": 64, "vocab_size": 512, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
DISTIL = {
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def test_experts_that_are_modules_have_a_finding_unless_fsdptool_trains(tmp_path: Path) -> None:
    """FSD413: no family that ships has such experts, so that the rule has no example."""
    switch = inspect(resolve(
        tiny(tmp_path / "switch", "switch_transformers", "SwitchTransformersForConditionalGeneration",
             d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=128, num_experts=4)
    ))  # fmt: skip
    text = change(("LlamaDecoderLayer", "SwitchTransformersBlock"))
    assert "FSD413" in found(text, model=switch)
    assert "FSD413" not in found("# fsdptool: consumer=fsdptool\n" + text, model=switch)


@pytest.mark.parametrize(
    ("target", "severity"),
    [
        ("accelerate==1.13.0", None),
        ("accelerate==1.14.0", "error"),
        ("accelerate==1.14.1,torch==2.13.0", "error"),
        ("accelerate==1.14,torch==2.12.0+cu126", "error"),
        ("accelerate==1.14,torch==2.11.0", None),
        ("accelerate==1.15.0,torch==2.13", None),
    ],
)
def test_tied_embeddings_need_accelerate_and_torch_that_agree(
    target: str, severity: str | None, tmp_path: Path
) -> None:
    def finding(text: str, reference: str, **options: Any) -> Diagnostic | None:
        reading = read_settings(SourceText(text), model=inspect(resolve(reference)), **options)
        return next((item for item in reading.diagnostics if item.code == "FSD412"), None)

    tied = tiny(tmp_path / "tied", "llama", "LlamaForCausalLM", **LLAMA, tie_word_embeddings=True)
    own = tiny(tmp_path / "own", "llama", "LlamaForCausalLM", **LLAMA)
    seen = finding(GOOD, tied, target=target)
    assert (seen.severity if seen else None) == severity
    if seen is not None:
        assert "torch 2.1" in seen.message
        rule = RULES["FSD412"]
        assert "accelerate 1.15" in rule.fix
        assert "torch below" in rule.fix
    assert finding(GOOD, own, target=target) is None, "untied"
    fsdp1 = change(("  fsdp_version: 2\n", "  fsdp_version: 1\n"))
    assert finding(fsdp1, tied, target=target) is None
    assert finding(GOOD, tied, consumer="fsdptool") is None


def test_torch_refuses_the_units_of_accelerate_1_14_and_not_those_of_1_13(tmp_path: Path) -> None:
    """The units of both versions, as their prepare makes them, with the installed torch."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from fsdptool.inspection import build

    tied = resolve(tiny(tmp_path / "tied", "llama", "LlamaForCausalLM", **LLAMA, tie_word_embeddings=True))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for tail in (True, False):
            model = build(tied).to_empty(device="cpu")
            model.tie_weights()
            if tail:
                fully_shard([model.model.norm, model.model.embed_tokens], mesh=mesh)
            fully_shard(model, mesh=mesh)
            if tail:
                with pytest.raises(ValueError, match="already managed by another FSDP group"):
                    model(torch.tensor([[1]]))
            else:
                model(torch.tensor([[1]]))
    finally:
        dist.destroy_process_group()


def _llava(folder: Path) -> Any:
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32,
              "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 8, "patch_size": 4, "projection_dim": 8}  # fmt: skip
    text = {"model_type": "llama", **LLAMA}
    return inspect(
        resolve(
            tiny(folder, "llava", "LlavaForConditionalGeneration", vision_config=vision, text_config=text)
        )
    )


def test_accelerate_stops_at_names_the_model_lacks_and_wraps_nothing_without_names(tmp_path: Path) -> None:
    """FSD410 and FSD406: the plugin itself, on the models of the cases above."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    from fsdptool.inspection import build
    from fsdptool.source import resolve

    def policy(model: torch.nn.Module) -> Callable[[torch.nn.Module], bool]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        plugin.set_auto_wrap_policy(model)
        made = fsdp2_prepare_auto_wrap_policy(plugin, model)
        assert callable(made)
        return made

    _llava(tmp_path / "llava")
    with pytest.raises(ValueError, match="Could not find the transformer layer class"):
        policy(build(resolve(str(tmp_path / "llava"))))
    distil = build(resolve(tiny(tmp_path / "distil", "distilbert", "DistilBertForMaskedLM", **DISTIL)))
    wraps = policy(distil)
    assert not [module for module in distil.modules() if wraps(module)]


def test_accelerate_crashes_on_persistent_buffers() -> None:
    """FSD404: what accelerate broadcasts must be a DTensor; one process is enough to see it fail."""
    import torch
    import torch.distributed as dist
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.fsdp import fully_shard

    class Accelerator:
        is_main_process = True
        device = torch.device("cpu")

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        fully_shard(model)
        with pytest.raises(AttributeError, match="device_mesh"):
            fsdp2_load_full_state_dict(Accelerator(), model, whole)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_every_code_in_the_source_has_a_page_and_every_page_a_code() -> None:
    root = Path(fsdptool.__file__).parent
    form = re.compile(r"(?:FSD|DET|PLN|DOC|CACHE|[A-Z]{3})\d{3}")
    emitted: set[str] = set()
    for path in root.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        tables = {
            node.args[0]
            for node in nodes
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Rule"
        }
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in tables:
                emitted.update(form.findall(node.value) if form.fullmatch(node.value) else ())
    # The failures of runs are data: each with the patterns that recognise it.
    failures = (root / "failures.json").read_text(encoding="utf-8")
    emitted.update(re.findall(r'"code": "([A-Z]{3}\d{3})"', failures))
    assert emitted == set(all_rules())
