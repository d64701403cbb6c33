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
    "tinyllama-v1.1": "tinyllama-1.1b-v1.0", "stable-diffusion-v1-4": "stable-diffusion-v1-5",
    "deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3",
    "deepseek-coder-v2-lite": "deepseek-v2-lite",
    "phi-3-mini-128k": "phi-3-mini-4k", "phi-3-medium-128k": "phi-3-medium-4k", "bloomz": "bloom",
    "yi-1.5-6b": "yi-6b", "yi-1.5-34b": "yi-34b", "deepseek-math-7b": "deepseek-llm-7b",
    "deepseek-coder-7b-v1.5": "deepseek-llm-7b", "vicuna-33b-v1.3": "llama-30b",
    "open-llama-3b-v2": "open-llama-3b", "llama-guard-3-8b": "llama-3.1-8b",
    "llama-3.1-nemotron-nano-8b": "llama-3.1-8b",
    "granite-3.3-2b": "granite-3.1-2b", "granite-3.2-2b": "granite-3.1-2b",
    "granite-3.1-8b": "granite-3.3-8b", "granite-3.2-8b": "granite-3.3-8b", "aya-expanse-8b": "aya-23-8b",
    "mistral-small-3.1-24b": "mistral-small-3.2-24b", "devstral-small": "mistral-small-24b",
    "chroma1": "chroma1-hd", "chroma1-hd-hd": "chroma1-hd", "chroma1-hd-flash": "chroma1-hd",
    "z-image": "z-image-turbo", "z-image-turbo-turbo": "z-image-turbo",
    "sdxl-turbo": "sdxl-1.0", "realvisxl-v5.0": "sdxl-1.0",
    "hidream-i1-dev": "hidream-i1-full", "hidream-i1-fast": "hidream-i1-full",
    "wav2vec2-xls-r-300m": "wav2vec2-large-xlsr-53",
    "deepseek-prover-v1.5": "deepseek-llm-7b", "deepseek-prover-v2-7b": "deepseek-llm-7b",
    "goedel-prover": "deepseek-llm-7b", "qwen3-reranker": "qwen3", "openchat-3.5": "mistral-7b-v0.1",
    "olmo-3-7b": "olmo-3-1025-7b", "medgemma-4b": "gemma-3-4b", "smolvlm2-2.2b": "smolvlm",
    "wan2.1-i2v-14b-720p": "wan2.1-i2v-14b-480p",
    "dreamshaper-8": "stable-diffusion-v1-5", "hunyuanvideo-1.5-480p-t2v": "hunyuanvideo-1.5-720p-t2v",
    "gemma-1.1": "gemma", "codegemma": "gemma", "functiongemma-270m": "gemma-3-270m",
    "medgemma-27b": "gemma-3-27b", "qwen3.6": "qwen3.5",
    "minimax-m2.1": "minimax-m2", "minimax-m2.5": "minimax-m2", "hermes-4-14b": "qwen3-14b",
    "olmo-3-32b": "olmo-3-1125-32b", "olmo-3-32b-think": "olmo-3-1125-32b", "olmo-3.1-32b": "olmo-3-1125-32b",
    "granite-3.0-8b": "granite-3.3-8b", "granite-3.0-2b": "granite-3.1-2b", "lfm2.5-1.2b": "lfm2-1.2b",
    "ministral-3-8b-reasoning": "ministral-3-8b", "ministral-3-14b-reasoning": "ministral-3-14b",
    "mathstral-7b-v0.1": "mistral-7b-v0.3", "llama-guard-3-1b": "llama-3.2-1b", "llemma-7b": "codellama-7b",
    "starling-lm-7b": "mistral-7b-v0.1", "biomistral-7b": "mistral-7b-v0.1", "notus-7b": "mistral-7b-v0.1",
    "neuralbeagle14-7b": "mistral-7b-v0.1", "neural-7b": "mistral-7b-v0.1", "bielik-7b": "mistral-7b-v0.1",
    "occiglot-7b": "mistral-7b-v0.1", "tulu-2-7b": "llama-2-7b", "tulu-2-13b": "llama-2-13b",
    "tulu-2-70b": "llama-2-70b", "wizardlm-7b": "llama-2-7b", "wizardlm-13b": "llama-2-13b",
    "alpaca-7b": "llama-2-7b", "jamba-mini-1.5": "jamba-v0.1", "stable-code-3b": "stablelm-3b-4e1t",
    "tinyswallow-1.5b": "qwen2.5-1.5b", "nextcoder-7b": "qwen2.5-7b", "sailor-7b": "qwen1.5-7b",
    "sailor-4b": "qwen1.5-4b", "sailor-0.5b": "qwen1.5-0.5b",
    "smolvlm2-500m-video": "smolvlm-500m", "smolvlm2-256m-video": "smolvlm-256m",
    "animagine-xl": "sdxl-1.0", "illustrious-xl": "sdxl-1.0", "noobai-xl": "sdxl-1.0",
    "dreamshaper-xl": "sdxl-1.0", "juggernaut-xl": "sdxl-1.0", "pony-diffusion-v6-xl": "sdxl-1.0",
    "ltx-video-0.9.8-13b": "ltx-video-0.9.7", "wan2.1-flf2v-14b-720p": "wan2.1-i2v-14b-480p",
}  # fmt: skip
"""Names of models whose shapes are those of another one, applied in this order."""
_OTHER_UPLOADS = {
    "tencent/hunyuanvideo-1.5": "hunyuanvideo-1.5:8b",
    "terminusresearch/sana-1.6b-1024px": "sana:1.6b",
    "black-forest-labs/flux.2-klein-base-4b": "flux.2:klein-4b",
    "black-forest-labs/flux.2-klein-base-9b": "flux.2:klein-9b",
    "stabilityai/stable-diffusion-2": "sd2:unet-2.1",
    "stabilityai/stable-diffusion-2-base": "sd2:unet-2.1",
    "timbrooks/instruct-pix2pix": "sd1.5:unet",  # four channels more of input: 11,520 parameters
    "deepseek-ai/deepseek-v2": "deepseek-v2:236b",
    "deepseek-ai/deepseek-v2-chat": "deepseek-v2:236b",
    "deepseek-ai/deepseek-coder-v2-base": "deepseek-v2:236b",
    "deepseek-ai/deepseek-coder-v2-instruct": "deepseek-v2:236b",
    "arcee-ai/llama-3.1-supernova-lite": "llama3.1:8b",
    **dict.fromkeys(
        (
            "baai/bge-m3",
            "baai/bge-reranker-v2-m3",
            "intfloat/multilingual-e5-large",
            "intfloat/multilingual-e5-large-instruct",
        ),
        "xlm-roberta:large",
    ),
    "baai/bge-large-en-v1.5": "bert:large-uncased",
    "baai/bge-base-en-v1.5": "bert:base-uncased",
    "dmis-lab/biobert-v1.1": "bert:base-cased",
    "emilyalsentzer/bio_clinicalbert": "bert:base-cased",
    "databricks/dolly-v2-3b": "pythia:2.8b",
    "liuhaotian/llava-v1.5-7b": "llava:1.5-7b",
    "liuhaotian/llava-v1.5-13b": "llava:1.5-13b",
    "nvidia/cosmos-predict2-2b": "cosmos:predict2-2b-text2image",
    "deepcogito/cogito-v1-preview-llama-3b": "llama3.2:3b",
    "deepcogito/cogito-v1-preview-llama-8b": "llama3.1:8b",
    "deepcogito/cogito-v1-preview-llama-70b": "llama3.1:70b",
    "deepcogito/cogito-v1-preview-qwen-14b": "qwen2.5:14b",
    "deepcogito/cogito-v1-preview-qwen-32b": "qwen2.5:32b",
    "agentica-org/deepcoder-14b-preview": "qwen2.5:14b",
    "agentica-org/deepscaler-1.5b-preview": "qwen2.5:r1-distill-1.5b",
    "open-thoughts/openthinker-7b": "qwen2.5:7b",
    "open-thoughts/openthinker-32b": "qwen2.5:32b",
    "skywork/skywork-or1-7b": "qwen2.5:7b",
    "skywork/skywork-or1-32b": "qwen2.5:32b",
    "bytedtsinghua-sia/dapo-qwen-32b": "qwen2.5:32b",
    "janeai/jan-nano": "qwen3:4b",
    "menlo/jan-nano": "qwen3:4b",
    "unsloth/tinyllama-bnb-4bit": "tinyllama:1.1b",
    "zai-org/glm-4.6": "glm4-moe:4.5",
    "zai-org/glm-4.7": "glm4-moe:4.5",
    "lodestones/chroma": "chroma:1-hd",
    "mistralai/mistral-small-instruct-2409": "mistral:22b",
    "unsloth/mistral-small-instruct-2409": "mistral:22b",
    "qwen/qwen3-coder-next": "qwen3-next:80b-a3b",
    "microsoft/dialogpt-small": "gpt2:small",
    "microsoft/dialogpt-medium": "gpt2:medium",
    "microsoft/dialogpt-large": "gpt2:large",
    "ibm-granite/granite-8b-code-base": "llama:granite-code-8b",
    "ibm-granite/granite-8b-code-instruct-4k": "llama:granite-code-8b",
    "ibm-granite/granite-3b-code-instruct-2k": "llama:granite-code-3b",
    "bigcode/starcoderbase": "starcoder:15b",
    "coherelabs/c4ai-command-r-08-2024": "cohere:aya-expanse-32b",
    "cohereforai/c4ai-command-r-08-2024": "cohere:aya-expanse-32b",
    "coherelabs/command-a-reasoning-08-2025": "cohere2:command-a",
    "llm360/k2": "llama1:65b",
    "nousresearch/hermes-4-70b": "llama3.1:70b",
    "primeintellect/intellect-2": "qwen2.5:32b",
    "simplescaling/s1-32b": "qwen2.5:32b",
    "simplescaling/s1.1-32b": "qwen2.5:32b",
    "nvidia/openreasoning-nemotron-7b": "qwen2.5:7b",
    "nvidia/openreasoning-nemotron-14b": "qwen2.5:14b",
    "nvidia/openreasoning-nemotron-32b": "qwen2.5:32b",
    "nvidia/acereason-nemotron-7b": "qwen2.5:7b",
    "nvidia/acereason-nemotron-14b": "qwen2.5:14b",
    "seallms/seallms-v3-7b-chat": "qwen2.5:7b",
    "seallms/seallms-v3-1.5b-chat": "qwen2.5:1.5b",
    "wizardlmteam/wizardcoder-15b-v1.0": "starcoder:15b",
    "huggingfaceh4/starchat-beta": "starcoder:15b",
    "llm360/amber": "llama2:7b",
    "adaptllm/finance-llm": "llama2:7b",
    "epfl-llm/meditron-7b": "llama2:7b",
    "epfl-llm/meditron-70b": "llama2:70b",
    "unsloth/zephyr-sft-bnb-4bit": "mistral:7b-v0.1",
    "unsloth/orpheus-3b-0.1-ft": "llama3.2:orpheus-3b",
    "canopylabs/orpheus-3b-0.1-pretrained": "llama3.2:orpheus-3b",
    "prosusai/finbert": "bert:base-uncased",
    "intfloat/e5-base-v2": "bert:base-uncased",
    "intfloat/e5-large-v2": "bert:large-uncased",
    "hfl/chinese-roberta-wwm-ext": "bert:base-chinese",
    "hfl/chinese-bert-wwm-ext": "bert:base-chinese",
    **dict.fromkeys(
        (
            "microsoft/codebert-base",
            "microsoft/graphcodebert-base",
            "microsoft/unixcoder-base",
            "cardiffnlp/twitter-roberta-base",
            "cardiffnlp/twitter-roberta-base-sentiment-latest",
        ),
        "roberta:base",
    ),
    "snowflake/snowflake-arctic-embed-l-v2.0": "xlm-roberta:large",
    "nomic-ai/modernbert-embed-base": "modernbert:base",
    "distil-whisper/distil-large-v3.5": "whisper:distil-large-v3",
    "fal/auraflow": "auraflow:v0.2",
    "hunyuanvideo-community/hunyuanimage-2.1-diffusers": "hunyuan-image:default",
    "nvidia/cosmos-predict2-14b-text2image": "cosmos:predict2-14b-video2world",
    **dict.fromkeys(
        (
            "kandinskylab/kandinsky-5.0-t2v-lite-sft-5s-diffusers",
            "kandinskylab/kandinsky-5.0-t2v-lite-pretrain-5s-diffusers",
            "kandinskylab/kandinsky-5.0-t2v-lite-sft-10s-diffusers",
            "kandinskylab/kandinsky-5.0-t2v-lite-pretrain-10s-diffusers",
            "kandinskylab/kandinsky-5.0-i2v-lite-5s-diffusers",
        ),
        "kandinsky5:t2v-lite",
    ),
    "kandinskylab/kandinsky-5.0-t2i-lite-pretrain-diffusers": "kandinsky5:t2i-lite",
    "terminusresearch/fluxbooru-v0.3": "flux.1:dev",
    "terminusresearch/neta-lumina-v1": "lumina2:2b",
    "efficient-large-model/sana_1600m_2kpx_bf16_diffusers": "sana:1.6b",
    "purplesmartai/pony-v7-base": "auraflow:v0.3",
    "terminusresearch/pixart-900m-1024-ft-v0.7-stage1": "pixart-sigma:900m-1024",
    "terminusresearch/pixart-900m-1024-ft-v0.7-stage2": "pixart-sigma:900m-1024",
}
"""Hub ids whose names are not those of the size that they hold."""
_OTHER_SHAPES = frozenset([
    "vl", "omni", "audio", "vision", "eagle", "eagle3", "medusa", "draft", "pruned", "minitron", "embedding",
    "reranker", "lora", "moe", "distill", "merge", "upscaled", "depth", "llava", "onevision", "vlm", "ocr",
    "asr", "tts", "speech", "image", "mamba", "bitnet", "controlnet", "multimodal", "adapter", "adapters",
    "qlora", "dora", "peft", "vae", "sae", "ip", "extended", "h",
])  # fmt: skip
"""Parts of a name that stand for other shapes than those of the name around them."""
OWN_CODE = re.compile(
    r"(?:^|/)(?:chatglm[23]?|codegeex[24]|minicpm4?(?!-v-4\.[67]|-ocr)|baichuan2?(?!-m[23])|internlm2?|internvl2"
    r"|internvl-chat|qwen-(?:1_8b|7b|14b|72b|vl|audio)|phi-3(?:\.5)?-vision|llada2?|dream-(?:coder-)?v0|exaone-3"
    r"|xverse|orion-14b|telechat2?|aquila(?:chat)?2?(?!-135m|-vl)|deepseek-vl2|kimi-vl|ovis(?:1\.[56]|2\.5|-clip)"
    r"|molmoe?|nv-embed|step3|yuan2|skywork-(?:13b|moe|r1v))(?![a-z0-9])[^/]*/?$",
    re.IGNORECASE,
)
"""Names of models whose classes are code of their own repositories: transformers 5.23 has none of them."""
_SIZE = re.compile(
    r"(?!1m$)a?\d+(?:\.\d+)?[bm]|\d+x\d+(?:\.\d+)?b|tiny|nano|mini|small|medium|large|x+l|huge|giant|lite"
)
"""A part of a name that is a size (a context of a million tokens, ``1m``, is not)."""

