"""Kill a run repeatedly, let it recover, and compare its final state with an undisturbed run, bit for bit.

    python benchmarks/faults/soak.py --output benchmarks/results/faults-soak.json

Two gloo ranks run the real worker (``fsdptool.training.worker``). A random rank receives SIGKILL at a random
step, or every rank receives it while a checkpoint is being written. Afterwards the files of the final
checkpoint (parameters, optimizer states, random generators) must have the digests of the undisturbed run's,
and ``metrics.jsonl`` the same losses.

Ranks are forked from a process that has imported torch and transformers. This script restarts them as
torchrun would (SIGTERM to the survivor, then SIGKILL, with the attempt counted in its variable), so that
forty recoveries take minutes on two cores. ``tests/runs/test_faults.py`` tests the same faults under
torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fsdptool.records.diagnostic import library_versions, tool_version
from fsdptool.runs.events import read_lines
from fsdptool.runs.manifest import list_checkpoints, read_manifest

RANKS = 2
GRACE_SECONDS = 5.0
"""Seconds in which a survivor must notice that the other rank died, as in the supervisor."""

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = (EXAMPLES / "configs" / "two_cpu_processes.yaml").read_text(encoding="utf-8")

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 259,
    "max_position_embeddings": 128,
}  # fmt: skip


def recipe(folder: Path, steps: int, every: int) -> str:
    """Return the recipe of the soak."""
    return f"""\
model: {{reference: {folder / "model"}, weights: random}}
data: {{source: synthetic}}
batch: {{micro_batch: 2, sequence_length: 32}}
steps: {steps}
checkpoints: {{every_steps: {every}, keep_last: 3}}
tracking: {{log_every: 1000}}
"""


def preload() -> None:
    """Import what every rank needs, once, before the first fork, without starting a thread."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import fsdptool.training.checkpoint.checkpointer
    import fsdptool.training.data
    import fsdptool.training.sampling
    import fsdptool.training.trainer  # noqa: F401

    torch.set_num_threads(1)


def forked(body: Callable[[], int], log: Path) -> int:
    """Run ``body`` in a child whose output goes to ``log``; returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        status = body()
    finally:
        os._exit(status)


def write_folder(work: Path, folder: Path) -> int:
    """Prepare a run as ``fsdptool train`` does, and write its folder."""
    from fsdptool.launch.prepare import prepare
    from fsdptool.launch.start import write_run

    prepared = prepare(work / "recipe.yaml", work / "accelerate.yaml", with_prediction=False)
    write_run(folder, prepared, resume=None, number=0, argv=[], force=False)
    return 0


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Run:
    """A run whose ranks are restarted whenever one of them dies."""

    def __init__(self, work: Path, name: str, *, restarts: int = 0) -> None:
        self.folder = work / name
        self.log = work / f"{name}.log"
        self.restarts = restarts
        self.number = -1
        self.status: int | None = None
        self.alive: dict[int, int] = {}
        self.failed_at: float | None = None
        _, status = os.waitpid(forked(lambda: write_folder(work, self.folder), self.log), 0)
        if status:
            raise RuntimeError(f"the run could not be prepared:\n{self.log.read_text()}")
        self.launch()

    def launch(self) -> None:
        """Start every rank."""
        self.number += 1
        self.failed_at = None
        port = free_port()
        for rank in range(RANKS):
            self.alive[forked(lambda rank=rank: self.work(rank, port), self.log)] = rank  # type: ignore[misc]

    def work(self, rank: int, port: int) -> int:
        """Run one rank."""
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(RANKS),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RESTART_COUNT=str(self.number),
            GLOO_SOCKET_IFNAME="lo",
        )
        from fsdptool.training.worker import main as worker

        return worker([str(self.folder)])

    def tend(self) -> bool:
        """Collect dead ranks and restart all; return whether the run continues."""
        if self.status is not None:
            return False
        while self.alive:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            del self.alive[pid]
            if status and self.failed_at is None:
                self.failed_at = time.monotonic()
                for other in self.alive:
                    os.kill(other, signal.SIGTERM)
        if self.failed_at is not None and time.monotonic() - self.failed_at > GRACE_SECONDS:
            kill(list(self.alive))
        if self.alive:
            return True
        if self.failed_at is None:
            self.status = 0
        elif self.number >= self.restarts:
            self.status = 4
        else:
            self.launch()
            return True
        return False

    def finish(self) -> int:
        """Wait until the run ends."""
        while self.tend():
            time.sleep(0.05)
        assert self.status is not None
        return self.status

    def events(self, kind: str, rank: int | None = None) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        ranks = range(RANKS) if rank is None else [rank]
        paths = [self.folder / "events" / f"rank-{number:05d}.jsonl" for number in ranks]
        return [event for path in paths for event in read_lines(path) if event["kind"] == kind]

    def attempt(self) -> int:
        """Return how many times the workers were restarted."""
        return max((event["attempt"] for event in self.events("started")), default=-1)

    def pids(self) -> dict[int, int]:
        """Return the process ids of the current workers by rank."""
        current = self.attempt()
        return {e["rank"]: e["pid"] for e in self.events("started") if e["attempt"] == current}

    def step(self) -> int:
        """Return the last step recorded."""
        lines = list(read_lines(self.folder / "metrics.jsonl"))
        return int(lines[-1]["step"]) if lines else 0

    def reached(self, goal: int) -> bool:
        """Return whether a step is recorded."""
        return self.step() >= goal

    def recovered(self, before: int) -> bool:
        """Return whether the workers were restarted since then and have taken a step."""
        return self.attempt() > before and self.stepping()

    def stepping(self) -> bool:
        """Return whether the current workers have taken a step since they were started."""
        current = self.attempt()
        started = [event["time"] for event in self.events("started") if event["attempt"] == current]
        lines = list(read_lines(self.folder / "metrics.jsonl"))
        return len(started) == RANKS and bool(lines) and lines[-1]["time"] > max(started)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 240.0) -> bool:
        """Wait for a condition; return whether it became true while the run was alive."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.tend():
            if condition():
                return True
            time.sleep(0.005)
        return False


