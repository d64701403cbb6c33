"""Which class makes a family, by the ``kind`` of its card."""

from __future__ import annotations

from collections.abc import Mapping

from fsdptool.families.bases import CatalogueFamily
from fsdptool_diffusion import flux, further, image, unet, video

KINDS: Mapping[str, type[CatalogueFamily]] = {
    "acestep": further.AceStep,
    "auraflow": image.AuraFlow,
    "bria": flux.Bria,
    "chroma": flux.Chroma,
    "cogvideox": video.CogVideoX,
    "cogview4": image.CogView4,
    "cosmos": video.Cosmos,
    "dit": image.DiT,
    "ernie": further.ErnieImage,
    "flux": flux.Flux,
    "flux2": flux.Flux2,
    "hidream": image.HiDream,
    "hunyuanimage": further.HunyuanImage,
    "hunyuanvideo": video.HunyuanVideo,
    "hunyuanvideo15": video.HunyuanVideo15,
    "kandinsky5": further.Kandinsky5,
    "ltx": video.LtxVideo,
    "lumina2": image.Lumina2,
    "mochi": video.Mochi,
    "omnigen": image.OmniGen,
    "pixart": image.PixArt,
    "plainflux": flux.PlainFlux,
    "qwenimage": flux.QwenImage,
    "sana": image.Sana,
    "sanavideo": video.SanaVideo,
    "sd3": image.StableDiffusion3,
    "unet": unet.UNet,
    "unetxl": unet.UNetXL,
    "vae": unet.ImageVae,
    "videounet": unet.VideoUNet,
    "wan": video.Wan,
    "zimage": image.ZImage,
}