_CACHED = re.compile(r"(?:^|/)models--(?:([^/]+?)--)?([^/]+)/snapshots/[^/]+/?$")
_COMPONENTS = (("transformer", "unet", "prior"), (None,))
"""Components of pipelines by rank: of several of one pipeline the denoiser is the model that is trained."""
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
    written, name = name, _hub_name(name)
    exact = _published().get(name.lower()) or _OTHER_UPLOADS.get(name.lower())
    if exact is not None:
        return exact, None
    parts = _parts(name)
    best: tuple[str, str] | None = None
    length = 0
    for key, found in _known().items():
        wanted = key.split("-")
        if len(wanted) <= length or (len(wanted) < 2 and wanted != parts) or not _contains(parts, wanted):
            continue
        others = {*parts} - {*wanted}
        if not _OTHER_SHAPES & others and not any(_SIZE.fullmatch(part) for part in others):
            best, length = found, len(wanted)
    if best is None:
        return None, None
    return best[0], f"{written} is taken for {best[0]} ({best[1]}) by its name"


_STORED_AS = {
    "awq": "awq int4", "gptq": "gptq int4", "aqlm": "aqlm", "hqq": "hqq", "nf4": "bnb nf4", "nvfp4": "nvfp4",
    "mxfp4": "mxfp4", "fp8": "fp8", "w4a16": "int4", "w8a16": "int8", "w8a8": "int8", "int4": "int4",
    "int8": "int8", "4bit": "bnb nf4", "8bit": "bnb int8",
}  # fmt: skip
"""What a quantised upload is called after, and its format in words; the first that a name has counts."""


