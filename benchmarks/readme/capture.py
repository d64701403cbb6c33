"""Write the output of real commands into the documentation, and draw the picture of a plan.

    python benchmarks/readme/capture.py [NAME ...]      default: every block, and the picture

A block begins with ``<!-- capture: NAME -->`` and ends with ``<!-- end -->``. The main job keeps a few of its
step lines, and answers to questions keep the paragraphs that matter there, with ``...`` for the
others; nothing else is changed. ``picture`` writes ``docs/images/plan.svg``. The figures of their plans
also go to ``benchmarks/results/questions.json``: a test compares the page with them, because most of these
plans take too long for a test.
"""

from __future__ import annotations

import json
import os
import pty
import re
import selectors
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PICTURE = DOCS / "images" / "plan.svg"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "-->\n```console\n" in path.read_text(encoding="utf-8"))
FIGURES = ROOT / "benchmarks" / "results" / "questions.json"
BLOCK = re.compile(r"(<!-- capture: (?P<name>[a-z-]+) -->\n)```console\n.*?(<!-- end -->)", re.DOTALL)
PLAN = "plan llama3:8b --gpu H100-80GB-SXM --gpus 8 --seq-len 4096 --micro-batch 1"
STYLES = re.compile("\x1b\\[[0-9;]*m")
STEP = re.compile(r"step (\d+)/\d+ ")
KEPT_STEPS = (1, 2, 3, 20, 40, 60)

FSDP1 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_use_orig_params: true
  fsdp_sync_module_states: true
