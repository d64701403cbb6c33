"""The example family and dialect, installed by pip in a temporary environment, through the command line."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("third_party")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_family"
DIALECT = Path(__file__).parents[2] / "examples" / "third_party_dialect"


def _run(python: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [str(python), *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the environment's python and a folder to work in. Nothing is downloaded."""
    folder = tmp_path_factory.mktemp("third_party")
    home = folder / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    # The packages of the running environment, its editable installs included, lie under ours.
    ours = {*site.getsitepackages(), sysconfig.get_paths()["purelib"]}
    lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in sorted(ours))
    target = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (target / "running.pth").write_text(lines)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"),
            *("--no-build-isolation", "--disable-pip-version-check", "-q", str(EXAMPLE), str(DIALECT)),
        ],
        check=True,
        timeout=300,
    )
    return python, folder


def test_listed_and_detected(installed: tuple[Path, Path]) -> None:
    python, folder = installed
    outcome = _run(python, "-c", "import fsdptool_gatedconv as m; print(m.__file__)", folder=folder)
    assert str(folder) in outcome.stdout
    listed = json.loads(_run(python, "-m", "fsdptool", "families", "--format", "json", folder=folder).stdout)
    assert "gatedconv" in json.dumps(listed)
    done = _run(python, "-m", "fsdptool", "detect", "gatedconv:base", "--format", "json", folder=folder)
    answer = json.loads(done.stdout)
    assert answer["parameters"]["total"] == 78_309_888
    assert answer["wrap"]["classes"] == ["GatedConvBlock"]
    assert answer["model"] == {**answer["model"], "class": "GatedConvLM", "library": "gatedconv"}


def test_not_listed_outside_of_its_environment() -> None:
    from fsdptool.families.registry import load_registry

    assert "gatedconv" not in load_registry()


def test_planned(installed: tuple[Path, Path]) -> None:
    python, folder = installed
    arguments = ("plan", "gatedconv:base", "--gpu", "H100-80GB", "--gpus", "2", "--seq-len", "512")
    answer = json.loads(_run(python, "-m", "fsdptool", *arguments, "--format", "json", folder=folder).stdout)
    assert answer["verdict"] == "fits"
    chosen = next(item for item in answer["candidates"] if item["id"] == answer["chosen"])
    # A rank holds at least half of weights, gradients and two Adam states in fp32.
    assert chosen["allocated_peak_bytes"] > 78_309_888 * 4 * 4 // 2


@pytest.mark.distributed
def test_trained_on_two_ranks(installed: tuple[Path, Path]) -> None:
    python, folder = installed
    run = folder / "run"
    recipe, config = EXAMPLE / "recipe.yaml", EXAMPLE / "accelerate.yaml"
    _run(
        python, "-m", "fsdptool", "train", f"{recipe}", "--config", f"{config}", "-o", f"{run}", folder=folder
    )
    summary = json.loads((run / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["steps"] == 6
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_conforms(installed: tuple[Path, Path]) -> None:
    python, folder = installed
    test = EXAMPLE / "tests" / "test_conforms.py"
    done = _run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), folder=folder)
    assert "1 passed" in done.stdout


def test_the_dialect_validates_migrates_and_writes(installed: tuple[Path, Path]) -> None:
    python, folder = installed
    file = folder / "run.yaml"
    file.write_text((DIALECT / "run.yaml").read_text())
    answer = json.loads(
        _run(python, "-m", "fsdptool", "validate", "run.yaml", "--format", "json", folder=folder).stdout
    )
    (judged,) = answer["files"]
    assert judged["dialect"] == "minitrain" and judged["consumer"] == {"name": "minitrain", "version": "1.0"}
    assert [(item["code"], item["line"]) for item in judged["findings"]] == [("FSD202", 12)]
    _run(python, "-m", "fsdptool", "validate", "--fix", "run.yaml", folder=folder)
    assert "ofload" not in file.read_text() and "# A file of the imaginary" in file.read_text()
    moved = _run(python, "-m", "fsdptool", "migrate", "--to", "accelerate", "run.yaml", folder=folder).stdout
    (folder / "moved.yaml").write_text(moved)
    back = _run(python, "-m", "fsdptool", "migrate", "--to", "minitrain", "moved.yaml", folder=folder).stdout
    (folder / "back.yaml").write_text(back)
    again = _run(python, "-m", "fsdptool", "migrate", "--to", "accelerate", "back.yaml", folder=folder).stdout
    assert again == moved and "LlamaDecoderLayer" in moved and "minitrain: 1" in back


def test_the_dialect_reads_and_writes_whole_runs(installed: tuple[Path, Path]) -> None:
    python, folder = installed
    (folder / "whole.yaml").write_text((DIALECT / "run.yaml").read_text())
    tool = ("-m", "fsdptool")
    answer = json.loads(
        _run(python, *tool, "explain", "whole.yaml", "--format", "json", folder=folder).stdout
    )
    run = answer["run"]
    assert (run["program"], run["family"], run["micro_batch"], run["global_batch"]) == (
        *("minitrain", "qwen3:8b"),
        *(2, 16),
    )
    _run(python, *tool, "migrate", "--to", "trl", "whole.yaml", "-o", "trl.yaml", folder=folder)
    _run(python, *tool, "migrate", "--to", "minitrain", "trl.yaml", "-o", "again.yaml", folder=folder)
    assert "model: Qwen/Qwen3-8B" in (folder / "again.yaml").read_text()


def test_the_dialect_conforms(installed: tuple[Path, Path]) -> None:
    python, folder = installed
    test = DIALECT / "tests" / "test_conforms.py"
    done = _run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), folder=folder)
    assert "1 passed" in done.stdout
