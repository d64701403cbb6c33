"""Finds every installed family through the entry-point group ``fsdptool.families``.

No family is privileged, ours included: all come through package metadata, and a plugin that
fails to load is a diagnostic, never a crash. Imports the plugins' listing code only; torch and
the model libraries stay unloaded (``protocol.Family.build`` loads them).
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from fsdptool.cache import digest_of, files_imported_by, reached_files
from fsdptool.errors import ReferenceError  # noqa: A004 - a reference names a model here
from fsdptool.families.loading import load_bounded
from fsdptool.families.protocol import API_VERSION, Family, Flavour
from fsdptool.formatting import by_size
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.spelling import all_near

GROUP = "fsdptool.families"

BROKEN_PLUGIN = "DET001"
WRONG_API = "DET002"
DUPLICATE_FAMILY = "DET003"
_SOURCE_SUFFIXES = {".py", ".json", ".jsonl", ".gz", ".yaml", ".yml", ".toml"}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a family comes from: the distribution, its version and the entry point that named it."""

    distribution: str
    version: str
    entry_point: str
    module: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.entry_point})"


class FamilyRegistry:
    """The families that loaded, and why others did not.

    Attributes:
        diagnostics: One per plugin that failed, per family with the wrong ``api_version`` and per
            claimant of a contested name.
    """

    def __init__(self, claims: Iterable[tuple[Family, Origin]], diagnostics: Iterable[Diagnostic]) -> None:
        findings = list(diagnostics)
        by_name: dict[str, list[tuple[Family, Origin]]] = defaultdict(list)
        for family, origin in claims:
            by_name[family.name].append((family, origin))
        self._families: dict[str, tuple[Family, Origin]] = {}
        self._contested: dict[str, tuple[Origin, ...]] = {}
        for name, claimants in by_name.items():
            if len(claimants) == 1:
                self._families[name] = claimants[0]
                continue
            origins = tuple(origin for _, origin in claimants)
            self._contested[name] = origins
            findings += [_contested(name, origin, origins) for origin in origins]
        self.diagnostics: tuple[Diagnostic, ...] = tuple(findings)

    def _report_once(self, diagnostic: Diagnostic) -> None:
        if diagnostic not in self.diagnostics:
            self.diagnostics = (*self.diagnostics, diagnostic)

    def all(self) -> tuple[Family, ...]:
        """Return every usable family, sorted by name."""
        return tuple(self._families[name][0] for name in sorted(self._families))

    def origin(self, name: str) -> Origin:
        """Return where the family called ``name`` comes from.

        Raises:
            ReferenceError: The family is unknown.
        """
        self.get(name)
        return self._families[name][1]

    def __contains__(self, name: object) -> bool:
        return name in self._families or name in self._contested

    def get(self, name: str) -> Family:
        """Return the family called exactly ``name``; near misses are suggested, never taken.

        Raises:
            ReferenceError: No family, or more than one, has that name.
        """
        if name in self._families:
            return self._families[name][0]
        if name in self._contested:
            owners = " and ".join(str(origin) for origin in self._contested[name])
            raise ReferenceError(
                f"family {name!r} is registered by {owners}",
                help="uninstall one of them, or rename its family",
            )
        raise ReferenceError(
            f"unknown family {name!r}",
            help=_suggestion(name, self._families) or "`fsdptool families` lists the installed families",
        )

    def flavour(self, family: str, name: str) -> Flavour:
        """Return one flavour; a bogus one is an error, never a silent default.

        Raises:
            ReferenceError: The family or the flavour does not exist.
        """
        flavours = self.get(family).flavours()
        if name in flavours:
            return flavours[name]
        if not flavours:
            raise ReferenceError(
                f"family {family!r} has no flavours", help="use a Hugging Face id, a folder or a config.json"
            )
        nearest = self._elsewhere(family, name) or _suggestion(name, flavours, prefix=f"{family}:")
        listed = ", ".join(by_size(flavours))
        raise ReferenceError(
            f"family {family!r} has no flavour {name!r}",
            help=f"{nearest} {family} has: {listed}" if nearest else f"it has: {listed}",
        )

    def _elsewhere(self, family: str, name: str) -> str | None:
        """Suggest the families of a similar name that do have a flavour of this name."""
        others = [
            f"{other}:{name}"
            for other, (known, _) in sorted(self._families.items())
            if other.startswith(family.split("-")[0]) and name in known.flavours()
        ]
        return f"did you mean {' or '.join(others)}?" if others else None

    def match(self, config: Mapping[str, Any]) -> Family:
        """Return the family that claims a raw configuration with the highest score.

        Raises:
            ReferenceError: No family claims it, or two claim it equally.
        """
        claims = []
        for family, origin in self._families.values():
            try:
                found = family.match(config)
            except Exception as error:
                self._report_once(_broken(origin, f"match of {family.name!r} raised {type(error).__name__}"))
                continue
            if found is not None:
                claims.append((family.precedence, found.score, family, origin, found.evidence))
        if not claims:
            anonymous = not (config.get("_class_name") or config.get("model_type"))
            raise ReferenceError(
                f"no installed family matches {_describe(config)}",
                help="name the model itself, or the training file or script that uses this file"
                if anonymous
                else "install a plugin for it; docs/how-to/add-a-family.md shows how to write one",
            )
        best = max(claim[:2] for claim in claims)
        winners = [claim for claim in claims if claim[:2] == best]
        if len(winners) > 1:
            names = " and ".join(f"{c[2].name!r} of {c[3].distribution} ({c[4]})" for c in winners)
            raise ReferenceError(
                f"{_describe(config)} is matched equally by {names}",
                help="select the family (family:flavour), or uninstall one plugin",
            )
        winner: Family = winners[0][2]
        return winner


