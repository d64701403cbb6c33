"""Compare ``fsdptool migrate`` with ``accelerate to-fsdp2`` on the same FSDP1 files.

    python benchmarks/config/against_to_fsdp2.py --folder FOLDER [-o RESULT.json]

Both tools migrate every accelerate file of the folder that describes FSDP1. The results run through
accelerate's own loader, launch environment and plugin, and are compared with what the original file runs:

- ``works``: accelerate accepts the file and starts FSDP2;
- ``means_the_same``: reshard, wrapping, state dict, offload, loading, checkpointing, precision, processes
  and (for hybrid sharding across machines) the mesh equal those of the original, which must itself run;
- ``clean``: no key is left that accelerate does not read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
import tempfile
from collections import Counter
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "config"))

from accelerate_oracle import run_accelerate  # noqa: E402

from fsdptool.config import read_settings  # noqa: E402
from fsdptool.config.canonical import RESHARD_OF_STRATEGY, hybrid_mesh  # noqa: E402
from fsdptool.config.migrate import migrate_file  # noqa: E402

SAME = (
    "wrap_policy", "wrap_classes", "min_num_params", "state_dict_type", "cpu_offload",
    "cpu_ram_efficient_loading", "activation_checkpointing", "mixed_precision", "num_machines",
)  # fmt: skip
LEFTOVERS = {"FSD202", "FSD204", "FSD211", "FSD215", "FSD302", "FSD303", "FSD325", "FSD332", "FSD334"}


def theirs(path: Path, target: Path) -> str | None:
    """Run ``accelerate to-fsdp2`` in this process; return why it failed, or None."""
    from accelerate.commands.to_fsdp2 import to_fsdp2_command

    arguments = SimpleNamespace(config_file=str(path), output_file=str(target), overwrite=False)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            to_fsdp2_command(arguments)
    except (Exception, SystemExit) as error:  # the benchmark counts how it ends
        return f"{type(error).__name__}: {error}"
    return None if target.exists() else "nothing was written"


def ours(path: Path, target: Path) -> str | None:
    """Migrate with fsdptool; return the refusal, or None."""
    migrated = migrate_file(path)
    if migrated.after is None:
        return migrated.refusal
    target.write_bytes(migrated.encoded or migrated.after.encode())
    return None


def judge(path: Path, made: Path, flags: tuple[str, ...]) -> Counter[str]:
    """Compare what the original runs with what the migrated file runs."""
    before, after = run_accelerate(path, *flags), run_accelerate(made, *flags)
    result: Counter[str] = Counter()
    if after.error is None and after.fsdp and after.settings.get("fsdp_version") == 2:
        result["works"] += 1
        result["means_the_same"] += before.error is None and means_the_same(before.settings, after.settings)
    codes = {item.code for item in read_settings(made).diagnostics}
    result["clean"] += not codes & LEFTOVERS
    kept = [line.strip() for line in path.read_text().splitlines() if line.strip().startswith("#")]
    result["keeps_comments"] += all(line in made.read_text() for line in kept)
    return result


def means_the_same(before: Any, after: Any) -> bool:
    """Return whether the FSDP2 settings are those of the FSDP1 run."""
    strategy = before["sharding_strategy"]
    if strategy not in RESHARD_OF_STRATEGY or after["reshard_after_forward"] != RESHARD_OF_STRATEGY[strategy]:
        return False
    if strategy.startswith("hybrid"):
        mesh = hybrid_mesh(before["num_processes"], before["num_machines"])
        if any(after.get(key) != size for key, size in mesh.items()):
            return False
    return all(before.get(key) == after.get(key) for key in SAME)


def main() -> int:
    """Run both tools on every FSDP1 file of a folder and print the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    counts: dict[str, Counter[str]] = {"accelerate to-fsdp2": Counter(), "fsdptool migrate": Counter()}
    files = originals = 0
    with tempfile.TemporaryDirectory() as name:
        for path in sorted(options.folder.iterdir()):
            reading = read_settings(path) if path.suffix != ".jsonl" else None
            if reading is None or reading.dialect != "accelerate" or reading.version != 1:
                continue
            files += 1
            flags = () if reading.facts.get("num_processes") is not None else ("--num_processes", "8")
            originals += run_accelerate(path, *flags).error is None
            for tool, migrate in (("accelerate to-fsdp2", theirs), ("fsdptool migrate", ours)):
                folder = Path(name) / tool.replace(" ", "_")
                folder.mkdir(exist_ok=True)
                built = folder / path.name
                problem = migrate(path, built)
                if problem is not None:
                    counts[tool]["refused"] += 1
                    continue
                counts[tool] += judge(path, built, flags)
                counts[tool]["written"] += 1
    columns = ("written", "refused", "works", "means_the_same", "clean", "keeps_comments")
    result = {
        "benchmark": "config-against-to-fsdp2",
        "accelerate": metadata.version("accelerate"),
        "fsdptool": metadata.version("fsdptool"),
        "files": files,
        "originals_accelerate_runs": originals,
        "results": {tool: {column: count[column] for column in columns} for tool, count in counts.items()},
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
