"""Plan a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from fsdptool.planning.options import Options


def make(progress: Callable[[str], None], *, options: Mapping[str, Any], stamps: object) -> dict[str, Any]:
    """Return the document of ``plan``.

    Args:
        progress: Takes texts of progress.
        options: Of ``fsdptool plan``; files are absolute paths.
        stamps: State of the files that the options name, so that a changed file is another question.
    """
    from fsdptool.planning.plan import make_plan, plan_document
    from fsdptool.planning.request import read_request

    progress("reading the question")
    return plan_document(make_plan(read_request(cast("Options", dict(options))), progress=progress))
