"""Base classes of families whose models diffusers makes, and what a micro-batch of a denoiser holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError, InputsError, ModelError
from fsdptool.families.bases import CatalogueFamily
from fsdptool.families.bases.batches import SOURCES, stacked, time
from fsdptool.families.bases.families import load_class, one_line, plain, quiet
from fsdptool.families.objectives.common import unwrapped
from fsdptool.families.protocol import Family, Objective, TensorSpec
from fsdptool_diffusion.objectives import Epsilon, FlowMatching, VPrediction

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import Recipe

TRAIN_STEPS = 1000
_SIZES = {"original_size": 0, "crop_coords": 2, "target_size": 4}


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a family's VAE and patches turn pixels into latents.

    Attributes:
        spatial: Pixels per latent, each way.
        temporal: Frames per latent frame after the first; 0 for images (latents have no frames).
        patch: Latents per token, each way; sizes must divide by ``spatial`` x ``patch``.
        height, width, frames: What is trained when the recipe names no size.
        rate: Frames a second the model was trained at; 0 where nobody says.
    """

    spatial: int = 8
    temporal: int = 0
    patch: int = 2
    height: int = 1024
    width: int = 1024
    frames: int = 1
    rate: float = 0.0


class DiffusersFamily(CatalogueFamily):
    """Builds through ``from_config`` on whatever device is current."""

    library = "diffusers"
    default_objective = "flow_matching"
    encoded_data = "fsdptool_diffusion.precompute:LATENTS"

    def model_class(self, config: Mapping[str, Any]) -> str:
        """Return the configuration's ``_class_name``.

        Raises:
            ModelError: It has none.
        """
        name = config.get("_class_name")
        if isinstance(name, str) and name:
            return name
        raise ModelError(
            "the configuration has no _class_name", help="set _class_name to the diffusers class of the model"
        )

    def complete(self, config: Mapping[str, Any], model_class: str) -> dict[str, Any]:
        """Return the configuration with the defaults of its class's constructor filled in."""
        parameters = signature(load_class(self.library, model_class).__init__).parameters.values()
        defaults = {item.name: item.default for item in parameters if item.default is not Parameter.empty}
        return {**{key: plain(value) for key, value in defaults.items()}, **config}

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
        """Build the denoiser on the current device, in training mode.

        diffusers attends through torch's SDPA unless told otherwise; ``eager`` does not exist there.

        Raises:
            ModelError: The configuration cannot be built; the message is one line.
        """
        import torch

        cls = load_class(self.library, model_class)
        raw = {key: value for key, value in config.items() if not key.startswith("_")}
        try:
            # `source` reports unknown keys, with the nearest known one.
            with quiet("diffusers"):
                model = cls.from_config(raw)
        except Exception as error:
            raise ModelError(f"{model_class}: {one_line(error)}") from error
        # Past diffusers' own ``to``: it warns of modules it would rather keep in fp32, which one
        # dtype per FSDP unit does not allow (torch 2.13, ``_init_mp_dtypes``).
        built: nn.Module = torch.nn.Module.to(model, getattr(torch, dtype))
        return built.train()

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return the denoiser's inputs for the recipe's sizes.

        Raises:
            InputsError: No inputs are known for the class.
        """
        raise InputsError(
            f"the inputs of {self.model_class(config)} are not known",
            help="write a family plugin for the model (docs/how-to/add-a-family.md)",
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call the denoiser and return its raw prediction, in the latents' shape.

        Raises:
            ModelError: How to call the class is not known.
        """
        raise ModelError(
            f"how to call {type(model).__name__} is not known",
            help="write a family plugin for the model (docs/how-to/add-a-family.md)",
        )

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return flow matching, noise and velocity prediction."""
        return {
            objective.name: partial(objective, denoise=self.denoise)
            for objective in (FlowMatching, Epsilon, VPrediction)
        }


class Denoiser(DiffusersFamily):
    """A family of denoisers. Subclasses say what the model is given besides noisy latents."""

    geometry = Geometry()
    text_tokens = 512
    """Tokens of a caption when the recipe names no ``sequence_length``."""
    in_channels_key = "in_channels"
    packing = 1
    """Latents folded into one channel vector per token (FLUX folds 2 x 2 = 4)."""
    exact_inputs: tuple[str, ...] = (
        "timestep",
        "timesteps",
        "timestep_r",
        "target_timestep",
        "vision_timesteps",
    )
    patch_key: str | None = "patch_size"
    """Key of the latents per token, each way; None where it means something else. Not read if packed."""
    native_key: str | None = "sample_size"
    """Key of the latents, each way, that the model was trained on; None where it says something else."""
    vae_pixels: int | None = None
    """Pixels per latent of the pipeline's own VAE, where the model lies in one that says."""

    def bind(self, spec: ModelSpec) -> Family:
        """Return the family for one model: with what its pipeline makes of pixels and of captions."""
        from fsdptool.source.vae import pixels_per_latent
        from fsdptool_diffusion.encoders import caption_tokens

        pixels = pixels_per_latent(spec)
        tokens = caption_tokens(Path(spec.folder).parent) if spec.folder is not None else None
        if pixels is None and tokens is None:
            return self
        bound = copy(self)
        bound.vae_pixels = pixels
        bound.text_tokens = tokens or self.text_tokens
        return bound

    def full(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration with its class's defaults."""
        return self.complete(config, self.model_class(config))

    def geometry_for(self, full: Mapping[str, Any]) -> Geometry:
        """Return the geometry of the published models with such a configuration."""
        return self.geometry

    def patch_for(self, full: Mapping[str, Any]) -> int:
        """Return the latents, each way, that a side in latents has to be a multiple of."""
        patch = full.get(self.patch_key) if self.patch_key and self.packing == 1 else None
        last = patch[-1] if isinstance(patch, list | tuple) and patch else patch
        return last if isinstance(last, int) and last > 0 else self.geometry_for(full).patch

    def own_geometry(self, full: Mapping[str, Any]) -> Geometry:
        """Return the geometry of one model: its configuration's patch and its pipeline's VAE.

        With another VAE the default size has as many latents, in steps that the model can divide.
        """
        published, patch = self.geometry_for(full), self.patch_for(full)
        spatial = self.vae_pixels or published.spatial
        if (spatial, patch) == (published.spatial, published.patch):
            return published
        height, width = (
            max(side // published.spatial // patch, 1) * patch * spatial
            for side in (published.height, published.width)
        )
        return replace(published, spatial=spatial, patch=patch, height=height, width=width)

    def pixel_step(self, config: Mapping[str, Any]) -> int:
        """Return what a side in pixels has to be a multiple of."""
        geometry = self.own_geometry(self.full(config))
        return geometry.spatial * geometry.patch

    def native_size(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Return height and width in pixels that the model was trained at: its own, or its family's."""
        full = self.full(config)
        geometry = self.own_geometry(full)
        latents = full.get(self.native_key) if self.native_key and not geometry.temporal else None
        if not isinstance(latents, int) or latents <= 0:
            return geometry.height, geometry.width
        side = max(latents // geometry.patch, 1) * geometry.patch * geometry.spatial
        return side, side

    def frame_rate(self, config: Mapping[str, Any]) -> float | None:
        """Return the frames a second the model was trained at, if that is known."""
        return self.geometry_for(self.full(config)).rate or None

    def default_size(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return pixels and frames of a sample where the recipe does not say."""
        geometry = self.own_geometry(self.full(config))
        size = {"height": geometry.height, "width": geometry.width}
        return {**size, "frames": geometry.frames} if geometry.temporal else size

    def latent_channels(self, full: Mapping[str, Any]) -> int:
        """Return the channels of the latents (before packing)."""
        return int(full[self.in_channels_key]) // self.packing

    def latent_shape(self, full: Mapping[str, Any], recipe: Recipe) -> tuple[int, ...]:
        """Return the shape of one sample's latents, without the batch dimension.

        Raises:
            ConfigError: The recipe's sizes do not divide.
        """
        geometry, batch = self.own_geometry(full), recipe.batch
        unit = self.pixel_step(full)
        sides = []
        for name, given, default in (
            ("height", batch.height, geometry.height),
            ("width", batch.width, geometry.width),
        ):
            side = given or default
            if side % unit or side <= 0:
                raise ConfigError(
                    f"batch.{name} is {side}; {self.name} needs a multiple of {unit} pixels",
                    help=f"the nearest is {max(round(side / unit), 1) * unit}",
                )
            sides.append(side // geometry.spatial)
        channels = self.latent_channels(full)
        if not geometry.temporal:
            return (channels, *sides)
        frames = batch.frames or geometry.frames
        if frames < 1 or (frames - 1) % geometry.temporal:
            near = (max(frames - 1, 0) // geometry.temporal) * geometry.temporal + 1
            raise ConfigError(
                f"batch.frames is {frames}; {self.name} needs a multiple of {geometry.temporal} plus 1",
                help=f"the nearest below is {near}",
            )
        return (channels, (frames - 1) // geometry.temporal + 1, *sides)

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return latents, noise, time and the family's conditions.

        Raises:
            ConfigError: The recipe's sizes do not suit the model.
        """
        full = self.full(config)
        count = recipe.batch.micro_batch
        shape = (count, *self.latent_shape(full, recipe))
        objective = recipe.objective.name or self.objective_for(config)
        if objective == "flow_matching":
            time = TensorSpec("sigma", (count,), "float32", "uniform")
        else:
            time = TensorSpec("timestep", (count,), "int64", "timesteps", high=TRAIN_STEPS)
        return (
            TensorSpec("latents", shape, "float32", "normal", compute=True),
            TensorSpec("noise", shape, "float32", "normal", compute=True),
            time,
            *self.conditions(full, recipe, shape),
        )

    def untouched(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the card's prefixes; ``{last}`` stands for the last layer's index."""
        prefixes = super().untouched(config)
        if not any("{last}" in prefix for prefix in prefixes):
            return prefixes
        last = int(self.full(config)["num_layers"]) - 1
        return tuple(prefix.format(last=last) for prefix in prefixes)

    def assemble(
        self, config: Mapping[str, Any], recipe: Recipe, samples: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return a micro-batch from cached samples of one bucket.

        Args:
            config: A raw configuration.
            recipe: Its objective's options choose how times are drawn (docs/reference/objectives.md).
            samples: ``latents``, ``noise``, ``uniform`` (one number in [0, 1)), ``size`` (original
                height and width, crop top and left, target height and width), and the text's tensors
                by the names pipelines give them or the denoiser's own.

        Raises:
            ConfigError: A sample lacks what the denoiser takes.
        """
        import torch

        latents = stacked(samples, "latents")
        uniform = stacked(samples, "uniform")
        options = recipe.objective.options
        batch = {"latents": latents, "noise": stacked(samples, "noise")}
        for spec in self.batch_spec(config, recipe):
            if spec.name in batch:
                continue
            if spec.name == "sigma":
                batch["sigma"] = time(uniform, options).float()
            elif spec.name == "timestep":
                # Noise prediction is trained on all steps alike unless the recipe says otherwise.
                share = time(uniform, {"timestep_sampling": "uniform", **options})
                batch["timestep"] = (share * TRAIN_STEPS).long().clamp(max=TRAIN_STEPS - 1)
            elif spec.name == "log_sigma":
                batch["log_sigma"] = torch.special.ndtri(uniform.double().clamp(1e-9, 1 - 1e-9)).float()
            else:
                tensor = self.cached(spec.name, samples)
                batch[spec.name] = tensor.to(getattr(torch, spec.dtype))
        return batch

    def cached(self, name: str, samples: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return one condition of the denoiser from cached samples.

        Raises:
            ConfigError: The samples do not have it.
        """
        if name in samples[0]:
            return stacked(samples, name)
        if name == "time_ids":
            return stacked(samples, "size")
        if name in _SIZES:
            start = _SIZES[name]
            return stacked(samples, "size")[:, start : start + 2]
        return stacked(samples, SOURCES.get(name, name))

    def tokens(self, recipe: Recipe) -> int:
        """Return the tokens of a caption; card option ``tokens``: when the recipe names none."""
        return recipe.batch.sequence_length or int(self.options.get("tokens", self.text_tokens))

    def conditions(
        self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]
    ) -> tuple[TensorSpec, ...]:
        """Return what the denoiser is given besides latents and time."""
        return ()

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call the denoiser with diffusers' usual argument names."""
        result: Tensor = model(
            hidden_states=noisy,
            timestep=self.steps(time),
            encoder_hidden_states=batch["encoder_hidden_states"],
            return_dict=False,
        )[0]
        return result

    def steps(self, time: Tensor) -> Tensor:
        """Return time as the model counts it: a fraction becomes a step of a thousand."""
        return time * TRAIN_STEPS if time.is_floating_point() else time


def one_sample(name: str, recipe: Recipe, why: str) -> None:
    """Refuse micro-batches of several samples.

    Raises:
        ConfigError: The recipe wants more than one.
    """
    if recipe.batch.micro_batch != 1:
        raise ConfigError(
            f"batch.micro_batch is {recipe.batch.micro_batch}; {name} takes one sample at a time",
            help=f"{why}; accumulate instead",
        )


def floats(name: str, *shape: int) -> TensorSpec:
    """Return a normal tensor that follows the compute dtype (embeddings)."""
    return TensorSpec(name, shape, "float32", "normal", compute=True)


def mask(name: str, *shape: int, dtype: str = "int64") -> TensorSpec:
    """Return a mask of ones."""
    return TensorSpec(name, shape, dtype, "mask")


def settings(model: nn.Module) -> Any:
    """Return the configuration of a built denoiser, below any wrapper."""
    return unwrapped(model).config
