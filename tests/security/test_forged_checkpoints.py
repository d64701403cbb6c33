"""A checkpoint is believed only as far as its files bear it out; a stranger can sign any manifest."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from attacks import Cli, forge_manifest, tree_of
from safetensors import safe_open
from safetensors.torch import save_file

from fsdptool.files.safetensors_writer import digest_file
from fsdptool.runs.manifest import newest_good

STEP = "step-00000004"


def listed(folder: Path, *, without: str = "") -> dict[str, dict[str, Any]]:
    """Describe the shards that are there, as a manifest does."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != without:
            written = digest_file(path)
            found[path.name] = {"bytes": written.bytes, "sha256": written.sha256}
    return found


def rewrite(path: Path, change: Any) -> None:
    """Read a shard, let ``change(tensors, places)`` do something to it, and write it again."""
    with safe_open(str(path), framework="pt") as stream:
        tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118
        metadata = dict(stream.metadata())
    places = json.loads(metadata["DCP_SHARDING_INFO"])
    change(tensors, places)
    save_file(tensors, str(path), {**metadata, "DCP_SHARDING_INFO": json.dumps(places)})


@pytest.fixture
def newest(run_copy: Path) -> Path:
    """The newest checkpoint of the run; the older one is gone."""
    shutil.rmtree(run_copy / "checkpoints" / "step-00000002")
    return run_copy / "checkpoints" / STEP


def refused(here: Cli, newest: Path, reason: str) -> None:
    """Both readers, of the newest checkpoint and of one that is named, refuse it in one line."""
    run = newest.parents[1]
    assert newest_good(newest.parent) is None
    for options in ((), ("--checkpoint", newest)):
        answer = here("export", run, *options)
        assert answer.code == 2, answer
        assert len(answer.err.splitlines()) <= 2
        assert not (run / "export").exists()
    assert reason in answer.err


def test_an_honest_checkpoint_is_exported(here: Cli, newest: Path) -> None:
    answer = here("export", newest.parents[1])
    assert answer.code == 0, answer


def test_shards_dropped_consistently(here: Cli, newest: Path) -> None:
    (newest / "shard-00001.safetensors").unlink()
    forge_manifest(newest, files=listed(newest))
    refused(here, newest, "2 ranks")
    # With the number of ranks changed as well, only the model's own shapes tell.
    forge_manifest(newest, files=listed(newest), world_size=1)
    answer = here("export", newest.parents[1])
    assert answer.code == 2, answer
    assert "another model" in answer.err


def test_no_files_at_all(here: Cli, newest: Path) -> None:
    for shard in newest.glob("*.safetensors"):
        shard.unlink()
    forge_manifest(newest, files={})
    refused(here, newest, "0 files")


@pytest.mark.parametrize("name", ["../../../secret", "/etc/hostname", "shard-00001.safetensors/../x", "x/y"])
def test_names_that_lead_out_of_the_folder(here: Cli, newest: Path, name: str) -> None:
    files = listed(newest, without="shard-00001.safetensors")
    forge_manifest(newest, files={**files, name: {"bytes": 5, "sha256": "0" * 64}})
    refused(here, newest, "files")


def test_devices_pipes_and_links(here: Cli, newest: Path, tmp_path: Path) -> None:
    shard = newest / "shard-00001.safetensors"
    elsewhere = Path(shutil.move(shard, tmp_path / "shard"))
    for make in (
        lambda: os.mkfifo(shard),
        lambda: shard.symlink_to("/dev/zero"),
        lambda: shard.symlink_to(elsewhere),
        shard.mkdir,
    ):
        make()
        refused(here, newest, "regular file")
        shard.rmdir() if shard.is_dir() else shard.unlink()
    shutil.move(elsewhere, shard)
    (newest / "manifest.json").unlink()
    os.mkfifo(newest / "manifest.json")
    refused(here, newest, "regular file")


