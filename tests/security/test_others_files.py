"""What lies beside ours is not ours: exports and caches remove, follow and share nothing of others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attacks import Cli, tree_of

from fsdptool.errors import ConfigError
from fsdptool.records.recipe import Data
from fsdptool.training.data.sources import open_source
from fsdptool.training.export.api import _Export


def test_an_export_leaves_its_neighbours_alone(here: Cli, run_copy: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model"
    for name in (".model.part", ".model.old"):
        (target.parent / name).mkdir(parents=True)
        (target.parent / name / "thesis.tex").write_text("years of work")
    assert here("export", run_copy, "-o", target).code == 0
    assert here("export", run_copy, "-o", target, "--force").code == 0
    for name in (".model.part", ".model.old"):
        assert (target.parent / name / "thesis.tex").read_text() == "years of work"
    assert sorted(path.name for path in target.parent.iterdir()) == [".model.old", ".model.part", "model"]


def test_an_export_does_not_replace_a_link(here: Cli, run_copy: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    assert here("export", run_copy, "-o", real).code == 0
    link = tmp_path / "link"
    link.symlink_to(real)
    before = tree_of(real)
    answer = here("export", run_copy, "-o", link, "--force")
    assert answer.code == 2
    assert "link" in answer.err
    assert link.is_symlink()
    assert tree_of(real) == before


def pipeline(root: Path) -> tuple[Any, Path]:
    """A pipeline's folder and an export of its component, as far as copying the rest goes."""
    for name in ("vae", "transformer"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text("{}")
    (root / "model_index.json").write_text(json.dumps({"_class_name": "P"}))
    spec = SimpleNamespace(folder=str(root / "transformer"), component="transformer")
    made = object.__new__(_Export)
    made.inputs = SimpleNamespace(spec=spec)  # type: ignore[assignment]
    target = root.parent / "target"
    target.mkdir()
    return made, target


def test_links_out_of_a_pipeline_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "id_rsa").write_text("private")
    for number, plant in enumerate(
        (
            lambda root: (root / "vae" / "weights").symlink_to(secret / "id_rsa"),
            lambda root: (root / "vae" / "deep").symlink_to(secret),
            lambda root: (root / "scheduler").symlink_to(secret),
            lambda root: os.mkfifo(root / "vae" / "pipe"),
        )
    ):
        root = tmp_path / str(number) / "pipeline"
        export, target = pipeline(root)
        plant(root)
        with pytest.raises(ConfigError, match="not a file of the pipeline"):
            export._pipeline(target)
        assert not [path for path in target.rglob("*") if path.name == "id_rsa"]


def test_links_of_the_hub_s_cache_are_followed(tmp_path: Path) -> None:
    root = tmp_path / "models--a--b" / "snapshots" / "abc"
    export, _ = pipeline(root)
    blob = tmp_path / "models--a--b" / "blobs" / "1234"
    blob.parent.mkdir()
    blob.write_text("weights")
    (root / "vae" / "w.safetensors").symlink_to("../../../blobs/1234")
    target = tmp_path / "out"
    target.mkdir()
    assert export._pipeline(target) == "transformer"
    assert (target / "vae" / "w.safetensors").read_text() == "weights"
    assert not (target / "vae" / "w.safetensors").is_symlink()


@pytest.mark.parametrize("component", ["../x", "a/b", "/etc", ".."])
def test_a_component_is_a_name(tmp_path: Path, component: str) -> None:
    export, target = pipeline(tmp_path / "pipeline")
    export.inputs.spec.component = component
    with pytest.raises(ConfigError, match="component"):
        export._pipeline(target)


def test_two_data_sets_share_no_tokens(tmp_path: Path) -> None:
    marks = []
    for name, text in (("a", '{"text": "yes"}\n'), ("b", '{"text": "not"}\n')):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "rows.jsonl").write_text(text)
        os.utime(folder / "rows.jsonl", ns=(10**18, 10**18))
        marks.append(open_source(Data(source="jsonl", path=str(folder))).identity)
    assert marks[0] != marks[1]
    # Replaced where it is, with its size and its time.
    file = tmp_path / "a" / "rows.jsonl"
    shutil.copy(tmp_path / "b" / "rows.jsonl", tmp_path / "new")
    os.utime(tmp_path / "new", ns=(10**18, 10**18))
    (tmp_path / "new").replace(file)
    assert open_source(Data(source="jsonl", path=str(tmp_path / "a"))).identity != marks[0]
