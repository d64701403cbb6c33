"""Records of torch's flight recorder: written by torch here, changed to those of ranks that part."""

from __future__ import annotations

import argparse
import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from test_views import Folder
from torch.distributed.flight_recorder.components.builder import build_db

from fsdptool.cli.app import run as fsdptool
from fsdptool.errors import FsdptoolError
from fsdptool.records.diagnosis import FailureDiagnosis
from fsdptool.runs.diagnose import diagnose
from fsdptool.runs.folder import FLIGHT_RECORD, LOGS

Record = dict[str, Any]


@pytest.fixture(scope="module")
def record() -> Iterator[Record]:
    """What torch records of five collectives of one rank, as if it were one of four."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    first = len(pickle.loads(c10d._dump_fr_trace())["entries"])  # type: ignore[attr-defined]
    dist.all_reduce(torch.ones(4))
    dist.all_gather_into_tensor(torch.empty(8), torch.ones(8))
    dist.broadcast(torch.ones(3, 2), 0)
    dist.all_reduce(torch.ones(4))
    dist.barrier()
    made: Record = pickle.loads(c10d._dump_fr_trace())  # type: ignore[attr-defined]
    dist.destroy_process_group()
    patch.undo()
    made["entries"] = made["entries"][first:]
    # As of NCCL and of four ranks: gloo leaves the name of the group empty.
    made["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    for number, entry in enumerate(made["entries"], 1):
        entry.update(process_group=("0", "default_pg"), collective_seq_id=number, pg_id=0)
        entry["profiling_name"] = entry["profiling_name"].replace("gloo:", "nccl:")
    made["entries"][1]["output_sizes"] = [[32]]
    made["pg_status"] = {"0": {"last_enqueued_collective": 5, "last_completed_collective": 4}}
    yield made


def same(_record: Record) -> None:
    """Change nothing."""


def without_the_last(record: Record) -> None:
    """Let the rank stop before the last collective."""
    record["entries"].pop()
    record["pg_status"]["0"]["last_enqueued_collective"] = 4


def without_the_third(record: Record) -> None:
    """Let the rank leave out a collective: all later ones are a place too early."""
    del record["entries"][2]
    for number, entry in enumerate(record["entries"], 1):
        entry["collective_seq_id"] = number
    record["pg_status"]["0"]["last_enqueued_collective"] = 4


def another_size(record: Record) -> None:
    """Let the rank reduce fewer elements."""
    record["entries"][3].update(input_sizes=[[3]], output_sizes=[[3]])


def another_dtype(record: Record) -> None:
    """Let the rank reduce in another type."""
    record["entries"][3].update(input_dtypes=["BFloat16"], output_dtypes=["BFloat16"])


def of_ranks(record: Record, change: Callable[[Record], None], rank: int) -> dict[int, Record]:
    """Return the records of four ranks, one of which is changed."""
    ranks = {each: copy.deepcopy(record) for each in range(4)}
    change(ranks[rank])
    return ranks


def written(ranks: dict[int, Record], folder: Path, *, as_json: bool = False) -> list[Path]:
    paths = []
    for rank, each in ranks.items():
        path = folder / (f"rank_{rank}.json" if as_json else f"nccl_trace_rank_{rank}")
        path.write_bytes(json.dumps(each).encode() if as_json else pickle.dumps(each, protocol=2))
        paths.append(path)
    return paths


def torch_says(ranks: dict[int, Record]) -> tuple[int, set[int]] | None:
    """Return the first collective that torch's own analyser finds at fault, and the ranks it names."""
    details = {
        f"r{rank}": {**copy.deepcopy(each), "rank": rank, "host_name": str(rank)}
        for rank, each in ranks.items()
    }
    options = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
    )
    bad = [
        each
        for each in build_db(details, options, "2.10").collectives
        if not each.pass_check or each.missing_ranks
    ]
    if not bad:
        return None
    return bad[0].collective_seq_id, {*(bad[0].missing_ranks or ()), *(bad[0].mismatch_collectives or ())}


