"""The private names of torch that fsdptool uses, and why: what to review when a new torch comes out.

Public functions do not tell what a model holds on a fake device, in which order FSDP gathers, or which
storage tensors share. ``tests/house/test_torch_private.py`` finds a private name that is used and not listed,
and one that is listed and not used. ``fsdptool doctor`` looks up every name in the installed torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name of torch that may change without notice.

    Attributes:
        module: The module to import.
        name: The attribute of it, with dots; the last part may be an attribute of a class' instances.
        use: What it is needed for.
        since: The first minor version that has it, if that is newer than the oldest supported one.
        until: The first minor version that lacks it.
        nccl: Whether only builds with NCCL have it.
    """

    module: str
    name: str
    use: str
    since: tuple[int, int] | None = None
    until: tuple[int, int] | None = None
    nccl: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def expected_in(self, release: tuple[int, ...]) -> bool:
        """Return whether a torch of ``release`` should have it, in a build with NCCL."""
        return (self.since is None or release >= self.since) and (self.until is None or release < self.until)


def _all(module: str, use: str, *names: str, **limits: Any) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(module, name, use, **limits) for name in names)


_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"

NAMES = (
    # FSDP2: which parameters a unit holds, and the state that its collectives leave.
    *_all("torch.distributed.fsdp", "the state of a unit", "FSDPModule._get_fsdp_state"),
    *_all(_STATE, "the parameters of a unit", "FSDPState._fsdp_param_group"),
    *_all(_STATE, "a unit's parameters, by mesh", "FSDPState._fsdp_param_groups", since=(2, 13)),
    *_all(_STATE, "joining the collectives of a model that has not run", "FSDPState._lazy_init"),
    *_all(
        _STATE,
        "the callback that ends a backward; forgetting forwards without one",
        "FSDPState._state_ctx",
        "FSDPState._comm_ctx",
    ),
    *_all(
        _GROUP,
        "keeping the collectives of units in one order on all ranks",
        "FSDPParamGroup._all_gather_result",
        "FSDPParamGroup._partial_reduce_output",
        "FSDPParamGroup._sharded_state",
        "FSDPParamGroup._training_state",
        "FSDPParamGroup._to_sharded",
        "FSDPParamGroup._to_sharded_post_forward",
        "FSDPParamGroup._use_post_forward_mesh",
    ),
    *_all(
        _GROUP,
        "waiting for a gather that was begun",
        "FSDPParamGroup._wait_all_gather_streams_on_event",
        until=(2, 15),
    ),
    *_all(_GROUP, "forgetting forwards without a backward", "FSDPParamGroup._post_forward_indices"),
    *_all(_GROUP, "what the sharding check compares", "FSDPParamGroup._reshard_after_forward"),
    *_all(
        _PARAM,
        "gradients that are not sharded yet; names of sharded parameters",
        "FSDPParam._unsharded_param",
        "FSDPParam._module_info",
    ),
    *_all("torch.distributed.fsdp._fully_shard", "parameters of integers before torch 2.13", "_fsdp_param"),
    *_all("torch.distributed.fsdp", "FSDP's search for gradients in outputs", "_common_utils"),
    *_all("torch.distributed.utils", "FSDP's casts of inputs", "_apply_to_tensors"),
    # DTensor, process groups, checkpoints.
    *_all(
        "torch.distributed.tensor._dtensor_spec",
        "sharded tensors on a device of our choice",
        "DTensorSpec",
        "TensorMeta",
    ),
    *_all("torch.distributed.tensor", "the shard of a tensor, for its storage", "DTensor._local_tensor"),
    *_all("torch.distributed.distributed_c10d", "one time limit for a save", "_set_pg_timeout"),
    *_all("torch.distributed", "the buffers of collectives in traces", "_functional_collectives"),
    *_all(
        "torch._C._distributed_c10d", "the record of NCCL's last collectives", "_dump_nccl_trace", nccl=True
    ),
    *_all("torch._C._distributed_c10d", "the same of other backends", "_dump_fr_trace"),
    *_all("torch", "a tensor of a checkpoint that is read in parts", "Tensor._make_wrapper_subclass"),
    # Modules.
    *_all(
        "torch.nn",
        "reading and replacing what a module holds without running its __setattr__",
        "Module._parameters",
        "Module._buffers",
        "Module._modules",
        "Module._non_persistent_buffers_set",
        "Module._apply",
    ),
    *_all(
        "torch.nn.init",
        "draws that are equal on any number of ranks",
        "_no_grad_trunc_normal_",
    ),
    # Dispatch, fake tensors, traces.
    *_all("torch.utils._python_dispatch", "every operator", "TorchDispatchMode", "_disable_current_modes"),
    *_all("torch.utils._mode_utils", "operators on the inner tensors of a fake one", "no_dispatch"),
    *_all(
        "torch.utils._pytree",
        "tensors in nested arguments and outputs",
        "tree_flatten",
        "tree_iter",
        "tree_leaves",
        "tree_map",
        "tree_unflatten",
    ),
    *_all("torch._subclasses", "constants of fake tensors", "fake_tensor"),
    *_all(
        "torch._subclasses.fake_tensor",
        "a faster path for metadata",
        "_DISPATCH_META_HANDLERS",
        "_DISPATCH_HANDLE_DIRECTLY",
    ),
    *_all(
        "torch._subclasses.fake_tensor",
        "models on fake devices",
        "FakeTensor",
        "FakeTensorMode",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
    ),
    *_all(
        "torch",
        "fake tensors without a copy of their dispatch",
        "Tensor._make_subclass",
        "_C._DisableTorchDispatch",
        "_C._get_default_device",
        "_C._set_throw_on_mutable_data_ptr",
    ),
    *_all("torch", "which storage tensors share", "UntypedStorage._cdata"),
    *_all("torch", "views that autograd made", "Tensor._is_view"),
    *_all(
        "torch._ops",
        "what operators are called with, and which may alias",
        "OpOverload._schema",
        "OpOverload._overloadpacket",
    ),
    *_all("torch", "sums of gradients, as autograd makes them", "_C._current_autograd_node"),
    *_all("torch.autograd.graph", "sums of gradients, as autograd makes them", "_engine_run_backward"),
    *_all("torch.autograd.graph", "the order of backward nodes", "Node._sequence_nr", since=(2, 11)),
    *_all("torch._prims_common", "the layout of a kernel's output", "suggest_memory_format"),
    *_all(
        "torch",
        "shapes of grouped products on the meta device",
        "_meta_registrations",
        "_meta_registrations._meta_grouped_mm_common",
    ),
    *_all("torch", "kernels below autograd", "_C._AutoDispatchBelowAutograd"),
    # Kernels whose operators torch names with an underscore.
    *_all(
        "torch.ops",
        "attention by a kernel of our choice, and its parts over ranks",
        "aten._scaled_dot_product_attention_math",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_efficient_attention_backward",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_backward",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    *_all(
        "torch.ops",
        "fused norms of CUDA in traces",
        "aten._fused_rms_norm",
        "aten._fused_rms_norm_backward",
        since=(2, 11),
    ),
    *_all("torch.ops", "views of products", "aten._unsafe_view"),
    *_all("torch", "the attention kernel that torch would take", "_fused_sdp_choice"),
    *_all(
        "torch",
        "norms and scales of many gradients at once",
        "_foreach_norm",
        "_foreach_mul_",
        "_amp_foreach_non_finite_check_and_unscale_",
    ),
    # Compilation.
    *_all("torch", "operators on the meta device before torch 2.9", "_dynamo"),
    *_all("torch._dynamo.eval_frame", "the model inside a compiled one", "OptimizedModule._orig_mod"),
    *_all("torch._dynamo", "limits of compilation", "config"),
    *_all("torch._C._dynamo.eval_frame", "compiling a block anew for each trace", "reset_code"),
    *_all("torch._functorch", "traces without caches of compiled graphs", "config"),
    *_all("torch._inductor", "kernels of a GPU, without a GPU", "config", "cpp_builder", "cpu_vec_isa"),
    *_all("torch._inductor.graph", "kernels of a GPU, without a GPU", "GraphLowering"),
    *_all("torch._inductor.async_compile", "kernels of a GPU, without a GPU", "AsyncCompile"),
    *_all(
        "torch._prims.rng_prims",
        "dropout in compiled blocks that are computed again",
        "run_and_save_rng_state",
        "run_with_rng_state",
    ),
)
"""Every private name of torch in ``fsdptool`` and its plugins."""


def lacking(release: tuple[int, ...]) -> tuple[PrivateName, ...]:
    """Return the names that the installed torch should have and lacks.

    Args:
        release: The installed version of torch.
    """
    from torch.distributed import is_nccl_available

    names = [name for name in NAMES if name.expected_in(release) and (not name.nccl or is_nccl_available())]
    return tuple(name for name in names if not _exists(name))


def _exists(name: PrivateName) -> bool:
    try:
        owner: Any = importlib.import_module(name.module)
    except ImportError:
        return False
    *path, last = name.name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if hasattr(owner, last):
        return True
    try:
        importlib.import_module(f"{name.module}.{name.name}")
    except ImportError:
        return isinstance(owner, type) and last in _names_in(owner)
    return True


def _names_in(owner: type) -> frozenset[str]:
    """Return the attributes that the methods of a class and of its bases set or read on instances."""
    functions = [item for base in owner.__mro__ for item in vars(base).values()]
    unwrapped = (getattr(item, "__wrapped__", item) for item in functions)
    codes = [item.__code__ for item in unwrapped if isinstance(item, FunctionType)]
    annotated = (getattr(base, "__annotations__", {}) for base in owner.__mro__)
    return frozenset().union(*map(_names_of, codes), *annotated)


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    # nn.Module sets its own by name.
    yield from (value for value in code.co_consts if isinstance(value, str))


def fsdp_state(module: object) -> Any:
    """Return the ``FSDPState`` of a sharded module (torch 2.13, ``_fully_shard.py:FSDPModule``)."""
    sharded: Any = module
    return sharded._get_fsdp_state()


def fsdp_group(module: object) -> Any:
    """Return the ``FSDPParamGroup`` of a sharded module; None if it holds no parameters itself."""
    return fsdp_state(module)._fsdp_param_group


def fsdp_groups(module: object) -> list[Any]:
    """Return the groups of a sharded module: one for each mesh from torch 2.13 on, one before."""
    state = fsdp_state(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]
