"""The library versions fsdptool was tested with. Private names of torch and of the model libraries are used,
so a newer version may work or not; ``doctor`` and the trainer's preflight say so in one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.version import Version

from fsdptool.records.diagnostic import Diagnostic

UNTESTED = "DOC004"


@dataclass(frozen=True, slots=True)
class TestedVersions:
    """The versions of one library, as ``major.minor``.

    Attributes:
        package: Distribution.
        lowest: The oldest version that is supported.
        highest: The newest version the tests ran with; ``pyproject.toml`` ends below the next.
    """

    package: str
    lowest: str
    highest: str


TESTED = (
    TestedVersions("torch", "2.11", "2.13"),
    TestedVersions("accelerate", "1.15", "1.15"),
    TestedVersions("transformers", "5.17", "5.23"),
    TestedVersions("diffusers", "0.42", "0.42"),
    TestedVersions("peft", "0.21", "0.21"),
    TestedVersions("bitsandbytes", "0.50", "0.50"),
    TestedVersions("torchao", "0.18", "0.18"),
)
"""Libraries whose internals or exact behaviour fsdptool relies on; the last two are optional."""


def untested_versions() -> tuple[Diagnostic, ...]:
    """Return a warning for every installed library whose version was not tested."""
    findings = []
    for library in TESTED:
        try:
            version = metadata.version(library.package)
        except metadata.PackageNotFoundError:
            continue
        lowest, highest = Version(library.lowest).release, Version(library.highest).release
        if lowest <= Version(version).release[:2] <= highest:
            continue
        tested = library.highest if lowest == highest else f"{library.lowest} to {library.highest}"
        findings.append(
            Diagnostic(
                UNTESTED,
                "warning",
                f"{library.package} {version} was not tested with fsdptool: tested versions are {tested}",
                help=f"pip install '{library.package}=={library.highest}.*' if something fails",
            )
        )
    return tuple(findings)
