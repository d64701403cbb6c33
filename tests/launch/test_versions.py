"""Tested library versions: the table, pyproject.toml, the pins, doctor and the preflight agree."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from fsdptool import torch_private, versions
from fsdptool.cli.app import run
from fsdptool.distributed import devices
from fsdptool.launch import doctor
from fsdptool.launch.machine import local_cluster
from fsdptool.launch.prepare import prepare
from fsdptool.planning.hardware import expands
from fsdptool.records.plan import TrainingLoop
from fsdptool.records.sharding import FsdpSettings
from fsdptool.torch_private import PrivateName

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def next_minor(version: str) -> str:
    major, minor = Version(version).release
    return f"{major}.{minor + 1}"


def test_the_bounds_and_the_pins_are_those_of_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [line for name, lines in extras.items() if name != "train" for line in lines]
    requirements = {r.name: r for r in map(Requirement, [*project["dependencies"], *lines])}
    train = {r.name: str(r.specifier) for r in map(Requirement, extras["train"])}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    for library in versions.TESTED:
        bounds = f">={library.lowest},<{next_minor(library.highest)}"
        assert requirements[library.package].specifier == Requirement(f"x{bounds}").specifier
        assert train.get(library.package) == (library.trains and f">={library.trains}")
        assert (library.trains is None) is (library.reason == "")
        if library.package in pins:
            pinned = Version(pins[library.package]).release[:2]
            assert Version(library.lowest).release <= pinned <= Version(library.highest).release


def test_the_installed_versions_are_tested() -> None:
    assert versions.untested_versions() == ()


@pytest.mark.parametrize(("version", "tested"), [("2.10.1", True), ("2.14.0+cpu", True), ("2.16.0", False)])
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
    assert re.fullmatch(r"torch \S+ was not tested .* tested versions are 2\.8 to 2\.15", notes[0])


def test_a_private_name_that_torch_lacks_is_one_line_of_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = PrivateName("torch._no_such_module", "name", "a test")
    monkeypatch.setattr(torch_private, "NAMES", (*torch_private.NAMES, gone))
    _, diagnostics = doctor.examine(with_probe=False)
    (told,) = (item for item in diagnostics if item.code == "DOC006")
    assert told.severity == "warning"
    assert told.message.endswith(" lacks what fsdptool uses: torch._no_such_module.name")


@pytest.mark.parametrize(
    ("package", "version", "plans", "told"),
    [
        ("torch", "2.7.1", False, "torch 2.8 or newer, not 2.7.1: this version was not tested"),
        ("torch", "2.9.1+cpu", True, "torch 2.10 or newer, not 2.9.1+cpu: its torchrun cannot"),
        (
            "transformers",
            "4.57.6",
            True,
            "transformers 5.10 or newer, not 4.57.6: it cannot read the tokenizers",
        ),
        ("accelerate", "1.9.0", False, "accelerate 1.10 or newer, not 1.9.0: this version was not tested"),
    ],
)
def test_older_versions_are_refused_with_the_reason(
    package: str,
    version: str,
    plans: bool,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """The base needs none of them; what is planned already stays in the cache."""
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == package else real(name))
    monkeypatch.setenv("FSDPTOOL_CACHE", str(tmp_path))
    assert run(["detect", "qwen3:0.6b"]) == (0 if plans else 2)
    if not plans:
        assert f"error: fsdptool needs {told}" in capsys.readouterr().err
    recipe = str(EXAMPLES / "recipes" / "decoder_full.yaml")
    config = str(EXAMPLES / "configs" / "two_cpu_processes.yaml")
    assert run(["train", recipe, "--config", config, "-o", str(tmp_path / "run")]) == 2
    lowest = next(item.trains or item.lowest for item in versions.TESTED if item.package == package)
    error = capsys.readouterr().err
    assert error.startswith(f"error: training needs {package} {lowest} or newer, not {version}: ")
    assert plans is (told in error) or package == "accelerate"
    assert not (tmp_path / "run").exists()


def test_the_gpu_is_named_by_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA context is opened for it; variables that workers inherit are part of the prediction."""
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 16\n", encoding="utf-8")
    monkeypatch.setattr(devices, "_DRIVER", tmp_path)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    cluster = local_cluster(FsdpSettings(num_processes=2))
    assert cluster is not None and cluster.gpu is not None
    assert cluster.gpu.name.startswith("H200") and cluster.gpus_per_node == 2
    assert expands(cluster, TrainingLoop(program="accelerate"))
