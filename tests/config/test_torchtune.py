"""torchtune's YAML: the keys of its distributed recipes, and what these refuse."""

from __future__ import annotations

import pytest

from fsdptool.config import read_settings, write_settings
from fsdptool.errors import ConfigError
from fsdptool.records.sharding import FsdpSettings

FULL = (
    "model:\n  _component_: torchtune.models.llama3.llama3_8b\noptimizer:\n  _component_: torch.optim.AdamW\n"
    "enable_activation_checkpointing: true\n"
    "custom_sharded_layers: ['tok_embeddings', 'output']\ndtype: bf16\n"
)


def test_its_settings() -> None:
    reading = read_settings(FULL + "fsdp_cpu_offload: true\n")
    settings = reading.require()
    assert reading.dialect == "torchtune" and not reading.diagnostics
    assert settings.cpu_offload and settings.activation_checkpointing and settings.reshard_after_forward
    # Parameters, gradients and states are all in bf16.
    assert settings.mixed_precision == "no" and settings.state_dict_type == "full"
    assert [item.key for item in reading.ignored] == ["custom_sharded_layers"]


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (("dtype: bf16", "dtype: fp16"), ["FSD206"]),
        (("dtype: bf16", "enable_activation_offloading: true\ndtype: bf16"), []),
        (("enable_activation_checkpointing", "enable_activation_offloading"), ["FSD318"]),
        (("dtype: bf16", "tensor_parallel_dim: 2\ndtype: bf16"), ["FSD212"]),
        *(
            (("dtype: bf16", f"tensor_parallel_dim: {size}\ndtype: bf16"), ["FSD206"])
            for size in ("0", "true", "x")
        ),
        (("dtype: bf16", "fsdp_cpu_offload: 'yes'\ndtype: bf16"), ["FSD205"]),
    ],
)
def test_what_it_refuses(change: tuple[str, str], codes: list[str]) -> None:
    assert [item.code for item in read_settings(FULL.replace(*change)).errors] == codes


def test_what_only_a_distributed_recipe_reads_tells_the_recipe() -> None:
    single = FULL.replace("custom_sharded_layers: ['tok_embeddings', 'output']\n", "")
    assert [item.code for item in read_settings(single).diagnostics] == ["FSD362"]


def test_mixed_precision_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match="cannot express mixed_precision = 'bf16'"):
        write_settings(FsdpSettings(), "torchtune")
