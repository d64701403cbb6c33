"""Real diffusers pipelines with tiny random components: each function describes one of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tiny_parts import (
    CAUSAL_VAE,
    HEADS,
    UNET,
    UNET_XL,
    WAN,
    chat_tokenizer,
    clip,
    decoder,
    decoder_sizes,
    flow,
    image_vae,
    t5,
    texts,
)

PIPELINES: dict[str, Callable[[], Any]] = {}
VIDEO = {"cogvideox", "hunyuanvideo", "ltx", "mochi", "wan", "wan-i2v"}


def described(make: Callable[[], Any]) -> Callable[[], Any]:
    """Enter a pipeline under the name of its function."""
    PIPELINES[make.__name__.replace("_", "-")] = make
    return make


def write(name: str, folder: Path) -> Path:
    """Write a pipeline to a folder; its weights are the same every time."""
    torch.manual_seed(0)
    PIPELINES[name]().save_pretrained(str(folder))
    return folder


@described
def flux() -> Any:
    return diffusers.FluxPipeline(
        scheduler=flow(),
        vae=image_vae(0.5, shift=0.1),
        **texts(clip(), t5()),
        transformer=diffusers.FluxTransformer2DModel(
            **HEADS,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 4, 8),
        ),
    )


@described
def flux2() -> Any:
    config = transformers.Mistral3Config(
        # States of layers 10, 20 and 30 are joined.
        text_config={"model_type": "mistral", **decoder_sizes(layers=30, width=8), "head_dim": 4},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 16,
            "patch_size": 4,
        },
        image_token_index=3,
    )
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(4, 4, 4, 4), latent_channels=4, norm_num_groups=4, layers_per_block=1
    )
    vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, 16))
    return diffusers.Flux2Pipeline(
        scheduler=flow(),
        vae=vae,
        **texts((transformers.Mistral3ForConditionalGeneration(config), chat_tokenizer(side="left"))),
        transformer=diffusers.Flux2Transformer2DModel(
            **HEADS,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=24,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
        ),
    )


@described
def chroma() -> Any:
    return diffusers.ChromaPipeline(
        scheduler=flow(),
        vae=image_vae(0.5, shift=0.1),
        **texts(t5()),
        transformer=diffusers.ChromaTransformer2DModel(
            **HEADS,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=16,
            axes_dims_rope=(4, 4, 8),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
    )


@described
def sd3() -> Any:
    return diffusers.StableDiffusion3Pipeline(
        scheduler=flow(),
        vae=image_vae(1.5, shift=0.1),
        **texts(clip(projection=True), clip(projection=True), t5(width=32)),
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            caption_projection_dim=16,
            pooled_projection_dim=32,
        ),
    )


@described
def sd15() -> Any:
    unet = {**UNET, "attention_head_dim": 8, "cross_attention_dim": 16}
    parts: dict[str, Any] = {"safety_checker": None, "feature_extractor": None}
    return diffusers.StableDiffusionPipeline(
        scheduler=diffusers.DDIMScheduler(),
        vae=image_vae(0.18),
        **texts(clip()),
        unet=diffusers.UNet2DConditionModel(**unet),
        requires_safety_checker=False,
        **parts,
    )


@described
def sdxl() -> Any:
    return diffusers.StableDiffusionXLPipeline(
        scheduler=diffusers.EulerDiscreteScheduler(),
        vae=image_vae(0.13),
        **texts(clip(), clip(projection=True)),
        unet=diffusers.UNet2DConditionModel(**UNET_XL, cross_attention_dim=32),
    )


@described
def kolors() -> Any:
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer
    from sentencepiece import SentencePieceTrainer

    folder = tempfile.TemporaryDirectory()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["a red cat", "a red dog", "the blue sky", "a small mat"] * 5),
        model_prefix=f"{folder.name}/words",
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=9,
    )
    tokenizer = ChatGLMTokenizer(f"{folder.name}/words.model")
    tokenizer.folder = folder  # copied when it is saved
    encoder = ChatGLMModel(
        ChatGLMConfig(
            num_layers=2,
            padded_vocab_size=64,
            hidden_size=16,
            ffn_hidden_size=16,
            kv_channels=8,
            num_attention_heads=2,
            seq_length=64,
            add_qkv_bias=True,
            multi_query_attention=True,
            multi_query_group_num=1,
            original_rope=True,
        )
    )
    for parameter in encoder.parameters():  # made without values
        torch.nn.init.normal_(parameter, std=0.2)
    condition = {"encoder_hid_dim": 16, "encoder_hid_dim_type": "text_proj", "cross_attention_dim": 16}
    return diffusers.KolorsPipeline(
        scheduler=diffusers.EulerDiscreteScheduler(),
        vae=image_vae(0.13),
        **texts((encoder, tokenizer)),
        unet=diffusers.UNet2DConditionModel(**UNET_XL, **condition),
    )


@described
def pixart() -> Any:
    return diffusers.PixArtSigmaPipeline(
        scheduler=diffusers.DPMSolverMultistepScheduler(),
        vae=image_vae(0.13),
        **texts(t5()),
        transformer=diffusers.PixArtTransformer2DModel(
            sample_size=8,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_channels=16,
            in_channels=4,
            cross_attention_dim=16,
            out_channels=8,
            use_additional_conditions=False,
        ),
    )


@described
def auraflow() -> Any:
    return diffusers.AuraFlowPipeline(
        scheduler=flow(),
        vae=image_vae(0.13),
        **texts(t5(umt5=True)),
        transformer=diffusers.AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=64,
        ),
    )


@described
def qwenimage() -> Any:
    rope = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2]}
    text = {**decoder_sizes(), "rope_scaling": rope}
    del text["head_dim"]
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    vae = diffusers.AutoencoderKLQwenImage(
        **CAUSAL_VAE,
        z_dim=4,
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[0.5, 1.5, 2.0, 1.0],
    )
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(config)
    return diffusers.QwenImagePipeline(
        scheduler=flow(),
        vae=vae,
        **texts((encoder, chat_tokenizer(length=2048))),
        transformer=diffusers.QwenImageTransformer2DModel(
            **HEADS,
            in_channels=16,
            out_channels=4,
            num_layers=1,
            joint_attention_dim=16,
            axes_dims_rope=(4, 4, 8),
        ),
    )


@described
def zimage() -> Any:
    return diffusers.ZImagePipeline(
        scheduler=flow(),
        vae=image_vae(0.5, shift=0.1),
        **texts(decoder("Qwen3")),
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        ),
    )


@described
def lumina2() -> Any:
    return diffusers.Lumina2Pipeline(
        scheduler=flow(),
        vae=image_vae(0.5, shift=0.1),
        **texts(decoder("Gemma2")),
        transformer=diffusers.Lumina2Transformer2DModel(
            sample_size=8,
            in_channels=4,
            hidden_size=24,
            num_layers=1,
            num_refiner_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(128, 128, 128),
            cap_feat_dim=16,
        ),
    )


@described
def sana() -> Any:
    return diffusers.SanaPipeline(
        scheduler=flow(),
        vae=diffusers.AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_out_channels=(4,) * 6,
            decoder_block_out_channels=(4,) * 6,
            encoder_layers_per_block=(1,) * 6,
            decoder_layers_per_block=(1,) * 6,
            encoder_qkv_multiscales=((),) * 6,
            decoder_qkv_multiscales=((),) * 6,
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41,
        ),
        **texts(decoder("Gemma2")),
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=8,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=16,
            sample_size=32,
            patch_size=1,
        ),
    )


@described
def cogview4() -> Any:
    return diffusers.CogView4Pipeline(
        scheduler=flow(),
        vae=image_vae(0.7),
        **texts(decoder("Glm", side="left")),
        transformer=diffusers.CogView4Transformer2DModel(
            **HEADS,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            text_embed_dim=16,
            time_embed_dim=16,
            condition_dim=8,
            sample_size=8,
            rope_axes_dim=(8, 8),
        ),
    )


@described
def hidream() -> Any:
    return diffusers.HiDreamImagePipeline(
        scheduler=flow(),
        vae=image_vae(0.5, shift=0.1),
        **texts(clip(projection=True), clip(projection=True), t5(), decoder("Llama", head="ForCausalLM")),
        transformer=diffusers.HiDreamImageTransformer2DModel(
            **HEADS,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            caption_channels=[16, 16],
            text_emb_dim=32,
            axes_dims_rope=(8, 4, 4),
            max_resolution=(16, 16),
            llama_layers=[0, 1],
        ),
    )


@described
def wan() -> Any:
    return diffusers.WanPipeline(
        scheduler=flow(),
        vae=diffusers.AutoencoderKLWan(**CAUSAL_VAE, z_dim=16),
        **texts(t5(umt5=True)),
        transformer=diffusers.WanTransformer3DModel(**WAN, in_channels=16),
    )


@described
def wan_i2v() -> Any:
    seeing = transformers.CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        image_size=224,
        patch_size=14,
    )
    return diffusers.WanImageToVideoPipeline(
        scheduler=flow(),
        vae=diffusers.AutoencoderKLWan(**CAUSAL_VAE, z_dim=16),
        **texts(t5(umt5=True)),
        image_encoder=transformers.CLIPVisionModel(seeing),
        image_processor=transformers.CLIPImageProcessor(),
        transformer=diffusers.WanTransformer3DModel(**WAN, in_channels=36, image_dim=8, added_kv_proj_dim=24),
    )


@described
def cogvideox() -> Any:
    return diffusers.CogVideoXPipeline(
        scheduler=diffusers.CogVideoXDDIMScheduler(),
        vae=diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        **texts(t5()),
        transformer=diffusers.CogVideoXTransformer3DModel(
            **HEADS,
            in_channels=4,
            out_channels=4,
            time_embed_dim=4,
            text_embed_dim=16,
            num_layers=1,
            # Another grid than the one it is trained on: positions are laid over this.
            use_rotary_positional_embeddings=True,
            sample_width=12,
            sample_height=10,
            sample_frames=5,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=16,
        ),
    )


@described
def ltx() -> Any:
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, True, False),
        decoder_spatio_temporal_scaling=(True, True, True, False),
        decoder_inject_noise=(False, False, False, False, False),
        upsample_residual=(False, False, False, False),
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=False,
        patch_size=4,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
        scaling_factor=0.8,
    )
    vae.latents_mean.copy_(torch.linspace(-0.5, 0.5, 8))
    vae.latents_std.copy_(torch.linspace(0.5, 2.0, 8))
    return diffusers.LTXPipeline(
        scheduler=flow(),
        vae=vae,
        **texts(t5()),
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=1,
            caption_channels=16,
        ),
    )


@described
def mochi() -> Any:
    return diffusers.MochiPipeline(
        scheduler=flow(invert_sigmas=True, num_train_timesteps=1000),
        vae=diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            add_attention_block=(False,) * 5,
        ),
        **texts(t5()),
        transformer=diffusers.MochiTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=12,
            text_embed_dim=16,
            time_embed_dim=8,
            max_sequence_length=16,
        ),
        force_zeros_for_empty_prompt=True,
    )


@described
def hunyuanvideo() -> Any:
    return diffusers.HunyuanVideoPipeline(
        scheduler=flow(),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4,
            block_out_channels=(4, 4, 4, 4),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        **texts(decoder("Llama", layers=3), clip(positions=77)),
        transformer=diffusers.HunyuanVideoTransformer3DModel(
            **HEADS,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=16,
            pooled_projection_dim=16,
            rope_axes_dim=(4, 4, 8),
        ),
    )
