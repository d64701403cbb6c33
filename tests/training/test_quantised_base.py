"""LoRA on a quantised, sharded base equals plain PyTorch on the weights that base stands for."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import recipe_runs
import reference
import torch
from cases import write_model
from pool import Pool
from quantised_cases import QUANTISED, WIDE, decoded, installed, load_big, quantised_recipe, train
from reference import plain_model
from safetensors.torch import load_file
from sweeps import kept
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdptool.errors import ConfigError
from fsdptool.inspection.build import build
from fsdptool.modeling.methods import quantised_formats as formats
from fsdptool.modeling.methods.quantised_formats import check_format
from fsdptool.records.checkpointing import Checkpointing
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Sharding
from fsdptool.runs.events import read_lines
from fsdptool.runs.manifest import list_checkpoints, read_manifest
from fsdptool.source import resolve

pytestmark = pytest.mark.distributed

FORMATS = ("nf4", "int8", "float8")
STEPS, COUNT = 5, 4
TWO_PROCESSES = Path(__file__).parents[2] / "examples" / "configs" / "two_cpu_processes.yaml"
RUN = """\
model: {reference: model, weights: random}
data: {source: synthetic}
batch: {micro_batch: 2, sequence_length: 8}
method: {name: lora, lora: {rank: 4, base: nf4}}
steps: 7
checkpoints: {every_steps: 3}
"""


def hold(
    pool: Pool,
    world: int,
    name: str,
    folder: Path,
    recipe: Any,
    mesh: ParallelDims | None,
    settings: dict[str, Any],
) -> None:
    """Train on ``world`` ranks; losses and adapters equal the plain loop's on the decoded weights."""
    start = pool.run(decoded, world, name, folder, recipe, mesh)[0]["weights"]
    results = pool.run(train, world, name, folder, recipe, mesh, STEPS, COUNT, settings)
    assert len({result["hash"] for result in results}) == 1
    with installed(name):
        expected = reference.run(name, recipe, start, {}, steps=STEPS, count=COUNT)
    found = results[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    adapters = [key for key in expected["after"] if ".lora_" in key]
    gap = sum(float((found["after"][k] - expected["after"][k]).norm() ** 2) for k in adapters)
    size = sum(float(expected["after"][k].norm() ** 2) for k in adapters)
    assert (gap / size) ** 0.5 <= 1e-5
    frozen = [key for key in found["before"] if ".lora_" not in key]
    assert all(torch.equal(found["before"][key], found["after"][key]) for key in frozen)
    assert any(float(found["after"][k].abs().max()) > 0 for k in adapters if ".lora_B" in k), "it learned"


@pytest.mark.parametrize("base", FORMATS)
@pytest.mark.parametrize(
    ("name", "world"),
    kept([("wide", 2), ("denoiser", 2), ("uneven", 4), ("moe", 2)], ("uneven", 4), ("moe", 2)),
)
def test_training_equals_a_plain_loop_on_the_decoded_base(
    pool: Pool, tmp_path: Path, name: str, world: int, base: str
) -> None:
    recipe, folder = quantised_recipe(name, tmp_path, base)
    hold(pool, world, name, folder, recipe, None, {})


VARIANTS: dict[str, tuple[str, int, ParallelDims | None, dict[str, Any], dict[str, Any]]] = {
    "checkpointing": ("nf4", 2, None, {}, {"activation_checkpointing": True}),
    "selective checkpointing": (
        "nf4",
        2,
        None,
        {"sharding": Sharding(checkpointing=Checkpointing(mode="selective"))},
        {"activation_checkpointing": True},
    ),
    "no reshard": ("int8", 2, None, {}, {"reshard_after_forward": False}),
    "reshard to two": ("nf4", 4, None, {"sharding": Sharding(reshard_after_forward=2)}, {}),
    "hybrid": ("nf4", 4, ParallelDims(dp_replicate=2, dp_shard=2), {}, {}),
    "offload": ("int8", 2, None, {}, {"cpu_offload": True}),
    "unsharded accumulation": ("nf4", 2, None, {"sharding": Sharding(accumulation="unsharded")}, {}),
    "prefetch two": ("int8", 2, None, {"sharding": Sharding(prefetch=2)}, {}),
    "replicated adapters": ("nf4", 2, None, {"method": "lora_replicated"}, {}),
}


@pytest.mark.parametrize(
    "variant",
    kept(VARIANTS, "selective checkpointing", "no reshard", "hybrid", "offload", "replicated adapters"),
)
def test_every_way_to_shard_a_quantised_base_gives_the_same_run(
    pool: Pool, tmp_path: Path, variant: str
) -> None:
    base, world, mesh, changes, settings = VARIANTS[variant]
    recipe, folder = quantised_recipe("wide", tmp_path, base, **changes)
    hold(pool, world, "wide", folder, recipe, mesh, settings)


@pytest.mark.parametrize("base", FORMATS)
def test_the_same_base_comes_out_of_any_number_of_ranks(pool: Pool, tmp_path: Path, base: str) -> None:
    """Cuts fall between rows and scales are a row's own: codes are those of the whole weight."""
    recipe, folder = quantised_recipe("uneven", tmp_path, base)
    one = pool.run(decoded, 1, "uneven", folder, recipe)[0]
    for world in (2, 3, 4):
        some = pool.run(decoded, world, "uneven", folder, recipe)[0]
        assert some["layers"] == one["layers"]
        assert all(torch.equal(some["weights"][key], one["weights"][key]) for key in one["weights"])


def test_each_rank_holds_its_share_of_the_packed_bytes_and_no_more(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = quantised_recipe("wide", tmp_path, "nf4")
    found = pool.run(decoded, 2, "wide", folder, recipe)[0]
    spec = resolve(recipe.model.reference)
    base = dict(build(spec).named_parameters())
    packed = {name for name in base if f"{name.removesuffix('.weight')}" in _plain(found["layers"])}
    assert len(packed) == 14, "seven layers in each of two blocks"
    bits = sum(base[name].numel() for name in packed) * 4.5
    rest = sum(p.numel() for name, p in base.items() if name not in packed) * 32
    adapters = sum(t.numel() for name, t in found["weights"].items() if ".lora_" in name) * 32
    assert sum(found["bytes"]) == (bits + rest + adapters) / 8
    assert found["bytes"][0] == found["bytes"][1]


def _plain(layers: list[str]) -> set[str]:
    return {path.replace(".base_layer", "") for path in layers}


def test_no_rank_ever_holds_the_published_weights(pool: Pool, tmp_path: Path) -> None:
    """Weights stream from files and are packed one at a time: a rank grows by its codes, not by bf16."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 512}
    small, _ = quantised_recipe("wide", tmp_path / "small", "nf4")
    recipe, folder = quantised_recipe("wide", tmp_path, "nf4")
    model = plain_model(QUANTISED["wide"], {**WIDE, **sizes}, torch.bfloat16)
    model.save_pretrained(recipe.model.reference)
    published = sum(p.numel() * 2 for p in model.parameters())
    del model
    pretrained = dataclasses.replace(recipe.model, weights="pretrained", dtype="bfloat16")
    recipe = dataclasses.replace(recipe, model=pretrained)
    # In new processes: the heap of an old one has gaps, which allocations fill or do not.
    pool.close()
    for found in pool.run(load_big, 2, folder, recipe, small):
        assert found["shards"] < published * 0.16, "4.5 of 16 bits, on two ranks"
        assert found["grown"] < found["shards"] + 16 * 2**20 < published / 3


def test_a_stopped_run_continues_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    """Only adapters are saved; a resumed run makes the very same base again."""
    write_model(tmp_path / "model", QUANTISED["wide"].config)
    (tmp_path / "recipe.yaml").write_text(RUN)

    def run(name: str, *, resume: str | None = None, stop_in: int | None = None) -> str:
        folder = tmp_path / name
        recipe_runs.write_folder(folder, tmp_path / "recipe.yaml", TWO_PROCESSES, resume=resume)
        (ended, _) = pool.run(recipe_runs.work_in, 2, str(folder), stop_in)
        return str(ended["status"])

    assert run("whole") == "completed"
    assert run("stopped", stop_in=4) == "stopped"
    assert run("stopped", resume="auto") == "completed"
    whole, stopped = (recorded(tmp_path / name) for name in ("whole", "stopped"))
    assert [step for step, _ in whole[0]] == list(range(1, 8))
    assert whole == stopped
    newest = list_checkpoints(tmp_path / "whole" / "checkpoints")[0]
    names = [
        name for file in newest.glob("*.safetensors") for name in load_file(file) if name.startswith("model/")
    ]
    assert names and all(".lora_" in name for name in names)


def recorded(folder: Path) -> tuple[list[tuple[int, float]], dict[str, str]]:
    """Return every step's loss, and the digests of the newest checkpoint."""
    steps = [(line["step"], line["loss"]) for line in read_lines(folder / "metrics.jsonl")]
    newest = list_checkpoints(folder / "checkpoints")[0]
    return steps, {name: entry.sha256 for name, entry in read_manifest(newest).files.items()}


def test_what_a_base_leaves_is_said(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = quantised_recipe("moe", tmp_path, "nf4")
    proof = pool.run(decoded, 2, "moe", folder, recipe)[0]["proof"]
    assert "fused experts" in proof["quantised"]
    assert "model.layers.0.mlp.experts.gate_up_proj" in proof["quantised"]
    recipe, folder = quantised_recipe("uneven", tmp_path / "b", "nf4")
    proof = pool.run(decoded, 2, "uneven", folder, recipe)[0]["proof"]
    assert "not a multiple of 64" in proof["quantised"]


@pytest.mark.parametrize("base", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_base_decodes_to_within_its_formats_error(base: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(96, 128) * torch.logspace(-3, 0, 96).unsqueeze(1)
    weight[5] = 0.0
    back = formats.decode(base, *formats.encode(base, weight), dtype).float()
    step = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    if base == "nf4":
        # The widest gap between levels is that from -1 to -0.6962 (QLoRA, appendix E).
        largest = weight.view(96, -1, 64).abs().amax(-1, keepdim=True)
        bound = (largest * (0.304 / 2 + step)).expand(-1, -1, 64).reshape(96, 128)
    elif base == "int8":
        bound = weight.abs().amax(1, keepdim=True) * (0.51 / 127 + step)
    else:
        # Three bits of mantissa; below the normal range the spacing is 2^-9 of the scale.
        scale = weight.abs().amax(1, keepdim=True) / 448 * (1 + 2**-7)
        bound = torch.maximum(weight.abs() * (2**-4 + step), scale * 2**-10)
    assert bool(((weight - back).abs() <= bound + 1e-12).all())
    assert bool((back[5] == 0).all())


def test_a_missing_library_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="needs bitsandbytes, which is not installed") as caught:
        check_format("nf4")
    assert "pip install bitsandbytes" in (caught.value.help or "")
    check_format("int8")


def test_a_base_without_values_decodes_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan needs the shape of the decoded weight only."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    cpu = torch.device("cpu")
    with FakeTensorMode():
        weight = formats.decode("nf4", *formats.empty_parts("nf4", 96, 128, cpu), torch.bfloat16)
    assert (weight.shape, weight.dtype, weight.device) == ((96, 128), torch.bfloat16, cpu)
    with pytest.raises(ConfigError, match="needs bitsandbytes"):
        formats.decode("nf4", *formats.empty_parts("nf4", 96, 128, cpu), torch.bfloat16)


def test_layers_the_model_wants_in_fp32_or_an_adapter_reads_itself_stay() -> None:
    from cases import T5, TIED
    from reference import plain_model as made

    from fsdptool.modeling.methods.quantised_layers import choose_layers

    with torch.device("meta"):
        model = made(QUANTISED["wide"], {**T5, "d_model": 64, "d_ff": 64}, torch.float32)
    taken = choose_layers(model.requires_grad_(False), "int8")
    assert not any(path.endswith(".wo") for path in taken.layers)
    assert any(name.endswith("DenseReluDense.wo.weight") for names in taken.left.values() for name in names)
    assert any(path.endswith("SelfAttention.q") for path in taken.layers)
    with torch.device("meta"):
        tied = made(QUANTISED["wide"], TIED, torch.float32)
    tied.model.layers[1].mlp.up_proj.weight = tied.model.layers[0].mlp.up_proj.weight
    taken = choose_layers(tied.requires_grad_(False), "int8")
    assert not any("up_proj" in path for path in taken.layers)
    assert "lm_head" not in taken.layers
