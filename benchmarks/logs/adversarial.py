"""How long ``fsdptool diagnose`` takes for 10 MB of text that is made to be slow.

    python benchmarks/logs/adversarial.py [--megabytes 10] [--write benchmarks/results/logs-adversarial.json]

Seconds are those of this process, so that other programs of the machine count less.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from fsdptool.rules import signatures
from fsdptool.runs.logs import LogText
from fsdptool.runs.recognition import diagnose_logs

_SOURCE = random.Random(1)
_TEXTS = sorted({text for item in signatures() for text in item.texts})
_WORDS = [word for text in _TEXTS for word in text.split()]


def _rank() -> str:
    return f"[rank{_SOURCE.randrange(8)}]: "


def _words() -> str:
    return _rank() + " ".join(_SOURCE.choices(_WORDS, k=12))


def _broken() -> str:
    return _rank() + _SOURCE.choice(_TEXTS)[:-1] + "?"


CASES: dict[str, Callable[[], str]] = {
    "words of all signatures": _words,
    "texts that lack a letter": _broken,
    "every signature": lambda: _rank() + _SOURCE.choice(_TEXTS),
    "thirty signatures in each line": lambda: _rank() + " ".join(_SOURCE.choices(_TEXTS, k=30)),
    "exceptions": lambda: f"{_rank()}{'a.' * 8}Some{_SOURCE.randrange(10**6)}Error: {'x' * 40}",
    "tracebacks without an end": lambda: f"{_rank()}Traceback (most recent call last):",
    "prefixes": lambda: "[a] " * 20 + "2026-06-12T10:02:33Z worker-1 stderr F ERROR: " * 3,
    "escapes": lambda: "\x1b[" + "1;" * 30 + "31" + "\x1b]" * 10,
    "timeouts": lambda: (
        f"{_rank()}Watchdog caught collective operation timeout: WorkNCCL(SeqNum={_SOURCE.randrange(10**6)},"
        " OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)"
    ),
    "lacks of memory": lambda: (
        f"{_rank()}CUDA out of memory. Tried to allocate 1.00 GiB. "
        + "Process 1 has 9.00 GiB memory in use. " * 5
    ),
    "one traceback": lambda: (
        'Traceback (most recent call last):\n  File "/srv/train.py", line 9, in main\n    step(batch)\n'
        "KeyError: 'moon'\n\nDuring handling of the above exception, another exception occurred:\n"
    ),
    "many ranks": lambda: f"[rank{_SOURCE.randrange(10**5)}]: Error: retrying after step 1",
    "lines of five letters": lambda: "error",
    "lines of one letter": lambda: "a",
    "coloured words": lambda: "\x1b[31mError\x1b[0m",
    "no end of line": lambda: "",
}
"""What each line of a text is."""


def text_of(line: Callable[[], str], size: int) -> str:
    """Return a text of about ``size`` characters."""
    first = line()
    if not first:
        return " ".join(_SOURCE.choices(_WORDS, k=size // 7))[:size]
    lines, length = [], 0
    while length < size:
        lines.append(line())
        length += len(lines[-1]) + 1
    return "\n".join(lines)


def main() -> None:
    """Print the seconds of each case, and write them if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=10)
    parser.add_argument("--write", type=Path, help="a JSON file for the table")
    options = parser.parse_args()
    diagnose_logs("warm-up", (LogText("log", "step 1\n", 7, 7),))
    seconds = {}
    for name, line in CASES.items():
        text = text_of(line, options.megabytes << 20)
        begin = time.process_time()
        diagnose_logs("log", (LogText("log", text, len(text), len(text)),))
        seconds[name] = round(time.process_time() - begin, 2)
        print(f"{seconds[name]:6.2f} s  {name}")
    if options.write:
        document = {"megabytes": options.megabytes, "cpu_seconds": seconds}
        options.write.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
