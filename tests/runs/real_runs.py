"""Real runs that tests start: a tiny model on two gloo ranks under torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fsdptool.runs.events import event_path, read_lines
from fsdptool.runs.manifest import list_checkpoints, read_manifest

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = (EXAMPLES / "configs" / "two_cpu_processes.yaml").read_text(encoding="utf-8")

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 262,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}

STEPS = 14

RECIPE = f"""\
model: {{reference: model, weights: random}}
data: {{source: text, path: text.txt, tokenizer: bytes, workers: WORKERS}}
batch: {{micro_batch: 2, sequence_length: 32, accumulation: 2}}
steps: {STEPS}
checkpoints: {{every_steps: 4, keep_last: 10}}
"""


class Work:
    """A folder with a model, data, a recipe and a YAML, and the runs made from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        (folder / "accelerate.yaml").write_text(CONFIG)
        words = " ".join(f"The {n}th sentence says {n * n % 97} and nothing else." for n in range(400))
        (folder / "text.txt").write_text(words)
        (folder / "recipe.yaml").write_text(RECIPE.replace("WORKERS", "0"))

    def arguments(self, name: str, *options: str, recipe: str = "recipe.yaml") -> list[str]:
        return [
            *("train", str(self.folder / recipe), "--config", str(self.folder / "accelerate.yaml")),
            *("-o", str(self.folder / name), "--no-predict", *options),
        ]

    def start(
        self,
        name: str,
        *options: str,
        recipe: str = "recipe.yaml",
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> Run:
        """Start ``fsdptool train`` in the background."""
        return Run(
            self.folder / name,
            [sys.executable, "-m", "fsdptool", *self.arguments(name, *options, recipe=recipe)],
            {**os.environ, **(environment or {})},
            self.folder,
            before,
        )


class Run:
    """One ``fsdptool train``."""

    def __init__(
        self,
        folder: Path,
        argv: list[str],
        environment: Mapping[str, str],
        place: Path,
        before: Callable[[], None] | None,
    ) -> None:
        self.folder = folder
        self.errors = folder.with_name(f"{folder.name}.stderr").open("w+")
        self.answer = folder.with_name(f"{folder.name}.stdout").open("w+")
        self.process = subprocess.Popen(
            argv,
            stdout=self.answer,
            stderr=self.errors,
            env=environment,
            cwd=place,
            preexec_fn=before,  # noqa: PLW1509 - no threads here
        )

    def pid(self, rank: int) -> int:
        """Return the process id of a rank once it has announced itself last."""
        started = [e for e in read_lines(event_path(self.folder, rank)) if e["kind"] == "started"]
        return int(started[-1]["pid"])

    def wait_for_step(self, step: int, seconds: float = 240.0) -> None:
        """Wait until a step is recorded."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            lines = list(read_lines(self.folder / "metrics.jsonl"))
            if lines and lines[-1]["step"] >= step:
                return
            assert self.process.poll() is None, self.said()
            time.sleep(0.01)
        raise TimeoutError(self.said())

    def end(self, seconds: float = 300.0) -> int:
        """Wait for the exit status."""
        return self.process.wait(timeout=seconds)

    def said(self) -> str:
        """Return standard error so far."""
        return Path(self.errors.name).read_text()

    def summary(self) -> dict[str, Any]:
        """Return ``summary.json``."""
        loaded: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return loaded


def losses(folder: Path) -> list[float]:
    """Return the losses of every step in order."""
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


def digests(folder: Path) -> dict[str, str]:
    """Return the digests of the newest checkpoint: weights, optimizer states and generators."""
    newest = list_checkpoints(folder / "checkpoints")[0]
    return {name: entry.sha256 for name, entry in read_manifest(newest).files.items()}


def blocked(folder: Path, ranks: str, step: int = 6, attempts: str = "0") -> dict[str, str]:
    """Return the environment in which ``ranks`` wait for data before the ``step``-th step they take.

    Args:
        folder: Place of what makes them wait.
        ranks: Rank numbers, separated by commas.
        step: Counted from the start of the process.
        attempts: Numbers of the starts by torchrun in which they wait, separated by commas.
    """
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(Path(__file__).with_name("block_data.py").read_text())
    os.mkfifo(folder / "never")
    return {
        "PYTHONPATH": str(folder),
        "BLOCK_STEP": str(step),
        "BLOCK_FILE": str(folder / "never"),
        "BLOCK_RANKS": ranks,
        "BLOCK_ATTEMPTS": attempts,
    }


def release(process: subprocess.Popen[Any], block: Mapping[str, str]) -> None:
    """Let the one rank that :func:`blocked` blocks go on, as soon as it waits.

    A run that what disturbed it has ended already does not need that.
    """
    while process.poll() is None:
        with contextlib.suppress(OSError):  # nobody reads yet
            os.close(os.open(block["BLOCK_FILE"], os.O_WRONLY | os.O_NONBLOCK))
            return
        time.sleep(0.01)