def _describe(config: Mapping[str, Any]) -> str:
    for key in ("_class_name", "model_type"):
        if config.get(key):
            return f"a configuration with {key} {config[key]!r}"
    return "a configuration without model_type or _class_name"


def _suggestion(name: str, known: Iterable[str], *, prefix: str = "") -> str | None:
    by_fold = {item.casefold(): item for item in known}
    near = all_near(name, by_fold.values())
    if not near and name:
        near = [by_fold[item] for item in by_fold if item.startswith(name.casefold())][:3]
    return f"did you mean {' or '.join(prefix + item for item in near)}?" if near else None


def _contested(name: str, origin: Origin, origins: tuple[Origin, ...]) -> Diagnostic:
    others = ", ".join(str(other) for other in origins if other is not origin)
    return Diagnostic(
        code=DUPLICATE_FAMILY,
        severity="warning",
        message=f"both {origin} and {others} register the family name {name!r}; neither is used",
        help="uninstall one of them, or rename its family",
    )


@cache
def load_registry() -> FamilyRegistry:
    """Load every entry point of the group once per process. Never raises for a broken plugin."""
    return read_registry(metadata.entry_points(group=GROUP))


def read_registry(entry_points: Iterable[metadata.EntryPoint]) -> FamilyRegistry:
    """Load the given entry points (:func:`load_registry` gives it the installed ones)."""
    claims: list[tuple[Family, Origin]] = []
    diagnostics: list[Diagnostic] = []
    for entry_point in sorted(entry_points, key=lambda item: (item.name, item.value)):
        distribution = entry_point.dist
        origin = Origin(
            distribution=distribution.name if distribution else "unknown distribution",
            version=distribution.version if distribution else "?",
            entry_point=f"{entry_point.name} = {entry_point.value}",
            module=entry_point.module,
        )
        try:
            families = load_bounded(partial(_loaded_families, entry_point))
        except (Exception, SystemExit) as error:
            diagnostics.append(_broken(origin, f"{type(error).__name__}: {_one_line(error)}"))
            continue
        for family in families:
            problem = _problem(family)
            if problem is None:
                claims.append((family, origin))
            else:
                diagnostics.append(problem(origin))
    return FamilyRegistry(claims, diagnostics)


