"""Which size of the catalogue a model's name stands for: its hub id, a fine-tune, a quantised upload.

Nothing is looked up outside the catalogue.
"""

from __future__ import annotations

import re
from functools import cache

from fsdptool.families.registry import load_registry

_WITHOUT = frozenset([
    "instruct", "chat", "it", "base", "hf", "pt", "thinking", "diffusers", "bf16", "fp16", "fp8", "fp32",
    "bnb", "unsloth", "4bit", "8bit", "int4", "int8", "awq", "gptq", "gguf", "nf4", "mxfp4", "w4a16", "w8a8",
    "meta", "latest",
])  # fmt: skip
"""Parts of a name that change no shape: what a checkpoint was tuned for, and how it is stored."""
_SAME_SHAPES = {
    "qwen2.5-coder": "qwen2.5", "qwen2.5-math": "qwen2.5", "qwen3-coder": "qwen3", "flux.1-krea": "flux.1",
    "flux.1-kontext": "flux.1", "flux-dev": "flux.1-dev", "flux1-dev": "flux.1-dev",
    "stable-diffusion-xl": "sdxl",
    "mistral-7b-v0.2": "mistral-7b-v0.1", "llama-3.2-vision-11b": "llama-3.2-11b-vision",
    "llama-7b": "llama-2-7b", "llama-13b": "llama-2-13b", "vicuna-7b-v1.5": "llama-2-7b",
    "vicuna-13b-v1.5": "llama-2-13b", "qwq-32b": "qwen2.5-32b", "phi-3.5-mini": "phi-3-mini-4k",
    "magistral-small": "mistral-small-3.2-24b", "tinyllama-1.1b-intermediate": "tinyllama-1.1b-v1.0",
    "smollm-135m": "smollm2-135m", "smollm-360m": "smollm2-360m", "smollm-1.7b": "smollm2-1.7b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b", "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
    "deepseek-r1-distill-qwen7b": "qwen2.5-7b", "deepseek-r1-distill-qwen14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen32b": "qwen2.5-32b",
    "tinyllama-v1.1": "tinyllama-1.1b", "stable-diffusion-v1-4": "stable-diffusion-v1-5",
}  # fmt: skip
"""Names of models whose shapes are those of another one."""
_OTHER_SHAPES = frozenset([
    "vl", "omni", "audio", "vision", "eagle", "eagle3", "medusa", "draft", "pruned", "minitron", "embedding",
    "reranker", "lora", "moe", "distill", "merge", "upscaled", "depth", "tiny",
])  # fmt: skip
"""Parts of a name that stand for other shapes than those of the name around them."""


STORED_IN_FP32 = frozenset([
    "gpt2", "distilgpt2", "bert", "roberta", "xlm-roberta", "distilbert", "albert", "t5", "flan-t5", "bart",
    "vit", "dinov2", "clip", "pegasus", "sd1.5",
])  # fmt: skip
"""Families whose published checkpoints are stored in fp32; younger ones are stored in 16 bits."""


def family_of_name(name: str) -> tuple[str | None, str | None]:
    """Return the family and size that a model's name stands for, as ``llama3:8b``, and a note.

    Args:
        name: Hub id, path or name of the model.

    Returns:
        The reference, or None where the catalogue has no such size; and a note where the name is not the
        catalogue's, or None.
    """
    known = _known()
    exact = known.get(_plain(name))
    if exact is not None and exact[1].lower() == name.lower():
        return exact[0], None
    parts = _parts(name)
    best: tuple[str, str] | None = None
    length = 0
    for key, found in known.items():
        wanted = key.split("-")
        if len(wanted) <= length or (len(wanted) < 2 and wanted != parts):
            continue
        at = _place(wanted, parts)
        if at is not None and not _OTHER_SHAPES & ({*parts} - {*wanted}):
            best, length = found, len(wanted)
    if best is None:
        return None, None
    return best[0], f"{name} is taken for {best[0]} ({best[1]}) by its name"


def layer_classes_of(family: str | None) -> tuple[str, ...]:
    """Return the classes of the layers of a size: as recorded, else by the naming of transformers."""
    if family is None:
        return ()
    name, _, size = family.partition(":")
    flavour = load_registry().get(name).flavours()[size]
    recorded = flavour.facts.get("blocks")
    if recorded:
        return tuple(recorded)
    named = re.sub(r"For\w+$", "DecoderLayer", flavour.model_class)
    return (named,) if named != flavour.model_class else ()


@cache
def layer_classes() -> frozenset[str]:
    """Return the classes of the layers of every size of the catalogue."""
    return frozenset(name for family, _ in _known().values() for name in layer_classes_of(family))


def hub_id_of(family: str) -> str | None:
    """Return the name on the Hub that a size of the catalogue was published under, or None."""
    name, _, size = family.partition(":")
    flavour = load_registry().get(name).flavours().get(size)
    return flavour.hub_id if flavour is not None else None


@cache
def _known() -> dict[str, tuple[str, str]]:
    """Return the catalogue by plain names: the reference, and the hub id it was published under."""
    found: dict[str, tuple[str, str]] = {}
    # Of several components of one pipeline the denoiser is the model that is trained.
    for components in (("transformer", "unet"), (None,)):
        for family in load_registry().all():
            for flavour in family.flavours().values():
                if flavour.hub_id and flavour.component in components:
                    found.setdefault(
                        _plain(flavour.hub_id), (f"{family.name}:{flavour.name}", flavour.hub_id)
                    )
    return found


def _plain(name: str) -> str:
    return "-".join(_parts(name))


def _parts(name: str) -> list[str]:
    """Return the parts of a name that say its shapes."""
    base = re.sub(r"[_\s]+", "-", name.rstrip("/").rsplit("/", 1)[-1].lower())
    base = re.sub(r"(?<![^-])qwen-(?=\d)", "qwen", base)
    base = re.sub(r"(?<![^-])(llama|gemma)(?=\d)", r"\1-", base)
    kept = [part for part in base.split("-") if part and part not in _WITHOUT]
    kept = [part for part in kept if not re.fullmatch(r"2\d{3}", part)] or kept
    plain = "-".join(kept)
    # Fine-tunes of the 7B often leave out the version, and are of the first.
    plain = re.sub(r"(?<![^-])(?:zephyr|mistral)-7b(?!-v0|[^-])", "mistral-7b-v0.1", plain)
    for other, same in _SAME_SHAPES.items():
        plain = re.sub(rf"(?<![^-]){re.escape(other)}(?![^-])", same, plain)
    return plain.split("-")


def _place(wanted: list[str], parts: list[str]) -> int | None:
    size = len(wanted)
    return next((at for at in range(len(parts) - size + 1) if parts[at : at + size] == wanted), None)
