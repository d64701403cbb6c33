"""Which class makes a family, by the ``kind`` of its card."""

from __future__ import annotations

from collections.abc import Mapping

from fsdptool.families.bases import CatalogueFamily
from fsdptool_diffusion import cosmos, flux, image, image_recent, sound, unet, video

KINDS: Mapping[str, type[CatalogueFamily]] = {
    "acestep": sound.AceStep,
    "auraflow": image.AuraFlow,
    "bria": flux.Bria,
    "chroma": flux.Chroma,
    "cogvideox": video.CogVideoX,
    "cogview4": image.CogView4,
    "cosmos": cosmos.Cosmos,
    "cosmos3": cosmos.Cosmos3,
    "deepfloyd": unet.DeepFloyd,
    "dit": image.DiT,
    "ernie": image_recent.ErnieImage,
    "flux": flux.Flux,
    "flux2": flux.Flux2,
    "flux3": flux.Flux3,
    "hidream": image.HiDream,
    "hunyuanimage": image_recent.HunyuanImage,
    "hunyuanvideo": video.HunyuanVideo,
    "hunyuanvideo15": video.HunyuanVideo15,
    "ideogram4": image_recent.Ideogram4,
    "kandinsky5": video.Kandinsky5,
    "krea2": image_recent.Krea2,
    "ltx": video.LtxVideo,
    "ltx2": sound.Ltx2,
    "lumina2": image.Lumina2,
    "minimaxh3": sound.MiniMaxH3,
    "minimaxmusic3": sound.MiniMaxMusic3,
    "mochi": video.Mochi,
    "omnigen": image.OmniGen,
    "pixart": image.PixArt,
    "plainflux": flux.PlainFlux,
    "qwenimage": flux.QwenImage,
    "qwenimage21": flux.QwenImage21,
    "sana": image.Sana,
    "sanavideo": video.SanaVideo,
    "sd3": image.StableDiffusion3,
    "stablecascade": unet.StableCascade,
    "unet": unet.UNet,
    "unetxl": unet.UNetXL,
    "vae": unet.ImageVae,
    "videounet": unet.VideoUNet,
    "wan": video.Wan,
    "zimage": image.ZImage,
}
