"""Run fsdptool's main paths on the libraries of this interpreter, and say what came of each.

``python benchmarks/versions/smoke.py OUT_JSON [--only TEXT]`` (with ``--only`` the other rows are kept)

``smoke.sh`` prepares an environment for it. Every row is a command in a process of its own, so a failure
does not hide the next one. Memory figures are part of the rows: a plan must not depend on the version of a
library unless the model's code does, so the files of the oldest and the newest versions can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
CONFIG = ROOT / "examples" / "configs" / "two_cpu_processes.yaml"
LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "diffusers",
    "peft",
    "datasets",
    "huggingface_hub",
    "numpy",
)
LIMIT_SECONDS = 1800


def run(*arguments: str, expect: int = 0) -> dict[str, Any]:
    """Run one command and return its status and, where it prints one, its JSON document."""
    done = subprocess.run(
        [sys.executable, "-m", "fsdptool", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    row: dict[str, Any] = {"status": done.returncode, "ok": done.returncode == expect}
    if not row["ok"]:
        row["error"] = (done.stderr.strip() or done.stdout.strip())[-1500:].splitlines()
    try:
        row["document"] = json.loads(done.stdout)
    except ValueError:
        row["output"] = done.stderr.strip().splitlines()[-2:]
    return row


def installed(name: str) -> bool:
    """Say whether a distribution is there."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def doctor() -> dict[str, Any]:
    """Check the machine, with the probe of FSDP2 on two processes."""
    row = run("doctor", "--format", "json")
    document = row.pop("document")
    row["probes"] = [{key: probe[key] for key in ("device", "backend", "ok")} for probe in document["probes"]]
    row["ok"] = all(probe["ok"] for probe in document["probes"])
    row["findings"] = [finding["message"] for finding in document["diagnostics"]]
    return row


def detect(reference: str) -> dict[str, Any]:
    """Choose the classes to wrap."""
    row = run("detect", reference, "--format", "json")
    if row["ok"]:
        document = row.pop("document")
        row["parameters"] = document["parameters"]["total"]
        row["classes"] = document["wrap"]["classes"]
    return row


def plan(*arguments: str) -> dict[str, Any]:
    """Plan the memory of a rank without a search."""
    row = run("plan", *arguments, "--no-search", "--format", "json", expect=0)
    if "document" in row:
        document = row.pop("document")
        by_id = {candidate["id"]: candidate for candidate in document["candidates"]}
        chosen = by_id.get(document["chosen"], document["candidates"][0])
        row["ok"] = row["status"] in (0, 1) and chosen["allocated_peak_bytes"] is not None
        row |= {key: chosen[key] for key in ("allocated_peak_bytes", "reserved_peak_bytes")}
        row["unknowns"] = document["unknowns"]
    return row


def configure(folder: Path) -> dict[str, Any]:
    """Write an accelerate YAML and check it."""
    path = str(folder / "fsdp.yaml")
    row = run("emit-config", "qwen3:0.6b", "--processes", "8", "-o", path)
    checked = run("validate", path, "--format", "json")
    statuses = [file["status"] for file in checked.get("document", {"files": []})["files"]]
    return {**row, "ok": row["ok"] and checked["ok"], "files": statuses}


