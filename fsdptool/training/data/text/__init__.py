"""Kinds of samples of text: by the name that an objective gives as its ``samples``."""

from __future__ import annotations

from collections.abc import Mapping

from fsdptool.training.data.text.common import TextSamples
from fsdptool.training.data.text.documents import Documents, Masked
from fsdptool.training.data.text.labelled import LabelledTexts, SourcesAndTargets
from fsdptool.training.data.text.preferences import Preferences

TEXT_SAMPLES: Mapping[str, TextSamples] = {
    "documents": Documents(),
    "masked": Masked(),
    "pairs": SourcesAndTargets(),
    "labelled": LabelledTexts(),
    "preferences": Preferences(),
}

__all__ = ["TEXT_SAMPLES", "TextSamples"]
