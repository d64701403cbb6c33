"""Run fsdptool's main paths on the libraries of this interpreter, and say what came of each.

``python benchmarks/versions/smoke.py OUT_JSON``

``corners.py`` prepares environments for it. Every row is a command in a process of its own, so a failure does
not hide the next one. Memory figures are part of the rows: a plan must not depend on the version of a library
unless the model's code does, so the rows of the corners can be compared.
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
    "torch", "transformers", "accelerate", "diffusers", "peft", "datasets", "huggingface_hub", "numpy",
)  # fmt: skip
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
    """Check the machine, with the probe of FSDP2 on two processes.

    torch 2.8 adds gradients over gloo where it should average them: the probe says so.
    """
    row = run("doctor", "--format", "json")
    document = row.pop("document")
    row["probes"] = [{key: probe[key] for key in ("device", "backend", "ok")} for probe in document["probes"]]
    sharded = all(probe["ok"] for probe in document["probes"])
    row["ok"] = sharded is not metadata.version("torch").startswith("2.8.")
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
    """Write an accelerate YAML, check it, and let the installed accelerate load it."""
    path = str(folder / "fsdp.yaml")
    row = run("emit-config", "qwen3:0.6b", "--processes", "8", "-o", path)
    checked = run("validate", path, "--format", "json")
    statuses = [file["status"] for file in checked.get("document", {"files": []})["files"]]
    load = "from accelerate.commands.config.config_args import load_config_from_file as load; import sys; "
    load += "print(load(sys.argv[1]).fsdp_config['fsdp_version'])"
    loaded = subprocess.run([sys.executable, "-c", load, path], capture_output=True, text=True, check=False)
    read = loaded.stdout.strip() == "2"
    return {**row, "ok": row["ok"] and checked["ok"] and read, "files": statuses, "loaded": read}


def train(folder: Path, recipe: str) -> dict[str, Any]:
    """Train on two processes, stop in the middle, resume, and export; or be refused, with the reason."""
    target, work = folder / recipe, RECIPES / recipe
    tool = [sys.executable, "-m", "fsdptool"]
    command = [*tool, "train", str(work), "--config", str(CONFIG), "-o", str(target)]
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
    if process.returncode == 2 and error.startswith("error: training needs "):
        return {"ok": True, "refused": error.splitlines()[0]}
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
    tokens = ("--seq-len", "2048")
    plans = {
        "llama3:8b": tokens,
        "qwen3:0.6b": tokens,
        "gemma3:1b": tokens,
        # The loop over experts of transformers 4.57 takes minutes to trace with all layers.
        "mixtral:8x7b": ("--seq-len", "512", "--override", "num_hidden_layers=2"),
        "flux.1:dev": ("--method", "lora"),
    }
    return {
        "doctor": doctor,
        "validate": lambda: run("validate", str(CONFIG.parent)),
        **{f"detect {name}": lambda name=name: detect(name) for name in ("llama3:8b", "flux.1:dev")},  # type: ignore[misc]
        **{f"plan {name}": lambda name=name: plan(name, *h100, *plans[name]) for name in plans},  # type: ignore[misc]
        "emit-config": lambda: configure(folder),
        "train decoder_full.yaml": lambda: train(folder, "decoder_full.yaml"),
    }


def main() -> int:
    """Run all rows, print each, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "NO_COLOR": "1"}
    results: dict[str, Any] = {}
    document: dict[str, Any] = {
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) if installed(name) else None for name in LIBRARIES},
        "rows": {},
    }
    with tempfile.TemporaryDirectory(prefix="fsdptool-smoke-") as name:
        folder = Path(name)
        os.environ["FSDPTOOL_CACHE"] = str(folder / "cache")
        for title, action in stages(folder).items():
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