def test_numbers_no_run_has(here: Cli, newest: Path) -> None:
    for changes in ({"step": -5}, {"world_size": 10**12}, {"world_size": 0}, {"world_size": -1}):
        before = (newest / "manifest.json").read_text()
        forge_manifest(newest, **changes)
        refused(here, newest, "damaged")
        (newest / "manifest.json").write_text(before)


def test_a_step_that_is_not_the_folder_s(here: Cli, newest: Path) -> None:
    forge_manifest(newest, step=9)
    refused(here, newest, "step 9")


@pytest.mark.parametrize("start", [-1, 10**13, 1.5, "0"])
def test_offsets_that_are_no_places(here: Cli, newest: Path, start: Any) -> None:
    def move(tensors: dict[str, Any], places: dict[str, Any]) -> None:
        name = next(key for key in tensors if key.startswith("model/") and tensors[key].dim() == 2)
        places[name]["saved_offsets"][0] = start

    rewrite(newest / "shard-00001.safetensors", move)
    forge_manifest(newest, files=listed(newest))
    refused(here, newest, "")


def test_a_tensor_covered_twice(here: Cli, newest: Path) -> None:
    def move(tensors: dict[str, Any], places: dict[str, Any]) -> None:
        for name in tensors:
            if name.startswith("model/"):
                places[name]["saved_offsets"] = [0] * tensors[name].dim()

    rewrite(newest / "shard-00001.safetensors", move)
    forge_manifest(newest, files=listed(newest))
    refused(here, newest, "covered exactly once")


def test_a_shard_nobody_listed(here: Cli, newest: Path) -> None:
    # torch's reader takes every file of the folder that ends in .safetensors.
    shutil.copy(newest / "shard-00000.safetensors", newest / "zzz.safetensors")
    refused(here, newest, "zzz.safetensors")


def test_a_header_that_lies(here: Cli, newest: Path) -> None:
    shard = newest / "shard-00001.safetensors"
    data = shard.read_bytes()
    for header in ((1 << 62).to_bytes(8, "little"), (len(data) * 2).to_bytes(8, "little")):
        shard.write_bytes(header + data[8:])
        forge_manifest(newest, files=listed(newest))
        refused(here, newest, "header")


def test_a_tensor_of_another_name_or_shape(here: Cli, newest: Path) -> None:
    def rename(tensors: dict[str, Any], places: dict[str, Any]) -> None:
        for name in [key for key in tensors if key.startswith("model/") and "down_proj" in key]:
            tensors[name + "x"], places[name + "x"] = tensors.pop(name), places.pop(name)

    for number in range(2):
        rewrite(newest / f"shard-0000{number}.safetensors", rename)
    forge_manifest(newest, files=listed(newest))
    before = tree_of(newest.parents[1])
    answer = here("export", newest.parents[1])
    assert answer.code == 2, answer
    assert "another model" in answer.err
    assert "down_proj" in answer.err
    assert tree_of(newest.parents[1]) == before


def test_training_goes_on_from_the_older_checkpoint(cli: Cli, trained: Path, run_copy: Path) -> None:
    """The trainer's own reader passes over a forged checkpoint, and says why."""
    newest = run_copy / "checkpoints" / STEP
    shutil.copy(newest / "shard-00000.safetensors", newest / "zzz.safetensors")
    recipe = run_copy / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 4", "steps: 5"))
    shutil.copytree(trained.parent / "model", run_copy / "model")
    shutil.copy(trained.parent / "text.txt", run_copy)
    arguments = ("train", recipe, "--config", run_copy / "accelerate.yaml", "-o", run_copy, "--no-predict")
    answer = cli(*arguments, "--resume", "auto")
    assert answer.code == 0, answer
    assert "zzz.safetensors" in (run_copy / "events" / "rank-00000.jsonl").read_text()
    assert (run_copy / "checkpoints" / "superseded" / STEP).is_dir()
