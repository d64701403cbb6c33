"""Count the reports of users whose bug an advisory names when the file and the versions are given.

``python benchmarks/advisories/field_reports.py`` audits the affected example of each entry below with its
versions. A report counts if the audit names the entry and the entry links the report. Writes
``benchmarks/results/advisories-field.json``. The reports are issues and pull requests about FSDP2 of
May 2025 to September 2026 whose cause is a bug of particular releases.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import fsdptool
from fsdptool.advisories.catalogue import advisories
from fsdptool.records.advisory import Advisory

RESULTS = Path(__file__).parents[1] / "results" / "advisories-field.json"

REPORTS = {
    "axolotl-ai-cloud/axolotl/issues/2744": "torchao-low-bit-optimizer-fsdp1-save",
    "axolotl-ai-cloud/axolotl/issues/3476": "axolotl-4bit-ram-loading",
    "axolotl-ai-cloud/axolotl/pull/3167": "axolotl-cpu-offload-pins-host-memory",
    "axolotl-ai-cloud/axolotl/pull/3403": "axolotl-lora-on-embeddings-fsdp2",
    "axolotl-ai-cloud/axolotl/pull/3958": "axolotl-architecture-name-stripped",
    "bitsandbytes-foundation/bitsandbytes/issues/1633": "bitsandbytes-8bit-optimizer-fsdp2",
    "bitsandbytes-foundation/bitsandbytes/issues/1709": "bitsandbytes-8bit-base-fsdp1",
    "ecmwf/WeatherGenerator/issues/2632": "torch-parameters-unused-on-some-ranks",
    "hiyouga/LlamaFactory/pull/10127": "llamafactory-reference-model-fsdp",
    "huggingface/accelerate/issues/3798": "accelerate-mesh-without-shard-dimension",
    "huggingface/accelerate/issues/3844": "accelerate-frozen-params-upcast",
    "huggingface/accelerate/issues/3855": "accelerate-optimizer-state-before-sharding",
    "huggingface/accelerate/issues/3897": "accelerate-checkpointing-of-children",
    "huggingface/accelerate/issues/3971": "accelerate-sharded-optimizer-resume",
    "huggingface/accelerate/issues/3979": "accelerate-fp32-masters-lost",
    "huggingface/accelerate/issues/3983": "accelerate-uint8-nf4-sharded",
    "huggingface/accelerate/pull/3921": "accelerate-persistent-buffers-ram-loading",
    "huggingface/accelerate/pull/3985": "accelerate-mixed-trainable-dtypes",
    "huggingface/accelerate/pull/4180": "accelerate-mesh-without-shard-dimension",
    "huggingface/accelerate/pull/4206": "accelerate-peft-full-state-dict",
    "huggingface/peft/issues/2833": "bitsandbytes-8bit-base-fsdp1",
    "huggingface/transformers/issues/43749": "transformers-ram-loading-reinitialises",
    "huggingface/transformers/pull/42521": "transformers-fsdp-version-ignored",
    "huggingface/transformers/pull/45640": "transformers-trainer-defaults-to-fsdp2",
    "huggingface/trl/issues/3581": "trl-reference-model-fsdp2",
    "huggingface/trl/issues/4550": "transformers-generate-adapter-fsdp2",
    "huggingface/trl/issues/6470": "trl-precompute-reference-fsdp2",
    "huggingface/trl/pull/3670": "trl-fsdp2-weights-never-synced",
    "huggingface/trl/pull/6065": "trl-chunked-nll-lora-mixed-tensors",
    "huggingface/trl/pull/7131": "trl-async-grpo-weight-sync-fsdp2",
    "huggingface/trl/pull/7304": "trl-kto-reference-not-prepared",
    "modelscope/ms-swift/issues/8198": "ms-swift-fsdp-config-not-read",
    "modelscope/ms-swift/pull/7962": "ms-swift-fsdp-config-not-read",
    "modelscope/ms-swift/pull/9844": "ms-swift-grpo-offloading",
    "modelscope/ms-swift/pull/9980": "ms-swift-model-on-every-rank",
    "modelscope/ms-swift/pull/9982": "transformers-ram-loading-commits-host-memory",
    "pytorch/pytorch/issues/154888": "torch-hybrid-shard-groups-of-one",
    "verl-project/verl/issues/1517": "verl-loading-memory-old-torch",
    "verl-project/verl/issues/2464": "verl-loading-memory-old-torch",
    "verl-project/verl/issues/2822": "verl-param-offload-fsdp2",
    "verl-project/verl/issues/7493": "torch-hybrid-shard-groups-of-one",
    "verl-project/verl/issues/7834": "verl-tied-embeddings-loaded-by-every-rank",
    "verl-project/verl/pull/2606": "verl-loading-memory-old-torch",
}
"""The entry that names each report."""


def names(advisory: Advisory, folder: Path) -> bool:
    """Whether an audit of the affected example names the advisory."""
    examples = advisory.database_specific.examples
    assert examples is not None
    example = examples.affected
    first = example.text.split(maxsplit=1)[0]
    suffix = ".json" if first.startswith("{") else ".yaml" if first.endswith(":") else ".sh"
    for name, text in {**example.files, f"run{suffix}": example.text}.items():
        (folder / name).write_text(text, encoding="utf-8")
    target = [f"{package}=={version}" for package, version in example.versions.items()]
    (audited,) = fsdptool.audit(folder / f"run{suffix}", target=target, isolated=True).files
    return any(finding.id == advisory.id for finding in audited.findings)


def main() -> None:
    """Audit the examples and write the rows."""
    entries = {advisory.id: advisory for advisory in advisories()}
    rows = []
    for report, name in REPORTS.items():
        url = f"https://github.com/{report}"
        linked = url in {reference.url for reference in entries[name].references}
        with tempfile.TemporaryDirectory() as folder:
            rows.append(
                {"report": url, "advisory": name, "named": linked and names(entries[name], Path(folder))}
            )
    count = sum(row["named"] is True for row in rows)
    document = {"advisories": len(entries), "reports": len(rows), "named": count, "rows": rows}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(
        f"{count} of {len(rows)} reports are named by {len({*REPORTS.values()})} of {len(entries)} advisories"
    )
    for row in rows:
        if not row["named"]:
            print(f"not named: {row['report']} by {row['advisory']}")


if __name__ == "__main__":
    main()