def kill(pids: list[int]) -> None:
    """Send SIGKILL to processes that may already have exited."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def harass(run: Run, generator: random.Random, kills: int, checkpoint_kills: int) -> list[dict[str, Any]]:
    """Kill the run's ranks the requested number of times, each time after the run has recovered.

    A kill during a checkpoint counts only if the checkpoint was still unfinished afterwards.
    """
    parts = run.folder / "checkpoints"
    left = {"rank": kills, "checkpoint": checkpoint_kills}
    results: list[dict[str, Any]] = []
    while any(left.values()):
        kind = generator.choice([name for name, count in left.items() if count])
        if not run.wait_for(run.stepping):
            break
        before = run.attempt()
        if kind == "rank":
            goal = run.step() + generator.randint(1, 12)
            if not run.wait_for(partial(run.reached, goal)):
                break
            victims = [generator.choice([0, 1])]
        else:
            if not run.wait_for(lambda: any(parts.glob(".step-*.part"))):
                break
            time.sleep(generator.uniform(0.0, 0.01))
            victims = [0, 1]
        pids = run.pids()
        kill([pids[rank] for rank in victims])
        began, step, unfinished = time.monotonic(), run.step(), any(parts.glob(".step-*.part"))
        if not run.wait_for(partial(run.recovered, before)):
            break
        results.append(
            {
                "kind": kind,
                "attempt": run.attempt(),
                "victims": victims,
                "killed_at_step": step,
                "checkpoint_unfinished": unfinished,
                "seconds_until_next_step": round(time.monotonic() - began, 2),
            }
        )
        if kind == "rank" or unfinished:
            left[kind] -= 1
        print(results[-1], flush=True)
    return results


def add_losses(run: Run, kills: list[dict[str, Any]]) -> None:
    """Add to every kill the step at which the run continued and the number of repeated steps."""
    began_at = {event["attempt"]: int(event["step"]) for event in run.events("resumed", 0)}
    for item in kills:
        item["resumed_from_step"] = began_at.get(item["attempt"], 0)
        item["steps_lost"] = item["killed_at_step"] - item["resumed_from_step"]


def final_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the newest checkpoint's files; empty if the run left none."""
    checkpoints = list_checkpoints(folder / "checkpoints")
    if not checkpoints:
        return {}
    manifest = read_manifest(checkpoints[0])
    return {name: entry.sha256 for name, entry in manifest.files.items()}


def losses(folder: Path) -> list[float]:
    """Return the recorded losses in order."""
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


def main() -> int:
    """Run the soak; return 0 only if the run survived every kill and the final states are equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--checkpoint-kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    requested = options.kills + options.checkpoint_kills
    with tempfile.TemporaryDirectory(prefix="fsdptool-soak-") as name:
        work = Path(name)
        preload()
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text(json.dumps(MODEL))
        (work / "accelerate.yaml").write_text(CONFIG)
        (work / "recipe.yaml").write_text(recipe(work, options.steps, options.every))
        began = time.monotonic()
        disturbed = Run(work, "disturbed", restarts=3 * requested)
        kills = harass(disturbed, random.Random(options.seed), options.kills, options.checkpoint_kills)
        status = disturbed.finish()
        add_losses(disturbed, kills)
        plain = Run(work, "plain")
        plain_status = plain.finish()
        ends = final_digests(disturbed.folder), final_digests(plain.folder)
        if status or plain_status:
            # The folders go with the temporary directory: keep what was said.
            print(disturbed.log.read_text()[-8000:], plain.log.read_text()[-8000:], sep="\n", file=sys.stderr)
        result = {
            "benchmark": "faults/soak",
            "tool_version": tool_version(),
            "libraries": library_versions(),
            "machine": {
                "cpus": os.cpu_count(),
                "platform": platform.platform(),
                "processor": platform.machine(),
            },
            "launcher": "ranks forked by the benchmark from a process that has imported torch",
            "load_average": [round(value, 1) for value in os.getloadavg()],
            "asked": {"kills": options.kills, "checkpoint_kills": options.checkpoint_kills},
            "steps": options.steps,
            "checkpoint_every": options.every,
            "survived": {
                "rank": sum(1 for item in kills if item["kind"] == "rank"),
                "checkpoint": sum(
                    1 for item in kills if item["kind"] == "checkpoint" and item["checkpoint_unfinished"]
                ),
            },
            "exit_status": {"disturbed": status, "undisturbed": plain_status},
            "final_checkpoint_equal": bool(ends[0]) and ends[0] == ends[1],
            "losses_equal": losses(disturbed.folder) == losses(plain.folder),
            "most_steps_lost": max((item["steps_lost"] for item in kills), default=None),
            "seconds": round(time.monotonic() - began, 1),
            "kills": kills,
        }
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    print(text)
    survived = result["survived"] == {"rank": options.kills, "checkpoint": options.checkpoint_kills}
    good = result["final_checkpoint_equal"] and result["losses_equal"] and survived
    return 0 if good and status == plain_status == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
