"""Families without flavours: any transformers or diffusers configuration, and modules of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

from fsdptool_diffusion.base import DiffusersFamily

from fsdptool.families.bases import TransformersFamily
from fsdptool.families.protocol import Family, Flavour, LoraTargets, Match, Objective, TensorSpec

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import Recipe

_LORA = ("q_proj", "k_proj", "v_proj", "o_proj", "to_q", "to_k", "to_v", "to_out.0")


class _AnyTransformers(TransformersFamily):
    name = "generic"
    default_objective = "features"


class _AnyDiffusers(DiffusersFamily):
    name = "generic"


class GenericFamily(Family):
    """Serves any transformers ``model_type`` and any diffusers ``_class_name``.

    It knows the objective from the class's name and the inputs from the configuration; where they
    cannot be known, ``batch_spec`` says so and detection still works.
    """

    name = "generic"
    title = "Any other transformers or diffusers model"
    library = "transformers"
    default_objective = "causal_lm"
    precedence = -1
    encoded_data = "fsdptool_diffusion.precompute:LATENTS"

    def __init__(self) -> None:
        self.transformers: TransformersFamily = _AnyTransformers()
        self._diffusers = _AnyDiffusers()

    def bind(self, spec: ModelSpec) -> Family:
        """Return the family for one model: with its folder where the model's own code may run."""
        bound = copy(self)
        bound.transformers = self.transformers.bind(spec)
        return bound

    def _for(self, config: Mapping[str, Any]) -> TransformersFamily | DiffusersFamily:
        return self._diffusers if isinstance(config.get("_class_name"), str) else self.transformers

    def flavours(self) -> Mapping[str, Flavour]:
        """Return none: the generic family has no published sizes."""
        return {}

    def match(self, config: Mapping[str, Any]) -> Match | None:
        """Claim whatever names a class or a model type."""
        for key in ("_class_name", "model_type"):
            if isinstance(config.get(key), str) and config[key]:
                return Match(0.1, f"{key} is {config[key]!r}")
        if isinstance(config.get("architectures"), list) and config["architectures"]:
            return Match(0.1, f"architectures names {config['architectures'][0]!r}")
        return None

    def model_class(self, config: Mapping[str, Any]) -> str:
        """Return the class the configuration names, or the one people train for its type."""
        return self._for(config).model_class(config)

    def objective_for(self, config: Mapping[str, Any]) -> str:
        """Return the objective that suits the configuration's class."""
        return self._for(config).objective_for(config)

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
            ModelError: The configuration cannot be built; the message is one line.
        """
        return self._for(config).build(
            config,
            model_class=model_class,
            dtype=dtype,
            attention=attention,
            folder=folder,
            trust_remote_code=trust_remote_code,
        )

    def complete(self, config: Mapping[str, Any], model_class: str) -> dict[str, Any]:
        """Return the configuration with its class's defaults filled in."""
        return self._for(config).complete(config, model_class)

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return the inputs, where the configuration tells them.

        Raises:
            ModelError: It does not.
        """
        return self._for(config).batch_spec(config, recipe)

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return the objectives of both libraries."""
        return {**self._diffusers.objectives(), **self.transformers.objectives()}

    def lora_targets(self, config: Mapping[str, Any]) -> LoraTargets:
        """Return the names that attention projections commonly have in either library."""
        return LoraTargets(_LORA)


def families() -> Iterable[Family]:
    """Yield the families of this package."""
    from fsdptool_generic.imported import ImportedFamily

    return (GenericFamily(), ImportedFamily())
