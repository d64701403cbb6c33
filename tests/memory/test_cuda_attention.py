"""Which attention kernel a trace for GPUs names, and the buffers that its backward takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from fsdptool.errors import ConfigError
from fsdptool.inspection import inspect
from fsdptool.memory.tracing.kernels import fuse_attention, kernels_of
from fsdptool.memory.tracing.operators import copied_bytes
from fsdptool.memory.tracing.tracer import trace
from fsdptool.modeling import half_groups_only
from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.point import point_of
from fsdptool.planning.hardware import load_gpu
from fsdptool.records.cluster import Cluster
from fsdptool.records.recipe import Batch, Data, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.records.trace import Trace
from fsdptool.source import resolve

FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


class Operators(TorchDispatchMode):
    """Notes the attention kernels, and how many heads their keys have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._overloadpacket.__name__
        if "attention" in name:
            self.seen.append((name, args[1].shape[1]))
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    """What transformers asks an attention layer about."""

    num_key_value_groups = 4
    is_causal = True


@pytest.mark.parametrize(
    ("dtype", "key_heads", "masked", "kernel", "heads"),
    [
        (torch.bfloat16, 8, False, FLASH, 8),
        (torch.bfloat16, 2, False, FLASH, 2),
        (torch.float16, 2, False, FLASH, 2),
        (torch.bfloat16, 8, True, EFFICIENT, 8),
        (torch.bfloat16, 2, True, EFFICIENT, 8),
        (torch.float32, 8, False, EFFICIENT, 8),
        # Grouped keys in fp32 would fall to plain products before torch 2.14.
        (torch.float32, 2, False, EFFICIENT, 8),
        (torch.float32, 2, True, EFFICIENT, 8),
    ],
)
def test_the_kernel_follows_dtype_grouping_and_mask(
    dtype: torch.dtype, key_heads: int, masked: bool, kernel: str, heads: int
) -> None:
    operators, layer = Operators(), Layer()
    layer.num_key_value_groups = 8 // key_heads
    with FakeTensorMode(), kernels_of("cuda"), operators:
        query = torch.empty(2, 8, 64, 32, dtype=dtype)
        keys = torch.empty(2, key_heads, 64, 32, dtype=dtype)
        mask = torch.ones(2, 1, 64, 64, dtype=torch.bool) if masked else None
        sdpa_attention_forward(layer, query, keys, keys, mask)
    assert operators.seen == [(kernel, heads)]


def test_autocast_narrows_attention() -> None:
    """Queries and keys are in fp32 behind rotary embeddings of fp32 hidden states, and values are not."""
    operators, layer = Operators(), Layer()
    with FakeTensorMode(), kernels_of("cuda"), torch.autocast("cpu", torch.bfloat16), operators:
        wide, values = torch.empty(2, 8, 64, 32), torch.empty(2, 8, 64, 32, dtype=torch.bfloat16)
        layer.num_key_value_groups = 1
        sdpa_attention_forward(layer, wide, wide, values, None)
    assert operators.seen == [(FLASH, 8)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "seen"), [(torch.float16, [(EFFICIENT, 8)]), (torch.bfloat16, [])])
def test_gpus_before_ampere_have_no_flash_attention(
    dtype: torch.dtype, seen: list[tuple[str, int]], masked: bool
) -> None:
    """Keys of groups are repeated; bfloat16 falls to plain products."""
    operators, layer = Operators(), Layer()
    with FakeTensorMode(), kernels_of("cuda", flash=False), operators:
        query, keys = torch.empty(2, 8, 64, 32, dtype=dtype), torch.empty(2, 2, 64, 32, dtype=dtype)
        mask = torch.ones(2, 1, 64, 64, dtype=torch.bool) if masked else None
        sdpa_attention_forward(layer, query, keys, keys, mask)
    assert operators.seen == seen


