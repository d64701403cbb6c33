"""The versions of libraries that fsdptool works with: what was tested, and what is refused.

``benchmarks/versions`` installs combinations of these versions and runs the main commands on each.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from packaging.version import Version

from fsdptool.errors import ConfigError
from fsdptool.records.diagnostic import Diagnostic

UNTESTED = "DOC004"


@dataclass(frozen=True, slots=True)
class TestedVersions:
    """The versions of one library, as ``major.minor``.

    Attributes:
        package: Distribution.
        lowest: The oldest version with which models are inspected and planned.
        highest: The newest version that was tested; ``pyproject.toml`` ends below the next.
        trains: The oldest version with which fsdptool trains, if that is a newer one than ``lowest``.
        reason: What the versions before ``trains`` lack.
    """

    package: str
    lowest: str
    highest: str
    trains: str | None = None
    reason: str = ""


TESTED = (
    TestedVersions(
        "torch", "2.8", "2.15", trains="2.10", reason="its torchrun cannot pass on every stop signal"
    ),
    TestedVersions("accelerate", "1.10", "1.15"),
    TestedVersions(
        "transformers",
        "4.57",
        "5.23",
        trains="5.10",
        reason="it cannot read the tokenizers of transformers 5",
    ),
    TestedVersions("diffusers", "0.39", "0.42"),
    TestedVersions("peft", "0.19", "0.21"),
    TestedVersions("bitsandbytes", "0.50", "0.50"),
    TestedVersions("torchao", "0.18", "0.18"),
)
"""Libraries whose internals or exact behaviour fsdptool relies on; the last two are optional.

The whole test suite runs on the versions of ``constraints.txt``.
"""


def untested_versions() -> tuple[Diagnostic, ...]:
    """Return a warning for every installed library whose version was not tested."""
    findings = []
    for library in TESTED:
        version = _installed(library.package)
        if version is None or _release(library.lowest) <= version.release[:2] <= _release(library.highest):
            continue
        tested = library.highest
        if library.lowest != library.highest:
            tested = f"{library.lowest} to {library.highest}"
        findings.append(
            Diagnostic(
                UNTESTED,
                "warning",
                f"{library.package} {version} was not tested with fsdptool: tested versions are {tested}",
                help=f"pip install '{library.package}=={library.highest}.*' if something fails",
            )
        )
    return tuple(findings)


def refuse_old(*, training: bool = False) -> None:
    """Refuse libraries that are older than what was tested.

    Args:
        training: Whether a run is to start. The trainer needs newer versions than inspection and plans do.

    Raises:
        ConfigError: A library is too old; the message says why.
    """
    for library in TESTED:
        version = _installed(library.package)
        if version is None:
            continue
        lowest, reason = library.lowest, "this version was not tested"
        if training and library.trains is not None:
            lowest, reason = library.trains, library.reason
        if version.release[:2] < _release(lowest):
            work = "training" if training else "fsdptool"
            raise ConfigError(
                f"{work} needs {library.package} {lowest} or newer, not {version}: {reason}",
                help=f"pip install '{library.package}=={library.highest}.*'",
            )


def torch_is(*release: int) -> bool:
    """Return whether the installed torch is of a release, or of a newer one."""
    import torch

    return Version(torch.__version__).release >= release


def _installed(package: str) -> Version | None:
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    return Version(text).release
