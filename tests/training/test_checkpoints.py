"""Checkpoints on real ranks: any number of them, any mesh, damaged files, a full disk on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest
from pool import Pool

from fsdptool.training.checkpoint.manifest import MANIFEST, folder_name, list_checkpoints, newest_good

pytestmark = pytest.mark.distributed


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / folder_name(step)


@pytest.mark.parametrize("policy", [{}, {"mode": "sync"}, {"kind": "full"}], ids=["async", "sync", "full"])
def test_a_checkpoint_is_read_on_any_number_of_ranks_and_mesh(
    pool: Pool, tmp_path: Path, policy: dict[str, Any]
) -> None:
    pool.run(cases.save_steps, 2, str(tmp_path), [3], policy)
    for world, replicate in ((2, 1), (4, 1), (4, 2), (3, 1), (1, 1)):
        found = pool.run(cases.load_newest, world, str(tmp_path), "auto", replicate)
        assert [item["step"] for item in found] == [3] * world
        assert all(item["right"] for item in found)
        expected = [[3, rank] if world == 2 else None for rank in range(world)]
        assert [item["own"] for item in found] == expected, "generators belong to a number of ranks"


def test_replicas_are_saved_once_and_read_everywhere(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.save_steps, 4, str(tmp_path), [2], {}, 2)
    files = checkpoint(tmp_path, 2).glob("shard-*.safetensors")
    payload = sum(path.stat().st_size for path in files)
    values = sum(cases.whole(name, 2).numel() * cases.whole(name, 2).element_size() for name in cases.SHAPES)
    assert payload < values + 4 * 4096, "two replicas must not double the data"
    assert all(item["right"] for item in pool.run(cases.load_newest, 2, str(tmp_path)))


def test_policy_keeps_the_last_and_every_nth(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.save_steps, 2, str(tmp_path), [1, 2, 3, 4, 5], {"keep_last": 2, "keep_every": 3})
    assert [path.name for path in list_checkpoints(tmp_path / "checkpoints")] == [
        folder_name(step) for step in (5, 4, 3)
    ]


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_checkpoint_is_passed_over(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.save_steps, 2, str(tmp_path), [1, 2, 3, 4], {"keep_last": 4})
    flip(checkpoint(tmp_path, 4) / "shard-00001.safetensors", -5)
    shard = checkpoint(tmp_path, 3) / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    (checkpoint(tmp_path, 2) / MANIFEST).unlink()
    assert [item["step"] for item in pool.run(cases.load_newest, 2, str(tmp_path))] == [1, 1]
    named = pool.run(cases.load_error, 2, str(tmp_path), str(checkpoint(tmp_path, 4)))
    assert named[0] == named[1]
    assert "shard-00001.safetensors does not match its digest" in named[0]


def test_every_flipped_byte_is_seen(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.save_steps, 2, str(tmp_path), [1], {})
    folder = tmp_path / "checkpoints"
    for path in sorted(checkpoint(tmp_path, 1).iterdir()):
        for position in range(0, path.stat().st_size, 97):
            flip(path, position)
            assert newest_good(folder) is None, f"{path.name}, byte {position}"
            flip(path, position)
    assert newest_good(folder) is not None


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("policy", [{}, {"kind": "full"}], ids=["sharded", "full"])
def test_a_full_disk_on_one_rank_reaches_every_rank(
    pool: Pool, tmp_path: Path, victim: int, policy: dict[str, Any]
) -> None:
    messages = pool.run(cases.save_with_full_disk, 2, str(tmp_path), victim, policy)
    assert messages[0] == messages[1]
    assert f"rank {victim}" in messages[0]
    assert "File too large" in messages[0]
    found = newest_good(tmp_path / "checkpoints")
    assert found is not None
    assert found[1].step == 1
    assert [item["step"] for item in pool.run(cases.load_newest, 2, str(tmp_path))] == [1, 1]
    assert not list((tmp_path / "checkpoints").glob(".step-*")), "the load sweeps what was left aside"


def test_a_manifest_holds_no_code_and_names_every_file(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.save_steps, 2, str(tmp_path), [1], {})
    folder = checkpoint(tmp_path, 1)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert {path.name for path in folder.iterdir()} == {MANIFEST, *manifest["files"]}
    assert all(name.endswith(".safetensors") for name in manifest["files"])
