"""Logs of many ranks and programs: who wrote a line, what ended the run, and what only looks like it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run as fsdptool
from fsdptool.records.diagnosis import FailureDiagnosis, FailurePhase
from fsdptool.report.console.runs import print_diagnosis
from fsdptool.rules import signatures
from fsdptool.runs.diagnose import diagnose
from fsdptool.runs.logs import LogText, TextIndex
from fsdptool.runs.recognition import diagnose_logs

CORPUS = Path(os.environ.get("FSDPTOOL_LOGS_CORPUS", "absent"))
INDEX = CORPUS / "index.jsonl"
ENTRIES = [json.loads(line) for line in INDEX.read_text("utf-8").splitlines()] if INDEX.is_file() else []


def answer_of(text: str) -> FailureDiagnosis:
    return diagnose_logs("log", (LogText("log", text, len(text), len(text)),))


def causes(answer: FailureDiagnosis) -> list[str]:
    return [item.code for item in answer.failures if not item.consequence]


def said(answer: FailureDiagnosis) -> str:
    """Return what is printed of causes: consequences and sources apart."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        print_diagnosis(answer)
    lines = stream.getvalue().splitlines()
    return "\n".join(line for line in lines if not line.startswith(("consequence: ", "  more: ")))


@pytest.mark.skipif(not ENTRIES, reason="FSDPTOOL_LOGS_CORPUS names no folder of logs")
@pytest.mark.parametrize("entry", ENTRIES or [{"id": "absent"}], ids=lambda entry: entry["id"])
def test_the_cause_of_a_real_failure_is_named(entry: dict[str, Any]) -> None:
    text = said(diagnose(CORPUS / entry["log"]))
    assert [each for each in entry["must_say"] if not re.search(each, text, re.IGNORECASE)] == []
    assert [each for each in entry["must_not_say"] if re.search(each, text, re.IGNORECASE)] == []


@pytest.mark.slow
def test_every_signature_has_an_example_that_it_alone_explains() -> None:
    table = signatures()
    assert len(table) >= 160
    for item in table:
        assert item.examples, item.code
        for text in item.examples:
            assert causes(answer_of(f"step 1\n{text}\n")) == [item.code], text
        for text in item.others:
            found = answer_of(f"step 1\n{text}\n").failures
            assert item.code not in [each.code for each in found], text
        assert {*item.explained_by, *item.beside} <= {each.code for each in table}


PREFIXES = (
    "(WorkerDict pid=1) ",
    "\x1b[36m(TrainWorker pid=88121, ip=10.0.0.2)\x1b[0m ",
    "2026-06-12T10:02:33Z worker-1 ",
    "2026-06-12T10:02:33.123456789Z stderr F ",
    "Jun 12 07:52:04 gpu-c11 train[812]: ",
    "3: [rank3]: ",
    "trainer-1  | ",
    "[2026-06-12 15:55:06] CRITICAL [olmo.util:158, rank=6] ",
    "2025-10-31 03:11:02,475 - SimpleTuner - INFO - [rank7]: ",
    "(EngineCore_DP0 pid=6940) ERROR 06-12 20:21:58 [core.py:710] ",
    "node-2 [rank8]: ",
)
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/srv/train.py", line 9, in main',
    "    step(batch)",
)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(
    "line",
    ["KeyError: 'moon'", "Exception: the moon is gone", "hydra.errors.Gone: no moon", "AssertionError"],
)
def test_what_stands_in_front_of_an_exception_does_not_hide_it(prefix: str, line: str) -> None:
    answer = answer_of("".join(f"{prefix}{each}\n" for each in ("step 1", *TRACEBACK, line)))
    assert answer.exception is not None
    assert (answer.exception.line, answer.exception.text) == (5, line)


def test_prose_is_no_exception() -> None:
    assert (
        answer_of("stopped due to an error of type ConnectionError\nValueErrors are logged\n").exception
        is None
    )


CHAIN = (
    *TRACEBACK,
    "KeyError: 'moon'",
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    *TRACEBACK,
    "RuntimeError: cannot build the batch",
)


def test_of_a_chain_the_first_exception_is_shown_and_never_a_wrapper() -> None:
    wrapper = "subprocess.CalledProcessError: Command '['accelerate']' returned non-zero exit status 1."
    answer = answer_of("\n".join((*CHAIN, *TRACEBACK, wrapper)))
    assert answer.exception is not None
    assert answer.exception.text == "KeyError: 'moon'"
    alone = answer_of("\n".join((*TRACEBACK, wrapper)))
    assert alone.exception is not None and "CalledProcessError" in alone.exception.text


OWN = """\
{0}Traceback (most recent call last):
{0}  File "/srv/train.py", line 9, in main
{0}    step(batch)
{0}  File "/srv/metrics.py", line 44, in compute
{0}    return logs["eval_f1"]
{0}  File "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl
{0}    return forward_call(*args, **kwargs)
{0}KeyError: 'eval_f1'
"""