"""
_OFFER = "name: {0}\ngpu: {1}\ngpus_per_node: {2}\nhost_memory: 256 GiB\nprice_per_gpu_hour: {3}\n"
OFFERS = (
    ("four-4090", "RTX-4090-24GB", 4, "0.40"),
    ("two-a100", "A100-80GB-SXM", 2, "1.40"),
    ("one-h100", "H100-80GB-SXM", 1, "2.40"),
)
FILES = {"fsdp1.yaml": FSDP1, **{f"{offer[0]}.yaml": _OFFER.format(*offer) for offer in OFFERS}}
"""What the commands of the questions read, in their working directory."""

_FULL = "plan llama3:8b --gpu A100-40GB-SXM --gpus 4 --seq-len 4096 --micro-batch 4 --checkpointing none"
_CLUSTERS = " ".join(f"--cluster {offer[0]}.yaml" for offer in OFFERS)
QUESTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "wrap": ("detect llama3:8b", ("wrap:",)),
    "two-gpus": (
        "plan llama3:70b --method qlora --gpu RTX-4090-24GB --gpus 2 --seq-len 2048 --host-memory '128 GiB'",
        ("llama3", "suggested"),
    ),
    "which-gpus": (
        f"plan qwen2.5:7b --method lora --seq-len 4096 --global-batch 64 --steps 1000 {_CLUSTERS}"
        " --prefer price",
        ("qwen2.5", "offer"),
    ),
    "how-long": (
        "plan llama3:8b --gpu H100-80GB-SXM --gpus 8 --seq-len 4096 --global-batch 64 --steps 2000"
        " --price 2.50",
        ("llama3",),
    ),
    "out-of-memory": (f"{_FULL} --no-search", ("llama3", "memory", "suggested")),
    "largest-batch": (
        "plan llama3.1:8b --method lora --gpu RTX-4090-24GB --gpus 2 --seq-len 4096 --max-batch",
        ("checkpointing", "largest"),
    ),
    "longest-sequence": (
        "plan llama3.1:8b --method lora --gpu H100-80GB-SXM --gpus 1 --sweep seq-len=8192,16384,32768",
        ("sequence",),
    ),
    "what-runs": ("explain fsdp1.yaml", ("fsdp1", "  setting")),
    "fsdp-two": ("migrate --diff fsdp1.yaml", ("---",)),
}
"""Block of a page in ``docs/how-to`` to its command, and how the paragraphs begin that the page shows."""
QUICK = ("what-runs", "fsdp-two", "wrap", "out-of-memory")
"""Questions whose answers a test derives anew."""
PLANS = ("two-gpus", "which-gpus", "how-long", "out-of-memory", "largest-batch")
"""Questions whose figures are kept."""


def run(
    *command: str,
    cwd: Path = ROOT,
    columns: int = 110,
    statuses: tuple[int, ...] = (0,),
    progress: bool = True,
) -> str:
    """Return the output of a command on a terminal, without colour.

    Standard output is a terminal, so that tables are drawn; standard error is a pipe, so that progress comes
    in lines.
    """
    environment = {**os.environ, "COLUMNS": f"{columns}", "LINES": "50", "TERM": "dumb"}
    environment |= {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    screen, terminal = pty.openpty()
    piped, pipe = os.pipe()
    errors = pipe if progress else subprocess.DEVNULL
    with subprocess.Popen(command, cwd=cwd, env=environment, stdout=terminal, stderr=errors) as process:
        os.close(terminal)
        os.close(pipe)
        text = _both(screen, piped)
    if process.returncode not in statuses:
        raise subprocess.CalledProcessError(process.returncode, command, text)
    text = STYLES.sub("", text)
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
    """Capture the plan of an 8 B model on eight GPUs."""
    answer = run(sys.executable, "-m", "fsdptool", *PLAN.split(), columns=100, progress=False)
    return f"$ fsdptool {PLAN}\n{answer}"


def picture() -> None:
    """Draw the same plan."""
    command = (*PLAN.split(), "-o", str(PICTURE), "--force")
    run(sys.executable, "-m", "fsdptool", *command)


def question(name: str) -> str:
    """Capture the answer to a question: the paragraphs that matter, ``...`` for the others."""
    command, starts = QUESTIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        for file, text in FILES.items():
            Path(folder, file).write_text(text, encoding="utf-8")
        given = (sys.executable, "-m", "fsdptool", *shlex.split(command))
        if name in PLANS:
            given += ("-o", "answer.json")
        answer = run(*given, cwd=Path(folder), columns=96, statuses=(0, 1), progress=False)
        if name in PLANS:
            keep_figures(name, json.loads(Path(folder, "answer.json").read_text(encoding="utf-8")))
    return f"$ fsdptool {command}\n{paragraphs(answer, starts)}"


def keep_figures(name: str, plan: Mapping[str, Any]) -> None:
    """Keep the figures of a plan that its answer shows, in the form of a plan document."""
    kept = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    offers = plan["details"].get("offers", [])
    ids = {plan["chosen"] or plan["candidates"][0]["id"], *(offer["candidate"] for offer in offers)}
    kept[name] = {
        "command": f"fsdptool {QUESTIONS[name][0]}",
        "tool_version": plan["tool_version"],
        "libraries": plan["libraries"],
        "verdict": plan["verdict"],
        "chosen": plan["chosen"],
        "inputs": {"model": {"reference": plan["inputs"]["model"]["reference"]}},
        "candidates": [
            {key: value for key, value in item.items() if key in _SHOWN}
            for item in plan["candidates"]
            if item["id"] in ids
        ],
        "next_steps": [{key: step[key] for key in _SHOWN_STEP} for step in plan["next_steps"]],
        "details": {"clusters": plan["details"]["clusters"], "offers": offers},
    }
    text = json.dumps({key: kept[key] for key in PLANS if key in kept}, indent=1)
    FIGURES.write_text(text + "\n", encoding="utf-8")


_SHOWN = (
    *("id", "settings", "device_total_bytes", "usable_bytes", "slack_bytes", "fit_share", "rejected_by"),
    *("step_seconds", "step_seconds_range", "tokens_per_second", "tokens_per_second_range"),
)
_SHOWN_STEP = ("kind", "change", "device_total_bytes", "tokens_per_second")


def paragraphs(answer: str, starts: tuple[str, ...]) -> str:
    """Return the paragraphs of an answer that begin with one of ``starts``, and ``...`` for the others."""
    kept: list[str] = []
    for part in re.split(r"\n\n+", answer):
        if part.startswith(starts):
            kept.append(part)
        elif not kept or kept[-1] != "...":
            kept.append("...")
    return "\n\n".join(kept)


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


CAPTURES: dict[str, Callable[[], str]] = {
    "plan": plan,
    "job": job,
    **{name: partial(question, name) for name in QUESTIONS},
}


def main(names: list[str]) -> None:
    """Rewrite the named blocks, or all of them and the picture."""

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if names and name not in names:
            return match[0]
        return f"{match[1]}```console\n{CAPTURES[name]()}\n```\n{match[3]}"

    for page in PAGES:
        page.write_text(BLOCK.sub(fill, page.read_text(encoding="utf-8")), encoding="utf-8")
    if not names or "picture" in names:
        picture()


if __name__ == "__main__":
    main(sys.argv[1:])
