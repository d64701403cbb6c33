"""The folders that pages may read and write: nothing outside of them, links resolved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from fsdptool.errors import ConfigError
from fsdptool.files import text as text_files
from fsdptool.files.text import is_folder
from fsdptool.formatting import printable
from fsdptool.source.references import expanded


class Roots:
    """Named folders.

    Args:
        folders: The folders that were named when the server started.

    Attributes:
        folders: Name to resolved folder, in order. A name is the folder's own; a number is added where
            two have the same.

    Raises:
        ConfigError: A folder does not exist.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        named: dict[str, Path] = {}
        for folder in folders:
            resolved = Path(os.path.realpath(folder))
            if not is_folder(resolved):
                raise ConfigError(f"{folder} is not a folder", help="name folders that exist")
            if resolved in named.values():
                continue
            base = printable(resolved.name) or "root"
            name, number = base, 2
            while name in named:
                name, number = f"{base}-{number}", number + 1
            named[name] = resolved
        self.folders: Mapping[str, Path] = named

    def resolve(self, text: str, *, exists: bool = True, parents: bool = True) -> Path:
        """Return the path that ``NAME/below/it`` or an absolute path stands for.

        Args:
            text: From a page.
            exists: Whether the file or folder must be there; otherwise only its folder must.
            parents: Whether at least its folder must be there.

        Raises:
            ConfigError: It is outside of every root (links resolved), or not there.
        """
        if not text or "\0" in text:
            raise ConfigError("no path is given", help=self._help())
        path = expanded(text)
        if not path.is_absolute():
            name, _, rest = text.replace(os.sep, "/").partition("/")
            base = self.folders.get(name)
            path = base / rest if base is not None else self._first() / text
        resolved = Path(os.path.realpath(path))
        if not self.contains(resolved):
            raise ConfigError(f"{printable(text)} is outside the folders of this page", help=self._help())
        if exists and not text_files.exists(resolved):
            raise ConfigError(f"{printable(text)} does not exist", help=self._help())
        if not exists and parents and not is_folder(resolved.parent):
            raise ConfigError(f"the folder of {printable(text)} does not exist", help="create it first")
        return resolved

    def reference(self, text: str) -> str:
        """Return a model reference; one that is a path must be below a root.

        Raises:
            ConfigError: It is a path outside of every root.
        """
        text = text.strip()
        name = text.partition("/")[0]
        if text.startswith(("./", "../", "/", "~")) or text_files.exists(expanded(text)):
            return str(self.resolve(str(expanded(text).absolute())))
        if name in self.folders and text_files.exists(self.folders[name] / text.partition("/")[2]):
            return str(self.resolve(text))
        return text

    def name_of(self, path: Path) -> str:
        """Return ``NAME/below/it`` of a path below a root.

        Raises:
            ConfigError: It is outside of every root.
        """
        resolved = Path(os.path.realpath(path))
        for name, root in self.folders.items():
            if resolved.is_relative_to(root):
                return "/".join((name, *resolved.relative_to(root).parts))
        raise ConfigError(f"{printable(str(path))} is outside the folders of this page", help=self._help())

    def contains(self, path: Path) -> bool:
        """Return whether a path is below a root, links resolved."""
        resolved = Path(os.path.realpath(path))
        return any(resolved.is_relative_to(root) for root in self.folders.values())

    def confine(self, *others: Path) -> AbstractContextManager[None]:
        """Return a block in which no file outside of the roots is opened, whatever links or texts name it.

        Args:
            others: Further folders whose files may be opened.
        """
        places = tuple(Path(os.path.realpath(place)) for place in others)

        def allowed(path: Path) -> bool:
            resolved = Path(os.path.realpath(path))
            return any(resolved.is_relative_to(place) for place in (*self.folders.values(), *places))

        return text_files.confined(allowed)

    def check_links(self, folder: Path) -> None:
        """Refuse a folder in which a link, at most two levels down, leads outside of the roots.

        Code that reads a run folder follows the links in it.

        Raises:
            ConfigError: There is one; the message names it.
        """
        for place, folders, files in os.walk(folder):
            for name in (*folders, *files):
                path = Path(place, name)
                if path.is_symlink() and not self.contains(path):
                    raise ConfigError(
                        f"{printable(str(path))} is a link to outside the folders of this page",
                        help="replace the link by the file itself",
                    )
            if len(Path(place).relative_to(folder).parts) == 2:
                folders.clear()

    def files(self, suffixes: Sequence[str], *, limit: int = 500, depth: int = 4) -> Iterator[str]:
        """Yield the names of files below the roots, for suggestions; hidden folders are left out.

        Args:
            suffixes: Endings such as ``.yaml``.
            limit: The most that are yielded.
            depth: Folders below a root that are entered.
        """
        left = limit
        for name, root in self.folders.items():
            for folder, folders, files in os.walk(root):
                below = Path(folder).relative_to(root).parts
                folders[:] = sorted(f for f in folders if not f.startswith(".")) if len(below) < depth else []
                for file in sorted(files):
                    if file.endswith(tuple(suffixes)):
                        yield "/".join((name, *below, file))
                        left -= 1
                        if left == 0:
                            return

    def _first(self) -> Path:
        return next(iter(self.folders.values()))

    def _help(self) -> str:
        names = ", ".join(f"{name} ({path})" for name, path in self.folders.items())
        return f"the folders are {printable(names)}; name others when you start fsdptool ui"
