"""The flags of diffusers' training scripts, by what they change, and the defaults that decide a run.

Source: diffusers 0.40.0.dev0 (58eb52c0) ``examples/dreambooth``, ``examples/text_to_image``,
``examples/cogvideo``, ``examples/controlnet``.
"""

from __future__ import annotations

import re

from fsdptool.config.dialects.run_reader import RunKeys, names, sides

SCRIPT = re.compile(
    r"(?:^|\.)train_(?:dreambooth|text_to_image|controlnet|cogvideox|unconditional|instruct_pix2pix|custom|lcm"
    r"|textual|flux|sd3|sana|t2i_adapter|wuerstchen|latte|hidream|qwen|lora|control_|diffusion_dpo"
    r"|diffusion_orpo|kandinsky|pixart)\w*$"
)
"""Names of scripts of diffusers."""
KEYS = RunKeys(
    program="diffusers",
    version="0.40.0.dev0",
    defaults={
        "rank": (4, "examples/dreambooth/train_dreambooth_lora_flux.py:378"),
        "gradient_accumulation_steps": (1, "examples/dreambooth/train_dreambooth_lora_flux2.py:519"),
        "num_train_epochs": (1, "examples/dreambooth/train_dreambooth_lora_flux.py"),
        "train_batch_size": (4, "examples/dreambooth/train_dreambooth_lora_flux.py"),
        "gradient_checkpointing": (False, "examples/dreambooth/train_dreambooth_lora_flux.py:485"),
        "resolution": (512, "examples/dreambooth/train_dreambooth_lora_flux.py"),
        "optimizer": ("AdamW", "examples/dreambooth/train_dreambooth_lora_flux.py"),
    },
    memory=sides(
        less="""
        do_fp8_training remote_text_encoder cache_latents offload enable_slicing enable_tiling lora_blocks
        fsdp_text_encoder only_target_transformer_blocks low_vram enable_text_encoder_in_dataloader
        lora_skip_name
        """,
        more="""
        train_text_encoder with_prior_preservation train_text_encoder_ti enable_t5_ti
        controlnet_model_name_or_path use_dora cond_image_column train_norm_layers use_lora_bias
        """,
        either="""
        enable_xformers_memory_efficient_attention lora_layers aspect_ratio_buckets
        use_aspect_ratio_buckets bnb_quantization_config_path upcast_before_saving transformer_config
        max_sequence_length num_double_layers num_single_layers unet_config
        """,
    ),
    time=names("allow_tf32 dataloader_num_workers torch_compile multi_stream"),
    numbers=names("""
    snr_gamma noise_offset weighting_scheme logit_mean logit_std mode_scale guidance_scale
    proportion_empty_prompts noise_scheduler input_perturbation conditioning_dropout_prob caption_dropout
    train_text_encoder_ti_frac train_transformer_frac loss_type huber_c w_min w_max beta_dpo
    uniform_sampling snr_loss noise_share_in_frames* motion_sub_loss*
    """),
    no_effect=names("""
    instance_data_dir instance_data_root instance_prompt class_data_dir class_prompt
    num_class_images train_data_dir dataset_name dataset_config_name cache_dir image_column
    caption_column video_column output_dir seed center_crop random_flip learning_rate
    text_encoder_lr scale_lr lr_* adam_* prodigy_* max_grad_norm push_to_hub hub_* logging_dir
    report_to local_rank validation_* num_validation_* checkpointing_steps checkpoints_total_limit
    resume_from_checkpoint revision variant repeats id_token sample_batch_size prior_loss_weight
    max_train_samples fps skip_frames_* image_interpolation_mode tracker_* lora_alpha
    conditioning_image_column set_grads_to_none prior_reflow_data_root skip_final_inference
    final_validation_prompt tracker_project_name non_ema_revision prediction_type
    pretrained_vae_model_name_or_path vae_model_name_or_path foreach_ema dataset_file
    prior_generation_precision learnable_property placeholder_token initializer_token token_abstraction
    num_new_tokens_per_abstraction train_shards_path_or_url jsonl_for_train gaussian_init_lora
    original_image_column edited_image_column edit_prompt_column
    initial_learning_rate num_inference_steps system_prompt
    train_data_meta config_path transformer_path vae_path vae_mini_batch enable_bucket random_hw_adapt
    random_ratio_crop video_sample_stride video_repeat save_state report_model_info tokenizer_max_length
    abnormal_norm_clip_start initial_grad_norm_ratio network_alpha use_peft_lora use_deepspeed use_fsdp
    train_sampling_steps auto_tile_batch_size keep_all_node_same_token_length boundary_type
    token_sample_size image_sample_size
    """),
    unknown="script",
)