def _loaded_families(entry_point: metadata.EntryPoint) -> list[Any]:
    return list(_families(entry_point.load()))


def _families(loaded: Any) -> Iterator[Any]:
    if isinstance(loaded, type) and issubclass(loaded, Family):
        yield loaded()
    elif isinstance(loaded, Family):
        yield loaded
    elif callable(loaded):
        yield from loaded()
    else:
        raise TypeError(f"names a {type(loaded).__name__}, not a Family or a callable that yields them")


def _problem(family: Any) -> Any:
    """Return a maker of the diagnostic for an unusable family, or None."""
    if not isinstance(family, Family):
        return lambda origin: _broken(origin, f"yields a {type(family).__name__}, not a Family")
    if family.api_version != API_VERSION:
        return lambda origin: Diagnostic(
            code=WRONG_API,
            severity="warning",
            message=f"family {getattr(family, 'name', '?')!r} of {origin} uses protocol"
            f" {family.api_version!r}; this fsdptool uses {API_VERSION}",
            help="install compatible versions of the two",
        )
    for field in ("name", "library", "default_objective"):
        value = getattr(family, field, None)
        if not isinstance(value, str) or not value:
            return lambda origin: _broken(origin, f"{type(family).__name__} has no {field}")
    if any(character in family.name for character in ":/\\@ \t\n"):
        what = f"family name {family.name!r} contains a colon, a slash, an at sign or a space"
        return lambda origin: _broken(origin, what)
    return None


def _broken(origin: Origin, what: str) -> Diagnostic:
    return Diagnostic(
        code=BROKEN_PLUGIN,
        severity="warning",
        message=f"plugin {origin} is ignored: {what}",
        help=f"fix or uninstall {origin.distribution}",
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def family_of(spec: ModelSpec) -> Family:
    """Return the family that made ``spec``, bound to it.

    Raises:
        ReferenceError: It is not installed here.
    """
    return load_registry().get(spec.family).bind(spec)


def family_digest(name: str) -> str:
    """Return a digest of a family's distribution version and of every source and data file beside it.

    The detection cache keys on it, so editing a plugin in place is a miss.

    Raises:
        ReferenceError: The family is unknown.
    """
    registry = load_registry()
    family, origin = registry.get(name), registry.origin(name)
    modules = [module for module in (type(family).__module__, origin.module) if module]
    tops = sorted({module.partition(".")[0] for module in modules} - {__package__.partition(".")[0]})
    parts = [*(_package_digest(top) for top in tops), digest_of(files_reached_by_family(name))]
    return f"{origin.distribution}=={origin.version}:" + ",".join(parts)


def files_reached_by_family(name: str) -> frozenset[Path]:
    """Return the files of this package that a family and its distribution import, at any depth."""
    registry = load_registry()
    family, origin = registry.get(name), registry.origin(name)
    reached = set[Path]()
    for module in (type(family).__module__, origin.module):
        top = module.partition(".")[0]
        if top == __package__.partition(".")[0]:
            reached |= reached_files(module)
        elif top:
            reached |= _imported_by_package(top)
    return frozenset(reached)


@cache
def _package_files(package: str) -> tuple[Path, ...]:
    """Return the source and data files of a package that was imported."""
    top = sys.modules.get(package)
    folders = getattr(top, "__path__", None)
    if folders is None:
        single = getattr(top, "__file__", None)
        return (Path(single),) if single else ()
    paths = (path for folder in folders for path in sorted(Path(folder).rglob("*")))
    return tuple(path for path in paths if path.suffix in _SOURCE_SUFFIXES and path.is_file())


@cache
def _imported_by_package(package: str) -> frozenset[Path]:
    sources = (path for path in _package_files(package) if path.suffix == ".py")
    return frozenset[Path]().union(*(files_imported_by(path) for path in sources))


@cache
def _package_digest(package: str) -> str:
    digest = hashlib.sha256()
    for path in _package_files(package):
        digest.update(path.as_posix().rpartition(f"/{package}/")[2].encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
