"""Text and latents from a sharded model. Every rank runs the same forwards, so no rank waits for another.

Nothing here looks at what was generated to decide how many forwards to run: a rank that stopped
early would leave the others in a collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fsdptool.distributed.session import LongWait
from fsdptool.errors import ConfigError, FsdptoolError, StorageError
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Recipe
from fsdptool.runs.watchdog import beat
from fsdptool.training.data.order import mix

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.distributed.session import Session
    from fsdptool.training.data.loader import Loader


_PATIENCE = 1800.0
"""Seconds that rank 0 may take for one picture or video."""


def continue_text(
    model: nn.Module, prompt: Tensor, *, new_tokens: int, temperature: float, generator: Any
) -> Tensor:
    """Return ``prompt`` [1, P] continued by ``new_tokens`` tokens, [1, P + new_tokens].

    Without a cache: the window is short, and a model under FSDP gathers its weights once per forward
    either way.
    """
    from fsdptool.families.objectives.vocabulary import whole_logits

    length = prompt.shape[1]
    tokens = torch.nn.functional.pad(prompt, (0, new_tokens))
    for at in range(length, length + new_tokens):
        # Without a name for it, one position's view does not keep all logits until the next forward ends.
        tokens[:, at] = _choose(
            whole_logits(model, model(input_ids=tokens, use_cache=False).logits[:, at - 1]),
            temperature,
            generator,
        )
    return tokens


def translate(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    start: int,
    new_tokens: int,
    temperature: float,
    generator: Any,
) -> Tensor:
    """Return what a decoder says about the encoder's inputs, [1, new_tokens]."""
    from fsdptool.families.objectives.vocabulary import whole_logits

    source = {name: tensor for name, tensor in batch.items() if name != "labels"}
    translated = torch.full((1, new_tokens + 1), start, dtype=torch.int64, device=batch["input_ids"].device)
    for at in range(new_tokens):
        translated[:, at + 1] = _choose(
            whole_logits(
                model, model(**source, decoder_input_ids=translated[:, :-1], use_cache=False).logits[:, at]
            ),
            temperature,
            generator,
        )
    return translated[:, 1:]


def _choose(logits: Tensor, temperature: float, generator: Any) -> Tensor:
    if temperature <= 0:
        return logits.argmax(-1)
    shares = torch.softmax(logits.float().cpu() / temperature, -1)
    return torch.multinomial(shares, 1, generator=generator)[:, 0].to(logits.device)


def denoise(model: nn.Module, objective: Any, batch: Mapping[str, Tensor], *, steps: int) -> Tensor:
    """Return latents denoised from ``batch["noise"]`` in ``steps`` forwards, without guidance.

    Flow matching: Euler steps along the predicted velocity, levels shifted as in training. Noise and
    velocity prediction: DDIM (Song et al. 2021, equation 12, eta 0).
    """
    if objective.name == "flow_matching":
        return _euler(model, objective, batch, steps)
    return _ddim(model, objective, batch, steps)


def _euler(model: nn.Module, objective: Any, batch: Mapping[str, Tensor], steps: int) -> Tensor:
    shift = float(objective.options.get("shift", 1.0))
    levels = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)
    levels = shift * levels / (1 + (shift - 1) * levels)
    latents = batch["noise"]
    for now, after in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        time = latents.new_full((latents.shape[0],), now)
        velocity = objective.denoise(model, latents, time, batch)
        latents = latents + (after - now) * velocity.to(latents.dtype)
    return latents


def _ddim(model: nn.Module, objective: Any, batch: Mapping[str, Tensor], steps: int) -> Tensor:
    times = torch.linspace(objective.steps - 1, 0, steps).round().long().tolist()
    latents = batch["noise"]
    for number, now in enumerate(times):
        time = torch.full((latents.shape[0],), now, dtype=torch.int64, device=latents.device)
        signal, spread = objective.coefficients({**batch, "latents": latents, "timestep": time})
        predicted = objective.denoise(model, latents, time, batch).to(latents.dtype)
        if objective.name == "epsilon":
            clean, noise = (latents - spread * predicted) / signal, predicted
        else:
            clean, noise = signal * latents - spread * predicted, spread * latents + signal * predicted
        if number + 1 == len(times):
            latents = clean
            break
        later = torch.full_like(time, times[number + 1])
        signal, spread = objective.coefficients({**batch, "latents": latents, "timestep": later})
        latents = signal * clean + spread * noise
    return latents