def we_say(answer: FailureDiagnosis) -> tuple[int, set[int]] | None:
    """Return the same of our answer."""
    causes = [item for item in answer.failures if not item.consequence]
    if not causes:
        return None
    (cause,) = causes
    if answer.divergence is not None:
        assert cause.code == "RUN011"
        return answer.divergence.sequence, set(cause.ranks)
    assert cause.code == "RUN164"
    return int(cause.also[0].partition("SeqNum=")[2].partition(",")[0]), set(cause.ranks)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("change", [same, without_the_last, without_the_third, another_size, another_dtype])
def test_what_parts_is_what_torch_finds(
    change: Callable[[Record], None], as_json: bool, record: Record, tmp_path: Path
) -> None:
    ranks = of_ranks(record, change, 2)
    found = we_say(diagnose(written(ranks, tmp_path, as_json=as_json)))
    assert found == torch_says(ranks)
    assert (found is None) == (change is same)


def test_the_call_that_is_missing_is_shown(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = written(of_ranks(record, without_the_last, 3), tmp_path)
    assert fsdptool(["diagnose", *map(str, paths)]) == 0
    text = capsys.readouterr().out
    assert "Rank 3 is 1 collective behind: it has called 4, others wait in 5" in text
    assert "SeqNum=5, OpType=BARRIER" in text
    assert "test_flight_records.py" in text, "the line that made the call"


def test_a_rank_without_a_record_is_named(record: Record, tmp_path: Path) -> None:
    paths = written(of_ranks(record, same, 0), tmp_path)
    answer = diagnose([path for path in paths if not path.name.endswith("1")])
    assert answer.notes == ("the flight record of rank 1 is missing: look there first",)


def test_groups_are_told_apart(record: Record, tmp_path: Path) -> None:
    ranks = of_ranks(record, same, 0)
    for rank, each in ranks.items():
        for entry in each["entries"][3:]:
            entry.update(process_group=(f"mesh_{rank % 2}", "shard"), pg_id=1)
        each["pg_status"] = {}
    ranks[3]["entries"].pop()
    (cause,) = diagnose(written(ranks, tmp_path)).failures
    assert (cause.code, cause.ranks) == ("RUN164", (3,))
    assert "process group mesh_1 (shard)" in cause.why


def test_the_records_in_a_run_folder_are_read(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path / "locks"))
    folder = Folder(tmp_path / "run").path
    for rank, each in of_ranks(record, another_size, 1).items():
        (folder / LOGS / f"{FLIGHT_RECORD}{rank}").write_bytes(pickle.dumps(each, protocol=2))
    answer = diagnose(folder)
    assert answer.divergence is not None and answer.divergence.sequence == 4
    assert [item.code for item in answer.failures] == ["RUN011"]


def test_a_record_stands_beside_the_logs(record: Record, tmp_path: Path) -> None:
    paths = written(of_ranks(record, without_the_last, 1), tmp_path)
    log = tmp_path / "train.log"
    log.write_text("[rank1]: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    codes = {item.code for item in diagnose([log, *paths]).failures}
    assert codes == {"RUN001", "RUN164"}


class Runs:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return print, ("pg_config collective_seq_id",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"pg_config": Runs(), "entries": []}, protocol=2),
        pickle.dumps(["pg_config"], protocol=2),
        b'{"entries": [{"collective_seq_id": "x"}, 3, {"collective_seq_id": 1}], "pg_status": []',
        b'{"entries": 3, "collective_seq_id": 1}',
    ],
)
def test_a_hostile_record_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace_rank_0"
    path.write_bytes(content)
    with pytest.raises(FsdptoolError) as refused:
        diagnose(path)
    assert "\n" not in refused.value.message


def test_entries_of_any_kind_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "trace_rank_0.json"
    entries: list[Any] = [
        3,
        {"collective_seq_id": -1, "profiling_name": "nccl:all_reduce"},
        {"collective_seq_id": 1, "profiling_name": 4},
        {"collective_seq_id": 2, "profiling_name": "all\n_reduce", "input_sizes": [[1e300], "x"]},
        {"collective_seq_id": 3, "profiling_name": "nccl:x", "input_sizes": [[9] * 99], "frames": [1, {}]},
        {"collective_seq_id": 4, "profiling_name": "nccl:x", "process_group": [[], {}], "pg_id": []},
    ]
    path.write_text(
        json.dumps({"entries": entries, "pg_status": {"[]": 1}, "pg_config": {"0": {"ranks": 3}}})
    )
    assert diagnose(path).failures == ()
