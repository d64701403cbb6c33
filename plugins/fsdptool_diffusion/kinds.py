"""Which class makes a family, by the ``kind`` of its card."""

from __future__ import annotations

from collections.abc import Mapping

from fsdptool.families.bases import CatalogueFamily
from fsdptool_diffusion import cascade, cosmos, flux, further, image, joint, recent, unet, video

KINDS: Mapping[str, type[CatalogueFamily]] = {
    "acestep": further.AceStep,
    "auraflow": image.AuraFlow,
    "bria": flux.Bria,
    "chroma": flux.Chroma,
    "cogvideox": video.CogVideoX,
    "cogview4": image.CogView4,
    "cosmos": cosmos.Cosmos,
    "cosmos3": cosmos.Cosmos3,
    "deepfloyd": cascade.DeepFloyd,
    "dit": image.DiT,
    "ernie": further.ErnieImage,
    "flux": flux.Flux,
    "flux2": flux.Flux2,
    "flux3": recent.Flux3,
    "hidream": image.HiDream,
    "hunyuanimage": further.HunyuanImage,
    "hunyuanvideo": video.HunyuanVideo,
    "hunyuanvideo15": video.HunyuanVideo15,
    "ideogram4": recent.Ideogram4,
    "kandinsky5": further.Kandinsky5,
    "krea2": recent.Krea2,
    "ltx": video.LtxVideo,
    "ltx2": joint.Ltx2,
    "lumina2": image.Lumina2,
    "minimaxh3": joint.MiniMaxH3,
    "minimaxmusic3": recent.MiniMaxMusic3,
    "mochi": video.Mochi,
    "omnigen": image.OmniGen,
    "pixart": image.PixArt,
    "plainflux": flux.PlainFlux,
    "qwenimage": flux.QwenImage,
    "qwenimage21": recent.QwenImage21,
    "sana": image.Sana,
    "sanavideo": video.SanaVideo,
    "sd3": image.StableDiffusion3,
    "stablecascade": cascade.StableCascade,
    "unet": unet.UNet,
    "unetxl": unet.UNetXL,
    "vae": unet.ImageVae,
    "videounet": unet.VideoUNet,
    "wan": video.Wan,
    "zimage": image.ZImage,
}