FOLDER = "samples"
"""Folder of a run folder: ``samples/step-00000100/0.txt`` (or ``.png``, ``.safetensors``)."""


class Sampler:
    """Writes ``evaluation.samples`` samples.

    ``data.options`` may say ``prompts`` (a list of texts), ``sample_tokens`` (32), ``temperature``
    (0: the likeliest token) and ``sample_steps`` of a denoiser (20). Without prompts the beginnings of
    the data's first samples are continued; a denoiser takes their captions and sizes.

    Args:
        recipe: The run's recipe.
        spec: The model.
        objective: The task.
        session: This rank.
        folder: The run folder.
        loader: Where examples come from (validation data, else training data).
    """

    def __init__(
        self, recipe: Recipe, spec: ModelSpec, objective: Any, session: Session, folder: Path, loader: Loader
    ) -> None:
        self._recipe = recipe
        self._spec = spec
        self._objective = objective
        self._session = session
        self._folder = folder
        self._loader = loader
        self._options = recipe.data.options

    def make(self, model: nn.Module, *, stop: Callable[[], int] = lambda: 0) -> list[Any]:
        """Sample on all ranks; the model is left as it was found.

        Args:
            model: Sharded.
            stop: Asked before and after each sample, the same on all ranks; unless 0, that is the end.
        """
        from fsdptool.distributed.shard import reshard_all
        from fsdptool.families.objectives.context import using

        was_training = model.training
        model.eval()
        samples: list[Any] = []
        try:
            # Every rank runs the same whole sequence, those that share one included.
            with torch.no_grad(), using(None):
                for number in range(self._recipe.evaluation.samples):
                    if stop():
                        return samples
                    samples.append(self._one(model, number))
        finally:
            # A forward without a backward leaves the root gathered; the next step would not see it.
            reshard_all(model)
            model.train(was_training)
        stop()
        return samples

    def write(self, samples: list[Any], step: int) -> tuple[Path, ...]:
        """Write what was sampled on rank 0 (latents decoded on the host), into a folder named by the step.

        Returns:
            What was written; on rank 0 only.

        Raises:
            StorageError: Rank 0 could not write; raised on every rank.
        """
        return self._save(samples, self._folder / FOLDER / f"step-{step:08d}")

    def _one(self, model: nn.Module, number: int) -> Any:
        if self._objective.generates == "latents":
            return self._latents(model, number)
        return self._words(model, number)

    def _latents(self, model: nn.Module, number: int) -> Tensor:
        from fsdptool.training.sampling import denoise

        batch = self._example(number)
        return denoise(model, self._objective, batch, steps=self._options.get("sample_steps", 20))

    def _words(self, model: nn.Module, number: int) -> tuple[list[int], list[int]]:
        from fsdptool.training.sampling import continue_text, translate

        # On the CPU and of the same seed on every rank: all choose the same token.
        generator = torch.Generator().manual_seed(mix(self._recipe.seed, number, 31))
        count = self._options.get("sample_tokens", 32)
        temperature = self._options.get("temperature", 0.0)
        example = self._example(number)
        if self._objective.generates == "translation":
            prompt_ids = example["input_ids"][0].tolist()
            generated = translate(
                model,
                example,
                start=self._start(),
                new_tokens=count,
                temperature=temperature,
                generator=generator,
            )
            return prompt_ids, generated[0].tolist()
        prompt = self._prompt(number, example)
        whole = continue_text(model, prompt, new_tokens=count, temperature=temperature, generator=generator)
        return prompt[0].tolist(), whole[0, prompt.shape[1] :].tolist()

    def _start(self) -> int:
        for name in ("decoder_start_token_id", "pad_token_id"):
            if isinstance(value := self._spec.config.get(name), int):
                return value
        return 0

    def _prompt(self, number: int, example: Mapping[str, Tensor]) -> Tensor:
        prompts = self._options.get("prompts")
        if not prompts:
            tokens = example["input_ids"].flatten(0, -2)[:1]  # of a pair of answers, the first
            return tokens[:, : max(min(32, tokens.shape[1] // 4), 1)]
        text = prompts[number % len(prompts)]
        (ids,) = self._encoder().encode([text], special=False)
        ids = [*self._encoder().frame[0], *ids.tolist()]
        return torch.tensor([ids or [0]], device=example["input_ids"].device)

    def _encoder(self) -> Any:
        from fsdptool.training.data.tokenizer import load_tokenizer

        return load_tokenizer(self._recipe.data, self._spec)

    def _example(self, number: int) -> dict[str, Tensor]:
        batch = self._loader.example(number % self._loader.samples_per_epoch)
        return {name: tensor.to(self._session.device) for name, tensor in batch.items()}

    def _save(self, samples: list[Any], folder: Path) -> tuple[Path, ...]:
        files: tuple[Path, ...] = ()
        failure: FsdptoolError | None = None
        # Decoding a video may take longer than a collective may: nobody waits inside one.
        pace = LongWait(dist.group.WORLD if dist.is_initialized() else None, patience=_PATIENCE, beat=beat)
        pace.begin()
        if self._session.is_main:
            try:
                files = self._write_all(samples, folder, pace)
            except OSError as error:
                failure = StorageError(f"{folder} cannot be written: {error.strerror or error}")
            except FsdptoolError as error:
                failure = error
        pace.wait()
        if self._session.most(failure is not None):
            raise failure or StorageError("rank 0 could not write its samples", help="see rank 0's message")
        return files

    def _write_all(self, samples: list[Any], folder: Path, pace: LongWait) -> tuple[Path, ...]:
        folder.mkdir(parents=True, exist_ok=True)
        if self._objective.generates == "latents":
            device = self._session.device
            return _write_latents(samples, folder, self._recipe, self._spec, device, pace)
        encoder = self._encoder() if self._recipe.data.source != "synthetic" else None
        files = []
        for number, (prompt_ids, generated) in enumerate(samples):
            words = [encoder.decode(part) if encoder else str(part) for part in (prompt_ids, generated)]
            files.append(_written(folder / f"{number}.txt", f"{words[0]}\n---\n{words[1]}\n".encode()))
        return tuple(files)


def _write_latents(
    samples: list[Tensor],
    folder: Path,
    recipe: Recipe,
    spec: ModelSpec,
    device: torch.device,
    pace: LongWait,
) -> tuple[Path, ...]:
    """Pictures where the pipeline's VAE is at hand, else the latents themselves.

    Decoded on the run's device in what memory the run leaves free, on the CPU if that is not enough.
    """
    import io

    from safetensors.torch import save

    decoding = None
    with suppress(ConfigError):
        from fsdptool.training.data.encoded import encoded_data

        encoded = encoded_data(spec)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        decoding = encoded.decoder(recipe, spec, str(device))
    files = []
    for number, latents in enumerate(samples):
        plain = latents[0].float().cpu().contiguous()
        if decoding is None:
            files.append(_written(folder / f"{number}.safetensors", save({"latents": plain})))
            continue
        try:
            frames = decoding.decode(plain)
        except torch.OutOfMemoryError:
            decoding.move("cpu")
            torch.cuda.empty_cache()
            frames = decoding.decode(plain)
        pace.report()
        kind = "png" if len(frames) == 1 else "gif"
        stream = io.BytesIO()
        frames[0].save(
            stream, format=kind, **({"save_all": True, "append_images": frames[1:]} if frames[1:] else {})
        )
        files.append(_written(folder / f"{number}.{kind}", stream.getvalue()))
    if decoding is not None:
        decoding.unload()
    return tuple(files)


def _written(file: Path, content: bytes) -> Path:
    aside = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        aside.write_bytes(content)
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    return file


def open_sampler(
    recipe: Recipe, spec: ModelSpec, objective: Any, session: Session, folder: Path, loader: Loader
) -> Sampler | None:
    """Return what writes a run's samples, or None if the recipe wants none.

    Raises:
        ConfigError: The objective has nothing to sample.
    """
    if recipe.evaluation.samples <= 0:
        return None
    if objective.generates is None:
        raise ConfigError(
            f"evaluation.samples is {recipe.evaluation.samples}, but {objective.name} has nothing to sample",
            help="set it to 0, or choose an objective that generates text or latents"
            " (docs/reference/objectives.md)",
        )
    return Sampler(recipe, spec, objective, session, folder, loader)