@pytest.mark.slow
def test_plans_for_gpus_before_ampere_assume_no_flash_attention(tmp_path: Path) -> None:
    """Packed documents, which a kernel keeps apart on newer GPUs and a mask on these."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}
    config |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "vocab_size": 64}))
    spec = resolve(str(tmp_path))
    recipe = Recipe(ModelChoice(str(tmp_path)), batch=Batch(sequence_length=64))
    run = resolve_run(recipe, FsdpSettings(num_processes=1, mixed_precision="fp16"))
    estimator = Estimator(spec, inspect(spec), run)
    for name, fused in (("V100-32GB-SXM", False), ("T4-16GB", False), ("A100-80GB-SXM", True)):
        trace = estimator.trace_of(point_of(run), Cluster(load_gpu(name), 1))
        kinds = {item.fused for item in trace.operations if item.kind.startswith("attention")}
        assert kinds == {fused}, name


GROUPS = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 64}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, **GROUPS}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SMALL}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4, **SMALL}


def traced(folder: Path, config: dict[str, Any], attention: Any, length: int, mask: bool = True) -> Trace:
    (folder / "config.json").write_text(json.dumps(config))
    choice = ModelChoice(str(folder), attention=attention)
    recipe = Recipe(choice, data=Data(document_mask=mask), batch=Batch(sequence_length=length))
    run = resolve_run(recipe, FsdpSettings(num_processes=1, mixed_precision="bf16"))
    return trace(resolve(str(folder)), run, use_cache=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "square"),
    [("eager", True), ("flash_attention_2", False), ("flash_attention_3", False), ("flex_attention", False)],
)
def test_a_plan_of_fused_attention_has_no_scores(tmp_path: Path, attention: str, square: bool) -> None:
    """Without the packages. gpt-oss has attention sinks, for which SDPA has no kernel, and windows."""
    short, long = (traced(tmp_path, GPT_OSS, attention, length) for length in (256, 512))
    assert long.known
    assert (sum(long.sizes) > 2.1 * sum(short.sizes)) == square
    assert "model.layers.0.self_attn.sinks" in long.gradients


@pytest.mark.slow
def test_fused_attention_takes_what_sdpa_takes_without_a_mask(tmp_path: Path) -> None:
    plain, fused = (
        traced(tmp_path, LLAMA, attention, 128, mask=False) for attention in ("sdpa", "flash_attention_2")
    )
    assert fused == plain
    t5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "num_layers": 1}
    with pytest.raises(ConfigError, match="transformers has no flash_attention_2 for T5ForConditionalG"):
        traced(tmp_path, t5, "flash_attention_2", 32)


def test_an_image_encoder_attends_through_the_kernel() -> None:
    """Its layers name the mask that they do not have."""
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    encoder = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**sizes))
    grid = torch.tensor([[1, 4, 4]])
    patches = torch.randn(16, 3 * 2 * 14 * 14)
    plain = encoder(patches, grid_thw=grid).last_hidden_state
    assert fuse_attention(encoder, "flash_attention_2")
    assert torch.equal(encoder(patches, grid_thw=grid).last_hidden_state, plain)


def test_values_of_another_width_are_for_the_memory_efficient_kernel() -> None:
    """As in DeepSeek's latent attention."""
    operators = Operators()
    with FakeTensorMode(), kernels_of("cuda"), operators:
        query, value = torch.empty(1, 8, 64, 24).bfloat16(), torch.empty(1, 8, 64, 16).bfloat16()
        out, _ = sdpa_attention_forward(Layer(), query, query[:, :2], value[:, :2], None)
    assert operators.seen == [(EFFICIENT, 8)]
    assert out.shape == (1, 64, 8, 16)


@pytest.mark.parametrize(("version", "grouped"), [("2.11.0", False), ("2.13.0", False), ("2.14.0", True)])
def test_fp32_keeps_groups_where_a_fused_kernel_takes_them(
    monkeypatch: pytest.MonkeyPatch, version: str, grouped: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    keys = torch.empty(1, 2, 4, 8)
    wanted = half_groups_only(lambda mask, key, value: mask is None)
    assert wanted(None, keys, keys) == grouped
    assert wanted(None, keys.bfloat16(), keys.bfloat16())
    assert not wanted(keys, keys.bfloat16(), keys.bfloat16())
    without = half_groups_only(lambda mask, key, value: mask is None, flash=False)
    assert without(None, keys.half(), keys.half()) == grouped


@pytest.mark.parametrize(
    ("heads", "key_heads", "positions", "size", "mebibytes"),
    [
        # fp32 sums of the queries' gradient, and one number per query; then keys and values of all heads.
        (32, 32, 8192, 128, 128 + 1),
        (32, 8, 8192, 128, 128 + 1 + 2 * 64),
        # Positions in multiples of 128, head sizes in multiples of 32.
        (32, 32, 8192 - 127, 100, 128 + 1),
    ],
)
def test_flash_attention_takes_buffers_in_backward(
    heads: int, key_heads: int, positions: int, size: int, mebibytes: int
) -> None:
    query = torch.empty(1, heads, positions, size, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(1, key_heads, positions, size, dtype=torch.bfloat16, device="meta")
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    assert copied_bytes(backward, (query, query, keys, keys), "cuda") == mebibytes * 2**20
    assert copied_bytes(backward, (query, query, keys, keys), "cpu") == 0


@pytest.mark.parametrize(("key_heads", "mebibytes"), [(32, 129), (8, 129 + 2 * 62)])
def test_packed_documents_take_buffers_in_backward(key_heads: int, mebibytes: int) -> None:
    """Room for 128 more tokens for each of two documents (torch 2.13, ``mha_varlen_bwd``)."""
    query = torch.empty(8192 - 256, 32, 128, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(8192 - 256, key_heads, 128, dtype=torch.bfloat16, device="meta")
    begins = torch.empty(3, dtype=torch.int32, device="meta")
    args = (query, query, keys, keys, query, query, begins)
    assert copied_bytes(torch.ops.torch_attn._varlen_attn_backward.default, args, "cuda") == mebibytes * 2**20
