"""Image, video and audio diffusion families."""

from __future__ import annotations

from collections.abc import Iterable

from fsdptool.families.protocol import Family


def families() -> Iterable[Family]:
    """Yield the families of this package."""
    from fsdptool.families.bases.catalogue import instances, read_cards
    from fsdptool_diffusion.kinds import KINDS

    return instances(read_cards(__name__), KINDS)
