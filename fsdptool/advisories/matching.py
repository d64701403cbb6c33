"""Which advisories apply to a run: conditions are compared with facts that are true, false or not known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fsdptool.advisories.catalogue import Versions, advisories, affected_version, fixed_in
from fsdptool.advisories.facts import RunFacts
from fsdptool.records.advisory import Advisory, AuditFinding, FactTest
from fsdptool.records.diagnostic import Diagnostic

_WORDS = {
    "fsdp": "whether FSDP runs, and its version",
    "program": "which program trains",
    "method": "whether adapters or a quantised base are trained",
    "base_dtype": "the dtype in which the model is loaded",
    "objective": "the objective",
    "accumulation": "gradient accumulation",
    "optimizer": "the optimizer",
    "processes": "the number of processes",
    "settings.mixed_precision": "mixed precision",
    "settings.cpu_ram_efficient_loading": "whether loading is RAM-efficient",
    "settings.state_dict_type": "the state-dict type",
}
"""What is not known where a fact is missing; other facts are named as they are."""

_NO_EVIDENCE = frozenset({"program", "processes"})
"""Facts of almost every run: an advisory for which nothing else speaks is not worth a line."""


def findings(facts: RunFacts, versions: Versions, ignored: Collection[str] = ()) -> tuple[AuditFinding, ...]:
    """Return the advisories that apply to a run, and then those that may.

    An advisory may apply where its condition asks for something that the file does not show, if another part
    of the condition is known to hold. Where no repaired release is known, the file must show the condition as
    a whole: there is no version without the advisory.

    Args:
        facts: What the file shows.
        versions: Versions of the libraries.
        ignored: Names of advisories to leave out.
    """
    found = (finding(item, facts, versions) for item in advisories() if item.id not in ignored)
    return tuple(sorted((item for item in found if item), key=lambda item: (item.verdict, item.id)))


def diagnostics(
    facts: RunFacts, versions: Versions, path: str | None, ignored: Collection[str] = ()
) -> Iterator[Diagnostic]:
    """Yield a finding FSD376 for every advisory that applies to the run of a file, but for those ignored."""
    for item in findings(facts, versions, ignored):
        if item.verdict != "applies" or item.effect == "cosmetic":
            continue
        repaired = (
            f"fixed in {item.fixed_in}" if item.fixed_in is not None else "no repaired release is known"
        )
        yield Diagnostic(
            "FSD376",
            "warning",
            f"{item.package} {item.installed} ({repaired}): {item.summary} ({item.id})",
            help=f"{item.change}; see {item.references[0]}",
            path=path,
        )


def finding(advisory: Advisory, facts: RunFacts, versions: Versions) -> AuditFinding | None:
    """Return what an advisory says of a run, or None where it does not apply."""
    version = affected_version(advisory, versions)
    if version is None:
        return None
    repaired = fixed_in(advisory, version)
    unknown = _unknown(advisory, facts, must_show=repaired is None)
    if unknown is None:
        return None
    effect = advisory.database_specific
    return AuditFinding(
        id=advisory.id,
        package=advisory.package,
        installed=str(version),
        fixed_in=repaired,
        verdict="may_apply" if unknown else "applies",
        effect=effect.effect,
        evidence=effect.evidence,
        summary=advisory.summary,
        consequence=effect.consequence,
        change=effect.change,
        unknown=unknown,
        error=effect.error,
        memory=effect.memory,
        references=tuple(reference.url for reference in advisory.references),
    )


def _unknown(advisory: Advisory, facts: RunFacts, *, must_show: bool) -> tuple[str, ...] | None:
    """Return what decides about an advisory and is not known; None where it does not apply."""
    effect = advisory.database_specific
    open_parts = [_open(tests, facts) for tests in effect.condition]
    possible = [names for names in open_parts if names is not None and not (names and must_show)]
    if not possible:
        return None
    names = (_WORDS.get(name) or _named(name) for name in min(possible, key=len))
    return (*names, *(f"whether {clause}" for clause in effect.unseen))


def _named(name: str) -> str:
    kind, _, rest = name.partition(".")
    return f"the key {rest}" if kind == "keys" else f"the setting {rest if kind == 'settings' else name}"


def _open(tests: Mapping[str, FactTest], facts: RunFacts) -> list[str] | None:
    """Return the facts of a conjunction that are not known; None: it is false, or nothing speaks for it."""
    answers = {name: _holds(name, test, facts) for name, test in tests.items()}
    if False in answers.values():
        return None
    shown = [name for name, test in tests.items() if answers[name] and not _excludes(test)]
    unknown = [name for name, answer in answers.items() if answer is None]
    # A bug of one program is not worth a line for every file of a launcher.
    evidence = set(shown) - _NO_EVIDENCE - ({"fsdp"} if "program" in unknown else set())
    return None if unknown and not evidence else unknown


def _excludes(test: FactTest) -> bool:
    """Whether a test asks only for what a run is not: that speaks for no advisory."""
    return bool(test.none_of) or test.present is False


def _holds(name: str, test: FactTest, facts: RunFacts) -> bool | None:
    """Return whether a fact is as a test wants it; None where the fact is not known."""
    if name.startswith("keys."):
        key = name.removeprefix("keys.")
        value = facts.keys.get(key)
        if value in (None, ""):
            if not facts.knows(key):
                return None
            if test.present is not None or test.default is None:
                return _excludes(test)
            value = test.default
    else:
        value = facts.values.get(name)
        if value is None and test.none_of:
            return True
        if value is None and not (test.present is not None and facts.lacks(name)):
            return None
    if test.present is not None:
        return test.present is (value not in (None, (), []))
    if test.greater is not None:
        number = _number(value)
        return None if number is None else number > test.greater
    given = {_plain(item) for item in (value if isinstance(value, list | tuple) else (value,))}
    if test.none_of:
        return given.isdisjoint(map(_plain, test.none_of))
    return not given.isdisjoint(map(_plain, test.any_of or (test.equals,)))


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _plain(value: Any) -> str:
    """Return a value as text, so that ``true`` of a flag equals a truth of a file."""
    return str(value).strip().lower()
