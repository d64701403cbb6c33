"""The trainer's own grouping: embeddings, blocks, tail and root, safe for every tie.

Each block is a unit. Large untied embeddings outside the blocks are units of their own that
backward never gathers again. An untied head forms the tail with the final norm and stays
gathered between forward and backward, where freeing it would cost a gather that nothing can
hide. Everything else belongs to the root, which torch keeps gathered for the whole step: correct
however many modules share a tensor. Tied embeddings and heads are there, and embeddings whose weight
the model's code reads without calling them.

peft replaces an adapted table or head by a module that holds it: the grouping is that of the plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdptool.errors import ConfigError
from fsdptool.layout.accelerate import DEFAULT_MIN_NUM_PARAMS
from fsdptool.layout.tree import ModuleTree
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.checkpointing import BlockPolicy
from fsdptool.records.resolved_run import ResolvedSharding
from fsdptool.records.sharding import Unit, UnitKind

_EMBEDDING_SHARE = 0.01
"""An embedding below this share of the parameters is not worth a collective of its own."""

_COPIED = "ModulesToSaveWrapper"
"""peft's module that holds another one and a copy of it that is trained in its place (0.21)."""


@dataclass(slots=True)
class _Builder:
    tree: ModuleTree
    ignored: set[str]
    reshard: bool | int
    units: list[Unit]
    taken: set[str]

    def shard(
        self,
        kind: UnitKind,
        roots: list[str],
        *,
        reshard: bool | int | None,
        unshard_in_backward: bool = True,
        policy: BlockPolicy | None = None,
    ) -> None:
        parameters = tuple(p for p in self.tree.claim(roots, self.taken) if p.fqn not in self.ignored)
        self.taken.update(roots)
        checkpointed = policy is not None and policy.mode != "none"
        if parameters or checkpointed or kind == "root":
            unit = Unit(
                id="+".join(roots) or "root",
                kind=kind,
                modules=tuple(roots),
                class_name=self.tree.modules[roots[0]].class_name,
                parameters=parameters,
                reshard_after_forward=reshard,
                unshard_in_backward=unshard_in_backward,
                checkpointed=checkpointed,
                save_operators=policy.saved if policy is not None else (),
            )
            self.units.append(unit)


def native_units(
    anatomy: Anatomy,
    sharding: ResolvedSharding,
    ignored: set[str],
    experts: Sequence[str] = (),
) -> tuple[Unit, ...]:
    """Return the trainer's units, in call order, the root last.

    Args:
        anatomy: The model (after LoRA injection, if any).
        sharding: Wrap policy and classes, resharding, checkpointing, and the grouping outside the blocks.
        ignored: Names of parameters left out of sharding.
        experts: Paths of modules that are units of their own, sharded over fewer ranks than the others.

    Raises:
        ConfigError: A wrap class is not in the model, or is the whole model.
    """
    tree = ModuleTree(anatomy)
    builder = _Builder(tree, ignored, sharding.reshard_after_forward, [], set())
    blocks = block_paths(anatomy, tree, sharding)
    for path in experts:
        builder.shard("experts", [path], reshard=builder.reshard)
    _shard_unused(builder, blocks)
    _shard_shared(builder, blocks)
    _shard_blocks(builder, blocks, sharding)
    if sharding.grouping.embedding == "unit":
        _shard_embeddings(builder, anatomy, blocks)
    if sharding.grouping.head == "tail":
        _shard_tail(builder, anatomy, blocks)
    builder.shard("root", [""], reshard=None)
    return tuple(builder.units)


def block_paths(anatomy: Anatomy, tree: ModuleTree, sharding: ResolvedSharding) -> list[str]:
    """Return the paths the wrap policy makes blocks of, children first."""
    if sharding.wrap_policy == "none":
        return []
    if sharding.wrap_policy == "size":
        minimum = sharding.min_num_params or DEFAULT_MIN_NUM_PARAMS
        return [
            path
            for path in tree.postorder()
            if path
            and tree.modules[path].forwards
            and sum(parameter.numel for parameter in tree.subtree(path)) > minimum
        ]
    classes = sharding.wrap_classes or anatomy.wrap.classes
    live = {module.class_name for path, module in tree.modules.items() if path}
    for name in classes:
        if name not in live:
            root = tree.modules[""].class_name
            what = "is the whole model" if name == root else f"is not in {root}"
            raise ConfigError(
                f"the wrap class {name} {what}",
                help=f"wrap {', '.join(anatomy.wrap.classes) or 'a class that detect lists'} instead",
            )
    return tree.instances(classes)


def _inside(path: str, blocks: list[str]) -> str | None:
    """Return the outermost block that is or holds ``path``, or None."""
    holders = [block for block in blocks if path == block or path.startswith(f"{block}.")]
    return min(holders, key=len) if holders else None


