"""Put what the commands really print into README.md, between its capture marks.

    python benchmarks/readme/capture.py [NAME ...]      default: every block

A block begins with ``<!-- capture: NAME -->`` and ends with ``<!-- end -->``. The main job's step
lines are shortened to a few, which is said in the block; nothing else is changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- capture: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
PLAN = "plan llama3:8b --gpu H100-80GB-SXM --gpus 8 --seq-len 4096 --micro-batch 1"
STEP = re.compile(r"step (\d+)/\d+ ")
KEPT_STEPS = (1, 2, 3, 20, 40, 60)


def run(*command: str) -> str:
    """Return what a command prints on a terminal of 100 columns, without colour."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, check=True, **streams)
    return done.stdout.strip("\n")


def plan() -> str:
    """Capture the plan of an 8 B model on eight GPUs, down to the timeline."""
    answer, _, rest = run(sys.executable, "-m", "fsdptool", *PLAN.split()).partition("\n\nthe front of")
    more = "\n\n... every candidate weighed, and why not" if rest else ""
    return f"$ fsdptool {PLAN}\n{answer}{more}"


def job() -> str:
    """Capture the main job, its folder named as a reader would name it."""
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
    text = README.read_text(encoding="utf-8")

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if names and name not in names:
            return match[0]
        return f"{match[1]}```console\n{CAPTURES[name]()}\n```\n{match[3]}"

    README.write_text(BLOCK.sub(fill, text), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
