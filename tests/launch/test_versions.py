"""Tested library versions: the table, pyproject.toml, the pins, doctor and the preflight agree."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from fsdptool.distributed import devices
from fsdptool.launch import doctor
from fsdptool.launch import machine as versions
from fsdptool.launch.prepare import prepare
from fsdptool.planning.hardware import expands
from fsdptool.records.plan import TrainingLoop
from fsdptool.records.sharding import FsdpSettings

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def next_minor(version: str) -> str:
    major, minor = Version(version).release
    return f"{major}.{minor + 1}"


def test_the_bounds_and_the_pins_are_those_of_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (line for lines in project["optional-dependencies"].values() for line in lines)
    requirements = {r.name: r for r in map(Requirement, [*project["dependencies"], *extras])}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    for library in versions.TESTED:
        bounds = f">={library.lowest},<{next_minor(library.highest)}"
        assert requirements[library.package].specifier == Requirement(f"x{bounds}").specifier
        if library.package in pins:
            pinned = Version(pins[library.package]).release[:2]
            assert Version(library.lowest).release <= pinned <= Version(library.highest).release


def test_the_installed_versions_are_tested() -> None:
    assert versions.untested_versions() == ()


@pytest.mark.parametrize(
    ("version", "tested"), [("2.10.1", False), ("2.11.0", True), ("2.14.0+cpu", True), ("2.16.0", False)]
)
def test_other_versions_are_one_line_of_doctor_and_of_the_preflight(
    version: str, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "torch" else real(name))
    _, diagnostics = doctor.examine(with_probe=False)
    told = [item for item in diagnostics if item.code == versions.UNTESTED]
    recipe = EXAMPLES / "recipes" / "decoder_full.yaml"
    config = EXAMPLES / "configs" / "two_cpu_processes.yaml"
    notes = prepare(recipe, config, with_prediction=False, with_data=False).notes
    if tested:
        assert not told and not notes
        return
    assert [item.severity for item in told] == ["warning"]
    assert notes == (told[0].message,)
    assert re.fullmatch(r"torch \S+ was not tested .* tested versions are 2\.11 to 2\.15", notes[0])


def test_the_gpu_is_named_by_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA context is opened for it; variables that workers inherit are part of the prediction."""
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\n", encoding="utf-8")
    monkeypatch.setattr(devices, "_DRIVER", tmp_path)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    cluster = versions.local_cluster(FsdpSettings(num_processes=2))
    assert cluster is not None and cluster.gpu is not None
    assert cluster.gpu.name.startswith("H200") and cluster.gpus_per_node == 2
    assert expands(cluster, TrainingLoop(program="accelerate"))
