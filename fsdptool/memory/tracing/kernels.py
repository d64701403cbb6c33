"""Whose kernels the trace assumes.

On fake CPU tensors torch's SDPA picks the CPU flash kernel, and some operators are composite that are one
kernel on a GPU. A GPU saves other tensors, so for the ``cuda`` profile SDPA, dropout and ``rms_norm`` are
answered by the operators that torch 2.13 would choose there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.bias import CausalBias

from fsdptool.families.objectives.packed_attention import assuming_cuda
from fsdptool.memory.tracing.recorder import SegmentRecorder
from fsdptool.modeling import half_groups_only
from fsdptool.records.recipe import FUSED_ATTENTION, Attention
from fsdptool.records.trace import Profile
from fsdptool.versions import torch_is

_HALF = (torch.float16, torch.bfloat16)


def _attending(flash: bool) -> Callable[..., torch.Tensor]:
    """Return what routes attention: a function, because Dynamo does not follow ``functools.partial`` here."""

    def attend(*args: Any, **options: Any) -> torch.Tensor:
        return _attend(*args, flash=flash, **options)

    return attend


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    flash: bool = True,
) -> torch.Tensor:
    """Route as ``sdp_utils.cpp`` does on CUDA (torch 2.13).

    Flash for half precision without a mask and values as wide as queries; else the memory-efficient kernel,
    which takes masks, fp32 and values of another width. Both compute a causal mask that has no values
    (``torch.nn.attention.bias``) by themselves. GPUs before Ampere have no flash kernel, and plain products
    for bfloat16. Autocast narrows what it gets first (``autocast_mode.h``).
    """
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = None, True
    if torch.is_autocast_enabled("cpu"):
        narrow = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(narrow), key.to(narrow), value.to(narrow)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(narrow)
    if not flash and query.dtype == torch.bfloat16:
        plain: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return plain
    if flash and attn_mask is None and query.dtype in _HALF and query.shape[-1] == value.shape[-1] <= 256:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, torch.full((), torch.finfo(query.dtype).min, dtype=query.dtype))
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        bias = bias.expand(shape)
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    size = query.shape[-1]
    extra = -size % 8
    if extra:
        # pad_last_dim in attention.cpp: flash wants multiples of 8.
        scale = scale if scale is not None else size**-0.5
        query, key, value = (torch.nn.functional.pad(t, (0, extra)) for t in (query, key, value))
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :size] if extra else out


class _InKernel(torch.autograd.Function):
    """Attention sinks that the kernel adds to its sums: nothing is kept, and they get a gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        ctx.like = sinks.shape, sinks.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype = ctx.like
        return gradient, gradient.new_zeros(shape, dtype=dtype)


def _without_scores(
    flex: bool,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' interface asks (5.23), by the kernel that SDPA takes without a mask.

    Flash kernels and FlexAttention keep the same for backward: queries, keys, values, the output and the fp32
    logarithm of each row's sum. A window counts as whole causal attention, although a kernel skips blocks
    outside it. A cap of the scores adds nothing; a bias that the model has computed is taken as SDPA's mask.

    Args:
        flex: Whether sinks scale the output of the kernel (transformers 5.23, ``flex_attention.py``).
        module: The attention layer.
        query: [B, heads, S, D].
        key, value: [B, key heads, S, D]; narrower values are padded for a flash kernel, as transformers does
            (5.23, ``modeling_deepseek_v3.py``).
        attention_mask: Not used; layers of image encoders pass it by this name.
        dropout, scaling, is_causal: As in torch's attention.
        s_aux: The sinks, [heads].
        position_bias: [B or 1, heads, S, S].

    Returns:
        [B, S, heads, D], and no attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    del attention_mask
    size = value.shape[-1]
    if not flex and size < key.shape[-1]:
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - size))
    biased = {} if position_bias is None else {"position_bias": position_bias}
    out: torch.Tensor = sdpa_attention_forward(
        module, query, key, value, None, dropout, scaling, is_causal, **biased
    )[0][..., :size]
    if s_aux is None:
        return out, None
    if flex:
        return out * torch.sigmoid(s_aux.to(out.dtype)).unsqueeze(-1), None
    return _InKernel.apply(out, s_aux), None  # type: ignore[no-untyped-call]


_OWN = {name: "planned_flex" if "flex" in name else "planned_fused" for name in FUSED_ATTENTION}
"""What transformers calls the implementations here. It would look for packages behind a name of its own, and
makes masks for names alone that it knows masks of (5.23, ``masking_utils.py``)."""


@cache
def _register() -> None:
    from transformers import AttentionInterface

    for name in FUSED_ATTENTION:
        AttentionInterface.register(_OWN[name], partial(_without_scores, name == "flex_attention"))


