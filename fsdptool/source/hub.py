"""Hugging Face ids: the local cache first, then JSON files (and code that may run), never weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdptool.errors import ReferenceError  # noqa: A004 - a reference names a model here
from fsdptool.families.registry import load_registry

_ID = re.compile(r"[\w.-]+(/[\w.-]+)?\Z")
_LONGEST = 96
"""Characters of the longest id that huggingface_hub takes (1.x); it raises on longer ones."""
_METADATA_SECONDS = 5.0


class UnreachableError(ReferenceError):
    """The configuration of a repository is not available now.

    Args:
        message: What happened.
        help: What to do about it.
        why: The reason in a few words: no network, offline, or a licence to accept.
    """

    def __init__(self, message: str, *, help: str | None = None, why: str) -> None:
        super().__init__(message, help=help)
        self.why = why


def looks_like_id(text: str) -> bool:
    """Whether ``text`` could be a Hub id (``organisation/name`` or an old one-part name)."""
    short = len(text) <= _LONGEST
    return short and bool(_ID.fullmatch(text)) and ".." not in text and not text.startswith((".", "-"))


class HubFiles:
    """JSON files of one repository at one revision, as local paths.

    Args:
        repo_id: ``organisation/name``.
        revision: Branch, tag or commit; None is ``main``.
        hint: A further suggestion for when the repository cannot be reached.
    """

    def __init__(self, repo_id: str, revision: str | None, hint: str | None = None) -> None:
        self.repo_id = repo_id
        self.revision = revision
        self.commit: str | None = None
        self._hint = hint

    def cached(self, name: str) -> Path | None:
        """Return the local path of ``name`` if the cache has it."""
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.repo_id, name, revision=self.revision)
        return self._located(path) if isinstance(path, str) else None

    def fetch(self, name: str) -> Path | None:
        """Return the local path of ``name``, downloading it if need be; None if the repository lacks it.

        Raises:
            ReferenceError: Out of reach, gated, or no such repository or revision.
        """
        local = self.cached(name)
        if local is not None or self._known_absent(name):
            return local
        from huggingface_hub import errors as hub
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url

        if self.offline():
            raise self._missing("HF_HUB_OFFLINE is set")
        try:
            # One request without retries first: hf_hub_download alone retries for about 23 s
            # when there is no network (huggingface_hub 1.x and 2.4).
            url = hf_hub_url(self.repo_id, name, revision=self.revision)
            get_hf_file_metadata(url, timeout=_METADATA_SECONDS)
            path = hf_hub_download(self.repo_id, name, revision=self.revision, etag_timeout=_METADATA_SECONDS)
        except hub.EntryNotFoundError:
            return None
        except hub.GatedRepoError as error:
            raise UnreachableError(
                f"{self.repo_id} is gated: its files need an accepted licence",
                help="accept it on the model's page and log in (`hf auth login`), or give a config.json",
                why="it is gated",
            ) from error
        except hub.RevisionNotFoundError as error:
            raise ReferenceError(
                f"{self.repo_id} has no revision {self.revision!r}", help="use an existing --revision"
            ) from error
        except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
            raise ReferenceError(
                f"there is no model {self.repo_id!r} on the Hub, or it is private",
                help=self._hint or "check the spelling, or log in with `hf auth login`",
            ) from error
        except OSError as error:
            raise self._missing(f"the Hub request failed ({_words(error)})") from error
        except Exception as error:
            # The HTTP library under huggingface_hub differs by version; all it raises means the same here.
            raise self._missing(f"the Hub cannot be reached ({_words(error)})") from error
        return self._located(path)

    def offline(self) -> bool:
        """Whether huggingface_hub is offline (``HF_HUB_OFFLINE``)."""
        from huggingface_hub import constants

        return bool(constants.HF_HUB_OFFLINE)

    def _known_absent(self, name: str) -> bool:
        """Whether the cache knows that the repository has no such file."""
        from huggingface_hub import try_to_load_from_cache

        entry = try_to_load_from_cache(self.repo_id, name, revision=self.revision)
        return entry is not None and not isinstance(entry, str)

    def _located(self, path: str) -> Path:
        parts = Path(path).parts
        if "snapshots" in parts:
            at = len(parts) - 1 - parts[::-1].index("snapshots")
            self.commit = parts[at + 1]
        return Path(path)

    def _missing(self, why: str) -> UnreachableError:
        from huggingface_hub import constants

        at = f" at revision {self.revision}" if self.revision else ""
        supply = (
            f"on a machine with network access, run `hf download {self.repo_id} --include '*.json'"
            + (f" --revision {self.revision}" if self.revision else "")
            + "`, or give a local folder or config.json"
        )
        return UnreachableError(
            f"{self.repo_id}{at} has no configuration in the local cache"
            f" ({constants.HF_HUB_CACHE}) and {why}",
            help=f"{self._hint}; or {supply}" if self._hint else supply,
            why=why,
        )


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__


def fetch_code(files: HubFiles, config: Mapping[str, Any]) -> None:
    """Put the code that a configuration names (``auto_map``) beside it in the cache.

    That is the named modules and what they import from beside them, at the configuration's commit, as
    transformers looks for them (5.23, ``dynamic_module_utils.py``: ``get_relative_imports``). Nothing is run.

    Args:
        files: The repository, from which the configuration was read.
        config: The raw configuration.

    Raises:
        ReferenceError: The repository is out of reach.
    """
    pinned = HubFiles(files.repo_id, files.commit or files.revision)
    named = config.get("auto_map")
    targets = named.values() if isinstance(named, Mapping) else ()
    texts = [item for target in targets for item in (target if isinstance(target, list) else [target])]
    # ``other/repository--module.Class`` is code of another repository.
    waiting = [text.rpartition(".")[0] for text in texts if isinstance(text, str) and "--" not in text]
    seen = set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen or not module.isidentifier():
            continue
        seen.add(module)
        # Without network: a file that is missing is named by transformers, if it needs it.
        path = pinned.cached(f"{module}.py") if pinned.offline() else pinned.fetch(f"{module}.py")
        if path is not None:
            waiting += _BESIDE.findall(path.read_text(encoding="utf-8", errors="replace"))


_BESIDE = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)


def hint_for(text: str) -> str | None:
    """Return what ships under this Hub id or under a name like it, as a suggestion only."""
    registry = load_registry()
    for family in registry.all():
        for flavour in family.flavours().values():
            if flavour.hub_id and flavour.hub_id.casefold() == text.casefold():
                return f"an architecture of the same size ships as {family.name}:{flavour.name}"
    if "/" in text:
        return None
    try:
        registry.get(text)
    except ReferenceError as error:
        return error.help if error.help and error.help.startswith("did you mean") else None
    return None
