"""Real diffusers pipelines with tiny random components, written to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsdptool.records.codec import from_json
from fsdptool.records.recipe import Recipe


def tokenizer(length: int, specials: dict[str, str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = "a the cat dog red blue small big on mat sky number".split()  # noqa: SIM905
    known = [*dict.fromkeys(specials.values()), "[U]", *words]
    vocabulary = {word: number for number, word in enumerate(known)}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="[U]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    end = specials["eos_token"]
    core.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, vocabulary[end])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=length, padding_side="right", **specials
    )


def clip_tokenizer() -> Any:
    return tokenizer(16, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"})


def t5_tokenizer() -> Any:
    return tokenizer(16, {"pad_token": "<pad>", "eos_token": "</s>"})


def clip(*, projection: bool, positions: int = 16) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
        projection_dim=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)


def t5(*, umt5: bool = False, width: int = 16) -> Any:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "d_model": width,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
    }
    return UMT5EncoderModel(UMT5Config(**sizes)) if umt5 else T5EncoderModel(T5Config(**sizes))


def image_vae(channels: int, *, shift: float | None, scale: float) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=4,
        layers_per_block=1,
        shift_factor=shift,
        scaling_factor=scale,
    )


def flux(folder: Path) -> Path:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(4, shift=0.1, scale=0.5),
        text_encoder=clip(projection=False),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=t5_tokenizer(),
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=(4, 4, 8),
        ),
    ).save_pretrained(str(folder))
    return folder


def sd3(folder: Path) -> Path:
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    torch.manual_seed(0)
    StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(4, shift=0.1, scale=1.5),
        text_encoder=clip(projection=True),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(projection=True),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5(width=32),
        tokenizer_3=t5_tokenizer(),
        transformer=SD3Transformer2DModel(
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
    ).save_pretrained(str(folder))
    return folder


def sdxl(folder: Path) -> Path:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    StableDiffusionXLPipeline(
        scheduler=EulerDiscreteScheduler(),
        vae=image_vae(4, shift=None, scale=0.13),
        text_encoder=clip(projection=False),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(projection=True),
        tokenizer_2=clip_tokenizer(),
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
            cross_attention_dim=32,
        ),
    ).save_pretrained(str(folder))
    return folder


def wan(folder: Path) -> Path:
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )

    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    WanPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=t5(umt5=True),
        tokenizer=t5_tokenizer(),
        transformer=WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=1,
            rope_max_seq_len=32,
        ),
    ).save_pretrained(str(folder))
    return folder


def sd15(folder: Path) -> Path:
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    parts: dict[str, Any] = {"safety_checker": None, "feature_extractor": None}
    StableDiffusionPipeline(
        scheduler=DDIMScheduler(),
        vae=image_vae(4, shift=None, scale=0.18),
        text_encoder=clip(projection=False),
        tokenizer=clip_tokenizer(),
        unet=UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8,
            norm_num_groups=8,
            cross_attention_dim=16,
        ),
        requires_safety_checker=False,
        **parts,
    ).save_pretrained(str(folder))
    return folder


def pixart(folder: Path) -> Path:
    from diffusers import DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel

    torch.manual_seed(0)
    PixArtSigmaPipeline(
        scheduler=DPMSolverMultistepScheduler(),
        vae=image_vae(4, shift=None, scale=0.13),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        transformer=PixArtTransformer2DModel(
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
    ).save_pretrained(str(folder))
    return folder


def chroma(folder: Path) -> Path:
    from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

    torch.manual_seed(0)
    ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(4, shift=0.1, scale=0.5),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        transformer=ChromaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 4, 8),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
    ).save_pretrained(str(folder))
    return folder


def auraflow(folder: Path) -> Path:
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

    torch.manual_seed(0)
    AuraFlowPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=image_vae(4, shift=None, scale=0.13),
        text_encoder=t5(umt5=True),
        tokenizer=t5_tokenizer(),
        transformer=AuraFlowTransformer2DModel(
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
    ).save_pretrained(str(folder))
    return folder


def cogvideox(folder: Path) -> Path:
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    torch.manual_seed(0)
    CogVideoXPipeline(
        scheduler=CogVideoXDDIMScheduler(),
        vae=AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        transformer=CogVideoXTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
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
    ).save_pretrained(str(folder))
    return folder


def ltx(folder: Path) -> Path:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    torch.manual_seed(0)
    vae = AutoencoderKLLTXVideo(
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
    LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        transformer=LTXVideoTransformer3DModel(
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
    ).save_pretrained(str(folder))
    return folder


MAKERS = {
    "auraflow": auraflow,
    "chroma": chroma,
    "cogvideox": cogvideox,
    "flux": flux,
    "ltx": ltx,
    "pixart": pixart,
    "sd15": sd15,
    "sd3": sd3,
    "sdxl": sdxl,
    "wan": wan,
}
VIDEO = {"cogvideox", "ltx", "wan"}


def pictures(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    """Write images of (height, width) with captions beside them."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number, (height, width) in enumerate(sizes):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(noise)
        image.save(folder / f"{number:03d}.png")
        word = ("cat", "dog", "mat", "sky")[number % 4]
        (folder / f"{number:03d}.txt").write_text(f"a red {word}\n", encoding="utf-8")
    return folder


def clips(folder: Path, count: int, frames: int, size: tuple[int, int], *, stills: bool = False) -> Path:
    """Write clips: every other one a GIF, the rest folders of stills; or stills alone."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (frames, *size, 3), dtype=np.uint8)
        pictures = [Image.fromarray(frame) for frame in noise]
        if number % 2 and not stills:
            pictures[0].save(folder / f"{number}.gif", save_all=True, append_images=pictures[1:])
        else:
            (folder / str(number)).mkdir()
            for frame, still in enumerate(pictures):
                still.save(folder / str(number) / f"{frame:03d}.png")
        (folder / f"{number}.txt").write_text("the blue sky\n", encoding="utf-8")
    return folder


def recipe_of(
    pipeline: Path,
    images: Path,
    *,
    micro: int = 2,
    size: tuple[int, int] = (64, 64),
    frames: int | None = None,
    length: int = 16,
    objective: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
    seed: int = 0,
    global_batch: int | None = None,
    **options: Any,
) -> Recipe:
    """Return a recipe that trains a pipeline's denoiser on pictures."""
    document = {
        "model": {"reference": str(pipeline)},
        "objective": {"options": objective or {}},
        "data": {"source": "images", "path": str(images), "options": {"pipeline": str(pipeline), **options}},
        "batch": {
            "micro_batch": micro,
            "height": size[0],
            "width": size[1],
            "frames": frames,
            "sequence_length": length,
            "global_batch": global_batch,
        },
        "evaluation": evaluation or {},
        "seed": seed,
    }
    return from_json(Recipe, document)
