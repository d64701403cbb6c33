"""Which class makes a family, by the ``kind`` of its card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from fsdptool.families.bases import CatalogueFamily, TransformersFamily
from fsdptool.families.objectives import Contrastive
from fsdptool.families.protocol import Objective
from fsdptool_vision import multimodal, segmentation, speech


class Sigmoid(TransformersFamily):
    """SigLIP: contrastive by sigmoid."""

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return the library's objectives, contrastive with sigmoid for its default."""
        return {**super().objectives(), Contrastive.name: partial(Contrastive, kind="sigmoid")}


KINDS: Mapping[str, type[CatalogueFamily]] = {
    "": TransformersFamily,
    "multimodal": multimodal.Multimodal,
    "sam": segmentation.Sam,
    "sigmoid": Sigmoid,
    "wav2vec2": speech.Wav2Vec2,
    "whisper": speech.Whisper,
}