def fuse_attention(model: nn.Module, attention: Attention) -> bool:
    """Let a model attend as by a kernel that this machine need not have.

    Args:
        model: Just built.
        attention: One of ``FUSED_ATTENTION``.

    Returns:
        Whether it does: False for a model for which transformers has none of these kernels. Parts of a model
        without one, such as an image encoder, keep theirs.
    """
    _register()
    changed = False
    able = "_supports_flex_attn" if attention == "flex_attention" else "_supports_flash_attn"
    for part in model.modules():
        through_interface = getattr(part, "_can_set_attn_implementation", None)
        if getattr(part, able, False) and through_interface is not None and through_interface():
            # The property of that name would change the configurations of other parts, too.
            vars(part.config)["_attn_implementation_internal"] = _OWN[attention]
            changed = True
    return changed


def _drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    # CUDA has a fused kernel that keeps a boolean mask; the CPU keeps one in the input's dtype.
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's normalisation by the root mean square: one kernel, which keeps its input and a factor per row.

    The operator is composite on CPUs, where autograd takes it apart into eight operators that keep copies in
    fp32 (torch 2.13, ``_fused_rms_norm`` in ``native_functions.yaml`` and ``derivatives.yaml``).
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, shape: list[int], eps: float | None
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, factors = torch.ops.aten._fused_rms_norm(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, factors)
        ctx.shape = shape
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        kept, weight, factors = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:2])
        of_input, of_weight = torch.ops.aten._fused_rms_norm_backward(
            gradient, kept, ctx.shape, factors, weight, needed
        )
        return of_input, of_weight, None, None