_FLUX = (
    "attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0", "attn.add_k_proj", "attn.add_q_proj",
    "attn.add_v_proj", "attn.to_add_out", "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj",
    "ff_context.net.2",
)  # fmt: skip
_FLUX2 = ("to_k", "to_q", "to_v", "to_out.0", "to_qkv_mlp_proj")
TARGETS = {
    "flux2_klein": (*_FLUX2, "attn.to_out of 24 single blocks"),
    "flux2": (*_FLUX2, "attn.to_out of 48 single blocks"),
    "kontext": (*_FLUX, "proj_mlp"),
    "control_lora_flux": ("x_embedder", *_FLUX),
    "flux": _FLUX,
    "hidream": ("to_k", "to_q", "to_v", "to_out"),
    "lcm_distill": (
        "to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.0.proj", "ff.net.2", "conv1",
        "conv2", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv", "time_emb_proj",
    ),
    "krea2": (
        "img_in", "final_layer.linear", "to_q", "to_k", "to_v", "to_out.0", "to_gate", "ff.up", "ff.down",
        "text_fusion.projector", "txt_in.linear_1", "txt_in.linear_2", "time_embed.linear_1",
        "time_embed.linear_2", "time_mod_proj",
    ),
    "sd3": (
        "attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out", "attn.to_k",
        "attn.to_out.0", "attn.to_q", "attn.to_v",
    ),
    "sana": ("to_k", "to_q", "to_v"),
    "": ("to_k", "to_q", "to_v", "to_out.0"),
}  # fmt: skip
"""Part of a script's name, and the modules that it adapts; the first that fits counts."""
EPOCHS = {
    "cogvideox": 1, "text_to_image": 100, "controlnet": 1, "instruct_pix2pix": 100, "lcm_distill": 100,
    "unconditional": 100,
}  # fmt: skip
_COGVIDEO = "examples/cogvideo/train_cogvideox_lora.py"
CLIP = {"height": (480, _COGVIDEO), "width": (720, _COGVIDEO), "max_num_frames": (49, _COGVIDEO)}
"""Sizes of a clip that CogVideoX is trained on, where the command names none."""
BESIDE = (
    "controlnet",
    "t2i_adapter",
    "ip_adapter",
    "textual_inversion",
    "custom_diffusion",
    "lcm_distill_sd",
)
"""Parts of the names of scripts that train something beside the model, and keep that frozen."""
SIDES = {
    **dict.fromkeys(("text_to_image_lora_sdxl", "text_to_image_sdxl", "dreambooth_lora_sdxl"), 1024),
    **dict.fromkeys(("lcm_distill_sdxl", "lcm_distill_lora_sdxl"), 1024),
    **dict.fromkeys(("control_lora_flux", "control_flux", "control_lora_cogview4", "control_cogview4"), 1024),
    "instruct_pix2pix": 256,
    "unconditional": 64,
}
"""Part of a script's name, and its default resolution where that is not 512."""
BATCHES = {"text_to_image": 16, "instruct_pix2pix": 16, "lcm_distill": 16, "unconditional": 16}
"""Part of a script's name, and its default where that differs."""
RANKS = {"lcm_distill": 64}
"""Part of a script's name, and its default rank where that is not 4."""
MODELS = {
    "kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    "flux2_klein": None,
    "flux2": "black-forest-labs/FLUX.2-dev",
    "flux": "black-forest-labs/FLUX.1-dev",
    "hidream": "HiDream-ai/HiDream-I1-Full",
    "lumina2": "Alpha-VLLM/Lumina-Image-2.0",
    "qwen_image": "Qwen/Qwen-Image",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "z_image": "Tongyi-MAI/Z-Image-Turbo",
}
"""Part of a script's name, and a model of the only shape that it trains; the first that fits counts."""
