"""accelerate 1.15's own grouping, call by call.

Follows ``fsdp2_prepare_model`` and ``fsdp2_prepare_auto_wrap_policy`` in
``accelerate/utils/fsdp_utils.py`` (1.15.0). Where accelerate or torch would raise on this
model, so does this, with the setting that avoids it; a test holds it against the real code.
"""

from __future__ import annotations

from fsdptool.errors import ConfigError
from fsdptool.layout.tree import ModuleTree
from fsdptool.records.anatomy import Anatomy, Parameter
from fsdptool.records.resolved_run import ResolvedSharding
from fsdptool.records.sharding import Unit

DEFAULT_MIN_NUM_PARAMS = 100_000_000
"""What ``accelerate launch`` exports when the file names no size (``FSDP_MIN_NUM_PARAMS``)."""


class NoForwardError(ConfigError):
    """Size-based wrapping reaches a module without a forward, which ``fully_shard`` refuses."""


def accelerate_units(
    anatomy: Anatomy, sharding: ResolvedSharding, ignored: set[str], saved: tuple[str, ...] = ()
) -> tuple[Unit, ...]:
    """Return the units accelerate 1.15 makes of this model, in call order, the root last.

    Args:
        anatomy: The model.
        sharding: Wrap policy and classes, true or false for resharding, whether blocks are recomputed.
        ignored: Names of parameters left out of sharding.
        saved: Selectors of what recomputation finds saved.

    Raises:
        ConfigError: accelerate or torch would refuse this model with these settings.
    """
    reshard_blocks = bool(sharding.reshard_after_forward)
    tree = ModuleTree(anatomy)
    units: list[Unit] = []
    taken: set[str] = set()

    def shard(kind: str, roots: list[str], reshard: bool | None, checkpointed: bool = False) -> None:
        roots = _outermost(roots)
        claimed = tree.claim(roots, taken)
        parameters = tuple(p for p in claimed if p.fqn not in ignored)
        taken.update(roots)
        if parameters or checkpointed or kind == "root":
            unit = Unit(
                id="+".join(roots) or "root",
                kind=kind,  # type: ignore[arg-type]
                modules=tuple(roots),
                class_name=tree.modules[roots[0]].class_name,
                parameters=parameters,
                reshard_after_forward=reshard,
                checkpointed=checkpointed,
                save_operators=saved if checkpointed else (),
            )
            units.append(unit)

    managed = any(parameter.fqn not in ignored for parameter in anatomy.parameters)
    for path in _wrapped(anatomy, tree, sharding, managed):
        shard("block", [path], reshard_blocks, sharding.recomputes)

    embedding, head = anatomy.input_embedding, anatomy.output_embedding
    tied = _weight(tree, embedding) is not None and _weight(tree, embedding) is _weight(tree, head)
    if not tied and embedding is not None and embedding not in taken:
        _refuse_nested(tree, embedding, taken)
        shard("embedding", [embedding], reshard_blocks)
    tail = (anatomy.final_norm, embedding, head) if tied else (anatomy.final_norm, head)
    present = [path for path in tail if path is not None and path not in taken]
    if present:
        shard("tail", present, False)
    shard("root", [""], None)
    _refuse_shared(units)
    return tuple(units)


def _wrapped(anatomy: Anatomy, tree: ModuleTree, sharding: ResolvedSharding, managed: bool) -> list[str]:
    if sharding.wrap_policy == "none":
        if sharding.recomputes:
            raise ConfigError(
                "accelerate 1.15 crashes on activation checkpointing with NO_WRAP",
                help="wrap by class (TRANSFORMER_BASED_WRAP), or switch activation checkpointing off",
            )
        return []
    if sharding.wrap_policy == "size":
        return _by_size(tree, sharding.min_num_params or DEFAULT_MIN_NUM_PARAMS)
    classes = sharding.wrap_classes or anatomy.no_split_modules
    live = {module.class_name for module in tree.modules.values()}
    for name in classes:
        if name not in live and (managed or sharding.wrap_classes):
            raise ConfigError(
                f"accelerate would not find the wrap class {name} in {anatomy.spec.model_class}",
                help=f"wrap {', '.join(anatomy.wrap.classes) or 'a class that detect lists'} instead",
            )
    return tree.instances(classes)


def _by_size(tree: ModuleTree, minimum: int) -> list[str]:
    chosen = []
    for path in tree.postorder():
        if path and sum(parameter.numel for parameter in tree.subtree(path)) > minimum:
            module = tree.modules[path]
            if not module.forwards:
                raise NoForwardError(
                    f"SIZE_BASED_WRAP reaches {path}, a {module.class_name} without a forward,"
                    " which fully_shard refuses",
                    help="wrap by class (TRANSFORMER_BASED_WRAP) instead",
                )
            chosen.append(path)
    return chosen


def _weight(tree: ModuleTree, path: str | None) -> Parameter | None:
    if path is None:
        return None
    return next((p for p in tree.subtree(path) if f"{path}.weight" in p.names), None)


def _outermost(roots: list[str]) -> list[str]:
    """Drop modules nested in others of one call, as torch's ``_get_root_modules`` does."""
    return [r for r in roots if not any(r != other and f"{r}.".startswith(f"{other}.") for other in roots)]


def _refuse_nested(tree: ModuleTree, embedding: str, taken: set[str]) -> None:
    owner = next((path for path in tree.ancestors(embedding) if path in taken), None)
    if owner is not None:
        name = tree.modules[owner].class_name
        raise ConfigError(
            f"accelerate 1.15 cannot wrap {name}: it contains the input embedding {embedding}",
            help=f"leave {name} out of the wrap classes",
        )


def _refuse_shared(units: list[Unit]) -> None:
    owner: dict[str, str] = {}
    for unit in units:
        for parameter in unit.parameters:
            other = owner.setdefault(parameter.fqn, unit.id)
            if other != unit.id:
                raise ConfigError(
                    f"accelerate 1.15 puts the shared parameter {' = '.join(parameter.names)} into two"
                    f" FSDP units ({other} and {unit.id}), which torch refuses",
                    help="train with fsdptool's native layout, or untie the weights",
                )
