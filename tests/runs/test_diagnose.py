"""Logs as they really look, torch's own messages: the cause is recognised, or nothing is claimed."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run as fsdptool
from fsdptool.files.values import check
from fsdptool.launch.outcome import write_summary
from fsdptool.records.diagnosis import FailureDiagnosis, FailurePhase
from fsdptool.records.run import RankProgress, RunFailure, Start, Summary
from fsdptool.report.console.runs import print_diagnosis
from fsdptool.rules import signatures
from fsdptool.runs import logs as module
from fsdptool.runs.diagnose import diagnose
from fsdptool.runs.events import EventLog, WorkerPhase
from fsdptool.runs.folder import write_start
from fsdptool.runs.logs import LogText, read_stream
from fsdptool.runs.recognition import diagnose_logs
from fsdptool.runs.watchdog import ProgressFile

TIMEOUT = (
    "[rank{0}]:[E1122 06:40:00.504 ProcessGroupNCCL.cpp:689] [Rank {0}] Watchdog caught collective operation"
    " timeout: WorkNCCL(SeqNum=122, OpType=_REDUCE_SCATTER_BASE, NumelIn=106343680, NumelOut=53171840,"
    " Timeout(ms)=600000) ran for 600080 milliseconds before timing out.\n"
)
OUT_OF_MEMORY = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 90, in <module>
[rank3]:     accelerator.backward(loss)
[rank3]:   File "/venv/torch/autograd/__init__.py", line 364, in backward
[rank3]:     _engine_run_backward(
[rank3]:   File "/venv/torch/utils/checkpoint.py", line 1123, in unpack_hook
[rank3]:   File "/venv/transformers/models/llama/modeling_llama.py", line 176, in forward
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity \
of 79.11 GiB of which 812.00 MiB is free. Process 4711 has 78.31 GiB memory in use. Of the allocated memory \
76.02 GiB is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated. If reserved but \
unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.
"""
SUMMARY = """\
E1122 06:41:00.1 140 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 3
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def causes(text: str) -> list[str]:
    answer = diagnose_logs("log", (LogText("log", text, len(text), len(text)),))
    return [item.code for item in answer.failures if not item.consequence]


def test_the_cause_comes_before_what_other_ranks_report_of_it(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    waits = "".join(TIMEOUT.format(rank) for rank in (0, 1, 2))
    log.write_text(waits + OUT_OF_MEMORY.format(unused="1.10 GiB") + SUMMARY)
    answer = diagnose(log)
    first, *others = answer.failures
    assert (first.code, first.ranks, first.consequence) == ("RUN001", (3,), False)
    assert first.phase is FailurePhase.BACKWARD, "what is recomputed in a backward is no forward"
    assert first.line == 11
    assert [(item.code, item.consequence) for item in others] == [("RUN008", True), ("RUN014", True)]
    assert others[0].ranks == (0, 1, 2)
    assert answer.exception is None


def test_more_unused_than_wanted_memory_is_fragmentation() -> None:
    assert causes(OUT_OF_MEMORY.format(unused="2.25 GiB")) == ["RUN002"]
    assert causes(OUT_OF_MEMORY.format(unused="900.00 MiB")) == ["RUN001"]


def test_a_timeout_after_a_save_began_is_a_save_that_hangs() -> None:
    saving = "INFO:accelerate.accelerator:Saving current state to out/step_500\n"
    assert causes(saving + "Saving FSDP model\n" + TIMEOUT.format(1)) == ["RUN009"]
    assert causes("step 500 loss 1.2\n" + TIMEOUT.format(1)) == ["RUN008"]
    late = saving + "".join(f"step {n} loss 1.2\n" for n in range(300))
    assert causes(late + TIMEOUT.format(1)) == ["RUN008"]


LINES = {
    "RUN004": "traceback : Signal 9 (SIGKILL) received by PID 12345",
    "RUN006": "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared"
    " memory (shm).",
    "RUN007": "h:2:9 [0] misc/shmutils.cc:87 NCCL WARN Error while creating shared memory segment"
    " /dev/shm/nccl-pZafXL (size 7340384), error: No space left on device (28)",
    "RUN010": "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for send"
    " operation to complete",
    "RUN011": "  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456]"
    " op.preamble.length <= op.nbytes. 200000 vs 20. Received data size doesn't match expected size. Is there"
    " a distributed collective mismatch in your code?",
    "RUN013": "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1234",
    "RUN015": "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 2000",
    "RUN016": "torch.AcceleratorError: CUDA error: invalid device ordinal",
    "RUN017": "[E socket.cpp:1037] The server socket has failed to bind to [::]:29500 (errno: 98 - Address"
    " already in use).",
    "RUN018": "torch.distributed.DistNetworkError: The client socket has failed to connect to any network"
    " address of (node-0, 29500).",
    "RUN021": "node:41:41 [0] misc/socket.cc:588 NCCL WARN Bootstrap : no socket interface found",
    "RUN025": "NVRM: Xid (PCI:0000:81:00): 62, pid=4711, name=python, 2a0e8a34 00000002",
    "RUN166": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "RUN027": "Indexing.cu:1553: indexSelectLargeIndex: Assertion `srcIndex < srcSelectDimSize` failed.",
    "RUN038": "ValueError: The config file at f.yaml had unknown keys (['fsdp_foo']), please try upgrading",
    "RUN042": "\tsize mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([0]) from"
    " checkpoint, the shape in current model is torch.Size([46336, 5120]).",
    "RUN046": "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    "RUN047": "ImportError: flash_attn_2_cuda.cpython-311.so: undefined symbol: _ZN3c105ErrorC2ENS_14Source",
    "RUN052": "OSError: [Errno 28] No space left on device: 'out/step-12/model.safetensors'",
    "RUN053": "rank 1: no progress since training (step 7), 20 s ago; rank 0 gave up waiting for it",
    "RUN058": "slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2026-11-22T06:40:00 DUE TO TIME LIMIT ***",
}


@pytest.mark.parametrize("code", LINES)
def test_a_line_of_a_real_log(code: str) -> None:
    assert causes(f"step 1 loss 5.2\n{LINES[code]}\n") == [code]


def test_collectives_that_differ_name_what_only_some_ranks_use() -> None:
    for code in ("RUN008", "RUN011"):
        why = next(item for item in signatures() if item.code == code).why
        assert "expert" in why
        assert "tower" in why


def raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except BaseException:  # torch's CheckpointException is not an Exception
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


def test_torchs_own_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed torch says these; no collective is needed to make it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous
    from torch.utils.checkpoint import checkpoint

    half, single, meta = torch.ones(2, 2).half(), torch.ones(2, 2), torch.ones(2, device="meta")
    wide, empty = torch.nn.Linear(4, 2), torch.nn.Embedding(4, 2)
    calls = iter((True, False))

    def forgetful(x: Any) -> Any:
        return (x * x).exp() if next(calls) else x * 1.0

    def recompute() -> None:
        checkpoint(forgetful, single.clone().requires_grad_(), use_reentrant=False).sum().backward()

    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(variable, raising=False)
    for code, act in {
        "RUN019": lambda: next(rendezvous("env://")),
        "RUN020": lambda: dist.get_rank(dist.group.WORLD) or dist.barrier(),
        "RUN027": lambda: empty(torch.tensor([9])),
        "RUN031": lambda: half @ single,
        "RUN032": lambda: wide(torch.ones(3, 3)),
        "RUN033": lambda: torch.nn.functional.embedding(torch.tensor([0]), torch.ones(4)),
        "RUN034": recompute,
        "RUN035": lambda: meta.to("cpu"),
        "RUN041": lambda: wide.load_state_dict(torch.nn.Linear(5, 2).state_dict()),
        "RUN055": lambda: single.sum().backward(),
    }.items():
        assert causes(raised(act)) == [code]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_messages_of_fsdp2_checkpoints_and_accelerate(tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp
    from accelerate.utils import FullyShardedDataParallelPlugin as Plugin
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    one, half = torch.ones(1, 4), torch.bfloat16

    def sharded(*layers: torch.nn.Module) -> torch.nn.Sequential:
        model = torch.nn.Sequential(*layers)
        fully_shard(model, mesh=mesh)
        return model

    def unscale() -> None:
        layer = torch.nn.Linear(4, 4).half()
        optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
        scaler.scale(layer(one.half()).sum()).backward()
        scaler.unscale_(optimizer)

    def prepared() -> None:
        policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Absent"]}
        Plugin(fsdp_version=2, **policy).set_auto_wrap_policy(torch.nn.Linear(2, 2))

    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "saved")
    for code, act in {
        "RUN005": lambda: torch.empty(2**50),
        "RUN028": lambda: sharded(torch.nn.Linear(4, 4))[0](one),
        "RUN029": lambda: sharded(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).to(half))(one),
        "RUN035": lambda: sharded(torch.nn.Linear(4, 4, device="meta"))(one),
        "RUN037": prepared,
        "RUN039": lambda: Plugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT"),
        "RUN041": lambda: dcp.load({"a": torch.ones(4)}, checkpoint_id=tmp_path / "saved"),
        "RUN043": lambda: dcp.load({"b": torch.ones(3)}, checkpoint_id=tmp_path / "saved"),
        "RUN050": unscale,
        "RUN061": lambda: torch.load(tmp_path / "pytorch_model_fsdp_0_rank2.bin", weights_only=True),
    }.items():
        assert causes(raised(act)) == [code]


def test_the_rank_that_reports_no_timeout_is_named() -> None:
    text = "[rank3]: INFO step 7\n" + "".join(TIMEOUT.format(rank) for rank in (0, 1, 2))
    answer = diagnose_logs("log", (LogText("log", text, len(text), len(text)),))
    assert answer.notes == ("rank 3 does not report a timeout: look there first",)


def test_messages_are_in_the_sources_that_the_table_names() -> None:
    """Python sources of the libraries: a text that they dropped would never match again."""
    looked = 0
    for signature in signatures():
        for library, path in re.findall(
            r"(?:(accelerate|transformers|peft) [\d.]+, |\b(?=torch/))([\w/]+\.py)", signature.source
        ):
            package = library or "torch"
            spec = find_spec(package)
            assert spec is not None
            assert spec.origin is not None
            root = Path(spec.origin).parent
            file = root / path if library else root.parent / path
            # Made of parts, or the context's and not the text's source.
            if signature.code in ("RUN004", "RUN009", "RUN041"):
                assert file.exists() or file.is_dir(), signature.code
                continue
            source = re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8"))
            assert any(text in source for text in signature.texts), (signature.code, file)
            looked += 1
    assert looked >= 150


def test_a_log_without_a_known_failure_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "Traceback (most recent call last):\n  File 'x', line 1\nKeyError: 'the\x1b[31m moon'\n" + SUMMARY
    )
    assert fsdptool(["diagnose", str(log)]) == 5
    said = capsys.readouterr().out
    assert "no known failure explains this; the run ended by:" in said
    assert "KeyError: 'the" in said
    assert "\x1b" not in said
    log.write_text("step 1 loss 3.0\nstep 2 loss 2.9\n")
    assert fsdptool(["diagnose", str(log)]) == 5
    assert "no known failure was found" in capsys.readouterr().out
    assert fsdptool(["diagnose", str(tmp_path / "missing.log")]) == 2
    assert fsdptool(["diagnose", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_words_of_a_healthy_log_are_no_failure() -> None:
    assert not causes(
        "Timed out waiting for the cache lock, continuing\nkilled 3 stale workers\n"
        "WARNING: address of node-0 is 10.0.0.1\nexpected scalar loss\nout of memory estimate: 3 GiB\n"
        "environment variable HF_HOME is set\nrank 0: progress 10 %\nall ranks finished\n"
    )


def test_a_huge_log_is_read_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEAD_BYTES", 4096)
    monkeypatch.setattr(module, "_TAIL_BYTES", 8192)
    log = tmp_path / "train.log"
    filler = b"\xff\x00 step loss\n" * 100_000
    log.write_bytes(LINES["RUN015"].encode() + b"\n" + filler + TIMEOUT.format(5).encode())
    answer = diagnose(log)
    assert [item.code for item in answer.failures] == ["RUN015", "RUN008"]
    assert answer.read_bytes < 13_000 < answer.total_bytes


def test_json_validates_and_names_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(OUT_OF_MEMORY.format(unused="1.10 GiB"))
    assert fsdptool(["diagnose", str(log), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check(document, "diagnose", where="the answer")
    assert document["failures"][0]["cause"] == "gpu_memory"
    assert fsdptool(["diagnose", str(log)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("GPU out of memory in backward (rank 3) [RUN001]\n")
    assert "fsdptool rule RUN001" in said
    assert fsdptool(["rule", "RUN001"]) == 0


def test_every_signature_is_well_formed() -> None:
    table = signatures()
    codes = [item.code for item in table]
    assert codes == sorted(set(codes))
    for item in table:
        for pattern in (item.pattern, item.context):
            assert pattern is None or re.compile(pattern)
        assert set(item.over) <= set(codes)
        assert all(len(text) >= 8 or text == "EADDRINUSE" for text in item.texts), item.code
        assert item.why.endswith(".")
        assert item.change.endswith(".")


NOW = "[rank{0}]:[E1122 06:40:00.504 ProcessGroupNCCL.cpp:689] [PG ID 0 PG GUID 0(default_pg) Rank {0}] "
PREFIXES = {
    "2.0": "[E ProcessGroupNCCL.cpp:475] [Rank {0}] ",
    "2.3": "[rank{0}]:[E ProcessGroupNCCL.cpp:563] [PG 0 Rank {0}] ",
    "2.4": "[rank{0}]:[E1122 06:40:00.5 ProcessGroupNCCL.cpp:607] [PG 0 (default_pg) Rank {0}] ",
    "2.13": NOW,
    "torchrun": "[default0]:[E1122 06:40:00.504 ProcessGroupNCCL.cpp:689] [Rank {0}] ",
    "slurm": "{0}: [rank{0}]:[E1122 06:40:00.504 ProcessGroupNCCL.cpp:689] [Rank {0}] ",
}
GATHER, SUM = "_ALLGATHER_BASE, NumelIn=65536, NumelOut=262144", "ALLREDUCE, NumelIn=1, NumelOut=1"


def waits(prefix: str, rank: int, call: str, sequence: int = 48211) -> str:
    return (
        f"{prefix.format(rank)}Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence},"
        f" OpType={call}, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.\n"
    )


def answer_of(*texts: str) -> FailureDiagnosis:
    logs = tuple(LogText(f"log{n}", text, len(text), len(text)) for n, text in enumerate(texts))
    return diagnose_logs("logs", logs)


@pytest.mark.parametrize("version", PREFIXES)
@pytest.mark.parametrize("odd", [GATHER, "ALLREDUCE, NumelIn=2, NumelOut=2"])
def test_the_rank_that_calls_another_collective_is_named(
    version: str, odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [waits(PREFIXES[version], rank, odd if rank == 2 else SUM) for rank in (1, 2, 3)]
    for texts in (["[rank0]: step 7\n" + "".join(lines)], lines):
        answer = answer_of(*texts)
        assert [(item.code, item.ranks, item.consequence) for item in answer.failures] == [
            ("RUN011", (2,), False),
            ("RUN008", (1, 2, 3), True),
        ]
        assert answer.divergence is not None
        assert answer.divergence.sequence == 48211
        assert [(call.ranks, call.odd) for call in answer.divergence.calls] == [((1, 3), False), ((2,), True)]
        assert not answer.notes, "rank 0 is not to blame"
    files = [tmp_path / f"rank{n}.log" for n in range(3)]
    for file, line in zip(files, lines, strict=True):
        file.write_text(line)
    assert fsdptool(["diagnose", *map(str, files)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ranks call different collectives (rank 2) [RUN011]\n")
    assert f"rank 2 called {odd.split(',')[0]} (NumelIn={odd.split('=')[1].split(',')[0]}, " in said
    assert "ranks 1, 3 called ALLREDUCE (NumelIn=1, NumelOut=1)" in said


def test_without_a_majority_all_ranks_are_named() -> None:
    answer = answer_of(waits(NOW, 0, GATHER), waits(NOW, 1, SUM))
    assert answer.failures[0].code == "RUN011"
    assert answer.failures[0].ranks == (0, 1)
    assert answer.divergence is not None
    assert all(call.odd for call in answer.divergence.calls)


def test_versions_without_sizes_are_compared_by_operation() -> None:
    lines = [
        f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType={call},"
        " Timeout(ms)=1800000) ran for 1804406 milliseconds before timing out.\n"
        for rank, call in enumerate(("BROADCAST", "ALLREDUCE", "BROADCAST"))
    ]
    assert answer_of("".join(lines)).failures[0].ranks == (1,)


@pytest.mark.parametrize(
    "lines",
    [
        [waits(NOW, 0, SUM, 7), waits(NOW, 1, GATHER, 8)],
        [waits(NOW, rank, f"{call}, NumelIn=8, NumelOut=8") for rank, call in enumerate(("SEND", "RECV"))],
        [waits(NOW, n, f"ALLTOALL_BASE, NumelIn={n + 1}, NumelOut=4") for n in (0, 1)],
        [
            waits(NOW.replace("0(default_pg)", f"{4 + rank}(mesh_dp)"), rank, call)
            for rank, call in enumerate((SUM, GATHER))
        ],
    ],
    ids=["sequence", "pairs", "uneven", "groups"],
)
def test_what_may_differ_between_ranks_is_no_divergence(lines: list[str]) -> None:
    answer = answer_of("".join(lines))
    assert answer.divergence is None
    assert [item.code for item in answer.failures] == ["RUN008"]


def test_a_group_whose_ranks_the_log_does_not_translate_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    prefix = "[PG ID 2 PG GUID 5(mesh_tp) Rank {0}] "
    lines = [waits(prefix, rank, GATHER if rank == 1 else SUM) for rank in range(3)]
    answer = answer_of("".join(lines))
    assert answer.divergence is not None
    print_diagnosis(answer)
    assert "rank 1 of process group 5 (mesh_tp) called _ALLGATHER_BASE" in capsys.readouterr().out


@pytest.mark.parametrize("size", ["1.2.3 GiB", "... GiB", ". GiB", "1.. MiB", "9" * 400 + " GiB", "1e9 GiB"])
def test_a_size_that_is_no_number_is_not_compared(size: str) -> None:
    line = OUT_OF_MEMORY.format(unused=size).replace("2.00 GiB", size)
    assert causes(line) in (["RUN001"], ["RUN002"])


@pytest.mark.slow
def test_a_log_through_a_pipe(tmp_path: Path) -> None:
    def piped(*arguments: str, log: bytes) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "fsdptool", "diagnose", *arguments]
        return subprocess.run(command, input=log, capture_output=True, check=False)

    log = LINES["RUN015"].encode() + b"\n"
    for arguments in (("-",), ()):
        done = piped(*arguments, log=log)
        assert done.returncode == 0, done.stderr
        assert b"standard input:1: Duplicate GPU detected" in done.stdout
    assert piped("-", log=b"").returncode == 5
    file = tmp_path / "a.log"
    file.write_bytes(log)
    done = piped("-", str(file), log=log)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"cannot be combined" in done.stderr


def test_a_long_pipe_is_read_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HEAD_BYTES", 4096)
    monkeypatch.setattr(module, "_TAIL_BYTES", 8192)
    filler = b"\xff\x00 step loss\n" * 400_000
    log = read_stream(io.BytesIO(LINES["RUN015"].encode() + b"\n" + filler + TIMEOUT.format(5).encode()), "-")
    assert [item.code for item in diagnose_logs("-", (log,)).failures] == ["RUN015", "RUN008"]
    assert log.read_bytes == 4096 + 8192 < log.total_bytes


@pytest.mark.parametrize(
    ("phase", "said", "unsaid"),
    [
        (WorkerPhase.TRAINING, "in training (rank 1)", "ram_efficient"),
        (WorkerPhase.LOADING_DATA, "data.workers", "ram_efficient"),
        (WorkerPhase.SAVING, "SHARDED_STATE_DICT", "ram_efficient"),
        (WorkerPhase.LOADING, "ram_efficient", "data.workers"),
    ],
)
def test_a_killed_rank_is_explained_by_what_it_did(
    phase: WorkerPhase, said: str, unsaid: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, now = tmp_path / "run", time.time()
    (folder / "logs").mkdir(parents=True)
    write_start(folder, Start(2, "cpu", started=now - 60), None)
    for rank in (0, 1):
        EventLog(folder, rank, 0).emit("started", node="elsewhere")
        doing = phase if rank == 1 else WorkerPhase.TRAINING
        ProgressFile(folder, rank).write(RankProgress(rank, doing, 158, now + 5, now + 5, False, 1.0))
    (folder / "logs" / "launcher.log").write_text("  traceback : Signal 9 (SIGKILL) received by PID 4711\n")
    write_summary(
        folder, failed_summary(RunFailure(1, "rank 1 (process 4711) was killed by SIGKILL", None, 4))
    )
    assert fsdptool(["diagnose", str(folder)]) == 0
    answer = capsys.readouterr().out
    assert "[RUN004]" in answer
    assert said in answer
    assert unsaid not in answer


def failed_summary(failure: RunFailure) -> Summary:
    return Summary(
        status="failed",
        exit_code=4,
        resumable=False,
        steps=158,
        world_size=2,
        mesh={"dp_replicate": 1, "dp_shard": 2},
        units=3,
        sharding_proof={},
        restarts=0,
        predicted_peak_bytes=None,
        measured_peak_bytes=(None, None),
        instrument="none",
        error_percent=None,
        throughput={},
        last_checkpoint=None,
        last_good_step=None,
        export=None,
        memory_report=None,
        failure=failure,
    )
