"""Checkpoints on real ranks: any number of them, any mesh, damaged files, a full disk on one rank."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_cases as cases
import pytest
import torch
from pool import Pool

from fsdptool.distributed.session import LongWait
from fsdptool.records.recipe import Checkpoints
from fsdptool.runs.events import EventLog
from fsdptool.runs.manifest import (
    MANIFEST,
    SUPERSEDED,
    folder_name,
    list_checkpoints,
    newest_good,
)
from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
from fsdptool.training.checkpoint.storage import Staged, save_full, save_sharded

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


def test_a_checkpoint_of_cpu_ranks_is_read_on_gpus(pool: Pool, tmp_path: Path) -> None:
    """It has no state of a GPU's random generator, which a run on GPUs would otherwise demand."""
    pool.run(cases.save_steps, 2, str(tmp_path), [3], {})
    found = pool.run(cases.load_newest, 2, str(tmp_path), "auto", 1, None, True)
    assert all(item["right"] for item in found) and [item["own"] for item in found] == [[3, 0], [3, 1]]


def test_a_rank_that_hangs_while_a_checkpoint_is_written_is_noticed_as_at_any_time(
    pool: Pool, tmp_path: Path
) -> None:
    """After ``--timeout``, not after the half hour that writing may take."""
    said, _ = pool.run(cases.ask_alone, 2, str(tmp_path))
    assert said is not None
    assert "Timed out waiting 3000ms" in said


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


@pytest.mark.parametrize(("every", "steps"), [(3, [3, 6, 9]), (None, [])])
def test_a_recipe_says_how_often_to_save(tmp_path: Path, every: int | None, steps: list[int]) -> None:
    policy, events = Checkpoints(every_steps=every), EventLog(tmp_path, 0, 0)
    saver = RunCheckpointer(tmp_path, policy, kind="sharded", events=events)
    assert [step for step in range(11) if saver.due(step)] == steps


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
    named = pool.run(cases.load_error, 2, str(tmp_path), str(checkpoint(tmp_path, 4)))
    assert named[0] == named[1]
    assert "shard-00001.safetensors does not match its digest" in named[0]
    assert [item["step"] for item in pool.run(cases.load_newest, 2, str(tmp_path))] == [1, 1]


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


def test_a_peer_that_dies_during_a_save_is_no_storage_error(tmp_path: Path) -> None:
    """Landing the save must leave the death what it is: another start helps, and the cause is the peer."""
    context = multiprocessing.get_context("forkserver")
    answers = context.Queue()
    ranks = [
        context.Process(
            target=cases.land_without_peer, args=(rank, str(tmp_path / "store"), str(tmp_path), answers)
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    found = answers.get(timeout=100)
    for rank in ranks:
        rank.join(timeout=30)
    assert found["error"] not in ("none", "StorageError"), found
    assert (found["retryable"], found["secondary"], found["exit_code"]) == (True, True, 4), found


def steps_in(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder / "checkpoints")]


def test_a_run_that_goes_on_from_an_older_checkpoint_keeps_what_it_writes(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.save_steps, 2, str(tmp_path), [2, 4, 6], {"keep_last": 3})
    pool.run(cases.continue_from, 2, str(tmp_path), str(checkpoint(tmp_path, 2)), [3], {"keep_last": 1})
    assert steps_in(tmp_path) == [folder_name(3)], "neither pruned nor passed over for the old course"
    assert [item["step"] for item in pool.run(cases.load_newest, 2, str(tmp_path))] == [3, 3]
    left = sorted(path.name for path in (tmp_path / "checkpoints" / SUPERSEDED).iterdir())
    assert left == [folder_name(4), folder_name(6)], "what was given up is moved, not removed"


def test_a_damaged_checkpoint_does_not_push_good_ones_out(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.save_steps, 2, str(tmp_path), [2, 9], {"keep_last": 2})
    flip(checkpoint(tmp_path, 9) / "shard-00000.safetensors", -3)
    pool.run(cases.continue_from, 2, str(tmp_path), "auto", [5, 7], {"keep_last": 1})
    assert [item["step"] for item in pool.run(cases.load_newest, 2, str(tmp_path))] == [7, 7]


def test_nothing_starts_anew_because_every_checkpoint_is_damaged(pool: Pool, tmp_path: Path) -> None:
    pool.run(cases.save_steps, 2, str(tmp_path), [1, 2], {"keep_last": 2})
    for step in (1, 2):
        flip(checkpoint(tmp_path, step) / "shard-00001.safetensors", -5)
    messages = pool.run(cases.load_error, 2, str(tmp_path), "auto")
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"none of the 2 checkpoints in {tmp_path / 'checkpoints'} can be used")
    assert steps_in(tmp_path) == [folder_name(2), folder_name(1)]


def test_a_relaunch_before_the_first_checkpoint_begins_where_the_run_did(pool: Pool, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    pool.run(cases.save_steps, 2, str(first), [4], {})
    origin = str(checkpoint(first, 4))
    found = pool.run(cases.load_newest, 2, str(second), "auto", 1, origin)
    assert [item["step"] for item in found] == [4, 4]
    pool.run(cases.save_steps, 2, str(second), [6], {})
    found = pool.run(cases.load_newest, 2, str(second), "auto", 1, origin)
    assert [item["step"] for item in found] == [6, 6], "its own checkpoint comes first"
    assert steps_in(first) == [folder_name(4)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", [save_sharded, save_full])
def test_a_save_reports_every_tensor(tmp_path: Path, save: Callable[..., None]) -> None:
    """Ranks that have written wait for the others as long as somebody reports."""
    reports: list[float] = []
    pace = LongWait(None, patience=1.0, beat=lambda: reports.append(time.monotonic()))
    staged = Staged({f"model/{number}": torch.zeros(2) for number in range(5)}, {})
    save(staged, tmp_path, None, lambda files: None, pace)
    assert len(reports) == 5