def test_an_unknown_exception_names_the_own_line_that_raised_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "train.log"
    log.write_text(OWN.format("3: [rank3]: "))
    assert fsdptool(["diagnose", str(log)]) == 5
    assert "raised in /srv/metrics.py:44 in compute" in capsys.readouterr().out
    rich = "╭─── Traceback (most recent call last) ───╮\n│ /srv/cli.py:88 in main │\n╰──╯\nValueError: moon\n"
    answer = answer_of(rich)
    assert answer.exception is not None and answer.exception.frame == "/srv/cli.py:88 in main"


def test_a_known_and_an_unknown_failure_are_two_answers() -> None:
    answer = answer_of(FULL.format(2, 2, "") + OWN.format("[rank0]: "))
    assert causes(answer) == ["RUN001"]
    assert answer.exception is not None and answer.exception.text == "KeyError: 'eval_f1'"
    # What was raised while a known failure was handled follows from it.
    during = "[rank2]: During handling of the above exception, another exception occurred:\n"
    assert answer_of(FULL.format(2, 2, "") + during + OWN.format("[rank2]: ")).exception is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            " 5: [rank5]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.96 GiB. GPU 5 has a"
            " total capacity of 63.98 GiB of which 0.20 GiB is free. Of the allocated memory 60.1 GiB is"
            " allocated by PyTorch, and 0.9 GiB is reserved by PyTorch but unallocated.\n"
            "srun: error: nid005021: task 5: Exited with exit code 1\n",
            "RUN001",
        ),
        (
            "RuntimeError: CUDA out of memory. Tried to allocate 512.00 MiB (GPU 1; 23.70 GiB total capacity;"
            " 21.02 GiB already allocated; 210.81 MiB free; 22.10 GiB reserved in total by PyTorch)\n",
            "RUN001",
        ),
        ("    Reason:       OOMKilled\n    Exit Code:    137\n", "RUN004"),
        ("trainer-0 exited with code 137\n", "RUN004"),
        (
            "(raylet) node_manager.cc:3287: 1 Workers (tasks / actors) killed due to memory pressure (OOM)\n"
            "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n",
            "RUN209",
        ),
        (
            "TensorCompare.cu:110: Assertion `probability tensor contains either `inf`, `nan` or element < 0`"
            " failed.\n"
            "[rank0]: RuntimeError: CUDA error: device-side assert triggered\n",
            "RUN228",
        ),
        (
            "ip-10:221 [0] nccl_net_ofi_create_plugin:209 NCCL WARN NET/OFI Unable to find a protocol that"
            " worked.\n"
            "[rank0]: ncclInternalError: Internal check failed.\n",
            "RUN290",
        ),
    ],
)
def test_other_wordings_lead_to_the_cause(text: str, code: str) -> None:
    assert causes(answer_of(text))[0] == code


TIMEOUT = (
    "[rank0]:[E612 09:14:22.1 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog caught collective operation"
    " timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=8, NumelOut=8, Timeout(ms)=600000)"
    " ran for 600017 milliseconds before timing out.\n"
)


def test_a_timeout_hides_no_exception_of_another_rank() -> None:
    raised = "".join(f"[rank3]: {line}\n" for line in (*TRACEBACK, "KeyError: 'moon'"))
    for text in (TIMEOUT + raised, raised + TIMEOUT):
        answer = answer_of(text)
        assert answer.exception is not None and answer.exception.text == "KeyError: 'moon'"
        assert [(item.code, item.consequence) for item in answer.failures] == [("RUN008", True)]


STEPS = "".join(f"{{'loss': 1.{n}, 'epoch': 0.{n}}}\n" for n in range(4))
FULL = (
    "[rank{0}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {1} has a total"
    " capacity of 79.15 GiB of which 1.02 GiB is free. {2}Of the allocated memory 20.02 GiB is allocated by"
    " PyTorch, and 0.10 GiB is reserved by PyTorch but unallocated.\n"
)


def test_what_the_program_recovered_from_is_a_note() -> None:
    retried = FULL.format(0, 0, "") + "[rank0]: Decreasing batch size to: 8.\n" + STEPS
    assert causes(answer_of(FULL.format(0, 0, ""))) == ["RUN001"]
    ended = answer_of(retried + "{'train_runtime': 119.8}\n")
    assert (ended.failures, ended.failed, ended.ended_well) == ((), False, True)
    assert ended.notes == ("the program went on after: GPU out of memory [RUN001], line 1",)
    failed = answer_of(retried + "\n".join((*TRACEBACK, "KeyError: 'eval_f1'\n")))
    assert failed.exception is not None and "eval_f1" in failed.exception.text
    assert causes(answer_of(retried + "CUDA error: device-side assert triggered\n")) == ["RUN027"]


def test_a_run_that_ended_well_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = (
        "[rank1]: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server crash?\n"
    )
    log = tmp_path / "train.log"
    log.write_text(STEPS + "{'train_runtime': 119.8}\n" + lost)
    assert fsdptool(["diagnose", str(log)]) == 0
    assert capsys.readouterr().out.startswith("the run ended well; nothing failed\n")
    assert causes(answer_of(STEPS + lost)) == ["RUN013"]