def _shard_shared(builder: _Builder, blocks: list[str]) -> None:
    """Give parameters that several blocks share a unit of their own.

    Two groups must not see one parameter (torch 2.13, ``_validate_no_duplicate_params``), so the
    modules that hold it directly are sharded together before the blocks around them.
    """
    groups: dict[tuple[str, ...], None] = {}
    for parameter in (p for p in builder.tree.parameters if p.aliases):
        owners = builder.tree.owners(parameter)
        homes = {_inside(owner, blocks) for owner in owners}
        if len(homes) > 1 and homes != {None}:
            groups[owners] = None
    merged: list[set[str]] = []
    for owners in groups:
        overlapping = [group for group in merged if group.intersection(owners)]
        union = set(owners).union(*overlapping)
        merged = [group for group in merged if group not in overlapping] + [union]
    for group in merged:
        builder.shard("shared", sorted(group), reshard=builder.reshard)


def _shard_blocks(builder: _Builder, blocks: list[str], sharding: ResolvedSharding) -> None:
    policies: dict[str, BlockPolicy] = {}
    outermost = [path for path in blocks if _inside(path, blocks) == path]
    kept = outermost[-1:] if sharding.grouping.last_block == "gathered" else []
    if sharding.recomputes:
        policies = dict(zip(outermost, sharding.checkpointing.per_block(len(outermost)), strict=True))
    for path in blocks:
        reshard = False if path in kept else builder.reshard
        builder.shard("block", [path], reshard=reshard, policy=policies.get(path))


def _shard_unused(builder: _Builder, blocks: list[str]) -> None:
    """Give what no forward calls, the module that a trained copy stands for, a unit that is never gathered.

    It holds parameters that nothing else holds: tied modules are unused together, or not at all.
    """
    copied = [
        p for p, m in builder.tree.modules.items() if m.class_name == _COPIED and not _inside(p, blocks)
    ]
    unused = [f"{path}.original_module" for path in copied]
    below = tuple(f"{path}." for path in unused)
    alone: dict[str, tuple[str, ...]] = {}
    for path in unused:
        owners = {o for p in builder.tree.subtree(path) for o in builder.tree.owners(p)}
        if all(f"{owner}.".startswith(below) for owner in owners):
            alone[path] = tuple(o for o in unused if any(f"{owner}.".startswith(f"{o}.") for owner in owners))
    done: set[str] = set()
    for path, together in alone.items():
        if path not in done and alone.keys() >= set(together):
            done.update(together)
            builder.shard("embedding", list(together), reshard=builder.reshard)


def _computing(tree: ModuleTree, path: str) -> str:
    """Return the module that FSDP has to gather for the table or head at ``path``: it, or one within it."""
    copy = f"{path}.modules_to_save.default"
    if tree.modules[path].class_name == _COPIED and copy in tree.modules:
        return copy
    base = f"{path}.base_layer"
    # DoRA reads the weight without calling the layer.
    if base in tree.modules and tree.modules[base].embedding and not _reads_base(tree, path):
        return base
    return path


def _reads_base(tree: ModuleTree, path: str) -> bool:
    return f"{path}.lora_magnitude_vector.default" in tree.modules


def _table_root(tree: ModuleTree, path: str) -> str:
    """Return the module whose forward gathers the table at ``path``: one around it may read its weight."""
    if not path.endswith(".base_layer"):
        return path
    holder = path.removesuffix(".base_layer")
    if holder.endswith(".token_adapter"):
        return holder.removesuffix(".token_adapter")
    return holder if _reads_base(tree, holder) else path


def _shard_embeddings(builder: _Builder, anatomy: Anatomy, blocks: list[str]) -> None:
    tree, table = builder.tree, anatomy.input_embedding
    least = anatomy.total_parameters * _EMBEDDING_SHARE
    first = _table_root(tree, _computing(tree, table)) if table in tree.modules else None
    read = {_computing(tree, path) if path in tree.modules else path for path in anatomy.weights_read}
    for inner, module in tree.modules.items():
        path = _table_root(tree, inner)
        if not module.embedding or builder.taken.intersection((inner, path)) or _inside(path, blocks):
            continue
        if read.intersection((inner, path)):
            continue  # read where nothing gathers it; the root's parameters are there all the time
        parameters = tree.subtree(path)
        if any(parameter.aliases for parameter in parameters):
            continue
        if path == first or sum(p.numel for p in parameters) >= least:
            # Token ids carry no gradient and the lookup's backward needs no weight, so the
            # gather in backward would be for nothing (``set_unshard_in_backward``, torch 2.13).
            # Whatever else the module has is needed: Inkling's embedding holds a norm, whose
            # backward would read freed memory.
            table_only = len(parameters) == 1
            builder.shard("embedding", [path], reshard=builder.reshard, unshard_in_backward=not table_only)


def _shard_tail(builder: _Builder, anatomy: Anatomy, blocks: list[str]) -> None:
    head = anatomy.output_embedding
    if head in builder.tree.modules:
        head = _computing(builder.tree, head)
    if head is None or head in builder.taken or _inside(head, blocks):
        return
    if any(parameter.aliases for parameter in builder.tree.subtree(head)):
        return
    norm = anatomy.final_norm
    separate = norm is not None and norm not in builder.taken and _inside(norm, blocks) is None
    builder.shard("tail", [norm, head] if separate and norm is not None else [head], reshard=False)
