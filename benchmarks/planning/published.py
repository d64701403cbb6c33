"""Compare the time model with a published throughput.

    python benchmarks/planning/published.py [-o benchmarks/results/planning_published.json]

The reference is torchtitan's Llama-3-8B on 8 H100 (its ``benchmarks/llama3_h100``): another implementation
of the model, on 500 W cards. It is not our own measurement; it shows whether the time model has the right
magnitude.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fsdptool.planning import Options, make_plan, read_request
from fsdptool.records.diagnostic import library_versions, tool_version

PUBLISHED = 5762
"""Tokens per second and GPU: FSDP alone, eager, selective checkpointing, 2 x 8,192 tokens a GPU."""

OPTIONS = Options(
    reference="llama3:8b",
    gpu="H100-80GB-SXM",
    gpus=8,
    sequence_length=8192,
    micro_batch=2,
    checkpointing="selective",
    search=False,
)


def main() -> None:
    """Predict, print and save the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    (requested,) = make_plan(read_request(OPTIONS)).candidates
    assert requested.tokens_per_second is not None
    document = {
        "benchmark": "planning/published",
        "fsdptool": tool_version(),
        "libraries": library_versions(),
        "settings": requested.settings,
        "tokens_per_second_and_gpu": {
            "published": PUBLISHED,
            "predicted": round(requested.tokens_per_second / 8),
        },
    }
    text = json.dumps(document, indent=1) + "\n"
    sys.stdout.write(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