def _rms_norm(original: Any) -> Any:
    """Return ``rms_norm`` as CUDA computes it: composite for two dtypes or channels last."""

    def normalise(
        input: torch.Tensor,
        normalized_shape: Any,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        mixed = weight is not None and weight.dtype != input.dtype
        if mixed or input.is_complex() or suggest_memory_format(input) is not torch.contiguous_format:
            composite: torch.Tensor = original(input, normalized_shape, weight, eps)
            return composite
        fused: torch.Tensor = _FusedRmsNorm.apply(  # type: ignore[no-untyped-call]
            input, weight, list(normalized_shape), eps
        )
        return fused

    return normalise


def _batch_norm(original: Any) -> Any:
    """Return torch's batch normalisation, refusing dtypes that the CPU's kernel refuses.

    FSDP2's mixed precision casts the weight and leaves the running statistics, which are buffers, in fp32.
    Fake tensors accept the pair (torch 2.13).
    """

    def normalise(
        input: torch.Tensor, mean: Any, variance: Any, weight: Any = None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        if isinstance(weight, torch.Tensor) and isinstance(mean, torch.Tensor) and weight.dtype != mean.dtype:
            raise RuntimeError(f"batch normalisation by {weight.dtype} weights with {mean.dtype} statistics")
        out: torch.Tensor = original(input, mean, variance, weight, *args, **kwargs)
        return out

    return normalise


def _grouped(profile: Profile) -> Any:
    """Return the shape rule of the grouped product, for every dtype.

    torch 2.13's own refuses all but bfloat16 on fake tensors, which neither kernel does, and pads
    rows to 16 bytes depending on the build it runs in rather than on the device it stands for.
    """

    def rule(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        offsets, dtype = kwargs.get("offs"), kwargs.get("out_dtype") or left.dtype
        groups = offsets.shape[0] if offsets is not None else left.shape[0]
        if left.dim() == 2 and right.dim() == 2:
            shape: tuple[int, ...] = (groups, left.shape[0], right.shape[1])
        elif left.dim() == 3 and right.dim() == 3:
            shape = (left.shape[0], left.shape[1], right.shape[-1])
        else:
            shape = (left.shape[-2], right.shape[-1])
        row = shape[-1]
        if profile == "cuda":
            step = max(16 // dtype.itemsize, 1)
            row = -(-row // step) * step
        strides = (shape[-2] * row, row, 1)[-len(shape) :]
        return torch.empty_strided(shape, strides, dtype=dtype, device=left.device)

    return rule


@contextmanager
def replaced(owner: Any, name: str, substitute: Any) -> Iterator[None]:
    """Let ``owner`` have another attribute of that name, while entered."""
    # A TorchFunctionMode would be off during backward, and so during recomputation (torch 2.13:
    # ``Tensor.backward`` itself goes through the mode).
    original = getattr(owner, name)
    setattr(owner, name, substitute)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def offloading(recorder: SegmentRecorder) -> Iterator[None]:
    """Let what checkpointing offloads to the host be host memory, and its copies no work of the device."""
    from fsdptool.modeling import activation_offload as offload

    def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        recorder.relabel(tensor, "activation", final=True)
        host = torch.empty_like(tensor)
        recorder.relabel(host, "offloaded")
        return host, None

    def to_device(host: torch.Tensor, _device: torch.device) -> tuple[torch.Tensor, None]:
        tensor = torch.empty_like(host)
        recorder.relabel(tensor, "activation")
        return tensor, None

    with replaced(offload, "to_host", to_host), replaced(offload, "to_device", to_device):
        yield


@contextmanager
def recomputation(recorder: SegmentRecorder) -> Iterator[None]:
    """Tell the recorder when checkpointing runs a unit's forward once more."""
    from fsdptool.modeling import activation_checkpointing as recompute

    original: Any = vars(recompute)["checkpoint"]

    def checkpoint(forward: Any, *args: Any, **kwargs: Any) -> Any:
        def counted(*inputs: Any, **options: Any) -> Any:
            # In the first forward nobody asks; in backward it ends early, by an exception.
            recorder.recomputing += 1
            try:
                return forward(*inputs, **options)
            finally:
                recorder.recomputing -= 1

        return original(counted, *args, **kwargs)

    with replaced(recompute, "checkpoint", checkpoint):
        yield


_FULL = "_fsdptool_full"
"""Attribute of fake tensors that contain only ones because they were created so."""


def _noted_as_full(create: Any) -> Any:
    """Return ``torch.ones`` or ``ones_like`` with a note on the fake tensors that it returns."""

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = create(*args, **kwargs)
        if isinstance(out, FakeTensor):
            setattr(out, _FULL, True)
        return out

    return noted


def _without_full_mask(preprocess: Any) -> Any:
    """Return transformers' preparation of masks without a padding mask that has only ones."""

    def prepare(
        config: Any, inputs_embeds: torch.Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if getattr(attention_mask, _FULL, False) and attention_mask.shape[-1] == inputs_embeds.shape[1]:
            attention_mask = None
        return preprocess(config, inputs_embeds, attention_mask, *args, **kwargs)

    return prepare


def _real_masks(masking: Any) -> Iterator[AbstractContextManager[None]]:
    """Yield what makes transformers build the masks of a real run, although the tensors are fake.

    ``masking_utils`` (transformers 5.23) takes fake tensors for a graph that is traced, and therefore never
    reads them: it expects packed documents in any ``position_ids``, and padding in any mask. A mask of the
    batch may contain padding. One that a model fills with ones by itself, as BART's decoder does, does not,
    and a real run drops it.
    """
    yield replaced(masking, "find_packed_sequence_indices", lambda *_, **__: None)
    name = "_preprocess_mask_arguments"
    if hasattr(masking, name):
        yield replaced(masking, name, _without_full_mask(getattr(masking, name)))
        for create in ("ones", "ones_like"):
            yield replaced(torch, create, _noted_as_full(getattr(torch, create)))


def _grouped_products(profile: Profile) -> Iterator[AbstractContextManager[None]]:
    """Yield what keeps transformers from asking fake tensors for their address, as it does before torch 2.11.

    Before torch 2.9 it decides against that kernel on CPUs itself: they lack one there.
    """
    try:
        from transformers.integrations import moe
    except ImportError:
        return
    if hasattr(moe, "_can_use_grouped_mm") and not torch_is(2, 11):
        able = profile == "cuda" or torch_is(2, 9)
        yield replaced(moe, "_can_use_grouped_mm", lambda *_, **__: able)


def _grouping() -> Iterator[tuple[Any, str]]:
    """Yield where transformers decides whether SDPA gets fewer key heads than query heads."""
    try:
        from transformers.integrations import sdpa_attention
    except ImportError:
        return
    if hasattr(sdpa_attention, "use_gqa_in_sdpa"):
        yield sdpa_attention, "use_gqa_in_sdpa"


@contextmanager
def kernels_of(profile: Profile, *, flash: bool = True) -> Iterator[None]:
    """Answer as the profile's device would, with the masks of a real run.

    Args:
        profile: The kind of device.
        flash: Whether a GPU has flash attention.
    """
    from torch import _meta_registrations

    from fsdptool.families.objectives import context_attention

    with ExitStack() as stack:
        try:
            from transformers import masking_utils
        except ImportError:
            pass
        else:
            for context in _real_masks(masking_utils):
                stack.enter_context(context)
        stack.enter_context(replaced(_meta_registrations, "_meta_grouped_mm_common", _grouped(profile)))
        for context in _grouped_products(profile):
            stack.enter_context(context)
        functional = torch.nn.functional
        if profile != "cuda":
            # What CUDA's kernels make of the same pair has not been measured.
            stack.enter_context(replaced(functional, "batch_norm", _batch_norm(functional.batch_norm)))
        else:
            stack.enter_context(assuming_cuda())
            attend = _attending(flash)
            stack.enter_context(replaced(functional, "scaled_dot_product_attention", attend))
            for module, name in _grouping():
                grouping = half_groups_only(getattr(module, name), flash=flash)
                stack.enter_context(replaced(module, name, grouping))
            stack.enter_context(replaced(functional, "dropout", _drop))
            if torch_is(2, 9):  # before, composite on CUDA, too
                stack.enter_context(replaced(functional, "rms_norm", _rms_norm(functional.rms_norm)))
            stack.enter_context(replaced(context_attention, "kernel_for", context_attention.cuda_kernel))
        yield