def train(folder: Path, recipe: str) -> dict[str, Any]:
    """Train on two processes, stop in the middle, resume, and export."""
    source, _, base = recipe.partition(" on ")
    target, work = folder / recipe.replace(" ", "-"), RECIPES / source
    if base:
        # A quantised base is made of integer parameters, which FSDP2 shards by itself from torch 2.13 on.
        text = work.read_text(encoding="utf-8").replace("    rank: 8\n", f"    rank: 8\n    base: {base}\n")
        work = folder / f"{base}.yaml"
        work.write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "fsdptool",
        "train",
        str(work),
        "--config",
        str(CONFIG),
        "-o",
        str(target),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LIMIT_SECONDS
    metrics = target / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= 2:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.05)
    try:
        error = process.communicate(timeout=LIMIT_SECONDS)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return {"ok": False, "error": ["the run did not end"]}
    if process.returncode not in (0, 75):
        return {"ok": False, "status": process.returncode, "error": error.strip().splitlines()[-8:]}
    row: dict[str, Any] = {"stopped": process.returncode}
    resumed = run("train", *command[4:], "--resume", "auto") if process.returncode == 75 else {"ok": True}
    row |= {"resumed": resumed.get("status"), "error": resumed.get("error", [])}
    summary = json.loads((target / "summary.json").read_text(encoding="utf-8"))
    exported = run("export", str(target), "-o", str(target / "exported"))
    row |= {key: summary[key] for key in ("status", "steps", "predicted_peak_bytes", "measured_peak_bytes")}
    row["proven"] = summary["sharding_proof"]["proven"]
    row["exported"] = exported["ok"]
    row["ok"] = bool(resumed["ok"] and exported["ok"] and summary["status"] == "completed" and row["proven"])
    return row


def stages(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the rows, by name."""
    h100 = ("--gpu", "h100", "--gpus", "8")
    rows: dict[str, Callable[[], dict[str, Any]]] = {
        "doctor": doctor,
        **{f"detect {name}": lambda name=name: detect(name) for name in ("llama3:8b", "qwen3:0.6b")},  # type: ignore[misc]
        "plan llama3:8b": lambda: plan("llama3:8b", *h100, "--seq-len", "4096"),
        "plan qwen3:0.6b": lambda: plan("qwen3:0.6b", *h100, "--seq-len", "2048"),
        # Experts in loops and in grouped products, at the size of an example.
        "plan moe_full.yaml": lambda: plan(
            "--recipe", str(RECIPES / "moe_full.yaml"), *h100, "--accumulation", "1"
        ),
        "emit-config and validate": lambda: configure(folder),
        **{
            f"train {recipe}": lambda recipe=recipe: train(folder, recipe)  # type: ignore[misc]
            for recipe in ("decoder_full.yaml", "decoder_lora.yaml on int8", "moe_full.yaml")
        },
    }
    if installed("diffusers"):
        rows["plan flux.1:dev lora"] = lambda: plan("flux.1:dev", *h100, "--method", "lora")
        rows["train flux_lora.yaml"] = lambda: train(folder, "flux_lora.yaml")
    else:
        # One line that names the package, and the status of a wrong configuration.
        def absent() -> dict[str, Any]:
            row = run("detect", "flux.1:dev", expect=2)
            row["ok"] = row["ok"] and any("pip install diffusers" in line for line in row["output"])
            return row

        rows["detect flux.1:dev without diffusers"] = absent
    return rows


def main() -> int:
    """Run all rows, print each, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "NO_COLOR": "1"}
    results: dict[str, Any] = {}
    document: dict[str, Any] = {
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) if installed(name) else None for name in LIBRARIES},
        "rows": {},
    }
    if options.only and options.out.exists():
        document["rows"] = json.loads(options.out.read_text(encoding="utf-8"))["rows"]
    with tempfile.TemporaryDirectory(prefix="fsdptool-smoke-") as name:
        folder = Path(name)
        os.environ["FSDPTOOL_CACHE"] = str(folder / "cache")
        for title, action in stages(folder).items():
            if options.only not in title:
                continue
            try:
                results[title] = action()
            except Exception as error:
                results[title] = {"ok": False, "error": [f"{type(error).__name__}: {error}"[:300]]}
            print(f"{'ok ' if results[title]['ok'] else 'NO '} {title}", flush=True)
            if not results[title]["ok"]:
                print(json.dumps(results[title], indent=1)[-2500:])
            # After every row: a row that hangs must not cost the others.
            text = json.dumps(results).replace(name, "FOLDER").replace(str(ROOT), "CHECKOUT")
            document["rows"] |= json.loads(text)
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
