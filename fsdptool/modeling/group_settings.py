"""Which settings the ranks of a tensor- or expert-parallel group support, judged without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool.errors import ConfigError
from fsdptool.layout.refusals import EXPERT
from fsdptool.modeling.optimizers import optimizer_spec

if TYPE_CHECKING:
    from fsdptool.records.recipe import Lora
    from fsdptool.records.resolved_run import ResolvedRun


def check_tensor_parallel(run: ResolvedRun) -> None:
    """Refuse what cannot be trained over a tensor-parallel group, before anything is written.

    Raises:
        ConfigError: Names the setting.
    """
    recipe = run.recipe
    spec = optimizer_spec(recipe.optimizer)
    reason = None
    if not spec.elementwise:
        reason = f"optimizer {spec.name} needs whole matrices, or states that cannot be resharded"
    elif recipe.method.lora is not None and (why := _undivided(recipe.method.lora)):
        reason = why
    elif recipe.sharding.compile:
        reason = "sharding.compile does not support the sums over the group"
    elif run.settings.mixed_precision == "fp8":
        reason = "mixed_precision fp8 scales whole layers"
    if reason is not None:
        raise ConfigError(f"tp_size is not supported: {reason}", help="set tp_size to 1, or change it")
    if recipe.sharding.sequence_parallel:
        _refuse_uneven(run)


def _undivided(lora: Lora) -> str | None:
    """Return why the ranks of a group cannot divide a model with such adapters, or None."""
    if lora.base != "unchanged":
        return f"a base stored as {lora.base} cannot be divided"
    names = ("modules_to_save", "trainable_token_indices", "use_dora", "lora_bias")
    used = [name for name in names if getattr(lora, name)] + ["bias"] * (lora.bias != "none")
    return f"method.lora.{used[0]} is trained on whole layers" if used else None


def check_expert_parallel(run: ResolvedRun) -> None:
    """Refuse what cannot be trained over an expert-parallel group, before anything is written.

    Raises:
        ConfigError: Names the setting.
    """
    recipe, sharding, spec = run.recipe, run.sharding, optimizer_spec(run.recipe.optimizer)
    reason = None
    if sharding.layout != "native":
        reason = f"the {sharding.layout} layout has no units of experts"
    elif not isinstance(sharding.reshard_after_forward, bool):
        reason = "experts are sharded over fewer ranks than sharding.reshard_after_forward assumes"
    elif recipe.sharding.compile:
        reason = "compiled blocks cannot exchange tokens in numbers that change with each batch"
    elif sharding.ignored_modules is not None:
        reason = "ignored_modules may leave experts out of sharding"
    elif not spec.elementwise:
        reason = f"optimizer {spec.name} needs whole matrices, or states that cannot be resharded"
    elif recipe.method.lora is not None and (why := _undivided(recipe.method.lora)):
        reason = why
    if reason is not None:
        name = EXPERT.removesuffix(":")
        raise ConfigError(
            f"{EXPERT} {run.mesh.ep} is not supported: {reason}", help=f"set {name} to 1, or change it"
        )


def _refuse_uneven(run: ResolvedRun) -> None:
    """Refuse sequences that the ranks of a group cannot divide evenly.

    Raises:
        ConfigError: Names the length.
    """
    length, mesh = run.recipe.batch.sequence_length, run.mesh
    if run.recipe.data.padded == "longest":
        raise ConfigError(
            "sharding.sequence_parallel needs sequences of one length",
            help="pack them, or set data.padding: length",
        )
    if length is not None and mesh.cp > 1:
        # Context parallelism fills sequences up to two chunks for each rank.
        length = -(-length // (2 * mesh.cp)) * 2
    if length is not None and length % mesh.tp:
        each = " of each context-parallel rank" if mesh.cp > 1 else ""
        raise ConfigError(
            f"sharding.sequence_parallel: {mesh.tp} ranks cannot divide the {length} positions{each}",
            help=f"set batch.sequence_length to a multiple of {mesh.tp * mesh.cp}",
        )
