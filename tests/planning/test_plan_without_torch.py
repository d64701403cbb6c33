"""A plan whose traces are cached imports neither torch nor the model libraries, and replays no allocator."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from sweeps import kept

from fsdptool.memory.simulation.allocator import ReplayLedger
from fsdptool.planning import Options, make_plan, read_request
from fsdptool.records.codec import to_json

COMMON: Options = {"gpu": "A100-40GB-SXM", "gpus": 2, "sequence_length": 64, "search": False}
CASES: dict[str, Options] = {
    "all parameters": {"reference": "qwen3:tiny", **COMMON},
    "adapters": {"reference": "qwen3:tiny", "method": "lora", **COMMON},
    "tensor parallel": {"reference": "granitemoe:3.0-1b-a400m", "tp": 2, **COMMON},
    "expert parallel": {"reference": "granitemoe:3.0-1b-a400m", "ep": 2, **COMMON},
}
PROGRAM = """
import sys
from fsdptool.planning import make_plan, read_request
plan = make_plan(read_request({options}))
heavy = {{"torch", "transformers", "diffusers", "peft", "accelerate", "numpy"}} & set(sys.modules)
print(plan.verdict, plan.chosen, sorted(heavy))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_by_default")
@pytest.mark.parametrize("case", kept(CASES, "adapters", "expert parallel"))
def test_a_cached_plan_imports_no_torch(case: str) -> None:
    options = CASES[case]
    plan = make_plan(read_request(options))
    program = PROGRAM.format(options=repr(dict(options)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"{plan.verdict} {plan.chosen} []", done.stderr


@pytest.mark.slow
def test_a_cached_plan_takes_over_reserved_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Options = {"reference": "qwen3:tiny", **COMMON}
    plan = make_plan(read_request(options))
    assert plan.candidates[0].reserved_peak_bytes
    played: list[object] = []
    run = ReplayLedger.run

    def noted(*args: Any) -> Any:
        played.append(args)
        return run(*args)

    monkeypatch.setattr(ReplayLedger, "run", noted)
    assert to_json(make_plan(read_request(options))) == to_json(plan)
    assert not played
    # Neither of these changes the trace, and each of them the peak.
    for change in ({"gpus": 4}, {"reshard": "false"}):
        played.clear()
        make_plan(read_request({**options, **change}))  # type: ignore[typeddict-item]
        assert played, change
