"""Objectives of denoisers: flow matching, noise and velocity prediction.

Noise and time are tensors of the batch, so the loss is a function of the batch alone. How a
denoiser is called differs by family: the family passes its ``denoise``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.common import require
from fsdptool.families.objectives.features import SquaredDistance, squared_error

if TYPE_CHECKING:
    from torch import Tensor, nn

Denoise = Callable[["nn.Module", "Tensor", "Tensor", Mapping[str, "Tensor"]], "Tensor"]
"""(model, noisy latents, time, batch) to the raw prediction in the latents' shape."""

SAMPLING = frozenset(
    {"timestep_sampling", "shift", "logit_mean", "logit_std", "caption_dropout", "num_train_timesteps"}
)
"""Options read when a batch is assembled, not by the loss (families/bases/batches.py)."""


class _Denoising(SquaredDistance):
    """Squared error in latent space, averaged within a sample and summed over samples.

    Args:
        denoise: The family's call of its denoiser.
        options: Sampling options (docs/reference/objectives.md); they act when a batch is assembled.
    """

    unit = "samples"

    def __init__(self, *, denoise: Denoise, **options: Any) -> None:
        if unknown := sorted(set(options) - SAMPLING):
            raise ConfigError(
                f"objective {self.name}: unknown option {unknown[0]!r}",
                help=f"available options: {', '.join(sorted(SAMPLING))}",
            )
        self.denoise = denoise
        self.options = options

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of samples."""
        import torch

        latents = require(batch, "latents", self.name)
        # Not `torch.tensor`, which copies from the host and waits for the device.
        return torch.full((), latents.shape[0], device=latents.device)

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the squared error against this objective's target."""
        return squared_error(prediction["prediction"], self.target(batch))

    @abstractmethod
    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what the denoiser should predict."""


def _spread(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(values.shape[0], *(1,) * (like.dim() - 1)).to(like.dtype)


class FlowMatching(_Denoising):
    """Rectified flow (Liu et al. 2022; Esser et al. 2024, section 3.1).

    Batch: ``latents`` and ``noise`` [B, ...], ``sigma`` [B] in [0, 1], the family's conditions.
    The model sees ``(1 - sigma) latents + sigma noise`` and predicts ``noise - latents``.
    """

    name = "flow_matching"
    samples = "latents"
    generates = "latents"

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the predicted velocity, in the latents' shape."""
        latents, noise = require(batch, "latents", self.name), require(batch, "noise", self.name)
        sigma = require(batch, "sigma", self.name)
        noisy = latents + _spread(sigma, latents) * (noise - latents)
        return {"prediction": self.denoise(model, noisy, sigma, batch)}

    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the velocity from latents to noise."""
        return batch["noise"] - batch["latents"]


class _Variance(_Denoising):
    """Variance-preserving diffusion. Batch: ``latents``, ``noise``, ``timestep`` [B] int64.

    Args:
        betas: Start and end of the schedule ``scaled_linear`` (Stable Diffusion 1 and XL:
            0.00085 and 0.012) or ``linear`` (DiT, PixArt: 0.0001 and 0.02); ``cosine`` has none.
        schedule: Its name; ``cosine`` is Nichol and Dhariwal 2021, equation 17, with betas below 0.999.
        steps: Its length.
    """

    samples = "latents"
    generates = "latents"

    def __init__(
        self,
        *,
        denoise: Denoise,
        schedule: str = "scaled_linear",
        betas: tuple[float, float] = (0.00085, 0.012),
        steps: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(denoise=denoise, **options)
        if schedule not in ("scaled_linear", "linear", "cosine"):
            raise ConfigError(f"objective {self.name}: schedule must be scaled_linear, linear or cosine")
        self.schedule, self.betas, self.steps = schedule, betas, steps
        self._kept: dict[Any, Tensor] = {}

    def coefficients(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the signal's and the noise's coefficients, shaped to multiply latents."""
        latents = require(batch, "latents", self.name)
        timestep = require(batch, "timestep", self.name)
        kept = self._schedule(latents)[timestep]
        return _spread(kept.sqrt(), latents), _spread((1 - kept).sqrt(), latents)

    def _schedule(self, latents: Tensor) -> Tensor:
        """Return the share of signal at every time [steps] in fp64, on the device of ``latents``.

        Kept once it is there: each micro-batch would otherwise wait for a copy from the host.
        """
        import torch

        if (known := self._kept.get(latents.device)) is not None:
            return known
        start, end = self.betas
        if self.schedule == "scaled_linear":
            betas = torch.linspace(start**0.5, end**0.5, self.steps, dtype=torch.float64).square()
        elif self.schedule == "cosine":
            times = torch.linspace(0, 1, self.steps + 1, dtype=torch.float64)
            signal = torch.cos((times + 0.008) / 1.008 * torch.pi / 2).square()
            betas = (1 - signal[1:] / signal[:-1]).clamp(max=0.999)
        else:
            betas = torch.linspace(start, end, self.steps, dtype=torch.float64)
        kept = torch.cumprod(1 - betas, 0).to(latents.device)
        # A trace's tensors have no values, and belong to that trace.
        if type(kept) is torch.Tensor and not kept.is_meta:
            self._kept[latents.device] = kept
        return kept

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the raw prediction, in the latents' shape."""
        signal, spread = self.coefficients(batch)
        noisy = signal * batch["latents"] + spread * require(batch, "noise", self.name)
        return {"prediction": self.denoise(model, noisy, batch["timestep"], batch)}


class Epsilon(_Variance):
    """Noise prediction (Ho et al. 2020, equation 14)."""

    name = "epsilon"

    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the noise."""
        return batch["noise"]


class VPrediction(_Variance):
    """Velocity prediction (Salimans and Ho 2022, appendix D)."""

    name = "v_prediction"

    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return signal x noise - spread x latents."""
        signal, spread = self.coefficients(batch)
        return signal * batch["noise"] - spread * batch["latents"]


class Edm(_Denoising):
    """EDM preconditioning with v-prediction scaling (Karras et al. 2022; Stable Video Diffusion).

    Batch: ``latents``, ``noise``, ``log_sigma`` [B] standard normal, turned into noise levels here.

    Args:
        mean, deviation: Of the noise level's logarithm (Stable Video Diffusion: 0.7 and 1.6).
    """

    name = "edm"

    def __init__(
        self, *, denoise: Denoise, mean: float = 0.7, deviation: float = 1.6, **options: Any
    ) -> None:
        super().__init__(denoise=denoise, **options)
        self.mean, self.deviation = mean, deviation

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the denoised latents, weighted so that the error has unit scale at every level."""
        latents, noise = require(batch, "latents", self.name), require(batch, "noise", self.name)
        level = (batch["log_sigma"].float() * self.deviation + self.mean).exp()
        sigma = _spread(level, latents)
        scale = (sigma.square() + 1).rsqrt()
        noisy = latents + sigma * noise
        raw = self.denoise(model, noisy * scale, level.log() / 4, batch)
        denoised = noisy * scale.square() - raw * sigma * scale
        return {"prediction": denoised / (sigma * scale)}

    def target(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the latents under the same weight."""
        latents = batch["latents"]
        level = (batch["log_sigma"].float() * self.deviation + self.mean).exp()
        sigma = _spread(level, latents)
        return latents / (sigma * (sigma.square() + 1).rsqrt())
