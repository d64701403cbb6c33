"""Further tiny pipelines: those whose captions pass through a language model, and image to video."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_pipelines import clip, clip_tokenizer, image_vae, t5, t5_tokenizer, tokenizer

CHAT = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }} "
    "{% else %}{% for part in message['content'] %}{{ part['text'] }} {% endfor %}{% endif %}{% endfor %}"
)


def chat_tokenizer(*, side: str = "right", length: int = 512) -> Any:
    made = tokenizer(length, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"})
    made.padding_side = side
    made.chat_template = CHAT
    return made


def sizes(*, layers: int = 2, width: int = 16) -> dict[str, Any]:
    """Of a decoder that encodes captions."""
    return {
        "vocab_size": 32,
        "hidden_size": width,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "pad_token_id": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def flow(**options: Any) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(**options)


def flux2(folder: Path) -> Path:
    from diffusers import AutoencoderKLFlux2, Flux2Pipeline, Flux2Transformer2DModel
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    torch.manual_seed(0)
    config = Mistral3Config(
        # States of layers 10, 20 and 30 are joined.
        text_config={"model_type": "mistral", **sizes(layers=30, width=8), "head_dim": 4},
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
    vae = AutoencoderKLFlux2(
        block_out_channels=(4, 4, 4, 4), latent_channels=4, norm_num_groups=4, layers_per_block=1
    )
    vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, 16))
    Flux2Pipeline(
        scheduler=flow(),
        vae=vae,
        text_encoder=Mistral3ForConditionalGeneration(config),
        tokenizer=chat_tokenizer(side="left"),
        transformer=Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
        ),
    ).save_pretrained(str(folder))
    return folder


def qwenimage(folder: Path) -> Path:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    text = {
        **sizes(),
        "rope_scaling": {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2]},
    }
    del text["head_dim"]
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    vae = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[0.5, 1.5, 2.0, 1.0],
    )
    QwenImagePipeline(
        scheduler=flow(),
        vae=vae,
        text_encoder=Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        ),
        tokenizer=chat_tokenizer(length=2048),
        transformer=QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 4, 8),
        ),
    ).save_pretrained(str(folder))
    return folder


def zimage(folder: Path) -> Path:
    from diffusers import ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    ZImagePipeline(
        scheduler=flow(),
        vae=image_vae(4, shift=0.1, scale=0.5),
        text_encoder=Qwen3Model(Qwen3Config(**sizes())),
        tokenizer=chat_tokenizer(),
        transformer=ZImageTransformer2DModel(
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
    ).save_pretrained(str(folder))
    return folder


def lumina2(folder: Path) -> Path:
    from diffusers import Lumina2Pipeline, Lumina2Transformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    Lumina2Pipeline(
        scheduler=flow(),
        vae=image_vae(4, shift=0.1, scale=0.5),
        text_encoder=Gemma2Model(Gemma2Config(**sizes())),
        tokenizer=chat_tokenizer(),
        transformer=Lumina2Transformer2DModel(
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
    ).save_pretrained(str(folder))
    return folder


def sana(folder: Path) -> Path:
    from diffusers import AutoencoderDC, SanaPipeline, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    SanaPipeline(
        scheduler=flow(),
        vae=AutoencoderDC(
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
        text_encoder=Gemma2Model(Gemma2Config(**sizes())),
        tokenizer=chat_tokenizer(),
        transformer=SanaTransformer2DModel(
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
    ).save_pretrained(str(folder))
    return folder


def cogview4(folder: Path) -> Path:
    from diffusers import CogView4Pipeline, CogView4Transformer2DModel
    from transformers import GlmConfig, GlmModel

    torch.manual_seed(0)
    CogView4Pipeline(
        scheduler=flow(),
        vae=image_vae(4, shift=None, scale=0.7),
        text_encoder=GlmModel(GlmConfig(**sizes())),
        tokenizer=chat_tokenizer(side="left"),
        transformer=CogView4Transformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=16,
            time_embed_dim=16,
            condition_dim=8,
            sample_size=8,
            rope_axes_dim=(8, 8),
        ),
    ).save_pretrained(str(folder))
    return folder


def hidream(folder: Path) -> Path:
    from diffusers import HiDreamImagePipeline, HiDreamImageTransformer2DModel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    HiDreamImagePipeline(
        scheduler=flow(),
        vae=image_vae(4, shift=0.1, scale=0.5),
        text_encoder=clip(projection=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(projection=True),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5(),
        tokenizer_3=t5_tokenizer(),
        text_encoder_4=LlamaForCausalLM(LlamaConfig(**sizes())),
        tokenizer_4=chat_tokenizer(),
        transformer=HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_channels=[16, 16],
            text_emb_dim=32,
            axes_dims_rope=(8, 4, 4),
            max_resolution=(16, 16),
            llama_layers=[0, 1],
        ),
    ).save_pretrained(str(folder))
    return folder


def kolors(folder: Path) -> Path:
    from diffusers import EulerDiscreteScheduler, KolorsPipeline, UNet2DConditionModel
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer
    from sentencepiece import SentencePieceTrainer

    torch.manual_seed(0)
    folder.mkdir(parents=True)
    words = folder.parent / "kolors-words"
    SentencePieceTrainer.train(
        sentence_iterator=iter(["a red cat", "a red dog", "the blue sky", "a small mat"] * 5),
        model_prefix=str(words),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=9,
    )
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
    KolorsPipeline(
        scheduler=EulerDiscreteScheduler(),
        vae=image_vae(4, shift=None, scale=0.13),
        text_encoder=encoder,
        tokenizer=ChatGLMTokenizer(str(words.with_suffix(".model"))),
        unet=UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4),
            norm_num_groups=8,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=(1, 1),
            projection_class_embeddings_input_dim=64,
            encoder_hid_dim=16,
            encoder_hid_dim_type="text_proj",
            cross_attention_dim=16,
        ),
    ).save_pretrained(str(folder))
    return folder


def mochi(folder: Path) -> Path:
    from diffusers import AutoencoderKLMochi, MochiPipeline, MochiTransformer3DModel

    torch.manual_seed(0)
    MochiPipeline(
        scheduler=flow(invert_sigmas=True, num_train_timesteps=1000),
        vae=AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            add_attention_block=(False,) * 5,
        ),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        transformer=MochiTransformer3DModel(
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
    ).save_pretrained(str(folder))
    return folder


def hunyuanvideo(folder: Path) -> Path:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    HunyuanVideoPipeline(
        scheduler=flow(),
        vae=AutoencoderKLHunyuanVideo(
            latent_channels=4,
            block_out_channels=(4, 4, 4, 4),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        text_encoder=LlamaModel(LlamaConfig(**sizes(layers=3))),
        tokenizer=chat_tokenizer(),
        text_encoder_2=clip(projection=False, positions=77),
        tokenizer_2=clip_tokenizer(),
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=16,
            pooled_projection_dim=16,
            rope_axes_dim=(4, 4, 8),
        ),
    ).save_pretrained(str(folder))
    return folder


def wan_i2v(folder: Path) -> Path:
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanTransformer3DModel
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    seeing = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        image_size=224,
        patch_size=14,
    )
    WanImageToVideoPipeline(
        scheduler=flow(),
        vae=AutoencoderKLWan(
            base_dim=4,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ),
        text_encoder=t5(umt5=True),
        tokenizer=t5_tokenizer(),
        image_encoder=CLIPVisionModel(seeing),
        image_processor=CLIPImageProcessor(),
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=36,
            out_channels=16,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=1,
            rope_max_seq_len=32,
            image_dim=8,
            added_kv_proj_dim=24,
        ),
    ).save_pretrained(str(folder))
    return folder


MAKERS = {
    "cogview4": cogview4,
    "flux2": flux2,
    "hidream": hidream,
    "hunyuanvideo": hunyuanvideo,
    "kolors": kolors,
    "lumina2": lumina2,
    "mochi": mochi,
    "qwenimage": qwenimage,
    "sana": sana,
    "wan-i2v": wan_i2v,
    "zimage": zimage,
}
VIDEO = {"hunyuanvideo", "mochi", "wan-i2v"}
