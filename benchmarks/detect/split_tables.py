"""Writes where every parameter of many families lies on a tensor-parallel group.

``tests/tensor/split_tables.jsonl`` has one line per flavour: the size of the group, the regions, what does
not divide, notes, and every distinct parameter with its placement. A test compares the committed tables with
what the code derives. Run: ``python -m benchmarks.detect.split_tables``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fsdptool.inspection import inspect
from fsdptool.inspection.document import summary
from fsdptool.records.codec import to_json
from fsdptool.source import resolve
from fsdptool.tensor.division import plan_tensor_parallel

OUTPUT = Path(__file__).parents[2] / "tests" / "tensor" / "split_tables.jsonl"

FLAVOURS = {
    "llama3:8b": 8, "qwen2.5:7b": 4, "qwen3:0.6b": 4, "gemma2:2b": 4, "mistral:7b-v0.1": 8, "phi3:mini-4k": 8,
    "olmo2:7b": 8, "cohere:aya-23-8b": 8, "gpt2:small": 4, "gpt-neox:20b": 8, "gptj:6b": 8, "falcon:180b": 8,
    "bloom:560m": 4, "opt:125m": 4, "t5:small": 4, "bart:base": 4, "bert:base-uncased": 4,
    "modernbert:base": 4, "mixtral:8x7b": 8, "qwen3-moe:30b-a3b": 4, "gpt-oss:20b": 8, "deepseek-v3:671b": 8,
    "llama4:scout-17b-16e": 8, "granitemoe:3.0-1b-a400m": 8, "qwen3-next:80b-a3b": 2, "mamba:2.8b": 2,
    "jamba:v0.1": 8, "vit:base-patch16-224": 4, "clip:vit-base-patch32": 4, "qwen3-vl:2b": 8,
    "whisper:tiny": 2, "flux.1:dev": 8, "flux.2:klein-4b": 8, "sd3:medium": 8, "sdxl:unet": 5,
    "qwen-image:20b": 8, "wan2.1:t2v-1.3b": 4, "pixart-sigma:xl-1024": 8,
}  # fmt: skip
"""Flavours of text, mixture, vision and diffusion models, and ranks of the group."""


def table(reference: str, size: int) -> dict[str, Any]:
    """Return one flavour's table as JSON data."""
    anatomy = inspect(resolve(reference))
    split = summary(anatomy, plan_tensor_parallel(anatomy, size))
    parameters = []
    for item in split.parameters:
        written = to_json(item).items()
        kept = {key: value for key, value in written if value not in (None, [], False) or "shape" in key}
        parameters.append(kept)
    return {"reference": reference, **to_json(split), "parameters": parameters}


def main() -> None:
    """Write every table; names of flavours on the command line limit it to those, which are printed."""
    if chosen := sys.argv[1:]:
        for reference in chosen:
            print(json.dumps(table(reference, FLAVOURS[reference]), indent=1))
        return
    with OUTPUT.open("w", encoding="utf-8") as stream:
        for reference, size in FLAVOURS.items():
            stream.write(json.dumps(table(reference, size)) + "\n")


if __name__ == "__main__":
    main()