def test_a_failure_of_an_earlier_attempt_is_a_note() -> None:
    again = (
        "I0612 900 api.py:889] [default] Worker group FAILED. 3/3 attempts left; will restart worker group\n"
    )
    port = "DistNetworkError: port: 29511, code: -98, name: EADDRINUSE, message: address already in use\n"
    answer = answer_of(port + again + STEPS + "RuntimeError: CUDA error: device-side assert triggered\n")
    assert causes(answer) == ["RUN027"]
    assert answer.notes[0].startswith("attempt 1 of 2 ended otherwise")
    assert "RUN017" in answer.notes[0]
    assert causes(answer_of(port + again + port)) == ["RUN017"]


def test_the_numbers_of_a_lack_of_memory_tell_whose_it_is() -> None:
    other = (
        "Process 7 has 55.00 GiB memory in use. Including non-PyTorch memory, this process has 21.00 GiB"
        " memory in use. "
    )
    own = "Process 7 has 21.00 GiB memory in use. "
    assert causes(answer_of(FULL.format(0, 0, own))) == ["RUN001"], "in a container it is the process itself"
    assert causes(answer_of(FULL.format(0, 0, other))) == ["RUN003"]
    assert causes(answer_of(FULL.format(0, 0, other) + FULL.format(1, 0, other))) == ["RUN015"]
    assert causes(answer_of(FULL.format(0, 0, other) + FULL.format(1, 1, other))) == ["RUN003"]


DUMP = (
    "[rank{0}]:[E612 ProcessGroupNCCL.cpp:1870] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Received a dump"
    " signal due to a collective timeout from {2} and we will try our best to dump the debug info. Last"
    " enqueued NCCL work: {1}, last completed NCCL work: 21936.\n"
)


def test_the_rank_with_fewer_collectives_is_named() -> None:
    waits = "".join(DUMP.format(rank, 21937, "this local rank") for rank in (0, 2, 3))
    answer = answer_of(waits + DUMP.format(1, 21936, "rank 0"))
    (cause,) = (item for item in answer.failures if not item.consequence)
    assert (cause.code, cause.ranks) == ("RUN164", (1,))
    assert "1 collective behind" in cause.why
    alike = answer_of(waits + "[rank1]: step 7\n")
    assert causes(alike) == ["RUN008"]
    assert alike.notes == ("rank 1 does not report a timeout: look there first",)


def test_a_timeout_is_explained_by_what_the_program_had_begun() -> None:
    for begun, phase in (
        ("***** Running Evaluation *****\n", FailurePhase.EVALUATION),
        ("Running tokenizer on dataset:   9%|▉ | 28/296 [29:55<4:48:08]\n", FailurePhase.DATA),
        ("Running tokenizer on dataset: 100%|▉ | 296/296 [29:55<0:00]\n", None),
        (STEPS, None),
    ):
        assert answer_of(begun + TIMEOUT).failures[0].phase is phase


def test_an_unknown_log_says_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "+ torchrun --nproc-per-node 2 train.py\ntorch 2.7.1+cu126\n- `Accelerate` version: 1.12.0\n"
        "NCCL version 2.26.2+cuda12.2\n[rank0]: step 1\n[rank1]: step 1\n[rank0]: step 2, odd\n"
    )
    assert fsdptool(["diagnose", str(log)]) == 5
    text = capsys.readouterr().out
    assert "no known failure was found" in text
    assert "programs: torchrun" in text
    assert "versions: accelerate 1.12.0, nccl 2.26.2+cuda12.2, torch 2.7.1+cu126" in text
    assert f"{log}:7: [rank0]: step 2, odd" in text
    assert f"{log}:6: [rank1]: step 1" in text


@pytest.mark.slow
def test_the_work_grows_with_the_length_of_the_log() -> None:
    texts = sorted({text for item in signatures() for text in item.texts})
    words = [word for text in texts for word in text.split()]
    source = random.Random(1)
    lines = [" ".join(source.choices(words, k=12)) for _ in range(4000)]
    counted = []

    class Counting(list[str]):
        asked = 0

        def __getitem__(self, index: Any) -> Any:
            self.asked += 1
            return super().__getitem__(index)

    for part in (Counting(lines[:2000]), Counting(lines)):
        index = TextIndex(part, texts)
        for text in texts:
            assert list(index.lines_with(text, 10**6)) == [
                n for n, line in enumerate(part) if text in line
            ] or (text.split()[0] not in " ".join(part).split())
        counted.append(part.asked)
    assert 0 < counted[1] < 2.3 * counted[0]
    assert counted[1] < len(texts) * len(lines) / 100, "most lines are not compared with most texts"


@pytest.mark.parametrize("text", ["x" * 9000 + " Duplicate GPU detected : rank 0 and rank 1 " + "y" * 9000])
def test_a_line_of_any_length_is_searched(text: str) -> None:
    answer = answer_of(f"step 1\n{text}\nstep 2\nRuntimeError: CUDA error: invalid device ordinal\n")
    assert [(item.code, item.line) for item in answer.failures] == [("RUN015", 2), ("RUN016", 4)]
    assert answer.failures[0].text.startswith("Duplicate GPU detected")
