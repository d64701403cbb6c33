"""Logs as they really look, torch's own messages: the cause is recognised, or nothing is claimed."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run as fsdptool
from fsdptool.files.values import check
from fsdptool.records.diagnosis import FailurePhase
from fsdptool.report.diagnosis import signatures_table
from fsdptool.runs import diagnose as module
from fsdptool.runs.diagnose import LogText, diagnose, diagnose_logs, signatures

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
    "RUN025": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
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
    """Python sources of torch and accelerate: a text that they dropped would never match again."""
    looked = 0
    for signature in signatures():
        for library, path in re.findall(
            r"(?:(accelerate) [\d.]+, |\b(?=torch/))([\w/]+\.py)", signature.source
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
    assert looked >= 12


def test_a_log_without_a_known_failure_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "Traceback (most recent call last):\n  File 'x', line 1\nKeyError: 'the\x1b[31m moon'\n" + SUMMARY
    )
    assert fsdptool(["diagnose", str(log)]) == 5
    said = capsys.readouterr().out
    assert "no known failure explains this; the last exception is" in said
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


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n{signatures_table(signatures())}")
