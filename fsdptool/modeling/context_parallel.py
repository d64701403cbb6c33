"""Context parallelism in a run: what can be split over ranks, and with which attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import ModelChoice, Recipe
    from fsdptool.records.resolved_run import ResolvedRun
    from fsdptool.records.sharding import FsdpSettings

_LENGTH_ROPES = frozenset({"dynamic", "longrope", "su"})
"""Rotary scalings that look at the longest position of a forward: it would differ between ranks."""


MASKED_KINDS = frozenset({"sliding_attention", "chunked_attention"})
"""Attention layers that a mask over the whole sequence describes: our trainer can split them."""


def attention_kinds(config: Any) -> list[str]:
    """Return the attention kinds of a configuration that context parallelism does not support."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    layers = text.get("layer_types")
    if isinstance(layers, list | tuple):
        return sorted({str(kind) for kind in layers} - {"full_attention", "attention", "global"})
    # transformers 5.23 MistralConfig: a sliding window unless the configuration switches it off.
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return ["sliding_attention"]
    if text.get("attention_chunk_size"):
        return ["chunked_attention"]
    if str(text.get("model_type")) in ("mamba", "mamba2", "falcon_mamba", "rwkv"):
        return ["linear_attention"]
    return []


def check_context(spec: ModelSpec, run: ResolvedRun) -> None:
    """Refuse context parallelism where results would not be those of whole sequences.

    What a configuration does not tell is refused in the first forward
    (``families.objectives.context_attention``).

    Args:
        spec: The model; a distillation's teacher is checked by itself.
        run: How it is trained, over how many ranks sequences are split, and how.

    Raises:
        ConfigError: It cannot be split; names what and why.
    """
    size = run.mesh.cp
    if size < 2:
        return
    reason = _unsplit(spec, run.recipe, size) or _unpassed(run.recipe, run.settings)
    if reason is not None:
        raise ConfigError(f"cp_size {size} is not supported: {reason}", help="set cp_size to 1")


def _unsplit(spec: ModelSpec, recipe: Recipe, size: int) -> str | None:
    """Return why sequences of this run cannot be split, or None."""
    from fsdptool.families.registry import family_of
    from fsdptool.modeling.objective import objective_for

    family = family_of(spec)
    objective = objective_for(recipe, spec)
    if not objective.splits_sequences:
        return (
            f"objective {objective.name} does not train on causal token sequences ({spec.model_class}); only"
            " causal_lm does"
        )
    if family.library != "transformers":
        return f"{spec.model_class} is not a transformers model, so its attention cannot be replaced"
    config = spec.config
    text = next(
        (config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), dict)), config
    )
    strange = [kind for kind in attention_kinds(config) if kind not in MASKED_KINDS]
    if strange:
        names = ", ".join(strange)
        return f"{spec.model_class} has layers of type {names}, which carry a state along the sequence"
    rope = _rope(text)
    if rope in _LENGTH_ROPES:
        return f"{spec.model_class} scales positions by the longest sequence of a batch (rope type {rope})"
    distillation = recipe.method.distillation
    for choice in (recipe.model, *([distillation.teacher] if distillation is not None else ())):
        if choice.attention not in (None, "sdpa"):
            return f"attention {choice.attention} sees only one rank's tokens; use sdpa"
    if recipe.sharding.compile:
        return "sharding.compile does not support the exchange of keys and values; disable it"
    if recipe.data.padded == "longest":
        return "data.padding: longest changes the length from step to step; set data.padding: length"
    length = recipe.batch.sequence_length
    balanced = "router_aux_loss_coef" in text and recipe.objective.options.get("auxiliary") != 0
    if balanced and (length is None or length % (2 * size)):
        return (
            "padding tokens would count in the load balancing of the routers; batch.sequence_length must be"
            f" a multiple of {2 * size}"
        )
    return None


def _unpassed(recipe: Recipe, settings: FsdpSettings) -> str | None:
    """Return why keys and values of this run cannot be passed round, or None."""
    if settings.cp_comm_strategy == "alltoall" and recipe.data.packing and recipe.data.document_mask:
        return (
            "cp_comm_strategy alltoall does not support the mask that separates packed documents; use"
            " allgather, or set data.document_mask: false"
        )
    return None


def _rope(config: Any) -> str | None:
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return None
    kinds = [scaling, *(part for part in scaling.values() if isinstance(part, dict))]
    names = [str(part.get("rope_type") or part.get("type")) for part in kinds]
    return next((name for name in names if name in _LENGTH_ROPES), names[0])


def attention_of(choice: ModelChoice, size: int) -> str | None:
    """Return the attention a model is built with whose sequences lie on ``size`` ranks."""
    if size < 2:
        return choice.attention
    from fsdptool.families.objectives.context_attention import register

    return register()
