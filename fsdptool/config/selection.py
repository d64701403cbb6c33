"""Findings named by code and place, as ``path:line:column: code`` prints them: ``FSD203:12:3``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fsdptool.config.lint_settings import check_codes
from fsdptool.errors import ConfigError
from fsdptool.records.diagnostic import Diagnostic

_FORM = re.compile(r"(?P<code>[A-Za-z0-9]+)(?::(?P<line>[1-9]\d{0,8})(?::(?P<column>[1-9]\d{0,8}))?)?")


@dataclass(frozen=True, slots=True)
class FindingSelector:
    """Findings of a code, in a whole file or at one place.

    Attributes:
        code: Code or its beginning.
        line, column: 1-based place; None stands for any.
    """

    code: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.code, self.line, self.column) if part is not None)

    def matches(self, item: Diagnostic) -> bool:
        """Return whether a finding is meant."""
        return (
            item.code.startswith(self.code)
            and self.line in (None, item.line)
            and self.column in (None, item.column)
        )


def selector_of(item: Diagnostic) -> FindingSelector:
    """Return what names a finding."""
    return FindingSelector(item.code, item.line, item.column)


def read_selectors(texts: Iterable[str], where: str) -> tuple[FindingSelector, ...]:
    """Return selectors from ``CODE[:LINE[:COLUMN]]``; commas separate several in one text.

    Args:
        texts: The texts.
        where: The option that they come from, for the message.

    Raises:
        ConfigError: A text has another form, or its code is not the beginning of any rule's.
    """
    chosen = []
    for text in filter(None, (piece.strip() for given in texts for piece in given.split(","))):
        form = _FORM.fullmatch(text)
        if form is None:
            raise ConfigError(
                f"{where}: {text} does not name a finding",
                help="write a code and, for one place, its line and column: FSD203, FSD203:12 or FSD203:12:3",
            )
        (code,) = check_codes([form["code"]], where)
        place = (int(form[name]) if form[name] else None for name in ("line", "column"))
        chosen.append(FindingSelector(code, *place))
    return tuple(chosen)
