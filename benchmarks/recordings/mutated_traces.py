"""Changes traces of torch's profiler at random, and says what becomes of them: read, cut short or refused.

    python benchmarks/recordings/mutated_traces.py FOLDER [--count 3000] [--write FILE]

FOLDER holds traces (``trace-*.json.gz``). Of each a part is taken: the smaller the text, the more of its
bytes are met. Anything but an answer or an error of fsdptool ends the program. Then a trace of a million
events is read, and traces that are made to be slow.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from fsdptool.errors import FsdptoolError
from fsdptool.runs.recordings.step_times import profile_traces

_PART = 60_000
"""Characters of a trace that are changed, at its beginning and within its events."""


def mutated(data: bytes, source: random.Random) -> bytes:
    """Return a text with a few bytes replaced, removed, repeated or moved."""
    changed = bytearray(data)
    for _ in range(source.randrange(1, 9)):
        at = source.randrange(len(changed))
        match source.randrange(4):
            case 0:
                changed[at] = source.choice(b'0123456789{}[]",:-eE\x00\xff\\u')
            case 1:
                del changed[at : at + source.randrange(60)]
            case 2:
                changed[at:at] = changed[at : at + source.randrange(300)]
            case 3:
                other = source.randrange(len(changed))
                changed[at : at + 40] = changed[other : other + 40]
    return bytes(changed)


def parts(folder: Path) -> Iterator[bytes]:
    """Yield a part of each trace, as a whole document."""
    for path in sorted(folder.glob("trace-*.json.gz")):
        document = json.loads(gzip.decompress(path.read_bytes()))
        work = [event for event in document["traceEvents"] if event.get("cat") == "kernel"][:100]
        kept = {event["args"].get("correlation") for event in work}
        others = [
            event
            for event in document["traceEvents"]
            if event.get("cat") == "user_annotation" or event.get("args", {}).get("correlation") in kept
        ]
        small = {**document, "traceEvents": [*others[:150], *work]}
        text = json.dumps(small).encode()
        yield (
            text
            if len(text) < 4 * _PART
            else json.dumps({"traceEvents": [*others[:60], *work[:40]]}).encode()
        )


def _events(line: Callable[[int], str], count: int) -> bytes:
    return b'{"traceEvents": [' + ",\n".join(map(line, range(count))).encode() + b"]}"


_KERNEL = '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":%d,"dur":5,"args":{"correlation":%d}}'
_HOOK = '{"ph":"X","cat":"user_annotation","name":"FSDP::%s (u%d)","pid":1,"tid":1,"ts":%d,"dur":%d}'
SLOW: dict[str, Callable[[], bytes]] = {
    "a million kernels": lambda: _events(lambda n: _KERNEL % (10 * n, n), 1_000_000),
    "hooks that never end": lambda: _events(
        lambda n: _HOOK % ("pre_forward", n, n, 10**9) if n else _KERNEL % (0, 0), 200_000
    ),
    "gathers within each other": lambda: _events(
        lambda n: _HOOK % ("all_gather", n, n, 10**9) if n else _KERNEL % (0, 0), 200_000
    ),
    "one long name": lambda: b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "' + b"x" * (100 << 20),
    "spaces": lambda: b'{"traceEvents": [' + b" " * (100 << 20),
}
"""Traces that are large, or made to be slow."""


def main() -> None:
    """Print what became of the traces, and write it if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--write", type=Path, help="a JSON file for the table")
    options = parser.parse_args()
    source, outcomes = random.Random(1), Counter[str]()
    seconds = {}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "trace.json")

        def read() -> str:
            try:
                answer = profile_traces([path])
            except FsdptoolError:
                return "refused"
            return "read" if answer.traces[0].complete else "cut short"

        texts = list(parts(options.folder))
        for number in range(options.count):
            path.write_bytes(mutated(texts[number % len(texts)], source))
            outcomes[read()] += 1
        print(dict(outcomes))
        for case, make in SLOW.items():
            path.write_bytes(make())
            begin = time.process_time()
            said = read()
            seconds[case] = round(time.process_time() - begin, 2)
            print(f"{seconds[case]:6.2f} s  {case}: {said}")
    if options.write:
        document = {
            "traces": options.count,
            "outcomes": dict(sorted(outcomes.items())),
            "cpu_seconds": seconds,
        }
        options.write.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
