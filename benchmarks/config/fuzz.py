"""Mutate configuration files and read them: no traceback, no hang, no fix with unannounced changes.

    python benchmarks/config/fuzz.py --folder FOLDER --count 20000 [--seed 0] [-o RESULT.json]

Mutations: bytes, keys, values, lines, indentation, encodings, deep nesting, anchors and alias bombs, sizes.
Every reading is timed in CPU seconds, so that a busy machine does not look like a hang. Every fix is applied
and checked by reading the result again. So is the migration, in place and to one other dialect.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptool.config import read_settings
from fsdptool.config.dialects import load_registry
from fsdptool.config.migrate import migrate_file, repair, write_across
from fsdptool.config.reader import fulfils, kept
from fsdptool.config.result import Reading, Verdict
from fsdptool.files.text import UnreadableError, decode
from fsdptool.records.diagnostic import tool_version
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.sharding import FsdpSettings

LIMIT_SECONDS = 2.0
KEYS = [
    "fsdp_version", "fsdp", "fsdp_config", "version", "xla", "distributed_type", "parallelism_config",
    "parallelism_config_cp_size", "num_processes", "mixed_precision", "fsdp_enable", "<<", "gpu_ids", "_note",
]  # fmt: skip
VALUES = [
    "", "null", "no", "yes", "2", "1e8", "0x10", "1:30", "[]", "{}", "[A, B]", "{a: b}", "'", '"', "&a *a",
    "!!python/object:os.system x", "!!binary aGk=", "2026-01-01", "\u00e9", "*x", "|", "FULL_SHARD", "-1",
    "~", "99999999999999999999", ".inf", ".nan", "true", "@", "`", "%", "? a", "- a", "\t", "\u00b2",
    "0x" + "f" * 3900, "9" * 3600,
]  # fmt: skip


@dataclass
class Report:
    """The failures of a fuzzer run."""

    readings: int = 0
    refused: int = 0
    fixed: int = 0
    migrated: int = 0
    slowest: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def mutate(data: bytes, random_: random.Random) -> bytes:
    """Return one to four mutations of a file."""
    for _ in range(random_.randint(1, 4)):
        data = random_.choice(MUTATIONS)(data, random_)[: 1 << 16]
    return data


def _bytes(data: bytes, r: random.Random) -> bytes:
    at = r.randrange(len(data) + 1)
    return data[:at] + bytes(r.randrange(256) for _ in range(r.randint(1, 4))) + data[at + r.randint(0, 3) :]


def _cut(data: bytes, r: random.Random) -> bytes:
    first, last = sorted((r.randrange(len(data) + 1), r.randrange(len(data) + 1)))
    return data[:first] + data[last:]


def _lines(
    change: Callable[[list[bytes], int, random.Random], None],
) -> Callable[[bytes, random.Random], bytes]:
    def mutation(data: bytes, r: random.Random) -> bytes:
        lines = data.split(b"\n")
        change(lines, r.randrange(len(lines)), r)
        return b"\n".join(lines)

    return mutation


def _duplicate(lines: list[bytes], at: int, r: random.Random) -> None:
    lines.insert(r.randrange(len(lines) + 1), lines[at])


def _indent(lines: list[bytes], at: int, r: random.Random) -> None:
    lines[at] = r.choice([b" ", b"  ", b"\t", b"- "]) + lines[at] if r.random() < 0.6 else lines[at].lstrip()


def _value(lines: list[bytes], at: int, r: random.Random) -> None:
    key, _, _ = lines[at].partition(b":")
    lines[at] = key + b": " + r.choice(VALUES).encode()


def _key(lines: list[bytes], at: int, r: random.Random) -> None:
    head, colon, tail = lines[at].partition(b":")
    indent = head[: len(head) - len(head.lstrip())]
    lines[at] = indent + r.choice(KEYS).encode() + (colon or b":") + tail


def _swap(lines: list[bytes], at: int, r: random.Random) -> None:
    other = r.randrange(len(lines))
    lines[at], lines[other] = lines[other], lines[at]


def _anchor(lines: list[bytes], at: int, r: random.Random) -> None:
    key, colon, tail = lines[at].partition(b":")
    lines[at] = key + colon + r.choice([b" &a", b" *a", b" *b", b" &b"]) + tail


def _encoding(data: bytes, r: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    return text.encode(r.choice(["utf-16", "utf-32", "latin-1", "utf-8-sig", "utf-7"]), "replace")


def _nest(data: bytes, r: random.Random) -> bytes:
    depth = r.choice([10, 70, 500, 5000])
    opening, closing = r.choice([(b"[", b"]"), (b"{a: ", b"}"), (b'{"a": ', b"}"), (b"- ", b"")])
    return data + b"\nfsdp_deep: " + opening * depth + b"1" + closing * depth + b"\n"


def _bomb(data: bytes, r: random.Random) -> bytes:
    rows = [b"b0: &b0 [1, 1, 1, 1, 1, 1, 1, 1]"]
    for level in range(1, r.randint(2, 9)):
        rows.append(b"b%d: &b%d [%s]" % (level, level, b", ".join([b"*b%d" % (level - 1)] * 8)))
    return data + b"\n" + b"\n".join(rows) + b"\n"


def _merge(data: bytes, r: random.Random) -> bytes:
    return b"base: &base {fsdp_version: 2}\n" + data + b"\nfsdp_config:\n  <<: *base\n"


def _newlines(data: bytes, r: random.Random) -> bytes:
    return data.replace(b"\n", r.choice([b"\r\n", b"\r", b"\n\n", b"\xc2\x85", b"\xe2\x80\xa8"]))


def _big(data: bytes, r: random.Random) -> bytes:
    return data + b"# " + b"x" * r.choice([1000, 60000])


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    _bytes, _cut, _lines(_duplicate), _lines(_indent), _lines(_value), _lines(_value), _lines(_key),
    _lines(_key), _lines(_swap), _lines(_anchor), _encoding, _nest, _bomb, _merge, _newlines, _big,
]  # fmt: skip


def examine(data: bytes, name: str, report: Report) -> Reading | None:
    """Read, judge and fix one mutated file, and record failures."""
    started = time.process_time()
    try:
        source = decode(data, name)
    except UnreadableError as error:
        report.refused += 1
        report.codes[error.code] += 1
        return None
    reading = read_settings(source)
    report.readings += 1
    for item in reading.diagnostics:
        report.codes[item.code] += 1
    json.dumps(Verdict((reading,)).document())
    if reading.dialect is None:
        report.refused += 1
    else:
        _fix(reading, report, name)
        _migrate(reading, report, name)
    report.slowest = max(report.slowest, time.process_time() - started)
    return reading


def _fix(reading: Reading, report: Report, name: str) -> None:
    safe = repair(reading)
    if safe.after.text != safe.before.text:
        report.fixed += 1
        # A safe fix changes no setting that is in effect.
        if not kept(reading, safe.reading, {}):
            report.failures.append(
                f"{name}: a safe fix changed the run: {[item.code for item in safe.applied]}"
            )
    unsafe = repair(reading, unsafe=True)
    promised: dict[str, Any] = {}
    for item in unsafe.applied:
        for key, value in item.changes.items():
            # A later fix may undo an earlier one's change: what counts is that somebody said it.
            if key not in promised or not fulfils(promised[key], unsafe.reading.facts.get(key)):
                promised[key] = value
    if unsafe.after.text != unsafe.before.text and not kept(reading, unsafe.reading, promised):
        report.failures.append(f"{name}: a fix changed more than it said: {[i.code for i in unsafe.applied]}")


def _migrate(reading: Reading, report: Report, name: str) -> None:
    assert reading.source is not None
    others = sorted(load_registry().names)
    for to in (None, others[len(reading.source.text) % len(others)]):
        migrated = migrate_file(Path(name), to=to, source=reading.source)
        if migrated.after is None:
            if not migrated.refusal or "\n" in migrated.refusal:
                report.failures.append(f"{name}: refused to migrate to {to} without one clear line")
            continue
        report.migrated += migrated.changed
        dialect = to or reading.dialect
        ending = ".json" if dialect in ("trainer", "simpletuner") else ".yaml"
        same = dialect == reading.dialect
        data = reading.source.encode(migrated.after) if same else migrated.after.encode()
        again = decode(data, name if same else f"made{ending}")
        second = migrate_file(Path(name), to=to, dialect=dialect, source=again)
        if second.after != migrated.after:
            report.failures.append(f"{name}: migrating to {to} again is not the same: {second.refusal}")


def fuzz(files: list[tuple[str, bytes]], count: int, seed: int) -> Report:
    """Examine ``count`` mutations of ``files``.

    Args:
        files: Names and contents to start from.
        count: Number of mutations.
        seed: Seed of the mutations.
    """
    report = Report()
    for number in range(count):
        generator = random.Random(f"{seed}:{number}")
        name, data = generator.choice(files)
        mutated = mutate(data, generator)
        before = report.slowest
        report.slowest = 0.0
        try:
            examine(mutated, name, report)
        except Exception:  # every escape is a finding about us
            report.failures.append(f"{name} seed {seed}:{number}: {traceback.format_exc(limit=-3)}")
        if report.slowest > LIMIT_SECONDS:
            report.failures.append(f"{name} seed {seed}:{number}: took {report.slowest:.2f} CPU s")
        report.slowest = max(before, report.slowest)
    return report


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    files = [
        (path.name, path.read_bytes()) for path in sorted(options.folder.iterdir()) if path.suffix != ".jsonl"
    ]
    # Nobody publishes command lines and environments as files of their own: ours stand for them.
    settings = FsdpSettings(wrap_classes=("Block",), num_processes=8, mesh=ParallelDims(2, 4))
    files += [
        (f"made.{dialect}", write_across(settings, dialect)[0].encode()) for dialect in ("env", "flags")
    ] * 8
    started = time.perf_counter()
    report = fuzz(files, options.count, options.seed)
    result = {
        "benchmark": "config-fuzz",
        "tool_version": tool_version(),
        "python": platform.python_version(),
        "machine": f"{platform.processor() or platform.machine()}",
        "files": len(dict(files)),
        "mutations": options.count,
        "seed": options.seed,
        "read": report.readings,
        "refused": report.refused,
        "fixed": report.fixed,
        "migrated": report.migrated,
        "slowest_cpu_seconds": round(report.slowest, 3),
        "limit_seconds": LIMIT_SECONDS,
        "peak_resident_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "wall_seconds": round(time.perf_counter() - started, 1),
        "failures": report.failures[:20],
        "failure_count": len(report.failures),
        "codes_seen": len(report.codes),
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