def format_of_name(name: str) -> str | None:
    """Return the format in which the checkpoint of a name is stored quantised, or None."""
    parts = re.split(r"[-_./\s]+", _hub_name(name).rstrip("/").rsplit("/", 1)[-1].lower())
    found = next((words for part, words in _STORED_AS.items() if part in parts), None)
    return found.replace("int4", "int8") if found == "gptq int4" and {"int8", "8bit"} & {*parts} else found


def _hub_name(name: str) -> str:
    """Return the Hub id that the folder of a cache stands for; other names as they are.

    The Hub's cache has ``models--ORG--NAME/snapshots/REVISION``; ModelScope's writes ``___`` for a dot.
    """
    cached = _CACHED.search(name)
    return "/".join(filter(None, cached.groups())) if cached is not None else name.replace("___", ".")


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


def denoises(family: str) -> bool:
    """Whether a size of the catalogue is a model that makes images, video or sound from noise."""
    objective = load_registry().get(family.partition(":")[0]).default_objective
    return objective in ("flow_matching", "epsilon", "v_prediction", "edm")


def hub_id_of(family: str) -> str | None:
    """Return the name on the Hub that a size of the catalogue was published under, or None."""
    name, _, size = family.partition(":")
    flavour = load_registry().get(name).flavours().get(size)
    return flavour.hub_id if flavour is not None else None


