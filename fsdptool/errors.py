"""The error tree: every failure a user can cause, with its exit code.

Anything that is not an :class:`FsdptoolError` is a bug in fsdptool and exits with
:data:`ExitCode.INTERNAL`. Messages are one line: what, where, and what to do next.
"""

from __future__ import annotations

import errno
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of the command line, stable within a major version (docs/reference/exit-codes.md)."""

    CLEAN = 0
    FINDINGS = 1
    """An error finding, a plan that does not fit, or a saved plan that no longer holds."""
    USAGE = 2
    """Bad arguments, an unreadable reference or an invalid configuration."""
    INTERNAL = 3
    WORKER_FAILED = 4
    INCOMPLETE = 5
    """The verdict is unknown: part of the answer could not be derived."""
    RESUMABLE = 75
    """Stopped on request with a checkpoint; start again with ``--resume auto``."""
    INTERRUPTED = 130


class FsdptoolError(Exception):
    """A failure with one clear line.

    Args:
        message: What is wrong and where, without a trailing full stop.
        help: What to do next, or None when nothing is known.
        others: Further mistakes in the same input, in its order.
    """

    exit_code: ExitCode = ExitCode.USAGE

    def __init__(
        self, message: str, *, help: str | None = None, others: tuple[FsdptoolError, ...] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.help = help
        self.others = others
        if help is not None:
            # Tracebacks and notebooks show notes; the command line prints the help itself.
            self.add_note(f"help: {help}")


class ReferenceError(FsdptoolError):  # noqa: A001 - within this package a reference names a model
    """A model reference that cannot be resolved (unknown family, folder without a config, ...)."""


class ModelError(FsdptoolError):
    """A model that resolves but cannot be built or inspected."""


class InputsError(ModelError):
    """A model of which nothing says what a micro-batch looks like: it can be inspected, but not traced."""


class ConfigError(FsdptoolError):
    """A configuration or recipe that cannot be used."""


class PlanError(FsdptoolError):
    """A plan that cannot be derived from its inputs (0 GPUs, unknown GPU, impossible mesh, ...)."""


class OptionError(FsdptoolError, TypeError):
    """A keyword argument that a function of the Python interface does not have."""


class WorkerError(FsdptoolError):
    """A training process failed."""

    exit_code = ExitCode.WORKER_FAILED


class ShardingError(WorkerError):
    """A live model that is not sharded as planned; the message lists what differs, a line each."""


class StoppedError(FsdptoolError):
    """A run stopped on request and can be resumed."""

    exit_code = ExitCode.RESUMABLE


class StorageError(FsdptoolError):
    """A file or folder that cannot be read or written (full disk, read-only cache, ...)."""


def unusable_name(error: Exception) -> StorageError | None:
    """Return what is wrong if an error comes from a name that no file can have; None for other errors."""
    if not isinstance(error, OSError) or error.errno not in _UNUSABLE:
        return None
    name = str(error.filename)
    shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
    return StorageError(f"{shown} cannot be used: {error.strerror}", help="check the path")


def missing_extra(error: Exception, wanted: str | None = None) -> FsdptoolError | None:
    """Return which extra to install if an error comes from a library that one of them brings; None otherwise.

    Args:
        error: What an import raised.
        wanted: The extra that the command needs; by default the smallest one that brings the library.
    """
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    from importlib import metadata

    from packaging.requirements import Requirement

    package = error.name.partition(".")[0]
    libraries: dict[str, set[str]] = {}
    for requirement in map(Requirement, metadata.requires("fsdptool") or ()):
        _, _, extra = str(requirement.marker or "").partition("extra == ")
        libraries.setdefault(extra.strip("'\""), set()).add(requirement.name.replace("-", "_"))
    extras = sorted((len(names), extra) for extra, names in libraries.items() if extra and package in names)
    if not extras:
        return None
    chosen = wanted if any(name == wanted for _, name in extras) else extras[0][1]
    return FsdptoolError(
        f"{package} is not installed",
        help=f"pip install 'fsdptool[{chosen}]' (in the clone: pip install '.[{chosen}]')",
    )


_UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP)
_SHOWN = 120
