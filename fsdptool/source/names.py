"""What a person may write where a model is asked for, before it is looked up."""

from __future__ import annotations

from pathlib import Path

from fsdptool.errors import ReferenceError  # noqa: A004 - a reference names a model here

_LONGEST = 120


def short(text: str) -> str:
    """Return ``text`` as a message can quote it."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def expanded(text: str) -> Path:
    """Return the path ``text`` names, a leading ``~`` resolved where there is such a home."""
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:  # ~somebody, of whom the system knows nothing
        return path


def exists(path: Path) -> bool:
    """Whether there is something at ``path``, readable or not; what cannot be a path is nowhere."""
    try:
        return path.exists()
    except PermissionError:
        return True
    except OSError:
        return False


def refuse_pages(text: str) -> None:
    """Refuse addresses.

    Raises:
        ReferenceError: ``text`` is one; the advice is the id in it.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return
    host, *parts = rest.split("/")
    name = "/".join(parts[:2]) if host == "huggingface.co" and len(parts) > 1 else "organisation/name"
    raise ReferenceError(f"{short(text)} is a page, not a model", help=f"give its id: {name}")
