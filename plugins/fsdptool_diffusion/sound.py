"""Denoisers of sound, alone and together with video: ACE-Step, MiniMax Music 3, LTX-2, MiniMax H3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.common import require
from fsdptool.families.objectives.features import squared_error
from fsdptool.families.protocol import Objective, TensorSpec
from fsdptool_diffusion.base import Denoiser, Geometry, floats, mask, one_sample, settings
from fsdptool_diffusion.objectives import FlowMatching

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe

Specs = tuple[TensorSpec, ...]
FPS = 24


class JointFlow(FlowMatching):
    """Rectified flow of picture and sound at one noise level; each counts its own mean error.

    Batch: that of ``flow_matching``, and ``audio_latents`` and ``audio_noise`` [B, ...]. The family's
    ``denoise`` returns both predictions.
    """

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return both predicted velocities, in the shapes of their latents."""
        sigma = require(batch, "sigma", self.name)
        latents, audio = require(batch, "latents", self.name), require(batch, "audio_latents", self.name)
        noisy = _mixed(latents, require(batch, "noise", self.name), sigma)
        sound = _mixed(audio, require(batch, "audio_noise", self.name), sigma)
        both: Any = self.denoise(model, noisy, sigma, {**batch, "audio": sound})
        return {"prediction": both[0], "audio": both[1]}

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of both squared errors."""
        audio = squared_error(prediction["audio"], batch["audio_noise"] - batch["audio_latents"])
        return super().loss(prediction, batch) + audio

    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return the squared error against both of the teacher's predictions."""
        audio = squared_error(student["audio"], teacher["audio"].detach())
        return super().distance(student, teacher, batch, temperature) + audio


