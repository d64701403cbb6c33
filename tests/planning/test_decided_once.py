"""A plan decides a run once, and reads its model once: calls are counted, not timed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fsdptool
from fsdptool.planning import Options, make_plan, read_request

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


@pytest.mark.slow
def test_a_search_decides_the_run_and_reads_the_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDPTOOL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    root = str(Path(fsdptool.__file__).parent)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            calls[code.co_name] += 1

    options = Options(reference=str(tmp_path), gpu="L4-24GB", gpus=4, sequence_length=64)
    request = read_request(options)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        plan = make_plan(request)
    finally:
        sys.setprofile(before)
    assert len(plan.candidates) > 10
    assert calls["at_point"] >= len(plan.candidates)
    once = ("resolve_run", "with_stored_dtypes", "inspect", "examine", "as_trained")
    assert {name: calls[name] for name in once} == dict.fromkeys(once, 1)
