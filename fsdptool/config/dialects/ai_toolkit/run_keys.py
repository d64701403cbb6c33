"""The keys of a training process of ai-toolkit, by what they change, with the defaults of those that decide.

Source: ai-toolkit 0.12.26 (27a03a91) ``toolkit/config_modules.py``, ``jobs/process/BaseSDTrainProcess.py``.
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import RunKeys, names, sides

_MODULES = "toolkit/config_modules.py"

KEYS = RunKeys(
    program="ai-toolkit",
    version="0.12.26",
    defaults={
        "train.batch_size": (1, f"{_MODULES}:393"),
        "train.steps": (1000, f"{_MODULES}:380"),
        "train.optimizer": ("adamw", f"{_MODULES}:387"),
        "train.dtype": ("fp32", f"{_MODULES}:395"),
        "train.gradient_checkpointing": (True, f"{_MODULES}:413"),
        "train.gradient_accumulation": (1, f"{_MODULES}:460"),
        "train.attention_backend": ("native", f"{_MODULES}:399"),
        "network.linear": (4, f"{_MODULES}:181"),
        "model.quantize": (False, f"{_MODULES}:685"),
        "model.qtype": ("qfloat8", f"{_MODULES}:687"),
        "model.compile": (False, f"{_MODULES}:746"),
    },
    memory=sides(
        less="""
        model.low_vram model.layer_offloading model.layer_offloading_transformer_percent
        model.layer_offloading_text_encoder_percent train.unload_text_encoder train.cache_text_embeddings
        model.quantize_te model.text_encoder_bits model.te_device model.vae_device
        train.do_paramiter_swapping train.single_item_batching
        """,
        more="""
        train.train_text_encoder train.diff_output_preservation
        train.do_prior_divergence network.conv train.blank_prompt_preservation model.assistant_lora_path
        train.do_guidance_loss train.do_cfg train.do_random_cfg train.do_double train.train_turbo
        train.inverted_mask_prior train.short_and_long_captions train.adapter_assist_name_or_path
        train.diffusion_feature_extractor_path train.latent_feature_extractor_path
        model.refiner_name_or_path embedding decorator
        """,
        either="""
        network.network_kwargs model.model_kwargs adapter guidance slider grpo model.split_model_over_gpus
        model.ignore_if_contains model.only_if_contains model.unet_path
        """,
    ),
    time=names("train.disable_sampling train.cudnn_benchmark"),
    numbers=names("""
    train.noise_offset train.min_snr_gamma train.weight_noise train.loss_type network.dropout
    train.content_or_style
    """),
    no_effect=names("""
    type training_folder device trigger_word performance_log_every sqlite_db_path save save.* sample
    sample.* logging logging.* name job meta train.* network.* model.* datasets log_dir
    """),
    unknown="dropped",
)

TRAINERS = frozenset({"sd_trainer", "ui_trainer", "diffusion_trainer", "slider", "concept_slider", ""})
"""Types of processes that train as the keys say; others are extensions with steps of their own."""

ARCHITECTURES = {
    "auraflow": "fal/AuraFlow-v0.3",
    "chroma": "lodestones/Chroma1-HD",
    "flex1": "ostris/Flex.1-alpha",
    "flex2": "ostris/Flex.2-preview",
    "flux": "black-forest-labs/FLUX.1-dev",
    "flux_kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    "flux2": "black-forest-labs/FLUX.2-dev",
    "flux2_klein_4b": "black-forest-labs/FLUX.2-klein-base-4B",
    "flux2_klein_9b": "black-forest-labs/FLUX.2-klein-base-9B",
    "hidream": "HiDream-ai/HiDream-I1-Full",
    "lumina2": "Alpha-VLLM/Lumina-Image-2.0",
    "pixart_sigma": "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
    "qwen_image": "Qwen/Qwen-Image",
    "qwen_image_edit": "Qwen/Qwen-Image-Edit",
    "qwen_image_edit_plus": "Qwen/Qwen-Image-Edit-2509",
    "sd1": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sd2": "stabilityai/stable-diffusion-2-1",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "wan21:1b": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "wan21:14b": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "wan22_14b": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "wan22_14b_i2v": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "wan22_5b": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "zimage": "Tongyi-MAI/Z-Image-Turbo",
}
"""``model.arch`` and a model of that shape; sizes of other architectures follow from the files alone."""
SWITCHES = {
    "is_v2": "sd2", "is_v3": "sd3", "is_xl": "sdxl", "is_pixart": "pixart",
    "is_pixart_sigma": "pixart_sigma", "is_auraflow": "auraflow", "is_flux": "flux",
    "is_lumina2": "lumina2", "is_vega": "vega", "is_ssd": "ssd",
}  # fmt: skip
"""What chose the architecture before ``model.arch``, in the order of ``toolkit/config_modules.py``."""
