"""Measure every setting of the matrix that has not been measured yet, and save the figures.

``python benchmarks/memory/run.py [--backend fake|gloo] [--only TEXT] [--again]``

Libraries are imported once; every setting runs in a forked child (one per rank under gloo), so
nothing of one setting is alive in the next. Results: ``benchmarks/results/memory_measured.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from filelock import FileLock
from kept_rows import write_document
from matrix import rows
from settings import Setting

from fsdptool.records.codec import to_json
from fsdptool.records.diagnostic import library_versions
from fsdptool.runs.folder import RunInputs

RESULTS = Path(__file__).parent.parent / "results" / "memory_measured.json"


def main() -> None:
    """Measure the missing settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("fake", "gloo"))
    parser.add_argument("--only", default="", help="text the setting's name must contain")
    parser.add_argument("--again", action="store_true", help="measure every setting again")
    parser.add_argument("--part", default="0/1", help="share of this process among several, as INDEX/COUNT")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    import measure  # noqa: F401 - warms this process up before the first fork
    from diffusers import FluxTransformer2DModel  # noqa: F401
    from peft import inject_adapter_in_model  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    for index, setting in enumerate(rows()):
        wanted = options.backend in (None, setting.backend) and options.only in setting.name
        known = setting.name in _read()["measured"] and not options.again
        if not wanted or known or index % parts != part:
            continue
        began = time.time()
        result = measured(setting)
        result["setting"] = to_json(setting)
        _keep(setting.name, result)
        print(
            f"{setting.name}: {result.get('peak_bytes', result.get('error'))} ({time.time() - began:.0f} s)",
            flush=True,
        )


def _read() -> dict[str, Any]:
    if RESULTS.exists():
        document: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
        return document
    return {
        "instrument": "torch CPU allocator events (profile_memory): running sum, peak in step 2",
        "libraries": library_versions(),
        "hardware": {"machine": platform.machine(), "processor": _processor(), "cores": os.cpu_count()},
        "measured": {},
    }


def _keep(name: str, result: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    with FileLock(Path(tempfile.gettempdir()) / "fsdptool-memory-measured.lock"):
        kept = _read()
        kept["measured"][name] = result
        write_document(RESULTS, kept)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def measured(setting: Setting, inputs: RunInputs | None = None) -> dict[str, Any]:
    """Measure a setting in processes of its own, which leave their process group behind.

    Args:
        setting: The setting.
        inputs: What is measured instead of the setting's own inputs.

    Returns:
        What ``measure`` returned, or the ``error``.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        count = setting.ranks if setting.backend == "gloo" else 1
        port = _free_port()
        children = [_fork(setting, inputs, rank, count, port, out) for rank in range(count)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes) or not out.exists():
            log = out.with_suffix(".log")
            return {
                "error": log.read_text(encoding="utf-8")[-400:] if log.exists() else f"exit codes {codes}"
            }
        document: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return document


def _fork(setting: Setting, inputs: RunInputs | None, rank: int, count: int, port: int, out: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        if setting.backend == "gloo":
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        from measure import measure

        result = measure(setting, inputs)
        if rank == 0:
            out.write_text(json.dumps(result), encoding="utf-8")
        code = 0
    except BaseException as error:
        out.with_suffix(".log").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    finally:
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
