"""Memory snapshots: one that is written here, damaged ones, and real ones of other people."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run as fsdptool
from fsdptool.errors import StorageError
from fsdptool.files.values import check
from fsdptool.runs.recordings.snapshots import describe_snapshot

MIB = 1 << 20
BASE = 0x7F0000000000
RECORDINGS = Path(os.environ.get("FSDPTOOL_RECORDINGS", "absent"))
INDEX = RECORDINGS / "index.jsonl"
ENTRIES = [json.loads(line) for line in INDEX.read_text("utf-8").splitlines()] if INDEX.is_file() else []
SNAPSHOTS = [
    each for each in ENTRIES if each["kind"] == "memory_snapshot" and (RECORDINGS / each["file"]).is_file()
]


def _frame(file: str, name: str, line: int) -> dict[str, Any]:
    return {"filename": file, "name": name, "line": line}


MAIN = _frame("/home/user/train.py", "main", 3)
FORWARD = [
    _frame("/site/torch/nn/functional.py", "linear", 9),
    _frame("/home/user/<b>model</b>.py", "forward", 40),
    _frame("/site/torch/nn/modules/module.py", "_call_impl", 1),
    MAIN,
]
LOSS = [_frame("/site/torch/nn/functional.py", "cross_entropy", 7), MAIN]
STEP = [_frame("/site/torch/optim/optimizer.py", "profile_hook_step", 5), MAIN]


def snapshot() -> dict[str, Any]:
    """Return 60 MiB in three segments: parameters from before, the optimizer's state, and a failure."""

    def entry(action: str, address: int, size: int, frames: list[Any], time: int) -> dict[str, Any]:
        place = "device_free" if action == "oom" else "addr"
        where = {place: address, "size": size, "stream": 0, "time_us": time}
        return {"action": action, "frames": frames, **where}

    loss, state = BASE + 20 * MIB, BASE + 40 * MIB
    entries = [
        entry("segment_alloc", loss, 20 * MIB, LOSS, 10),
        entry("alloc", loss, 8 * MIB, LOSS, 10),
        entry("alloc", loss + 8 * MIB, 4 * MIB, FORWARD, 20),
        entry("segment_alloc", state, 20 * MIB, STEP, 30),
        entry("alloc", state, 6 * MIB, STEP, 30),
        entry("free_requested", loss, 8 * MIB, [MAIN], 40),
        entry("free_completed", loss, 8 * MIB, [MAIN], 40),
        entry("oom", 2 * MIB, 15 * MIB, FORWARD, 50),
    ]

    def block(address: int, size: int, frames: list[Any] | None) -> dict[str, Any]:
        used = "active_allocated" if frames is not None else "inactive"
        return {"address": address, "size": size, "state": used, "frames": frames or []}

    def segment(address: int, *blocks: dict[str, Any], stream: int = 0) -> dict[str, Any]:
        kind = {"device": 0, "stream": stream, "segment_type": "large", "segment_pool_id": (0, 0)}
        return {**kind, "address": address, "total_size": 20 * MIB, "blocks": list(blocks)}

    return {
        "segments": [
            segment(BASE, block(BASE, 12 * MIB, []), block(BASE + 12 * MIB, 8 * MIB, None), stream=1),
            segment(
                loss,
                block(loss, 8 * MIB, None),
                block(loss + 8 * MIB, 4 * MIB, FORWARD),
                block(loss + 12 * MIB, 8 * MIB, None),
            ),
            segment(state, block(state, 6 * MIB, STEP), block(state + 6 * MIB, 14 * MIB, None)),
        ],
        "device_traces": [entries],
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    return path


def test_peak_failure_and_change(file: Path) -> None:
    found = describe_snapshot(file)
    assert (found.allocated_peak_bytes, found.reserved_peak_bytes) == (30 * MIB, 60 * MIB)
    assert (found.allocated_bytes, found.reserved_bytes, found.contradictions) == (22 * MIB, 60 * MIB, 0)
    assert {item.name: item.bytes for item in found.components if item.bytes} == {
        "before the recording": 12 * MIB,
        "optimizer": 6 * MIB,
        "activations": 4 * MIB,
    }
    assert found.failed is not None
    assert (found.failed.bytes, found.failed.device_free_bytes) == (15 * MIB, 2 * MIB)
    assert found.failed.line == "/home/user/<b>model</b>.py:40 forward"
    assert [(item.stream, item.bytes, item.pieces, item.reason) for item in found.inactive] == [
        (0, 30 * MIB, 3, "too_small"),
        (1, 8 * MIB, 1, "other_stream"),
    ]
    assert (found.changes[0].change, found.changes[0].bytes) == ("expandable_segments", 30 * MIB)
    assert found.changes[0].enough
    assert [(point.allocated_bytes, point.reserved_bytes) for point in found.timeline][:2] == [
        (12 * MIB, 20 * MIB),
        (12 * MIB, 40 * MIB),
    ]
    assert sum(found.timeline[5].components) == 30 * MIB


def test_peak_without_failure(tmp_path: Path) -> None:
    value = snapshot()
    value["device_traces"][0].pop()
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    found = describe_snapshot(path)
    assert {item.name: item.bytes for item in found.components if item.bytes}["loss"] == 8 * MIB
    assert (found.moment, found.moment_bytes, found.failed) == ("peak", 30 * MIB, None)


def test_earlier_form_without_history(tmp_path: Path) -> None:
    segments = snapshot()["segments"]
    for segment in segments:
        for block in segment["blocks"]:
            block["history"] = [{"addr": block.pop("address"), "frames": block.pop("frames")}]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(segments))
    found = describe_snapshot(path)
    assert (found.entries, found.moment_bytes, found.seconds) == (0, 22 * MIB, None)
    assert found.lines[0].file == "/home/user/train.py"


