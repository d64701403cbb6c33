"""One launch of ``prove_cases.py`` over two processes, for the test and for docs/how-to/prove-sharding.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsdptool

CASES = Path(__file__).with_name("prove_cases.py")
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96, **_SIZES}


def launch(folder: Path) -> list[dict[str, Any]]:
    """Return what both ranks saw when they proved models of Trainer, TRL and accelerate.

    Args:
        folder: An empty folder for the model, its plan and the results.

    Raises:
        RuntimeError: A rank failed; the message ends with what it printed.
    """
    model, planned = folder / "model", folder / "plan.json"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    plan = fsdptool.plan(
        str(model),
        profile="cpu-gloo",
        gpus=2,
        sequence_length=16,
        micro_batch=2,
        precision="no",
        layout="accelerate",
        search=False,
    )
    planned.write_text(json.dumps(plan.document()))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(str(CASES), str(model), str(planned), str(folder)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=400,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
