"""The family: everything that fsdptool needs from it. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ModelError
from fsdptool.families.protocol import Family, Flavour, LoraTargets, Match, Objective, TensorSpec

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.records.recipe import Recipe

_KEYS = ("vocabulary", "width", "blocks", "kernel")


def _flavour(name: str, parameters: int, **config: int) -> Flavour:
    return Flavour(
        name=name,
        config={"model_type": "gatedconv", "vocabulary": 264, **config},
        model_class="GatedConvLM",
        parameters=parameters,
        facts={"source": "made up for this example"},
    )


class GatedConvFamily(Family):
    """Gated convolutions over bytes."""

    name = "gatedconv"
    title = "Gated convolutions (example)"
    library = "gatedconv"
    default_objective = "next_byte"

    def flavours(self) -> Mapping[str, Flavour]:
        """Return two sizes."""
        sizes = (
            _flavour("small", 759_808, width=128, blocks=6, kernel=3),
            _flavour("base", 78_309_888, width=768, blocks=12, kernel=5),
        )
        return {flavour.name: flavour for flavour in sizes}

    def match(self, config: Mapping[str, Any]) -> Match | None:
        """Match configurations of our model type."""
        if config.get("model_type") != "gatedconv":
            return None
        return Match(1.0, "model_type is 'gatedconv'")

    def model_class(self, config: Mapping[str, Any]) -> str:
        """Return the only model class."""
        return "GatedConvLM"

    def build(
        self,
        config: Mapping[str, Any],
        *,
        model_class: str,
        dtype: str = "float32",
        attention: str | None = None,
        folder: str | None = None,
        trust_remote_code: bool = False,
    ) -> nn.Module:
        """Build the model on the current device.

        Raises:
            ModelError: A size is missing or not a positive integer.
        """
        import torch

        from fsdptool_gatedconv.model import GatedConvLM

        for key in _KEYS:
            value = config.get(key)
            if not isinstance(value, int) or value < 1:
                raise ModelError(f"gatedconv: {key} must be a positive integer, got {value!r}")
        model = GatedConvLM(**{key: config[key] for key in _KEYS})
        return model.to(getattr(torch, dtype)).train()

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return bytes and labels."""
        shape = (recipe.batch.micro_batch, recipe.batch.sequence_length or 256)
        high = int(config["vocabulary"])
        return (
            TensorSpec("input_ids", shape, "int64", "tokens", high=high),
            TensorSpec("labels", shape, "int64", "labels", high=high),
        )

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return the one objective."""
        from fsdptool_gatedconv.objective import NextByte

        return {NextByte.name: NextByte}

    def lora_targets(self, config: Mapping[str, Any]) -> LoraTargets:
        """Return the output projections."""
        return LoraTargets(("out",))

    def small(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the sizes of the shrunk copy in the conformance test."""
        return {"width": 16, "blocks": 2}
