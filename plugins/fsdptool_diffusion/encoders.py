"""A pipeline's own text encoders, loaded without VAE and denoiser."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError
from fsdptool.files.values import read_json
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor


def quiet() -> None:
    """No progress bars of the libraries: ours is one line per shard."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def free(device: str) -> None:
    """Give back what nobody holds any more."""
    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def owned(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, laid out as it reads: a view would keep, and save, all of a larger tensor."""
    import torch

    return tensor.cpu().clone(memory_format=torch.contiguous_format)


_EMBEDS, _POOLED, _MASK = "prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"
_NEGATIVE = "negative_"
_NO_EMBEDS, _NO_POOLED, _NO_MASK = (_NEGATIVE + name for name in (_EMBEDS, _POOLED, _MASK))
_PLACED = (_EMBEDS, None)
_PAIR = (_EMBEDS, _NO_EMBEDS)
_MASKED = (_EMBEDS, _MASK, _NO_EMBEDS, _NO_MASK)
_POOLED_PAIR = (_EMBEDS, _NO_EMBEDS, _POOLED, _NO_POOLED)
_T5, _LLAMA = "prompt_embeds_t5", "prompt_embeds_llama3"

TEXT_OUTPUTS: Mapping[str, tuple[str | None, ...]] = {
    "FluxPipeline": (_EMBEDS, _POOLED, None),
    "Flux2Pipeline": _PLACED,
    "Flux2KleinPipeline": _PLACED,
    "ChromaPipeline": (_EMBEDS, None, _MASK, _NO_EMBEDS, None, _NO_MASK),
    "StableDiffusionPipeline": _PAIR,
    "StableDiffusionXLPipeline": _POOLED_PAIR,
    "StableDiffusion3Pipeline": _POOLED_PAIR,
    "KolorsPipeline": _POOLED_PAIR,
    "WanPipeline": _PAIR,
    "WanImageToVideoPipeline": _PAIR,
    "CogVideoXPipeline": _PAIR,
    "CogView4Pipeline": _PAIR,
    "PixArtAlphaPipeline": _MASKED,
    "PixArtSigmaPipeline": _MASKED,
    "SanaPipeline": _MASKED,
    "Lumina2Pipeline": _MASKED,
    "AuraFlowPipeline": _MASKED,
    "LTXPipeline": _MASKED,
    "MochiPipeline": _MASKED,
    "HunyuanVideoPipeline": (_EMBEDS, _POOLED, _MASK),
    "QwenImagePipeline": (_EMBEDS, _MASK),
    "ZImagePipeline": _PAIR,
    "HiDreamImagePipeline": (_T5, _NEGATIVE + _T5, _LLAMA, _NEGATIVE + _LLAMA, _POOLED, _NO_POOLED),
}
"""What ``encode_prompt`` of a pipeline returns (diffusers 0.42.1), by the names its arguments have; what
begins with ``negative_`` stands for no caption. Tables of positions are None: families make them."""

_BY_TOKENIZER = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
_LONGEST_CAPTION = 100_000
"""Tokenizers without a limit name a number with thirty digits."""

_UNFILLED = ("ZImagePipeline",)
"""Pipelines whose captions come without padding; a mask then says where ours begins."""

_LAYERED = (_LLAMA,)
"""Embeddings with the encoder's layers before the batch."""

_DENOISERS = ("transformer", "transformer_2", "unet")
_PIXELS = ("vae", "image_encoder", "image_processor")


def pipeline_folder(recipe: Recipe, spec: ModelSpec) -> Path:
    """Return the pipeline's folder: ``data.options.pipeline``, or the one the model lies in.

    Raises:
        ConfigError: There is none, so there is no VAE and no text encoder.
    """
    requested = recipe.data.options.get("pipeline")
    places = [Path(requested).expanduser()] if requested else []
    if not requested and spec.folder is not None:
        places = [Path(spec.folder), Path(spec.folder).parent]
    for place in places:
        if (place / "model_index.json").is_file():
            return place
    raise ConfigError(
        f"no pipeline folder with model_index.json is known for {requested or spec.reference.id}",
        help="name a local diffusers pipeline under data.options.pipeline: its VAE and encoders are used",
    )


def pipeline_index(folder: Path) -> Mapping[str, Any]:
    """Return ``model_index.json``.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        index = read_json(folder / "model_index.json")
    except UnreadableError as error:
        raise ConfigError(f"{folder / 'model_index.json'} cannot be read: {error}") from error
    if not isinstance(index, Mapping) or not isinstance(index.get("_class_name"), str):
        raise ConfigError(f"{folder / 'model_index.json'} has no _class_name")
    return index


def caption_tokens(folder: Path) -> int | None:
    """Return the tokens of every caption, where the pipeline's tokenizer alone decides that.

    Stable Diffusion 1, 2 and XL fill captions up to what their tokenizer holds (``encode_prompt``, diffusers
    0.42.1). None: other pipelines take a length, or the tokenizer does not say.

    Args:
        folder: Of a pipeline.
    """
    try:
        if pipeline_index(folder)["_class_name"] not in _BY_TOKENIZER:
            return None
        said = read_json(folder / "tokenizer" / "tokenizer_config.json")
    except (ConfigError, UnreadableError, OSError):
        return None
    length = said.get("model_max_length") if isinstance(said, Mapping) else None
    return length if isinstance(length, int) and 0 < length <= _LONGEST_CAPTION else None


def check_pipeline(folder: Path) -> str:
    """Return the class of a pipeline whose captions and conditions can be cached.

    Raises:
        ConfigError: They cannot; the message says why.
    """
    index = pipeline_index(folder)
    name = str(index["_class_name"])
    if name == "WanImageToVideoPipeline" and index.get("expand_timesteps"):
        why = "its first frame is given by a time of its own, not by channels"
    elif name in TEXT_OUTPUTS:
        return name
    elif "ImageToVideo" in name or "I2V" in name:
        why = "its condition, the first image's encodings, is not cached"
    else:
        why = "what its encode_prompt returns is not known here"
    raise ConfigError(
        f"latents and captions cannot be encoded with {name}: {why}",
        help=f"known are {', '.join(sorted(TEXT_OUTPUTS))}; or train on data.source latents you made",
    )


class TextEncoding:
    """The pipeline's ``encode_prompt`` without VAE and denoiser.

    Its arguments are those the pipeline itself would give it: where ``__call__`` has an argument of the
    same name, its default is taken (Sana's instruction, Kolors' 256 tokens).

    Args:
        folder: The pipeline's folder.
        device: Where to encode.
        length: Tokens a caption is to have, for encoders that fill captions up; None: their own choice.
        trust_remote_code: Whether code from the folder may run.
    """

    def __init__(
        self, folder: Path, *, device: str, length: int | None, trust_remote_code: bool = False
    ) -> None:
        import diffusers
        import torch

        index, name = pipeline_index(folder), check_pipeline(folder)
        without: dict[str, Any] = {part: None for part in (*_DENOISERS, *_PIXELS) if part in index}
        cls = getattr(diffusers, name)
        quiet()
        try:
            pipeline = cls.from_pretrained(
                str(folder),
                dtype=torch.float32 if device == "cpu" else torch.bfloat16,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                **without,
            )
        except Exception as error:  # diffusers raises anything from OSError to TypeError here
            raise ConfigError(f"pipeline {folder} cannot be loaded: {first_line(error)}") from error
        self._pipeline: Any = pipeline.to(device)
        self._device = device
        self._name = name
        self._arguments = self._chosen(length)

    def _chosen(self, length: int | None) -> dict[str, Any]:
        known = inspect.signature(self._pipeline.encode_prompt).parameters
        own = inspect.signature(type(self._pipeline).__call__).parameters
        unset = (None, inspect.Parameter.empty)
        arguments = {
            name: own[name].default for name in known if name in own and own[name].default not in unset
        }
        arguments |= {"device": self._device, "do_classifier_free_guidance": False}
        # Some pipelines have no default for it.
        arguments |= dict.fromkeys(("num_images_per_prompt", "num_videos_per_prompt"), 1)
        for twin in ("prompt_2", "prompt_3"):
            if twin in known and known[twin].default is inspect.Parameter.empty:
                arguments[twin] = None
        if length is not None:
            arguments["max_sequence_length"] = length - self._before()
            if self._name == "CogView4Pipeline":
                self._pipeline.tokenizer = _Filling(self._pipeline.tokenizer, length)
        return {name: value for name, value in arguments.items() if name in known}

    def _before(self) -> int:
        """Tokens that stand before those ``max_sequence_length`` counts: CLIP's, in SD 3."""
        return int(self._pipeline.tokenizer_max_length) if self._name == "StableDiffusion3Pipeline" else 0

    def encode(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """Return, per caption, its embeddings without a batch dimension, on the CPU.

        One caption at a time: what a caption becomes must not depend on its neighbours.
        """
        return [self._one(caption, "", self._arguments) for caption in captions]

    def encode_nothing(self) -> dict[str, Tensor]:
        """Return what stands for a caption that was dropped: the pipeline's negative half, if it has one."""
        if not any(name and name.startswith(_NEGATIVE) for name in TEXT_OUTPUTS[self._name]):
            return self._one("", "", self._arguments)
        guided = {**self._arguments, "do_classifier_free_guidance": True, "negative_prompt": [""]}
        return self._one("", _NEGATIVE, guided)

    def _one(self, caption: str, prefix: str, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
        import torch

        try:
            with torch.no_grad():
                outputs = self._pipeline.encode_prompt(prompt=[caption], **arguments)
        except (ImportError, NameError) as error:  # Wan's names ftfy without importing it (diffusers 0.42.1)
            raise ConfigError(
                f"{self._name} needs a package that is not installed: {first_line(error)}",
                help=f"pip install {error.name}",
            ) from error
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        encoded: dict[str, Tensor] = {}
        for name, value in zip(TEXT_OUTPUTS[self._name], outputs, strict=True):
            if name is None or name.startswith(_NEGATIVE) != bool(prefix):
                continue
            plain = name.removeprefix(prefix)
            if value is not None:  # a mask of ones is None (Qwen-Image)
                encoded[plain] = owned(value[:, 0] if plain in _LAYERED else value[0])
        if _MASK in TEXT_OUTPUTS[self._name] or self._name in _UNFILLED:
            encoded.setdefault(_MASK, torch.ones(encoded[_EMBEDS].shape[0], dtype=torch.int64))
        return encoded

    def unload(self) -> None:
        """Give the memory back."""
        self._pipeline = None
        free(self._device)


class _Filling:
    """A tokenizer that fills every text up to one length, on the left.

    CogView 4 fills a batch to its longest text with tokens its encoder and its transformer see (diffusers
    0.42.1), so a caption's embeddings belong to a length; all get that of the plan.
    """

    def __init__(self, tokenizer: Any, length: int) -> None:
        self._tokenizer = tokenizer
        self._length = length

    def __call__(self, text: Any, **options: Any) -> Any:
        options = {"max_length": self._length, **options, "padding": "max_length", "padding_side": "left"}
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
