"""What compiled blocks allocate: the programs that Inductor writes for them, run on fake tensors.

``torch.compile`` runs as in training: Dynamo captures a block's forward, AOTAutograd traces forward and
backward together, the min-cut partitioner decides what forward keeps, Inductor fuses and schedules
(torch 2.13, ``torch/_inductor/compile_fx.py``). Only the last step differs. The Python program that Inductor
writes allocates buffers, calls kernels, and frees buffers; here its kernels do nothing and its buffers are
fake, so the recorder sees each allocation of the real program and no kernel is built.

Inductor writes for the CPU, also when the trace assumes the operators of CUDA. Which tensors are kept for
backward does not depend on the device; how operators are fused does. :class:`Fusion` therefore gives a lower
and an upper bound, too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from fsdptool.memory.tracing.recorder import SegmentRecorder
from fsdptool.modeling.compilation import MEASURED_TORCH
from fsdptool.records.trace import Segment, Trace


class Fusion(Enum):
    """Which of a block's tensors exist.

    Attributes:
        INDUCTOR: The buffers of Inductor's program.
        NONE: Upper bound: every operator's output, until its last use.
    """

    INDUCTOR = "inductor"
    NONE = "none"


class UncompiledBlockError(Exception):
    """A block cannot be compiled on fake tensors.

    Attributes:
        kind: Class of the block.
    """

    def __init__(self, kind: str, error: Exception) -> None:
        super().__init__(f"{kind} ({type(error).__name__}: {' '.join(str(error).split())[:120]})")
        self.kind = kind


class BlockCompiler:
    """Compiles blocks of models on fake tensors; like blocks share one compilation.

    Attributes:
        fusion: Which tensors of compiled blocks exist when they run next.
        uncompiled: Classes of blocks to leave alone, with the reason.
    """

    def __init__(self) -> None:
        self.fusion = Fusion.INDUCTOR
        self.uncompiled: dict[str, str] = {}
        self._codes: set[Any] = set()

    def compile(self, module: nn.Module) -> None:
        """Replace a block's forward by its compiled one; hooks on the block stay outside."""
        forward = module.forward
        kind = type(module).__name__
        if kind in self.uncompiled:
            return
        compiled = torch.compile(forward, backend="inductor", dynamic=False)
        self._codes.add(getattr(forward, "__func__", forward).__code__)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return compiled(*args, **kwargs)
            except Exception as error:
                raise UncompiledBlockError(kind, error) from error

        run.compiled = True  # type: ignore[attr-defined]
        run.saved = getattr(forward, "saved", None)  # type: ignore[attr-defined]
        module.forward = run

    def compile_modules(self, model: nn.Module, paths: Iterable[str]) -> None:
        """Compile modules of a model, each by itself."""
        for path in paths:
            self.compile(model.get_submodule(path))

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Let Inductor's programs run on fake tensors, while entered."""
        from torch._C._dynamo.eval_frame import reset_code
        from torch._dynamo import config as dynamo_config
        from torch._functorch import config as functorch_config
        from torch._inductor import config as inductor_config
        from torch._inductor import cpp_builder, cpu_vec_isa
        from torch._inductor.graph import GraphLowering

        from fsdptool.memory.tracing.kernels import replaced

        def load(graph: Any) -> _Program:
            operators = _unfused(graph.orig_gm)
            source = graph.codegen()[0].value
            program = _program(source, {**graph.constants, **graph.torchbind_constants})

            def call(args: list[Any]) -> Any:
                return operators(args) if self.fusion is Fusion.NONE else program(args)

            return _Program(call)

        _follow_random_states()
        with ExitStack() as stack:
            stack.enter_context(replaced(GraphLowering, "compile_to_module", load))
            # Programs that use fake buffers must not enter the caches of real ones.
            stack.enter_context(inductor_config.patch(fx_graph_cache=False, compile_threads=1))
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
            # Nothing here needs a C++ compiler; vector instructions do not change the buffers.
            stack.enter_context(replaced(cpu_vec_isa, "valid_vec_isa_list", list))
            stack.enter_context(replaced(cpp_builder, "is_gcc", lambda: True))
            stack.enter_context(replaced(cpp_builder, "is_msvc_cl", lambda: False))
            # What fails is said in the trace's unknowns.
            stack.enter_context(_without_logs())
            # A block of another width is another graph, not one with symbolic sizes.
            stack.enter_context(
                dynamo_config.patch(automatic_dynamic_shapes=False, recompile_limit=64, suppress_errors=False)
            )
            try:
                yield
            finally:
                for code in self._codes:
                    reset_code(code)


@contextmanager
def _without_logs() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def is_compiled(module: nn.Module) -> bool:
    """Say whether :meth:`BlockCompiler.compile` has compiled a module."""
    return getattr(vars(module).get("forward"), "compiled", False)


class _Program:
    """What Inductor takes for the loaded module of a graph's program."""

    def __init__(self, call: Callable[[list[Any]], Any]) -> None:
        self.call = call
        self.runner = None