def test_document_page_and_text(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert fsdptool(["diagnose", str(file), "--format", "json", "--html", str(page)]) == 0
    document = json.loads(capsys.readouterr().out)
    check(document, "memory-snapshot", where="snapshot")
    assert document["failed"]["bytes"] == 15 * MIB
    html = page.read_text("utf-8")
    assert "<b>model" not in html
    assert "&lt;b&gt;model" in html
    assert "<script" not in html
    assert fsdptool(["diagnose", str(file), "--html", str(page)]) == 2
    assert fsdptool(["diagnose", str(file), "--html", str(page), "--force"]) == 0
    assert fsdptool(["diagnose", str(file)]) == 0
    text = capsys.readouterr().out
    assert "a request of 15.0 MiB failed at /home/user/<b>model</b>.py:40 forward" in text
    assert "frees up to 30.0 MiB, enough for the request: PYTORCH_CUDA_ALLOC_CONF" in text


def test_refused_pickles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"segments": [pytest.raises]}))
    assert fsdptool(["diagnose", str(path)]) == 2
    assert "it imports _pytest.raises.raises" in capsys.readouterr().err
    path.write_bytes(pickle.dumps({"weights": [1.0]}))
    with pytest.raises(StorageError, match="not a memory snapshot"):
        describe_snapshot(path)


def test_damaged_snapshots(tmp_path: Path) -> None:
    """Whatever the values of a snapshot are, it is described, and the description has the document's form."""
    generator = random.Random(3)
    path = tmp_path / "snapshot.pickle"
    odd: list[Any] = [None, -1, 1 << 63, "x", [], {}, True, 0.5, (1,)]
    for _ in range(100):
        value = snapshot()
        for _ in range(generator.randrange(1, 4)):
            items = generator.choice([value["segments"], value["device_traces"][0]])
            chosen = generator.randrange(len(items))
            if not isinstance(items[chosen], dict):
                continue
            if generator.random() < 0.1:
                items[chosen] = generator.choice(odd)
            else:
                items[chosen][generator.choice(list(items[chosen]))] = generator.choice(odd)
        path.write_bytes(pickle.dumps(value))
        found = describe_snapshot(path)
        assert found.moment_bytes == sum(item.bytes for item in found.components)


@pytest.mark.slow
@pytest.mark.skipif(not SNAPSHOTS, reason="FSDPTOOL_RECORDINGS names no folder of recordings")
def test_real_snapshots() -> None:
    smallest = sorted(SNAPSHOTS, key=lambda entry: (RECORDINGS / entry["file"]).stat().st_size)[:6]
    for entry in smallest:
        found, facts = describe_snapshot(RECORDINGS / entry["file"]), entry["facts"]
        assert (found.reserved_bytes, found.contradictions) == (facts["reserved_end"], 0)
        assert found.allocated_bytes == facts["active_end"]
        if found.entries:
            assert found.reserved_peak_bytes == facts["peak_reserved"]
