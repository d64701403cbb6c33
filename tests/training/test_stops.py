"""A stop signal in any phase of a run: all ranks stop at one step, and the end is the undisturbed run's."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import recipe_runs
import stop_cases
from cases import LLAMA
from pool import Pool

from fsdptool.runs.events import event_path, read_lines
from fsdptool.runs.manifest import list_checkpoints, read_manifest

pytestmark = pytest.mark.distributed

TWO_PROCESSES = Path(__file__).parents[2] / "examples" / "configs" / "two_cpu_processes.yaml"
STEPS = 6
RECIPE = f"""\
model: {{reference: model, weights: random}}
data: {{source: jsonl, path: text.jsonl, tokenizer: bytes}}
batch: {{micro_batch: 2, sequence_length: 16}}
steps: {STEPS}
checkpoints: {{every_steps: 2, keep_last: 10}}
evaluation: {{every_steps: 3, holdout: 0.2, batches: 2, samples: 1}}
ema: {{decay: 0.9}}
"""

STOPS = [
    ("loading", 0, signal.SIGTERM, 0),
    ("proving", 1, signal.SIGTERM, 0),
    ("evaluating", 1, signal.SIGUSR1, 3),
    ("restoring", 0, signal.SIGTERM, 3),
    ("sampling", 1, signal.SIGINT, 3),
    # The thread that writes may begin when step 5 has agreed already.
    ("saving", 1, signal.SIGTERM, (5, 6)),
    ("evaluating", 0, signal.SIGTERM, 6),
]
"""Phase, the rank that gets the signal, the signal, and the step (or steps) at which both ranks may stop."""


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(event_path(folder, 0)) if event["kind"] == kind]


def end_of(folder: Path) -> dict[str, Any]:
    """What a run leaves; who is evaluated twice gives the same twice."""
    (newest, *_) = list_checkpoints(folder / "checkpoints")
    evaluated = {(event["step"], event["loss"]) for event in events(folder, "evaluation")}
    return {
        "files": {name: entry.sha256 for name, entry in read_manifest(newest).files.items()},
        "losses": [line["loss"] for line in read_lines(folder / "metrics.jsonl")],
        "evaluated": sorted(evaluated),
        "samples": {
            str(file.relative_to(folder)): file.read_text() for file in sorted(folder.glob("samples/*/*"))
        },
    }


def test_a_signal_in_any_phase_stops_all_ranks_and_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 262}))
    lines = (json.dumps({"text": f"The {n}th sentence says {n * n % 97}."}) for n in range(60))
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    recipe_runs.write_folder(tmp_path / "whole", recipe, TWO_PROCESSES)
    pool.run(recipe_runs.work_in, 2, str(tmp_path / "whole"))
    folder = tmp_path / "stopped"
    for number, (phase, rank, asked, expected) in enumerate(STOPS):
        recipe_runs.write_folder(folder, recipe, TWO_PROCESSES, resume="auto" if number else None)
        ended = pool.run(stop_cases.stopped_in, 2, str(folder), phase, rank, asked)
        assert ended[rank].pop("sent"), f"nothing was {phase}"
        step = ended[0]["step"]
        assert step in (expected if isinstance(expected, tuple) else (expected,)), phase
        found = [(item["status"], item["step"], item["signal"]) for item in ended]
        assert found == [("stopped", step, asked)] * 2, phase
        newest = list_checkpoints(folder / "checkpoints")
        assert (read_manifest(newest[0]).step if newest else 0) == step, f"{phase}: it saved where it stopped"
    recipe_runs.write_folder(folder, recipe, TWO_PROCESSES, resume="auto")
    ended = pool.run(recipe_runs.work_in, 2, str(folder))
    assert [(item["status"], item["step"]) for item in ended] == [("completed", STEPS)] * 2
    assert end_of(folder) == end_of(tmp_path / "whole")
    assert [step for step, _ in end_of(folder)["evaluated"]] == [3, 6]
    assert len(end_of(folder)["samples"]) == 2
    assert not list((folder / "checkpoints").glob(".*"))
