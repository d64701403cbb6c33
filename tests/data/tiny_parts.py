"""Tiny components of diffusion pipelines: text encoders with their tokenizers, VAEs, denoisers' sizes."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

CHAT = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }} "
    "{% else %}{% for part in message['content'] %}{{ part['text'] }} {% endfor %}{% endif %}{% endfor %}"
)
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
UNET = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 8,
}
UNET_XL = {
    **UNET,
    "attention_head_dim": (2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "transformer_layers_per_block": (1, 1),
    "projection_class_embeddings_input_dim": 64,
}
WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "out_channels": 16,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 1,
    "rope_max_seq_len": 32,
}
CAUSAL_VAE = {
    "base_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}

Text = tuple[Any, Any]
"""A text encoder and its tokenizer."""


def texts(*parts: Text) -> dict[str, Any]:
    """Return text encoders and tokenizers under the names pipelines give them."""
    results: dict[str, Any] = {}
    for number, (encoder, tokenizer) in enumerate(parts, start=1):
        suffix = f"_{number}" if number > 1 else ""
        results |= {f"text_encoder{suffix}": encoder, f"tokenizer{suffix}": tokenizer}
    return results


def tokenizer(length: int, **specials: str) -> Any:
    """Return one that knows a dozen words and puts an end after them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = "a the cat dog red blue small big on mat sky number".split()  # noqa: SIM905
    known = [*dict.fromkeys(specials.values()), "[U]", *words]
    vocabulary = {word: number for number, word in enumerate(known)}
    core = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="[U]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=length, padding_side="right", **specials
    )


def chat_tokenizer(*, side: str = "right", length: int = 512) -> Any:
    """Return one with a template for conversations."""
    built = tokenizer(length, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    built.padding_side = side
    built.chat_template = CHAT
    return built


def clip(*, projection: bool = False, positions: int = 16) -> Text:
    """Return CLIP's text half."""
    config = transformers.CLIPTextConfig(
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
    kind = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return kind(config), tokenizer(16, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def t5(*, umt5: bool = False, width: int = 16) -> Text:
    """Return T5's encoder, or UMT5's."""
    sizes: dict[str, Any] = {"vocab_size": 32, "d_model": width, "d_kv": 8, "d_ff": 16}
    sizes |= {"num_layers": 1, "num_heads": 2}
    if umt5:
        encoder = transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes))
    else:
        encoder = transformers.T5EncoderModel(transformers.T5Config(**sizes))
    return encoder, tokenizer(16, pad_token="<pad>", eos_token="</s>")


def decoder_sizes(*, layers: int = 2, width: int = 16) -> dict[str, Any]:
    """Return the sizes of a language model that encodes captions."""
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


def decoder(name: str, *, head: str = "Model", side: str = "right", layers: int = 2) -> Text:
    """Return a language model of transformers: ``Gemma2`` with head ``Model`` is ``Gemma2Model``."""
    config = getattr(transformers, f"{name}Config")(**decoder_sizes(layers=layers))
    return getattr(transformers, f"{name}{head}")(config), chat_tokenizer(side=side)


def image_vae(scale: float, *, shift: float | None = None) -> Any:
    """Return a VAE of 8 pixels to a latent of four channels."""
    return diffusers.AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
        layers_per_block=1,
        shift_factor=shift,
        scaling_factor=scale,
    )


def flow(**options: Any) -> Any:
    """Return the scheduler of flow matching."""
    return diffusers.FlowMatchEulerDiscreteScheduler(**options)
