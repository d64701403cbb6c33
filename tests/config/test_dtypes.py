"""Effective dtypes: as accelerate's own plugin and ``fsdp2_prepare_model`` have them, and other programs'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdptool.config import read_settings
from fsdptool.config.result import explain_document
from fsdptool.report.console.findings import render_explanation

FILE = """
distributed_type: FSDP
mixed_precision: {precision}
num_processes: 2
fsdp_config:
  fsdp_version: {version}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


def name_of(dtype: Any) -> str:
    """Return a torch dtype's name."""
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("version", [1, 2])
def test_dtypes_are_those_of_accelerates_plugin(precision: str, version: int) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    plugin.set_mixed_precision(precision)
    policy: Any = plugin.mixed_precision_policy
    dtypes = read_settings(FILE.format(precision=precision, version=version)).dtypes
    assert dtypes is not None
    assert dtypes.gathered == dtypes.computed == name_of(policy.param_dtype)
    assert dtypes.reduced == name_of(policy.reduce_dtype)
    if version == 2:
        assert dtypes.outputs == name_of(policy.output_dtype)
    assert (dtypes.stored, dtypes.saved) == ("float32", "float32")


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_dtypes_are_those_of_a_model_that_accelerate_prepared(precision: str) -> None:
    """``fsdp2_prepare_model`` itself, on the CPU and a fake process group, on a model loaded in bf16."""
    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp_utils
    from torch import nn
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class State:
        fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )

    class Prepares:
        state = State()
        mixed_precision = precision
        is_main_process = False
        device = torch.device("cpu")
        torch_device_mesh = None

    if precision != "no":
        State.fsdp_plugin.set_mixed_precision(precision)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        torch.distributed.init_device_mesh("cpu", (2,))
        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch.bfloat16)
        accelerator: Any = Prepares()
        model = fsdp_utils.fsdp2_prepare_model(accelerator, model)
        output = model(torch.ones(2, 8, dtype=torch.bfloat16))
        gathered = model[0].weight.dtype
        model.reshard()
        (shard, *_) = [item for item in model.parameters() if isinstance(item, DTensor)]
        saved = model.state_dict()["0.weight"].dtype
    finally:
        torch.distributed.destroy_process_group()
    dtypes = read_settings(FILE.format(precision=precision, version=2)).dtypes
    assert dtypes is not None

    def loaded(name: str | None) -> str:
        return name or "bfloat16"

    assert loaded(dtypes.stored) == name_of(shard.dtype)
    assert loaded(dtypes.gathered) == name_of(gathered)
    assert loaded(dtypes.outputs) == name_of(output.dtype)
    assert loaded(dtypes.saved) == name_of(saved)


@pytest.mark.parametrize(
    ("text", "consumer", "expected"),
    [
        (FILE.format(precision="bf16", version=2), "fsdptool",
         ("float32", "bfloat16", "bfloat16", "float32", "bfloat16", "float32")),
        (FILE.format(precision="'no'", version=2), "fsdptool", ("float32",) * 6),
        (FILE.format(precision="'no'", version=2), None, (None,) * 6),
        ("[training]\nseq_len = 512\n\n[parallelism]\ndata_parallel_shard_degree = 8\n", None,
         ("float32", "bfloat16", "bfloat16", "float32", "bfloat16", "float32")),
        ('[training]\ndtype = "bfloat16"\nmixed_precision_param = "float32"\n\n[parallelism]\n'
         "data_parallel_shard_degree = 8\n", None,
         ("bfloat16", "float32", "float32", "float32", "float32", "bfloat16")),
        ("model:\n  _component_: torchtune.models.llama3.llama3_8b\ndtype: bf16\n"
         "fsdp_cpu_offload: false\n", None,
         ("bfloat16",) * 6),
        ("output_dir: out\nlearning_rate: 0.1\nbf16: true\nfsdp: full_shard\nfsdp_config:\n  version: 2\n"
         "  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n", None,
         ("float32", "bfloat16", "bfloat16", "bfloat16", "bfloat16", "float32")),
    ],
)  # fmt: skip
def test_dtypes_follow_the_program_that_reads_the_file(
    text: str, consumer: str | None, expected: tuple[str | None, ...]
) -> None:
    reading = read_settings(text, consumer=consumer)
    dtypes = reading.dtypes
    assert dtypes is not None
    names = ("stored", "gathered", "computed", "reduced", "outputs", "saved")
    assert tuple(getattr(dtypes, name) for name in names) == expected
    assert explain_document(reading)["dtypes"] == dict(zip(names, expected, strict=True))
    shown = render_explanation(reading)
    for name, dtype in zip(names, expected, strict=True):
        assert any(
            line.split()[:2] == [name, (dtype or "as loaded").split()[0]] for line in shown.splitlines()
        )


def test_a_file_that_does_not_run_fsdp_has_no_dtypes() -> None:
    reading = read_settings("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    assert reading.dtypes is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("f.yaml", FILE.format(precision="bf16", version=2) + "  fsdp_mixed_precision_policy: bf16\n"),
        ("f.yaml", FILE.format(precision="bf16", version=2) + "  mixed_precision_policy: bf16\n"),
        ("f.env", "ACCELERATE_USE_FSDP=true\nFSDP_VERSION=2\nFSDP_MIXED_PRECISION_POLICY=bf16\n"),
        ("f.json", '{"output_dir": "o", "learning_rate": 0.1, "fsdp": "full_shard",'
         ' "fsdp_config": {"version": 2, "mixed_precision_policy": "bf16"}}'),
    ],
)  # fmt: skip
def test_a_policy_of_its_own_is_said_to_exist_in_python_only(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    findings = read_settings(tmp_path / name).diagnostics
    helps = [item.help or "" for item in findings if "mixed_precision_policy" in item.message.lower()]
    assert any("FullyShardedDataParallelPlugin(mixed_precision_policy=...)" in text for text in helps)
