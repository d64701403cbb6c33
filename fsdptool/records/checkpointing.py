"""Activation-checkpointing policies: which outputs a block keeps, and the policy as one line of text.

The recipe holds a policy as a record, a plan's search point holds it as text, and layout, tracer and
trainer read what is defined here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fsdptool.errors import ConfigError
from fsdptool.records.annotations import Positive
from fsdptool.records.sharding import CheckpointingMode

OPERATOR_CLASSES: Mapping[str, tuple[str, ...]] = {
    "matmul": ("aten.mm.default", "aten.addmm.default", "aten._scaled_mm.default"),
    "attention": (
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_attention_math.default",
        "torch_attn._varlen_attn.default",
        "flash_attn._flash_attn_forward.default",
        "flash_attn._flash_attn_varlen_forward.default",
    ),
}
"""Names that stand for several operators, so that a policy holds whichever kernel runs. ``matmul`` is the
product of a linear layer, without bias (``mm``), with it (``addmm``) or in float8 (``_scaled_mm``)."""

_CLASS_OF = {operator: name for name, members in OPERATOR_CLASSES.items() for operator in members}


def selector_name(operator: str) -> str:
    """Return the class an operator belongs to, or its own name."""
    return _CLASS_OF.get(operator, operator)


_FURTHER = (
    "aten.bmm.default",
    "aten._grouped_mm.default",
    "aten._scaled_grouped_mm.default",
    # A float8 product scales by the largest entry of its operands: one number, and a pass over them.
    "aten.max.default",
    "_c10d_functional.reduce_scatter_tensor.default",
)
SAVED_OPERATORS = ("matmul", "attention", *_FURTHER)
"""What selective checkpointing keeps by default: matrix products and attention, the operators that
cost far more time to repeat than memory to keep."""

_SELECTOR = re.compile(r"(?P<operator>[A-Za-z_][\w.:]*)(?:/(?P<every>[1-9]\d*)|#(?P<call>[1-9]\d*))?")
_EVERY_MATMULS = re.compile(r"every-([1-9]\d*)-matmuls")


@dataclass(frozen=True, slots=True)
class Selector:
    """Which calls of an operator keep their output.

    Attributes:
        operator: A name as in ``torch.ops``, or one of :data:`OPERATOR_CLASSES`.
        every: Keep the first of every so many calls in a block's forward.
        call: Keep this call only, counted from 1; None keeps what ``every`` selects.
    """

    operator: str
    every: int = 1
    call: int | None = None

    def selects(self, call: int) -> bool:
        """Return whether the output of the ``call``-th call, counted from 1, is kept."""
        return call == self.call if self.call is not None else (call - 1) % self.every == 0


def read_selector(text: str) -> Selector:
    """Return the selector that ``matmul``, ``matmul/2`` (every second) or ``matmul#3`` (the third) means.

    Raises:
        ConfigError: The text is not a selector.
    """
    match = _SELECTOR.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} does not name an operator whose output is kept",
            help="write an operator (aten.mm.default, matmul, attention), every n-th call (matmul/2) or one"
            " call (matmul#3)",
        )
    call = match["call"]
    return Selector(match["operator"], int(match["every"] or 1), int(call) if call else None)


@dataclass(frozen=True, slots=True)
class BlockPolicy:
    """How ``count`` successive blocks are checkpointed.

    Attributes:
        count: Blocks, in the order in which the model calls them.
        mode: ``none`` keeps what autograd saves, ``full`` the block's input only, ``selective`` the
            outputs of ``save_operators`` as well.
        save_operators: Selectors; empty with ``selective`` keeps matrix products and attention.
    """

    count: Positive
    mode: Literal["none", "full", "selective"] = "full"
    save_operators: tuple[str, ...] = ()

    @property
    def saved(self) -> tuple[str, ...]:
        """The selectors of what recomputation finds saved; empty when everything is recomputed."""
        return (self.save_operators or SAVED_OPERATORS) if self.mode == "selective" else ()


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Activation checkpointing beyond on and off (the YAML owns on and off).

    Attributes:
        mode: ``every_n`` recomputes every n-th block; ``per_block`` follows ``blocks``.
        every_n: For ``every_n``.
        save_operators: Selectors for ``selective``; empty keeps matrix products and attention.
        blocks: For ``per_block``: runs of blocks that together count every outermost wrapped block.
    """

    mode: CheckpointingMode = "full"
    every_n: Positive = 2
    save_operators: tuple[str, ...] = ()
    blocks: tuple[BlockPolicy, ...] = field(default=())

    def per_block(self, count: int) -> list[BlockPolicy]:
        """Return the policy of each of a model's ``count`` blocks.

        Raises:
            ConfigError: ``blocks`` describes another number of blocks.
        """
        if self.mode == "per_block":
            runs = [run for run in self.blocks for _ in range(run.count)]
            if len(runs) != count:
                raise ConfigError(
                    f"sharding.checkpointing.blocks describes {len(runs)} blocks, and the model has {count}",
                    help="make the counts add up, or plan again with --checkpointing optimal",
                )
            return runs
        if self.mode == "every_n":
            return [BlockPolicy(1, "none" if index % self.every_n else "full") for index in range(count)]
        return [BlockPolicy(1, self.mode, self.save_operators)] * count


