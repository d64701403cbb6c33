"""Kinds of samples of text: a module each, by the name that an objective gives as its ``samples``."""

from __future__ import annotations

from collections.abc import Mapping

from fsdptool.training.data.text.common import TextSamples
from fsdptool.training.data.text.documents import Documents
from fsdptool.training.data.text.labelled import LabelledTexts
from fsdptool.training.data.text.masked import Masked
from fsdptool.training.data.text.pairs import SourcesAndTargets
from fsdptool.training.data.text.preferences import Preferences

TEXT_SAMPLES: Mapping[str, TextSamples] = {
    "documents": Documents(),
    "masked": Masked(),
    "pairs": SourcesAndTargets(),
    "labelled": LabelledTexts(),
    "preferences": Preferences(),
}

__all__ = ["TEXT_SAMPLES", "TextSamples"]