def model_class_of(family: str) -> str:
    """Return the class that a size of the catalogue is built as."""
    name, _, size = family.partition(":")
    return load_registry().get(name).flavours()[size].model_class


def family_of_builder(name: str) -> str | None:
    """Return the size of the catalogue whose reference has the letters and digits of a name, or None.

    Programs that build models by functions name them after the size: ``llama3_2_3b`` is ``llama3.2:3b``.
    """
    return _references().get(_letters(name))


@cache
def _references() -> dict[str, str]:
    families = load_registry().all()
    known = [f"{family.name}:{size}" for family in families for size in family.flavours()]
    return {_letters(reference): reference for reference in known}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "", name.lower())


@cache
def _published() -> dict[str, str]:
    """Return the catalogue by the exact names that its sizes were published under."""
    found: dict[str, str] = {}
    for components in _COMPONENTS:
        for family in load_registry().all():
            for flavour in family.flavours().values():
                if flavour.hub_id and flavour.component in components:
                    found.setdefault(flavour.hub_id.lower(), f"{family.name}:{flavour.name}")
    return found


@cache
def _known() -> dict[str, tuple[str, str]]:
    """Return the catalogue by plain names: the reference, and the hub id it was published under."""
    found: dict[str, tuple[str, str]] = {}
    for hub_id, reference in _published().items():
        family, _, size = reference.partition(":")
        published = load_registry().get(family).flavours()[size].hub_id or hub_id
        found.setdefault("-".join(_parts(published)), (reference, published))
    return found


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


def _contains(parts: list[str], wanted: list[str]) -> bool:
    """Return whether a name has the wanted parts in one piece.

    The name of a fine-tune may stand before the size: ``llama-3.1-nemotron-70b`` contains ``llama-3.1-70b``.
    """
    head = wanted[:-1]
    own = 2 if len(head) > 1 else 0
    for at in range(len(parts) - len(head)):
        after = at + len(head)
        if parts[at:after] == head and wanted[-1] in parts[after : after + own + 1]:
            return True
    return False