EXAMPLES = ("none", "full", "every_2", "selective", "selective:every-2-matmuls")
"""Policies that are offered; others keep operators by name, or count blocks."""
POLICY_PATTERN = (
    r"^(every_[1-9][0-9]*"
    r"|(none|full|selective(:[^*+]+)?)"
    r"|[1-9][0-9]*\*(none|full|selective(:[^*+]+)?)(\+[1-9][0-9]*\*(none|full|selective(:[^*+]+)?))*)$"
)
"""What :func:`format_policy` writes, as a regular expression for JSON Schemas."""


def format_policy(policy: Checkpointing | None) -> str:
    """Return a policy as text, for example ``full``, ``every_2`` or ``12*full+20*selective:matmul/2``."""
    if policy is None:
        return "full"
    if policy.mode == "every_n":
        return f"every_{policy.every_n}"
    if policy.mode == "per_block":
        return "+".join(f"{run.count}*{_format_mode(run.mode, run.save_operators)}" for run in policy.blocks)
    return _format_mode(policy.mode, policy.save_operators)


def _format_mode(mode: str, saved: Sequence[str]) -> str:
    if mode != "selective" or not saved or tuple(saved) == SAVED_OPERATORS:
        return mode
    every = read_selector(saved[0]).every
    if tuple(saved) == _every_matmuls(every):
        return f"selective:every-{every}-matmuls"
    return f"selective:{','.join(saved)}"


def _every_matmuls(every: int) -> tuple[str, ...]:
    return (f"matmul/{every}", *SAVED_OPERATORS[1:])


def read_policy(text: str) -> Checkpointing:
    """Return the policy a text means.

    Raises:
        ConfigError: It means none.
    """
    if "*" in text:
        return Checkpointing("per_block", blocks=tuple(_read_run(text, part) for part in text.split("+")))
    prefix, _, number = text.rpartition("_")
    if prefix == "every" and number.isdecimal() and int(number) >= 1:
        return Checkpointing("every_n", every_n=int(number))
    mode, saved = _read_mode(text, text)
    return Checkpointing(mode, save_operators=saved)


def _read_run(text: str, part: str) -> BlockPolicy:
    count, _, rest = part.partition("*")
    if not count.isdecimal() or int(count) < 1:
        raise _unsupported(text)
    return BlockPolicy(int(count), *_read_mode(text, rest))


def _read_mode(text: str, part: str) -> tuple[Literal["none", "full", "selective"], tuple[str, ...]]:
    mode, colon, rest = part.partition(":")
    if mode not in ("none", "full", "selective") or (colon and (mode != "selective" or not rest)):
        raise _unsupported(text)
    every = _EVERY_MATMULS.fullmatch(rest)
    if every is not None:
        return "selective", _every_matmuls(int(every[1]))
    saved = tuple(rest.split(",")) if rest else ()
    for selector in saved:
        read_selector(selector)
    return mode, saved  # type: ignore[return-value]  # one of the three above


def _unsupported(text: str) -> ConfigError:
    return ConfigError(
        f"checkpointing {text!r} is not supported",
        help=f"choose {', '.join(EXAMPLES)}, selective:OPERATOR,..., every_3, ...,"
        " or runs of blocks such as 12*full+20*selective",
    )
