"""What a field's type cannot say and its JSON Schema must: bounds and patterns."""

from __future__ import annotations

from typing import Annotated, Any


class Keywords:
    """What a type cannot say, in JSON Schema's own words: ``Annotated[int, Keywords(minimum=1)]``."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords


Count = Annotated[int, Keywords(minimum=0)]
Positive = Annotated[int, Keywords(minimum=1)]
Share = Annotated[float, Keywords(minimum=0, maximum=1.0000001)]
"""A fraction of a total; sums of rounded terms may exceed 1 by their last digit."""
Digest = Annotated[str, Keywords(pattern="^sha256:[0-9a-f]{64}$")]
Text = Annotated[str, Keywords(minLength=1)]
