"""What the stacks of a memory snapshot tell: the component of a plan, and the lines of Python. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsdptool.records.trace import Component

BEFORE = "before the recording"
UNKNOWN = "not attributed"

_BACKWARD = "backward"
_MODULE = r"torch/nn/modules/module\.py$"

# (file, function, what a frame says), the strongest first: a stack is what its strongest frame says.
_MARKS: tuple[tuple[str, str, str], ...] = (
    (r"", r"Workspace|getCurrentCUDABlasHandle|allocate_workspace", Component.WORKSPACES),
    (r"fsdp/.*_fsdp_param\.py$", r"alloc_all_gather|init_unsharded|init_all_gather", Component.UNSHARDED),
    (r"fsdp/.*_fsdp_collectives\.py$", r"reduce", Component.REDUCE),
    (r"fsdp/.*_fsdp_collectives\.py$", r"all_gather", Component.GATHER),
    (r"fsdp/_flat_param\.py$", r"unshard|all_gather", Component.UNSHARDED),
    (r"fsdp/_runtime_utils\.py$", r"reduce", Component.REDUCE),
    (r"distributed/(distributed_c10d|_functional_collectives)\.py$", r"", "communication"),
    (r"", r"ProcessGroupNCCL", "communication"),
    (r"torch/optim/optimizer\.py$", r"profile_hook_step|wrapper", Component.OPTIMIZER),
    (
        r"(torch|torchao|bitsandbytes|apex|deepspeed)/(.*/)?optim(izers?)?/",
        r"step|_init",
        Component.OPTIMIZER,
    ),
    (r"torch/utils/checkpoint\.py$", r"recompute|unpack", Component.RECOMPUTED),
    (r"", r"AccumulateGrad", Component.GRADIENTS),
    (r"", r"autograd::Engine|_engine_run_backward", _BACKWARD),
    (r"", r"cross_entropy|log_softmax|nll_loss", Component.LOSS),
    (r"safetensors/|modeling_utils\.py$|core_model_loading", r"", Component.PARAMETERS),
    (_MODULE, r"^(_apply|to_empty|load_state_dict|reset_parameters)$", Component.PARAMETERS),
    (_MODULE, r"^(_call_impl|_wrapped_call_impl)$", Component.ACTIVATIONS),
    (r"", r"^forward$", Component.ACTIVATIONS),
    (r"torch/nn/modules/\w+\.py$", r"^__init__$", Component.PARAMETERS),
    (r"fsdp/", r"init_sharded|_init_sharded_param|__init__", Component.PARAMETERS),
)
_PATTERNS = tuple((re.compile(file), re.compile(name), mark) for file, name, mark in _MARKS)
_NONE = len(_PATTERNS)
_CALL = next(rank for rank, (file, name, _) in enumerate(_MARKS) if file == _MODULE and "_call_impl" in name)
_OWN = re.compile(r"(^|/)torch/|^<frozen|/importlib/|\.(c|cc|cpp|cu|h|hpp|o)$")
_CUT = 500

_MOST = 20_000
"""Stacks that are remembered."""

Line = tuple[str, int, str]
"""File, line and function of a frame."""


class Stacks:
    """Reads the stacks of one snapshot, whose frames are dicts of ``filename``, ``name`` and ``line``."""

    def __init__(self) -> None:
        # Frames stay alive with the snapshot, so that their identity names them.
        self._frames: dict[int, tuple[int, Line | None]] = {}
        self._known: dict[tuple[str, str, int], tuple[int, Line | None]] = {}
        # Torch makes one dict for each frame that differs, so that equal stacks are of the same dicts.
        self._summaries: dict[tuple[int, ...], tuple[int, tuple[Line | None, ...]]] = {}

    def rank(self, frames: Any) -> int:
        """Return the number of the strongest mark; that of none where no frame says anything."""
        return self._summary(frames)[0] if type(frames) is list else _NONE

    def component(self, frames: Any, freed: Any, *, python_only: bool) -> str:
        """Return the component of a block.

        Args:
            frames: The stack that allocated it.
            freed: The stack that freed it, or None for a block that was kept.
            python_only: Whether stacks have no C++ frames: those of autograd's threads are empty then.
        """
        if not frames:
            if not python_only:
                return BEFORE
            mark = _BACKWARD
        else:
            rank = self.rank(frames)
            if rank == _NONE:
                return UNKNOWN
            mark = _MARKS[rank][2]
        if mark not in (_BACKWARD, Component.REDUCE):
            return str(mark)
        # A gradient outlives the backward pass: the loop frees it, or nobody does. FSDP2's are parts of what
        # the reduce-scatter of their unit returned.
        if freed is None or (bool(freed) and _backward_rank() < self.rank(freed)):
            return str(Component.GRADIENTS)
        return str(Component.TEMPORARIES if mark == _BACKWARD else mark)

    def lines(self, frames: Any) -> list[Line]:
        """Return file, line and function of the frames outside of torch, the innermost first."""
        if type(frames) is not list:
            return []
        read = [(self._frames.get(id(frame)) or self._read(frame))[1] for frame in frames]
        return [line for line in read if line is not None]

    def forward_lines(self, frames: Any) -> tuple[Line | None, ...]:
        """Return the lines outside of torch below the outermost call of a module, the outermost first.

        None stands at the end, so that no stack is the beginning of another; nothing is returned where no
        module is called.
        """
        if type(frames) is not list:
            return ()
        return self._summary(frames)[1]

    def _summary(self, frames: Sequence[Any]) -> tuple[int, tuple[Line | None, ...]]:
        """Return the strongest mark and the forward lines of a stack."""
        key = tuple(map(id, frames))
        if (found := self._summaries.get(key)) is None:
            if len(self._summaries) >= _MOST:
                self._summaries.clear()
            found = self._summaries[key] = self._summarise(frames)
        return found

    def _summarise(self, frames: Sequence[Any]) -> tuple[int, tuple[Line | None, ...]]:
        strongest = _NONE
        lines: list[Line | None] = []
        called = False
        known = self._frames
        for frame in reversed(frames):
            found = known.get(id(frame))
            rank, line = self._read(frame) if found is None else found
            if rank < strongest:
                strongest = rank
            if not called:
                called = rank == _CALL
            elif line is not None:
                lines.append(line)
        return strongest, (*lines, None) if called else ()

    def _read(self, frame: Any) -> tuple[int, Line | None]:
        if type(frame) is not dict:
            return _NONE, None
        file, name, line = frame.get("filename"), frame.get("name"), frame.get("line")
        if type(file) is not str or type(name) is not str or type(line) is not int:
            found: tuple[int, Line | None] = (_NONE, None)
        else:
            key = (file[-_CUT:], name[:_CUT], line)
            if (known := self._known.get(key)) is None:
                known = self._known[key] = (_rank_of(*key[:2]), _place(*key))
            found = known
        self._frames[id(frame)] = found
        return found


def _rank_of(file: str, name: str) -> int:
    for rank, (files, names, _) in enumerate(_PATTERNS):
        if names.search(name) and files.search(file):
            return rank
    return _NONE


def _backward_rank() -> int:
    return next(rank for rank, mark in enumerate(_MARKS) if mark[2] == _BACKWARD)


def _place(file: str, name: str, line: int) -> Line | None:
    """Return a line of Python outside of torch, whose C++ frames have no line."""
    if line <= 0 or line >= 1 << 31 or "::" in name or _OWN.search(file):
        return None
    return file, line, name
