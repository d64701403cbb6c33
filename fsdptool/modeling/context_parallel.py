"""Context parallelism in a run: what can be split over ranks, and with which attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from fsdptool.records.model import ModelSpec
    from fsdptool.records.recipe import ModelChoice, Recipe
    from fsdptool.records.settings import FsdpSettings

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


def check_context(spec: ModelSpec, recipe: Recipe, settings: FsdpSettings) -> None:
    """Refuse context parallelism where results would not be those of whole sequences.

    What a configuration does not tell is refused in the first forward
    (``families.objectives.context_attention``).

    Args:
        spec: The model; a distillation's teacher is checked by itself.
        recipe: How it is trained.
        settings: Says over how many ranks sequences are split, and how.

    Raises:
        ConfigError: It cannot be split; names what and why.
    """
    size = settings.mesh.cp
    if size < 2:
        return
    reason = _unsplit(spec, recipe, size) or _unpassed(recipe, settings)
    if reason is not None:
        raise ConfigError(f"cp_size: {size} cannot be had: {reason}", help="set cp_size to 1")


def _unsplit(spec: ModelSpec, recipe: Recipe, size: int) -> str | None:
    """Return why sequences of this run cannot be split, or None."""
    from fsdptool.families.registry import family_of

    family = family_of(spec)
    objective = recipe.objective.name or spec.objective or family.objective_for(spec.config)
    if objective != "causal_lm":
        return (
            f"objective {objective} has no causal sequence of tokens to split ({spec.model_class}); only"
            " causal_lm has"
        )
    if family.library != "transformers":
        return f"{spec.model_class} is no transformers model, whose attention could be exchanged"
    config = spec.config
    text = next(
        (config[name] for name in ("text_config", "llm_config") if isinstance(config.get(name), dict)), config
    )
    strange = [kind for kind in attention_kinds(config) if kind not in MASKED_KINDS]
    if strange:
        return (
            f"{spec.model_class} has layers of type {', '.join(strange)}, whose state runs along the tokens"
        )
    rope = _rope(text)
    if rope in _LENGTH_ROPES:
        return f"{spec.model_class} scales its positions by the longest in a forward (rope type {rope})"
    taught = recipe.method.distillation
    for choice in (recipe.model, *([taught.teacher] if taught is not None else ())):
        if choice.attention not in (None, "sdpa"):
            return f"attention {choice.attention} sees one rank's tokens only; leave it out"
    if recipe.sharding.compile:
        return "sharding.compile cannot see through the exchange of keys and values; switch it off"
    length = recipe.batch.sequence_length
    balanced = "router_aux_loss_coef" in text and recipe.objective.options.get("auxiliary") != 0
    if balanced and (length is None or length % (2 * size)):
        return (
            "routers would balance the load of tokens that fill sequences up; batch.sequence_length has to"
            f" be a multiple of {2 * size}"
        )
    return None


def _unpassed(recipe: Recipe, settings: FsdpSettings) -> str | None:
    """Return why keys and values of this run cannot be passed round, or None."""
    if settings.cp_comm_strategy == "alltoall" and recipe.data.packing and recipe.data.document_mask:
        return (
            "cp_comm_strategy alltoall has no masks to keep packed documents apart; write allgather, or"
            " data.document_mask: false"
        )
    return None


def _rope(config: Any) -> str | None:
    found = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(found, dict):
        return None
    kinds = [found, *(part for part in found.values() if isinstance(part, dict))]
    names = [str(part.get("rope_type") or part.get("type")) for part in kinds]
    return next((name for name in names if name in _LENGTH_ROPES), names[0])


def attention_of(choice: ModelChoice, size: int) -> str | None:
    """Return the attention a model is built with whose sequences lie on ``size`` ranks."""
    if size < 2:
        return choice.attention
    from fsdptool.families.objectives.context_attention import register

    return register()
