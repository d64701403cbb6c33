"""Whether the head of a run computes the loss: as the recipe says, else on GPUs where that saves memory."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.inspection.census import item_bytes
from fsdptool.inspection.logit_tail import logit_tail
from fsdptool.inspection.micro_batch import planned_batch
from fsdptool.modeling.objective import objective_for
from fsdptool.modeling.units import TrainedModel, as_trained
from fsdptool.records.fused_loss import IMPOSSIBLE, PRODUCT_CHUNKS, FusedLoss, FusedLossReason
from fsdptool.records.plan import OWN_LOOP

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.families.objectives.fused_head import HeadLoss
    from fsdptool.families.protocol import Objective
    from fsdptool.records.anatomy import Anatomy, Parameter
    from fsdptool.records.resolved_run import ResolvedRun

_COPY = ".modules_to_save.default"
"""Where peft keeps the copy of a module that is trained whole."""


def decide_fused_loss(anatomy: Anatomy | TrainedModel, run: ResolvedRun) -> tuple[ResolvedRun, FusedLoss]:
    """Decide whether the head computes the loss: as the recipe says, by default where that saves memory.

    Args:
        anatomy: Of the model as published, or what :func:`as_trained` made of it.
        run: ``settings.use_cpu`` says on which kind of device, ``loop`` which program trains it.

    Returns:
        The run with the decision in its recipe, and the decision with its reason.

    Raises:
        ConfigError: The recipe asks for it, and the model or the method rules it out.
    """
    wanted = run.recipe.objective.fused
    trained = anatomy if isinstance(anatomy, TrainedModel) else as_trained(anatomy, run.recipe)
    decision = _decision(trained, run, wanted)
    if wanted and decision.reason in IMPOSSIBLE:
        raise ConfigError(
            f"objective.fused does not suit {trained.anatomy.spec.model_class}: {decision.reason.text}",
            help="leave objective.fused out, or set it to false",
        )
    objective = replace(run.recipe.objective, fused=decision.fused)
    return replace(run, recipe=replace(run.recipe, objective=objective)), decision


def fuse_head(model: nn.Module, compute: HeadLoss | None = None) -> None:
    """Let the head of a model compute the loss.

    Args:
        model: As the method prepared it, below FSDP.
        compute: Computes the loss; None takes fsdptool's own.

    Raises:
        ConfigError: The model does more with its logits than is known here, or an adapter changes its head.
    """
    from torch import nn

    from fsdptool.families.objectives.common import unwrapped
    from fsdptool.families.objectives.fused_head import FusedHead, fused_cross_entropy

    base: Any = unwrapped(model)
    head = base.get_output_embeddings()
    path = next((name for name, module in base.named_modules() if module is head), None)
    tail = logit_tail(base, path)
    for copy in getattr(head, "modules_to_save", {}).values():
        head = copy
    if tail is None or type(head) is not nn.Linear:
        raise ConfigError(
            f"{type(base).__name__} cannot compute the loss in its head", help="set objective.fused to false"
        )
    FusedHead(base, head, tail, compute or fused_cross_entropy)


def _decision(trained: TrainedModel, run: ResolvedRun, wanted: bool | None) -> FusedLoss:
    if run.loop.head_loss is not None:
        against = _against(trained, run)
        return FusedLoss(against is None, against or FusedLossReason.OTHER_PROGRAM)
    if wanted is False:
        return FusedLoss(False, FusedLossReason.DECLINED)
    if wanted is None and (run.loop.tiles is not None or run.loop.head_chunks):
        against = _against(trained, run)
        return FusedLoss(against is None, against or FusedLossReason.OTHER_PROGRAM)
    if wanted is None and run.settings.use_cpu:
        return FusedLoss(False, FusedLossReason.CPU)
    if wanted is None and run.loop.program != OWN_LOOP.program:
        return FusedLoss(False, FusedLossReason.OTHER_PROGRAM)
    against = _against(trained, run)
    if against is None and wanted is None:
        against = _not_worth_it(trained, run)
    if against is not None:
        return FusedLoss(False, against)
    return FusedLoss(True, FusedLossReason.REQUESTED if wanted else FusedLossReason.AUTOMATIC)


def _against(trained: TrainedModel, run: ResolvedRun) -> FusedLossReason | None:
    """Return what rules out that the head computes the loss, or None."""
    recipe, loop = run.recipe, run.loop
    anatomy = trained.published or trained.anatomy
    objective = objective_for(recipe, anatomy.spec)
    # In tiles, the loss of each token is computed, not their sum alone.
    of_tokens = loop.tiles is not None and objective.scores_tokens
    if not of_tokens and (not objective.fuses_head or recipe.method.distillation is not None):
        return FusedLossReason.OBJECTIVE
    if anatomy.logit_tail is None or plain_head(anatomy) is None:
        return FusedLossReason.UNKNOWN_HEAD
    if _adapted(trained.anatomy):
        return FusedLossReason.ADAPTED_HEAD
    if run.mesh.tp > 1:
        return FusedLossReason.TENSOR_PARALLEL
    if loop.keeps_logits or loop.own_loss or _chunk(objective) == 0:
        return FusedLossReason.WHOLE_LOGITS
    return None


def _not_worth_it(trained: TrainedModel, run: ResolvedRun) -> FusedLossReason | None:
    """Return why the head should return logits where nobody asked for either, or None."""
    anatomy, recipe = trained.published or trained.anatomy, run.recipe
    spec = anatomy.spec
    if spec.library != "transformers" or spec.trust_remote_code:
        return FusedLossReason.UNTESTED
    labels = next((item for item in planned_batch(spec, recipe) if item.name == "labels"), None)
    head = plain_head(anatomy)
    if labels is None or head is None:
        return FusedLossReason.UNTESTED
    tokens = -(-prod(labels.shape) // run.mesh.cp)
    size = item_bytes(run.sharding.compute_dtype or recipe.model.dtype)
    chunk = min(_chunk(objective_for(recipe, spec)), tokens)
    fused = _fused_bytes(tokens, head.shape, chunk, size, trained=_trains(trained.anatomy))
    return None if fused < _plain_bytes(tokens, head.shape, chunk, size) else FusedLossReason.NOTHING_SAVED


def _plain_bytes(tokens: int, shape: tuple[int, ...], chunk: int, size: int) -> int:
    """Return what a loss after the head holds at most: logits, their gradient, and two chunks in fp32."""
    return shape[0] * (2 * tokens * size + 2 * chunk * max(size, 4))


def _fused_bytes(tokens: int, shape: tuple[int, ...], chunk: int, size: int, *, trained: bool) -> int:
    """Return what a head that computes the loss holds at most, in forward or in backward."""
    vocabulary, width = shape
    wide = max(size, 4)
    logits = vocabulary * min(PRODUCT_CHUNKS * chunk, tokens) * size
    narrower = size < wide
    computing = logits + (vocabulary * chunk * wide if narrower else 0)
    scaling = vocabulary * width * size if trained and narrower else 0
    gradients = tokens * width * size + (vocabulary * width * wide if trained else 0)
    return gradients + max(computing, scaling)


def plain_head(anatomy: Anatomy) -> Parameter | None:
    """Return the weight of a head that is one linear layer, or None."""
    path = anatomy.output_embedding
    kinds = {module.path: module.class_name for module in anatomy.modules}
    if path is None or kinds.get(path) != "Linear":
        return None
    return next((item for item in anatomy.parameters if f"{path}.weight" in item.names), None)


def _adapted(anatomy: Anatomy) -> bool:
    """Say whether the method makes more of the head than one linear layer, or one trained copy of it."""
    path = f"{anatomy.output_embedding}"
    kinds = {item.path: item.class_name for item in anatomy.modules if f"{item.path}.".startswith(f"{path}.")}
    copy = f"{path}{_COPY}"
    return kinds[copy] != "Linear" if copy in kinds else len(kinds) != 1 or kinds[path] != "Linear"


def _trains(anatomy: Anatomy) -> bool:
    """Say whether the head's weight is trained."""
    names = {f"{anatomy.output_embedding}{part}.weight" for part in ("", _COPY)}
    return any(item.trainable and not names.isdisjoint(item.names) for item in anatomy.parameters)


def _chunk(objective: Objective) -> int:
    return int(getattr(objective, "chunk", 0))
