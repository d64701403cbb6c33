"""Names of models, and the sizes of the catalogue that they stand for."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from fsdptool.families.registry import load_registry
from fsdptool.source.known_models import OWN_CODE, family_of_builder, family_of_name, layer_classes_of


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("meta-llama/Llama-3.1-8B", "llama3.1:8b"),
        ("NousResearch/Meta-Llama-3.1-8B", "llama3.1:8b"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama3.1:8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-moe:30b-a3b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5:7b"),
        ("user/qwen-2.5-3b-instruct-multiturn-sft", "qwen2.5:3b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl:7b"),
        ("black-forest-labs/FLUX.1-Krea-dev", "flux.1:dev"),
        ("stabilityai/stable-diffusion-xl-base-1.0", "sdxl:unet"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2.5:7b"),
        ("models/bigscience_bloom-3b", "bloom:3b"),
        ("gpt2", "gpt2:small"),
        ("meta-llama/Llama-3.2-3B", "llama3.2:3b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "qwen2.5:r1-distill-1.5b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5:7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama3.1:8b"),
        ("teknium/OpenHermes-2.5-Mistral-7B", "mistral:7b-v0.1"),
        ("alignment-handbook/zephyr-7b-sft-full", "mistral:7b-v0.1"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral:7b-v0.3"),
        ("lmsys/vicuna-7b-v1.5", "llama2:7b"),
        ("google/gemma-2-27b-it", "gemma2:27b"),
        ("mistralai/Magistral-Small-2509", "mistral3:small-3.2-24b"),
        ("FlagAlpha/Llama3-Chinese-8B-Instruct", "llama3:8b"),
        ("nvidia/Llama-3.1-Nemotron-70B-Instruct-HF", "llama3.1:70b"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "mllama:11b-vision-instruct"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3:671b"),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "qwen3:8b"),
        ("deepseek-ai/deepseek-coder-6.7b-instruct", "deepseek-llm:coder-6.7b"),
        ("openai/whisper-large-v3-turbo", "whisper:large-v3-turbo"),
        ("Qwen/Qwen2.5-7B-Instruct-1M", "qwen2.5:7b"),
        ("stabilityai/stable-cascade-prior", "stable-cascade:stage-c"),
        ("tencent/HunyuanVideo-1.5", "hunyuanvideo-1.5:8b"),
        ("lodestones/Chroma1-Base", "chroma:1-hd"),
        (
            "/cache/models--Qwen--Qwen2.5-VL-72B-Instruct/snapshots/89c86200743eec961a297729e7990e8f2d",
            "qwen2.5-vl:72b",
        ),
        ("models--gpt2/snapshots/main/", "gpt2:small"),
        ("/srv/modelscope/hub/Qwen/Qwen2___5-7B-Instruct", "qwen2.5:7b"),
        ("arcee-ai/Llama-3.1-SuperNova-Lite", "llama3.1:8b"),
    ],
)
def test_a_name_stands_for_a_size(name: str, family: str) -> None:
    assert family_of_name(name)[0] == family


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-7B",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-3B",
        "meta-llama/Llama-3.2-4B",
        "mistralai/Mistral-7B-v0.9",
        "./qwen",
        "org/Qwen2.5-7B-eagle3",
        "google/flan-t5-xxxl",
        "google/electra-small-discriminator",
        "org/Qwen3-8B-draft-0.5B",
        "Qwen/Qwen3.5-500B-A17B",
        "ibm-granite/granite-4.0-h-350m",
        "org/Qwen3-Coder-Next-Draft",
        "OpenGVLab/InternVL2_5-8B",
        "tiiuae/Falcon3-Mamba-7B-Base",
        "nvidia/Llama-3.1-Nemotron-Nano-4B",
        "org/my-gpt2-large-clone-of-something-vision",
        "",
    ],
)
def test_other_shapes_are_not_guessed(name: str) -> None:
    assert family_of_name(name)[0] is None


@pytest.mark.parametrize(
    ("builder", "family"),
    [
        ("llama3_2_3b", "llama3.2:3b"),
        ("qwen2_5_14b", "qwen2.5:14b"),
        ("gemma2_27b", "gemma2:27b"),
        ("", None),
    ],
)
def test_a_builder_is_named_after_its_size(builder: str, family: str | None) -> None:
    assert family_of_builder(builder) == family


def test_every_published_id_of_a_language_model_is_known_without_a_note() -> None:
    llama = load_registry().get("llama3.1")
    for flavour in llama.flavours().values():
        assert flavour.hub_id is not None
        assert family_of_name(flavour.hub_id) == (f"llama3.1:{flavour.name}", None)


def test_layers_are_named_as_recorded_or_as_transformers_names_them() -> None:
    assert layer_classes_of("wan2.1:t2v-1.3b") == ("WanTransformerBlock",)
    assert layer_classes_of("qwen2.5:7b") == ("Qwen2DecoderLayer",)
    assert layer_classes_of(None) == ()


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("Qwen/Qwen3.5-0.8B-Base", "qwen3.5:0.8b"),
        ("google/mt5-small", "mt5:small"),
        ("LiquidAI/LFM2-1.2B", "lfm2:1.2b"),
        ("LiquidAI/LFM2-VL-450M", "lfm2-vl:450m"),
        ("OpenGVLab/InternVL3_5-8B", "internvl3:3.5-8b"),
        ("liuhaotian/llava-v1.6-mistral-7b", "llava-next:1.6-mistral-7b"),
        ("Wan-AI/Wan2.1-I2V-14B-720P", "wan2.1:i2v-14b"),
        ("BAAI/bge-m3", "xlm-roberta:large"),
        ("deepseek-ai/DeepSeek-Prover-V2-7B", "deepseek-llm:7b"),
        ("axolotl-quants/DeepSeek-V2.5-bnb-nf4-bf16", "deepseek-v2:236b"),
        ("stabilityai/stable-diffusion-2-base", "sd2:unet-2.1"),
        ("black-forest-labs/FLUX.2-klein-base-9B", "flux.2:klein-9b"),
        ("microsoft/Phi-4-multimodal-instruct", None),
        ("Qwen/Qwen3.5-122B-A10B", "qwen3.5-moe:122b-a10b"),
        ("Qwen/Qwen3.6-27B", "qwen3.5:27b"),
        ("Qwen/Qwen3-Coder-Next", "qwen3-next:80b-a3b"),
        ("MiniMaxAI/MiniMax-M2.1", "minimax-m2:230b-a10b"),
        ("mistralai/Mistral-Small-Instruct-2409", "mistral:22b"),
        ("mistralai/Mathstral-7B-v0.1", "mistral:7b-v0.3"),
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "nemotron-h:nano-9b-v2"),
        ("ibm-granite/granite-4.0-h-tiny", "granite4-h:tiny"),
        ("berkeley-nest/Starling-LM-7B-alpha", "mistral:7b-v0.1"),
        ("bigcode/starcoderbase", "starcoder:15b"),
        ("google/codegemma-7b-it", "gemma:7b"),
        ("Laxhar/noobai-XL-1.1", "sdxl:unet"),
        ("PixArt-alpha/PixArt-XL-2-1024-MS", "pixart-sigma:alpha-xl-1024"),
        ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "idefics3:smolvlm-500m"),
    ],
)
def test_models_of_training_files_are_known_or_left_open(name: str, reference: str | None) -> None:
    assert family_of_name(name)[0] == reference


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("THUDM/chatglm3-6b", "chatglm"),
        ("baichuan-inc/Baichuan2-7B-Chat", "baichuan"),
        ("models/internlm2_5-7b-chat", "internlm2"),
        ("internlm/internlm-xcomposer2-7b", "internlmxcomposer2"),
        ("openbmb/MiniCPM-V-2_6", "minicpmv"),
        ("openbmb/MiniCPM4-8B", "minicpm"),
        ("OpenGVLab/InternVL2_5-8B/", "internvl_chat"),
        ("nvidia/NV-Embed-v2", "nvembed"),
        ("Dream-org/Dream-v0-Instruct-7B", "Dream"),
        ("inclusionAI/LLaDA2.0-mini", "llada2_moe"),
        ("deepseek-ai/deepseek-vl2-tiny", "deepseek_vl_v2"),
        ("AIDC-AI/Ovis1.6-Gemma2-9B", "ovis"),
        ("allenai/Molmo-7B-D-0924", "molmo"),
        ("Skywork/Skywork-13B-base", "skywork"),
        ("stepfun-ai/step3", "step3_vl"),
    ],
)
def test_transformers_lacks_models_with_code_of_their_own(name: str, kind: str) -> None:
    assert OWN_CODE.search(name) is not None
    assert kind not in CONFIG_MAPPING_NAMES


@pytest.mark.parametrize(
    "name",
    [
        "internlm/internlm3-8b-instruct",
        "openbmb/MiniCPM3-4B",
        "openbmb/MiniCPM-V-4.6",
        "jinaai/jina-embeddings-v3-hf",
        "deepseek-community/deepseek-vl-1.3b-chat",
        "allenai/Molmo2-8B",
        "thisisiron/Ovis2-1B-hf",
        "Skywork/Skywork-OR1-7B",
        "baichuan-inc/Baichuan-M2-32B",
        "Alibaba-NLP/gte-base-en-v1.5",
        "stepfun-ai/Step-3.7-Flash",
        "internlm/gpt2",
    ],
)
def test_classes_of_transformers_are_not_taken_for_own_code(name: str) -> None:
    assert OWN_CODE.search(name) is None