def _mixed(clean: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    level = sigma.reshape(sigma.shape[0], *(1,) * (clean.dim() - 1)).to(clean.dtype)
    return clean + level * (noise - clean)


class Joint(Denoiser):
    """A denoiser with a second stream of audio latents."""

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return the joint flow under its usual name."""
        return {JointFlow.name: partial(JointFlow, denoise=self.denoise)}


def sounds(*shape: int) -> Specs:
    """Return the audio latents and their noise."""
    return floats("audio_latents", *shape), floats("audio_noise", *shape)


class Ltx2(Joint):
    """LTX-2: video latents of 32 pixels and 8 frames, audio latents of 25 a second."""

    geometry = Geometry(spatial=32, temporal=8, patch=1, height=512, width=768, frames=121)
    text_tokens = 1024

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return audio, text states for either stream, and their mask."""
        frames = recipe.batch.frames or self.geometry.frames
        rate = full["audio_sampling_rate"] / full["audio_hop_length"] / full["audio_scale_factor"]
        length, count = max(round(frames / FPS * rate), 1), self.tokens(recipe)
        # LTX-2.3 and later leave the projection to the text connectors (diffusers 0.42).
        widths = (
            (full["caption_channels"],) * 2
            if full["use_prompt_embeddings"]
            else (full["cross_attention_dim"], full["audio_cross_attention_dim"])
        )
        return (
            *sounds(shape[0], length, full["audio_in_channels"]),
            floats("encoder_hidden_states", shape[0], count, widths[0]),
            floats("audio_encoder_hidden_states", shape[0], count, widths[1]),
            mask("encoder_attention_mask", shape[0], count),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Any:
        """Flatten frames, rows and columns, call with the sound, restore them."""
        frames, height, width = noisy.shape[2:]
        steps, text = self.steps(time), batch["encoder_attention_mask"]
        video, audio = model(
            hidden_states=noisy.flatten(2).transpose(1, 2),
            audio_hidden_states=batch["audio"],
            encoder_hidden_states=batch["encoder_hidden_states"],
            audio_encoder_hidden_states=batch["audio_encoder_hidden_states"],
            timestep=steps,
            sigma=steps,
            encoder_attention_mask=text,
            audio_encoder_attention_mask=text,
            num_frames=frames,
            height=height,
            width=width,
            fps=float(FPS),
            audio_num_frames=batch["audio"].shape[1],
            # LTX-2.3 modulates each stream's attention to the other by the other's noise level.
            use_cross_timestep=bool(settings(model).cross_attn_mod),
            return_dict=False,
        )
        return video.transpose(1, 2).reshape(noisy.shape), audio


class MiniMaxH3(Joint):
    """MiniMax H3: one sequence of text, sound and video; time and velocity run from noise to data.

    The layout and its coordinates follow diffusers 0.42 (modular_pipelines/minimax_h3): text at its
    token's time, two channels of sound at 40 latents a second pinned to the picture's sides, frames in
    groups of 1, 4, 4, 4, 4.
    """

    geometry = Geometry(spatial=16, temporal=1, patch=2, height=768, width=1344, frames=124)
    text_tokens = 512
    chunk, kept = 17, 5
    spans = (1, 4, 4, 4, 4)

    def latent_shape(self, full: Mapping[str, Any], recipe: Recipe) -> tuple[int, ...]:
        """Return channels, frames, rows and columns.

        Raises:
            ConfigError: The sizes do not divide, or the micro-batch is not one sample.
        """
        one_sample(self.name, recipe, "the model takes one noise level per call")
        channels, _, *sides = super().latent_shape(full, recipe)
        frames = recipe.batch.frames or self.geometry.frames
        if frames < self.kept or frames % self.chunk != self.kept:
            near = max(frames - self.kept, 0) // self.chunk * self.chunk + self.kept
            raise ConfigError(
                f"batch.frames is {frames}; {self.name} needs a multiple of {self.chunk} plus {self.kept}",
                help=f"the nearest below is {near}",
            )
        return (channels, (frames - self.kept) // self.chunk * self.kept + 2, *sides)

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return two channels of sound, one after the other, and text states."""
        length = round((recipe.batch.frames or self.geometry.frames) / FPS * 40)
        return (
            *sounds(shape[0], 2 * length, full["audio_in_channels"]),
            floats("encoder_hidden_states", shape[0], self.tokens(recipe), full["text_dim"]),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Any:
        """Lay out text, sound and video in one sequence; turn time and velocities around."""
        import torch

        _, channels, frames, height, width = noisy.shape
        rows, columns = height // 2, width // 2
        tiles = noisy.reshape(1, channels, frames, rows, 2, columns, 2).permute(0, 2, 3, 5, 1, 4, 6)
        text, sound = batch["encoder_hidden_states"].shape[1], batch["audio"].shape[1]
        size = text + sound + frames * rows * columns
        places = torch.arange(size, device=noisy.device)
        tags = torch.zeros(size, dtype=torch.long, device=noisy.device)
        tags[:text] = 1
        tags[text : text + sound] = 2
        video, audio = model(
            hidden_states=tiles.reshape(1, frames * rows * columns, channels * 4),
            audio_hidden_states=batch["audio"],
            encoder_hidden_states=batch["encoder_hidden_states"],
            timestep=1 - time,
            timestep_indices=torch.zeros_like(tags),
            token_tags=tags,
            position_ids=self.positions(text, sound // 2, frames, height, width, noisy.device),
            video_indices=places[text + sound :],
            audio_indices=places[text : text + sound],
            text_indices=places[:text],
            return_dict=False,
        )
        restored = video.reshape(1, frames, rows, columns, channels, 2, 2).permute(0, 4, 1, 2, 5, 3, 6)
        return -restored.reshape(noisy.shape).to(noisy.dtype), -audio.to(noisy.dtype)

    def positions(self, text: int, sound: int, frames: int, height: int, width: int, device: Any) -> Tensor:
        """Return (time, row, column) of every token, [tokens, 3]."""
        import torch

        scale = (height * width) ** 0.5

        def axis(side: int) -> Tensor:
            ratio = side / scale
            steps = torch.arange(side // 2, dtype=torch.float32, device=device)
            places: Tensor = ((1 - ratio) / 2 + steps * ratio / (side // 2)) * 32
            return places

        starts = [0.0]
        for index in range(frames - 1):
            starts.append(starts[-1] + 5 / 3 * self.spans[index % len(self.spans)])
        times = torch.tensor(starts, dtype=torch.float32, device=device) + text
        cells = torch.stack(torch.meshgrid(times, axis(height), axis(width), indexing="ij"), dim=-1)
        words = torch.zeros(text, 3, device=device)
        words[:, 0] = torch.arange(text, device=device)
        clock = torch.arange(sound, dtype=torch.float32, device=device) + text
        still = torch.zeros_like(clock)
        sides = [torch.stack((clock, still, still + axis(width)[end]), dim=-1) for end in (0, -1)]
        return torch.cat((words, *sides, cells.reshape(-1, 3)))


class AceStep(Denoiser):
    """ACE-Step: music as 25 latent frames per second; ``batch.frames`` counts them."""

    exact_inputs = ()  # embeds times in the dtype they come in
    frames = 750
    text_tokens = 256

    def latent_shape(self, full: Mapping[str, Any], recipe: Recipe) -> tuple[int, ...]:
        """Return frames and channels.

        Raises:
            ConfigError: The frames do not fill patches.
        """
        count = recipe.batch.frames or self.frames
        if count % full["patch_size"]:
            raise ConfigError(
                f"batch.frames is {count}; {self.name} needs a multiple of {full['patch_size']}"
            )
        return (count, int(full["audio_acoustic_hidden_dim"]))

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return text and lyric states, and the context that rides beside the latents."""
        width = full.get("encoder_hidden_size") or full["hidden_size"]
        context = full["in_channels"] - shape[2]
        return (
            floats("encoder_hidden_states", shape[0], self.tokens(recipe), width),
            floats("context_latents", shape[0], shape[1], context),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with both ends of the step equal, as in training."""
        result: Tensor = model(
            hidden_states=noisy,
            timestep=time,
            timestep_r=time,
            encoder_hidden_states=batch["encoder_hidden_states"],
            context_latents=batch["context_latents"],
            return_dict=False,
        )[0]
        return result


class MiniMaxMusic3(Denoiser):
    """MiniMax Music 3: ``batch.frames`` counts latent frames; time runs from noise to music."""

    exact_inputs = ()  # embeds times in the dtype they come in
    frames = 512

    def latent_shape(self, full: Mapping[str, Any], recipe: Recipe) -> tuple[int, ...]:
        """Return channels and frames."""
        return (int(full["in_channels"]), recipe.batch.frames or self.frames)

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the condition of every frame."""
        return (floats("encoder_hidden_states", shape[0], shape[2], full["condition_dim"]),)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Turn time and the predicted velocity around."""
        result: Tensor = model(
            hidden_states=noisy,
            timestep=1 - time,
            encoder_hidden_states=batch["encoder_hidden_states"],
            return_dict=False,
        )[0]
        return -result
