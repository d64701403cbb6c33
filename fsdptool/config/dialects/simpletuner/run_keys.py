"""The keys of SimpleTuner's files, by what they change, and the models of its families.

Source: SimpleTuner 4.8.0 (bc8e6ab7) ``simpletuner_sdk/server/services/field_registry/sections``,
``helpers/models/*/model.py``, ``helpers/configuration/cmd_args.py``.
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import RunKeys, names, sides

_SECTIONS = "simpletuner_sdk/server/services/field_registry/sections"

KEYS = RunKeys(
    program="simpletuner",
    version="4.8.0",
    defaults={
        "model_type": ("full", f"{_SECTIONS}/model.py:203"),
        "train_batch_size": (4, f"{_SECTIONS}/training.py:67"),
        "gradient_accumulation_steps": (1, f"{_SECTIONS}/training.py:167"),
        "gradient_checkpointing": (True, f"{_SECTIONS}/training.py:224"),
        "optimizer": ("adamw_bf16", f"{_SECTIONS}/training.py:114"),
        "num_train_epochs": (1, f"{_SECTIONS}/training.py:26"),
        "lora_rank": (16, f"{_SECTIONS}/lora.py:25"),
        "lora_dropout": (0.1, f"{_SECTIONS}/lora.py"),
        "flux_lora_target": ("all", f"{_SECTIONS}/lora.py"),
        "ema_device": ("cpu", f"{_SECTIONS}/training.py"),
        "lora_type": ("standard", f"{_SECTIONS}/lora.py:70"),
        "base_model_precision": ("no_change", f"{_SECTIONS}/model.py:451"),
        "base_model_default_dtype": ("bf16", f"{_SECTIONS}/model.py:1242"),
        "mixed_precision": ("bf16", f"{_SECTIONS}/advanced.py:689"),
        "attention_mechanism": ("diffusers", f"{_SECTIONS}/advanced.py:743"),
        "dynamo_backend": ("no", f"{_SECTIONS}/advanced.py:2039"),
        "num_processes": (1, f"{_SECTIONS}/advanced.py:1909"),
        "fsdp_enable": (False, f"{_SECTIONS}/advanced.py:1667"),
        "fsdp_version": (2, f"{_SECTIONS}/advanced.py:1684"),
        "resolution": (1024, f"{_SECTIONS}/data.py:26"),
        "resolution_type": ("pixel_area", f"{_SECTIONS}/data.py:49"),
    },
    memory=sides(
        less="""
        ramtorch ramtorch_text_encoder enable_group_offload group_offload musubi_blocks_to_swap
        layer_freeze_strategy optimizer_cpu_offload_method optimizer_release_gradients
        optimizer_offload_gradients enable_model_cpu_offload enable_chunked_feed_forward tread_config
        gradient_checkpointing_offload_attention
        """,
        more="""
        controlnet control use_dora prior_preservation train_text_encoder gradient_checkpointing_interval
        gradient_checkpointing_segment_stride offload_during_startup_disabled lycoris_config
        """,
        either="""
        optimizer_config gradient_precision distillation_method unet_attention_slice
        fuse_qkv_projections fuse_optimizer vae_cache_ondemand gradient_checkpointing_backend
        slider_lora_target tokenizer_max_length ltx2_reference_* refiner_training
        """,
    ),
    time=names("""
    dynamo_mode dynamo_fullgraph dynamo_dynamic dynamo_use_regional_compilation ramtorch_disable_*
    dataloader_prefetch dataloader_prefetch_qlen allow_tf32 disable_tf32
    """),
    numbers=names("""
    flow_* noise_offset* offset_noise snr_gamma min_snr_gamma use_soft_min_snr soft_min_snr_* huber_*
    input_perturbation* loss_type caption_dropout_probability weight_noise masked_loss_probability
    rescale_betas_zero_snr prediction_type
    """),
    no_effect=names("""
    lora_rank lora_dropout lora_init_type peft_lora_target_modules base_model_default_dtype num_processes
    fsdp_version fsdp_transformer_layer_cls_to_wrap
    lora_type ignore_final_epochs quantize_activations text_encoder_1_precision
    text_encoder_2_precision text_encoder_3_precision text_encoder_4_precision
    prodigy_steps
    hidream_* conditioning_* pretrained_t5_model_name_or_path controlnet_custom_config
    strict_epoch_limit resume_from_checkpoint aspect_bucket_* seed minimum_image_size
    maximum_image_size disable_benchmark output_dir checkpoint* training_scheduler_* timestep_*
    learning_rate lr_* max_grad_norm evaluation_type pretrained_evaluation_*
    freeze_encoder_strategy validation_*
    num_validation_images num_eval_images eval_* hub_* push_* report_to tracker_* logging_dir vae_*
    write_batch_size read_batch_size text_embed_* image_processing_batch_size compress_disk_cache
    skip_file_discovery cache_* inference_scheduler_* instance_prompt user_prompt_library
    quantize_via disable_bucket_pruning grad_clip_method model_card_* ramtorch_* group_offload_*
    delete_* noise_scheduler i_know_what_i_am_doing metadata_update_interval max_workers aws_*
    torch_num_threads print_filenames print_sampler_statistics override_dataset_config ema_*
    keep_vae_loaded webhook_config flux_* init_lora preserve_data_backend_cache accelerate_*
    lora_alpha lr_end adam_* optimizer_beta* optimizer_weight_decay snr_weight max_train_samples
    local_rank set_grads_to_none offload_during_startup data_backend_sampling num_machines
    main_process_* same_network repa_* disable_accelerator default_negative_prompt
    model_flavour_description peft_lora_mode
    trust_remote_code allow_dataset_oversubscription text_cache_* text_encoder_* context_parallel_*
    cosmos3_* ltx_* ltx2_* sana_* sd3_* sdxl_* pixart_* wan_* deepfloyd_* refiner_* t5_padding
    lora_format offload_during_save offload_param_path seed_for_each_device enable_watermark framerate
    pretrained_vae_* pretrained_unet_* pretrained_transformer_subfolder revision variant
    accelerator_cache_clear_interval ignore_missing_files caption_strategy parquet_* init_lokr_norm
    singlora_* sageattention_usage sla_config fully_unload_text_encoder save_text_encoder
    freeze_encoder_* prepend_instance_prompt only_instance_prompt data_aesthetic_score
    disable_segmented_timestep_sampling enable_multiprocessing target_downsample_size
    max_upscale_threshold debug_* distillation_config post_* publishing_config sdnq_*
    quantization_config feed_forward_chunk_size gradient_checkpointing_offload_prefetch
    enable_xformers_memory_efficient_attention webhook_*
    """),
    unknown="refused",
)

MODELS: dict[str, dict[str, str]] = {
    "ace_step": {
        "base": "ACE-Step/ACE-Step-v1-3.5B",
        "v15-base": "ACE-Step/Ace-Step1.5",
        "v15-sft": "ACE-Step/Ace-Step1.5",
        "v15-turbo": "ACE-Step/Ace-Step1.5",
    },
    "auraflow": {
        "v0.3": "fal/AuraFlow-v0.3",
        "v0.2": "fal/AuraFlow-v0.2",
        "v0.1": "fal/AuraFlow",
        "pony": "purplesmartai/pony-v7-base",
    },
    "chroma": {
        "base": "lodestones/Chroma1-Base",
        "hd": "lodestones/Chroma1-HD",
        "flash": "lodestones/Chroma1-Flash",
    },
    "cosmos2image": {
        "2b": "nvidia/Cosmos-Predict2-2B-Text2Image",
        "14b": "nvidia/Cosmos-Predict2-14B-Text2Image",
    },
    "cosmos3": {
        "edge": "nvidia/Cosmos3-Edge",
        "nano": "nvidia/Cosmos3-Nano",
        "super": "nvidia/Cosmos3-Super",
        "super-i2v": "nvidia/Cosmos3-Super-Image2Video",
        "super-t2i": "nvidia/Cosmos3-Super-Text2Image",
    },
    "deepfloyd": {
        "i-medium-400m": "DeepFloyd/IF-I-M-v1.0",
        "i-large-900m": "DeepFloyd/IF-I-L-v1.0",
        "i-xlarge-4.3b": "DeepFloyd/IF-I-XL-v1.0",
    },
    "flux": {
        "dev": "black-forest-labs/FLUX.1-dev",
        "krea": "black-forest-labs/FLUX.1-Krea-dev",
        "schnell": "black-forest-labs/FLUX.1-schnell",
        "kontext": "black-forest-labs/FLUX.1-Kontext-dev",
        "fluxbooru": "terminusresearch/fluxbooru-v0.3",
        "libreflux": "jimmycarter/LibreFlux-SimpleTuner",
    },
    "flux2": {
        "dev": "black-forest-labs/FLUX.2-dev",
        "klein-4b": "black-forest-labs/FLUX.2-klein-base-4B",
        "klein-9b": "black-forest-labs/FLUX.2-klein-base-9B",
    },
    "hidream": {
        "full": "HiDream-ai/HiDream-I1-Full",
        "dev": "HiDream-ai/HiDream-I1-Dev",
        "fast": "HiDream-ai/HiDream-I1-Fast",
    },
    "hunyuanvideo": {
        "t2v-480p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        "t2v-720p": "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
    },
    "kandinsky5-image": {
        "t2i-lite-sft": "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers",
        "t2i-lite-pretrain": "kandinskylab/Kandinsky-5.0-T2I-Lite-pretrain-Diffusers",
        "i2i-lite-sft": "kandinskylab/Kandinsky-5.0-I2I-Lite-sft-Diffusers",
        "i2i-lite-pretrain": "kandinskylab/Kandinsky-5.0-I2I-Lite-pretrain-Diffusers",
    },
    "kandinsky5-video": {
        "t2v-lite-sft-5s": "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
        "t2v-lite-pretrain-5s": "kandinskylab/Kandinsky-5.0-T2V-Lite-pretrain-5s-Diffusers",
        "t2v-lite-sft-10s": "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-10s-Diffusers",
        "t2v-lite-pretrain-10s": "kandinskylab/Kandinsky-5.0-T2V-Lite-pretrain-10s-Diffusers",
        "t2v-pro-sft-5s-hd": "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-5s-Diffusers",
        "t2v-pro-sft-10s-hd": "kandinskylab/Kandinsky-5.0-T2V-Pro-sft-10s-Diffusers",
        "i2v-lite-5s": "kandinskylab/Kandinsky-5.0-I2V-Lite-5s-Diffusers",
        "i2v-pro-sft-5s": "kandinskylab/Kandinsky-5.0-I2V-Pro-sft-5s-Diffusers",
    },
    "kolors": {
        "1.0": "Kwai-Kolors/Kolors-diffusers",
    },
    "krea2": {
        "raw": "krea/Krea-2-Raw",
        "turbo": "krea/Krea-2-Turbo",
    },
    "ltxvideo": {
        "0.9.5": "Lightricks/LTX-Video-0.9.5",
        "0.9.0": "Lightricks/LTX-Video",
    },
    "ltxvideo2": {
        "dev": "Lightricks/LTX-2",
        "2.3-dev": "diffusers/LTX-2.3-Diffusers",
        "2.5-dev": "Lightricks/LTX-2.5-Diffusers",
    },
    "lumina2": {
        "2.0": "Alpha-VLLM/Lumina-Image-2.0",
        "neta-lumina": "terminusresearch/neta-lumina-v1",
    },
    "omnigen": {
        "v1": "Shitao/OmniGen-v1-diffusers",
    },
    "pixart_sigma": {
        "600m-1024": "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
        "600m-512": "PixArt-alpha/PixArt-Sigma-XL-2-512-MS",
        "600m-2048": "PixArt-alpha/PixArt-Sigma-XL-2-2K-MS",
        "900m-1024-v0.6": "terminusresearch/pixart-900m-1024-ft-v0.6",
        "900m-1024-v0.7-stage1": "terminusresearch/pixart-900m-1024-ft-v0.7-stage1",
        "900m-1024-v0.7-stage2": "terminusresearch/pixart-900m-1024-ft-v0.7-stage2",
    },
    "qwen_image": {
        "v1.0": "Qwen/Qwen-Image",
        "edit-v1": "Qwen/Qwen-Image-Edit",
        "v2.0": "Qwen/Qwen-Image-2512",
        "v2.1": "Qwen/Qwen-Image-2.1",
        "edit-v2": "Qwen/Qwen-Image-Edit-2509",
        "edit-v2+": "Qwen/Qwen-Image-Edit-2509",
        "edit-v3": "Qwen/Qwen-Image-Edit-2511",
    },
    "sana": {
        "sana1.0-1.6b-1024": "Efficient-Large-Model/Sana_1600M_1024px_diffusers",
        "sana1.0-600m-1024": "Efficient-Large-Model/Sana_600M_1024px_diffusers",
        "sana1.5-1.6b-1024": "Efficient-Large-Model/SANA1.5_1.6B_1024px_diffusers",
        "sana1.5-4.8b-1024": "Efficient-Large-Model/SANA1.5_4.8B_1024px_diffusers",
        "sana1.0-1.6b-2048": "Efficient-Large-Model/Sana_1600M_2Kpx_BF16_diffusers",
        "sana1.0-600m-512": "Efficient-Large-Model/Sana_600M_512px_diffusers",
    },
    "sanavideo": {
        "2b-480p": "Efficient-Large-Model/SANA-Video_2B_480p_diffusers",
    },
    "sd1x": {
        "1.5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "1.4": "CompVis/stable-diffusion-v1-4",
        "dreamshaper": "Lykon/dreamshaper-8",
    },
    "sd2x": {
        "2.1": "stabilityai/stable-diffusion-2-1",
    },
    "sd3": {
        "medium": "stabilityai/stable-diffusion-3.5-medium",
        "large": "stabilityai/stable-diffusion-3.5-large",
    },
    "sdxl": {
        "base-1.0": "stabilityai/stable-diffusion-xl-base-1.0",
        "base-0.9": "stabilityai/stable-diffusion-xl-base-0.9",
        "refiner-1.0": "stabilityai/stable-diffusion-xl-refiner-1.0",
    },
    "stable_cascade": {
        "stage-c": "stabilityai/stable-cascade-prior",
    },
    "wan": {
        "t2v-480p-1.3b-2.1": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "t2v-480p-14b-2.1": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "i2v-14b-2.1": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        "i2v-14b-2.2-high": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        "i2v-14b-2.2-low": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        "vace-1.3b-2.1": "Wan-AI/Wan2.1-VACE-1.3B-diffusers",
        "ti2v-5b-2.2": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        "i2v-14b-2.1-720p": "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
        "i2v-720p-14b-2.1": "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
        "vace-14b-2.1": "Wan-AI/Wan2.1-VACE-14B-diffusers",
    },
    "z_image": {
        "turbo": "Tongyi-MAI/Z-Image-Turbo",
    },
}
"""Hub ids by family and flavour."""
DEFAULT_FLAVOURS = {
    "ace_step": "base",
    "auraflow": "v0.3",
    "chroma": "base",
    "cosmos2image": "2b",
    "flux": "krea",
    "flux2": "dev",
    "hidream": "full",
    "hunyuanvideo": "t2v-480p",
    "kandinsky5-image": "t2i-lite-sft",
    "kandinsky5-video": "t2v-lite-sft-5s",
    "kolors": "1.0",
    "ltxvideo": "0.9.5",
    "ltxvideo2": "dev",
    "lumina2": "2.0",
    "omnigen": "v1",
    "pixart_sigma": "900m-1024-v0.6",
    "qwen_image": "v1.0",
    "sana": "sana1.5-4.8b-1024",
    "sanavideo": "2b-480p",
    "stable_cascade": "stage-c",
    "sd1x": "dreamshaper",
    "sd3": "medium",
    "sdxl": "base-1.0",
    "wan": "t2v-480p-1.3b-2.1",
    "z_image": "turbo",
}
"""Flavours of families, where none is named."""
ONE_SIZE = frozenset(
    {"auraflow", "chroma", "flux", "hidream", "kolors", "lumina2", "omnigen", "qwen_image", "sdxl", "z_image"}
)
"""Families whose flavours differ in their weights alone, so that the family says the size."""

ENVIRONMENT = {
    "MODEL_TYPE": "model_type", "MODEL_NAME": "pretrained_model_name_or_path",
    "MAX_NUM_STEPS": "max_train_steps",
    "NUM_EPOCHS": "num_train_epochs", "DATALOADER_CONFIG": "data_backend_config", "RESOLUTION": "resolution",
    "RESOLUTION_TYPE": "resolution_type", "TRAIN_BATCH_SIZE": "train_batch_size",
    "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps", "OPTIMIZER": "optimizer",
    "USE_GRADIENT_CHECKPOINTING": "gradient_checkpointing", "USE_EMA": "use_ema",
    "MIXED_PRECISION": "mixed_precision", "TRAINING_NUM_PROCESSES": "num_processes",
    "TRAINING_DYNAMO_BACKEND": "dynamo_backend", "USE_DORA": "use_dora", "CONTROLNET": "controlnet",
    "FLUX_LORA_TARGET": "flux_lora_target", "USE_BITFIT": "layer_freeze_strategy",
    "USE_XFORMERS": "enable_xformers_memory_efficient_attention",
    "RESUME_CHECKPOINT": "resume_from_checkpoint", "MINIMUM_RESOLUTION": "minimum_image_size",
    "TRAINING_SEED": "seed", "TRAINING_NUM_MACHINES": "num_machines",
}  # fmt: skip
"""Variables of the shell files before version 2.0, and the flags that they became."""
SWITCHES = {
    "FLUX": "flux", "STABLE_DIFFUSION_3": "sd3", "PIXART_SIGMA": "pixart_sigma", "KOLORS": "kolors",
    "STABLE_DIFFUSION_LEGACY": "sd1x", "AURA_FLOW": "auraflow", "LTXVIDEO": "ltxvideo", "SANA": "sana",
}  # fmt: skip
"""Variables that chose the family; without one it is SDXL."""

_IMAGE, _TEXT = ("to_k", "to_q", "to_v", "to_out.0"), ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
_MLP, _TEXT_MLP = ("ff.net.0.proj", "ff.net.2"), ("ff_context.net.0.proj", "ff_context.net.2")
_SINGLE = ("proj_mlp", "proj_out")
_ALL = (*_IMAGE, *_TEXT)
LORA_TARGETS = {
    "auraflow": _ALL,
    "flux2": ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj"),
    "hunyuanvideo": _ALL,
    "kandinsky5-image": ("to_key", "to_query", "to_value"),
    "kandinsky5-video": ("to_key", "to_query", "to_value"),
    "mageflow": _ALL,
}
"""Layers with adapters, where they are not those of :data:`PLAIN_TARGETS`.

Source: 4.10.1 ``helpers/models/*/model.py``: DEFAULT_LORA_TARGET, without names of fused projections.
"""
PLAIN_TARGETS = _IMAGE
FLUX_TARGETS = {
    "all": _ALL,
    "context": _TEXT,
    "context+ffs": (*_TEXT, *_TEXT_MLP),
    "all+ffs": (*_ALL, *_MLP, *_TEXT_MLP, *_SINGLE),
    "all+ffs+embedder": ("x_embedder", *_ALL, *_MLP, *_TEXT_MLP, *_SINGLE),
    "ai-toolkit": (*_ALL, *_MLP, *_TEXT_MLP, "norm.linear", "norm1.linear", "norm1_context.linear", *_SINGLE),
    "tiny": ("single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"),
    "nano": ("single_transformer_blocks.7.proj_out",),
}
"""Layers of ``flux_lora_target``; other words mean the plain ones.

Source: ``helpers/models/flux/model.py``: get_lora_target_layers.
"""
