"""Write the output of real commands into README.md and docs/job.md, between their capture marks.

    python benchmarks/readme/capture.py [NAME ...]      default: every block

A block begins with ``<!-- capture: NAME -->`` and ends with ``<!-- end -->``. Of the main job's step lines
only a few are kept, with ``...`` for the others; nothing else is changed.
"""

from __future__ import annotations

import os
import pty
import re
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "job.md")
BLOCK = re.compile(r"(<!-- capture: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PLAN = "plan llama3:8b --gpu H100-80GB-SXM --gpus 8 --seq-len 4096 --micro-batch 1"
STEP = re.compile(r"step (\d+)/\d+ ")
KEPT_STEPS = (1, 2, 3, 20, 40, 60)


def run(*command: str) -> str:
    """Return the output of a command on a terminal of 110 columns, without colour.

    Standard output is a terminal, so that tables are drawn; standard error is a pipe, so that progress comes
    in lines.
    """
    environment = {**os.environ, "COLUMNS": "110", "LINES": "50", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    screen, terminal = pty.openpty()
    piped, pipe = os.pipe()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=terminal, stderr=pipe) as process:
        os.close(terminal)
        os.close(pipe)
        text = _both(screen, piped)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, text)
    return "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").strip("\n").split("\n"))


def _both(screen: int, piped: int) -> str:
    """Read the terminal and the pipe to their ends, in the order in which they were written to."""
    parts: list[bytes] = []
    with selectors.DefaultSelector() as ready:
        for stream in (screen, piped):
            ready.register(stream, selectors.EVENT_READ)
        while ready.get_map():
            # An answer goes before the word that it was written to a file.
            for key, _ in sorted(ready.select(), key=lambda item: item[0].fd != screen):
                try:
                    data = os.read(key.fd, 1 << 16)
                except OSError:  # a terminal whose last writer left
                    data = b""
                parts.append(data)
                if not data:
                    ready.unregister(key.fd)
                    os.close(key.fd)
    return b"".join(parts).decode()


def plan() -> str:
    """Capture the plan of an 8 B model on eight GPUs, down to the timeline."""
    answer, _, rest = run(sys.executable, "-m", "fsdptool", *PLAN.split()).partition("\n\nPareto front of")
    more = "\n\n... the Pareto front of the candidates, with reasons for each rejection" if rest else ""
    return f"$ fsdptool {PLAN}\n{answer}{more}"


def job() -> str:
    """Capture the main job, with its folder named as a reader would name it."""
    with tempfile.TemporaryDirectory() as folder:
        work = str(Path(folder, "main_job"))
        text = run("sh", "examples/main_job/main_job.sh", work).replace(work, "runs/main_job")
    text = text.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    lines, dropped = [], False
    for line in text.splitlines():
        step = STEP.match(line)
        if step and int(step[1]) not in KEPT_STEPS:
            dropped = True
            continue
        if dropped:
            lines.append("...")
            dropped = False
        # A progress bar overwrites itself on a terminal; only its last state is worth reading.
        lines.append(line.rsplit("\r", 1)[-1])
    return "\n".join(lines)


CAPTURES = {"plan": plan, "job": job}


def main(names: list[str]) -> None:
    """Rewrite the named blocks, or all of them."""

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if names and name not in names:
            return match[0]
        return f"{match[1]}```console\n{CAPTURES[name]()}\n```\n{match[3]}"

    for page in PAGES:
        page.write_text(BLOCK.sub(fill, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