def _unfused(graph_module: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a program that runs a graph operator by operator and frees each value after its last use."""

    def call(args: list[Any]) -> Any:
        inputs = list(args)
        args.clear()
        interpreter = torch.fx.Interpreter(graph_module)
        return interpreter.boxed_run(inputs)

    return call


def _program(source: str, constants: dict[str, Any]) -> Callable[[list[Any]], Any]:
    """Return Inductor's program with fake buffers and kernels that do nothing.

    Args:
        source: As Inductor wrote it.
        constants: Tensors that the graph contains.
    """
    from torch._inductor.async_compile import AsyncCompile

    from fsdptool.memory.tracing.kernels import replaced

    namespace: dict[str, Any] = dict(constants)
    with replaced(AsyncCompile, "cpp_pybinding", lambda *_, **__: _nothing):
        exec(compile(source, "<inductor>", "exec"), namespace)  # noqa: S102 - Inductor's own program
    namespace |= {
        "assert_size_stride": _nothing,
        "assert_alignment": _nothing,
        "empty_strided_cpu": _allocate,
        "reinterpret_tensor": _reinterpret,
        "extern_kernels": _ExternKernels(namespace["extern_kernels"]),
    }
    program: Callable[[list[Any]], Any] = namespace["call"]
    return program


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for a generated kernel: its buffers are allocated and freed by the program."""


def _allocate(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, increment: int) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + increment)


_RANDOM_STATE_BYTES = 5056
"""State of the CPU's generator (torch 2.13, ``torch.get_rng_state``); a GPU's is smaller."""


def _follow_random_states() -> None:
    """Let the recorder see what a program runs under a saved random state (checkpointed attention)."""
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    def save(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8), operator(*args, **kwargs)

    def repeat(mode: Any, _state: torch.Tensor, operator: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return operator(*args, **kwargs)

    for operator, rule in ((run_and_save_rng_state, save), (run_with_rng_state, repeat)):
        if SegmentRecorder not in operator.python_key_table:
            operator.py_impl(SegmentRecorder)(rule)


class _ExternKernels:
    """Kernels that Inductor calls: those that fill a buffer do nothing, others return a fake tensor.

    Args:
        kernels: Inductor's own.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        def call(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
            return kernel(*args, **kwargs) if out is None else out

        return call


REMAINS = (
    "compiled blocks: the plan runs the program that Inductor writes for a CPU, and other devices fuse other"
    " operators; memory of autotuning, of CUDA graphs and of compilation in the first step is not included"
)
_EAGER = "the memory of compiled blocks: the figures are those of uncompiled blocks, because"


def trace_compiled(
    eager: Trace, trace_with: Callable[[BlockCompiler], Trace], *, reason: str | None = None
) -> Trace:
    """Return the trace with compiled blocks.

    The time model is calibrated on what eager operators compute and move, so these figures stay those of
    ``eager``. A class of blocks that cannot be compiled stays eager, and the trace's ``unknowns`` say so.

    Args:
        eager: The same micro-batch with no block compiled.
        trace_with: Traces with blocks compiled by what it is given.
        reason: Why no block can be compiled; None if nothing is known against it.
    """
    version = torch.__version__.split("+")[0]
    if version.rpartition(".")[0] not in MEASURED_TORCH:
        reason = f"compiled blocks were not compared with measurements on torch {version}"
    if reason is not None:
        return replace(eager, unknowns=(*eager.unknowns, f"{_EAGER} {reason}"))
    compiler = BlockCompiler()
    try:
        with compiler.compiling():
            estimate = _traced(compiler, trace_with)
            compiler.fusion = Fusion.NONE
            upper = trace_with(compiler)
        merged = replace(
            estimate, segments=_with_costs(estimate.segments, eager), operations=eager.operations, upper=upper
        )
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        return trace_compiled(eager, trace_with, reason=f"they fail on fake tensors ({text})")
    failed = tuple(f"{_EAGER} {why} cannot be compiled" for why in compiler.uncompiled.values())
    return replace(merged, unknowns=(*eager.unknowns, REMAINS, *failed), notes=eager.notes)


def _traced(compiler: BlockCompiler, trace_with: Callable[[BlockCompiler], Trace]) -> Trace:
    """Trace until every class of blocks that cannot be compiled is known."""
    while True:
        try:
            return trace_with(compiler)
        except UncompiledBlockError as error:
            if error.kind in compiler.uncompiled:
                raise
            compiler.uncompiled[error.kind] = str(error)


def _with_costs(segments: Sequence[Segment], eager: Trace) -> tuple[Segment, ...]:
    """Return segments with the arithmetic of an eager trace, which has boundaries inside blocks, too.

    Raises:
        ValueError: The two do not reach the same boundaries in the same order.
    """
    boundaries = {segment.path for segment in segments}
    groups: list[list[Segment]] = []
    for segment in eager.segments:
        if segment.path in boundaries:
            groups.append([])
        groups[-1].append(segment)
    if [(g[0].marker, g[0].path) for g in groups] != [(s.marker, s.path) for s in segments]:
        raise ValueError("compiled and eager blocks reach module boundaries in another order")
    return tuple(_costs(segment, group) for segment, group in zip(segments, groups, strict=True))


def _costs(segment: Segment, group: Sequence[Segment]) -> Segment:
    flops: dict[str, float] = {}
    for part in group:
        for dtype, count in part.flops.items():
            flops[dtype] = flops.get(dtype, 0.0) + count
    return replace(
        segment,
        flops=flops,
        bytes_moved=sum(part.bytes_moved for part in group),
        kernels=sum(part.kernels for part in group),
        recomputed=sum(part.recomputed for part in group),
        operations=tuple(number for part in group for number in part.operations),
        calls=tuple(call for part in group for call in part.calls),
        summed=tuple(size for part in group for size in part.summed),
        gathered=tuple(size for part in group for size in part.gathered),
    )
