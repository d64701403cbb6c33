"""float8 training: where it is refused, and torchao's emulation sharded over ranks against a plain loop.

Ranks gather float8 weights, and what they gather is compared with the plan.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import recipe_runs
import reference
import torch
from cases import CASES, LLAMA, MOE, TIED, Case, anatomy_of, inputs_for, prepare_case
from pool import Pool
from safetensors import safe_open
from torch import nn

from fsdptool.errors import ConfigError
from fsdptool.memory.simulation.collective_bytes import DEVICES
from fsdptool.memory.simulation.groups import cut
from fsdptool.modeling import build_model
from fsdptool.modeling.methods import float8
from fsdptool.modeling.prepare import prepare_model
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.tensor_group import ALONE
from fsdptool.modeling.units import plan_units
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import TrainingLoop
from fsdptool.records.recipe import Lora, Method, ModelChoice, Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings, UnitPlan
from fsdptool.runs.events import read_lines
from fsdptool.runs.folder import read_inputs
from fsdptool.runs.manifest import newest_good
from fsdptool.source import resolve

FP8 = FsdpSettings(mixed_precision="fp8")
CPU = torch.device("cpu")
NONE = UnitPlan("native", (), None, None, None)
WIDE = Case(
    "causal",
    {**LLAMA, "hidden_size": 64, "intermediate_size": 128},
    ("LlamaDecoderLayer",),
    "causal_lm",
    (),
)


class Blocks(nn.Module):
    """Two blocks of one layer, and a head outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 30))])
        self.head = nn.Linear(32, 32)


def recipe_of(method: Method | None = None) -> Recipe:
    return Recipe(ModelChoice("llama3:8b"), method=method or Method())


def test_float8_is_refused_where_nothing_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs float8 hardware, which this device \(cpu\) does not have"):
        float8.convert_layers(Blocks(), recipe_of(), FP8, NONE, CPU)
    with pytest.raises(ConfigError, match="fp8 trains whole weights, but LoRA keeps them frozen"):
        float8.convert_layers(Blocks(), recipe_of(Method("lora", lora=Lora())), FP8, NONE, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"NVIDIA A100 has 8\.0"):
        float8.convert_layers(Blocks(), recipe_of(), FP8, NONE, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs torchao, which is not installed") as missing:
        float8.convert_layers(Blocks(), recipe_of(), FP8, NONE, torch.device("cuda", 0))
    assert "pip install torchao" in (missing.value.help or "")


def test_other_precisions_convert_nothing() -> None:
    model = Blocks()
    assert float8.convert_layers(model, recipe_of(), FsdpSettings(mixed_precision="bf16"), NONE, CPU) == 0
    assert all(type(module).__name__ != "Float8Linear" for module in model.modules())


def test_a_methods_parameters_are_looked_at_before_layers_are_converted(tmp_path: Path) -> None:
    """Its files are opened by the names that the parameters have until then."""
    recipe, _ = prepare_case(WIDE, tmp_path, "full")
    spec = resolve(recipe.model.reference)
    run = resolve_run(recipe, dataclasses.replace(FP8, wrap_classes=WIDE.wrap, use_cpu=True), ranks=1)
    plan = plan_units(anatomy_of(spec, WIDE.wrap), run)
    model, seen = build_model(spec, run.recipe.model, cp=1), list[str]()
    with pytest.raises(ConfigError, match="needs float8 hardware"):
        prepare_model(
            model,
            spec,
            run.recipe,
            run.settings,
            plan,
            ALONE,
            float8_device=CPU,
            after_method=lambda model: seen.extend(name for name, _ in model.named_parameters()),
        )
    assert {*plan.float8} <= {*seen}


@pytest.mark.parametrize(
    ("config", "wrap", "layers"),
    [
        (WIDE.config, "LlamaDecoderLayer", 7),
        # Rows of 24 or 40 elements.
        (LLAMA, "LlamaDecoderLayer", 0),
        (TIED | {"hidden_size": 64, "intermediate_size": 128}, "LlamaDecoderLayer", 7),
        # Attention; experts are stacked, and the router is a layer of the model's own.
        (MOE, "Qwen3MoeDecoderLayer", 4),
    ],
)
def test_a_plan_lists_the_weights_of_linear_layers_in_blocks(
    tmp_path: Path, config: dict[str, Any], wrap: str, layers: int
) -> None:
    recipe, _ = prepare_case(Case("causal", config, (wrap,), "causal_lm", ()), tmp_path, "full")
    anatomy = anatomy_of(resolve(recipe.model.reference), (wrap,))
    run = resolve_run(recipe, dataclasses.replace(FP8, wrap_classes=(wrap,), use_cpu=True), ranks=2)
    names = plan_units(anatomy, run).float8
    assert len(names) == len(set(names)) == 2 * layers
    assert all(name.startswith("model.layers.") and name.endswith("_proj.weight") for name in names)
    others = (
        resolve_run(recipe, FsdpSettings(wrap_classes=(wrap,)), ranks=2),
        # axolotl gathers in 16 bits unless a key of its own says otherwise.
        resolve_run(recipe, run.settings, ranks=2, loop=TrainingLoop(program="axolotl")),
    )
    for other in others:
        assert plan_units(anatomy, other).float8 == ()


@contextmanager
def emulated() -> Iterator[None]:
    """Let a rank of the pool train the wide case with emulated float8 layers."""
    before = CASES["causal"]
    CASES["causal"], os.environ[float8.EMULATE] = WIDE, "1"
    try:
        yield
    finally:
        CASES["causal"] = before
        del os.environ[float8.EMULATE]


def train_emulated(folder: Path, recipe: Recipe, steps: int) -> dict[str, Any]:
    """Train the wide case on the pool's ranks with emulated float8 layers."""
    import ranks
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with emulated():
        found = ranks.train("causal", folder, recipe, None, steps, 4, {"mixed_precision": "fp8"})
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return {**found, "graphs": graphs, "breaks": breaks}


def gather_emulated(folder: Path, recipe: Recipe, mesh: ParallelDims) -> dict[str, Any]:
    """Take a step, scale the weights as loading a checkpoint would change them, and take another.

    Returns:
        By unit what was gathered, what stayed and what the plan says of both; by weight its scale and the one
        that its largest entry gives.
    """
    import ranks
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    from fsdptool.distributed.collective_order import _GATHER, _REDUCE
    from fsdptool.distributed.session import open_session
    from fsdptool.distributed.shard import local
    from fsdptool.training.trainer import assemble

    exchanged: list[int] = []
    original: Any = DefaultAllGather.__call__

    def count(self: Any, output_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        exchanged.append(output_tensor.nbytes)
        return original(self, output_tensor, *args, **kwargs)

    with emulated(), pytest.MonkeyPatch.context() as patch:
        inputs = inputs_for(WIDE, folder, recipe, mesh=mesh, mixed_precision="fp8")
        session = open_session(inputs.settings, 1)
        assembled = assemble(inputs, session)
        patch.setattr(DefaultAllGather, "__call__", count)
        assembled.stepper.run(
            ranks.share(session, 0, "causal", session.data_ranks, torch.float32), rate=assembled.rate
        )
        gathered = sorted(set(exchanged))
        named = dict(assembled.model.named_parameters())
        with torch.no_grad():
            for parameter in named.values():
                local(parameter).mul_(64.0)
        whole = {name: ranks.whole(parameter) for name, parameter in named.items()}
        assembled.stepper.run(
            ranks.share(session, 1, "causal", session.data_ranks, torch.float32), rate=assembled.rate
        )
    units = assembled.stepper.order._units
    rows: dict[str, Any] = {name: local(parameter) for name, parameter in named.items()}
    narrow = [name for name in named if hasattr(rows[name], "fsdp_pre_all_gather")]
    scales: dict[str, Any] = {name: rows[name].fsdp_pre_all_gather.__self__ for name in narrow}
    kept = [
        [
            sum(t.numel() * t.element_size() for t in item.all_gather_outputs)
            for item in unit.group.fsdp_params
        ]
        for unit in units
    ]
    # A rank that leaves a unit out joins its gather and adds zeros to its gradients.
    zeros = []
    for unit in units[1:2]:
        unit.stand_in(_GATHER)
        unit.stand_in(_REDUCE)
        unit.rest()
        zeros += [float(local(item.sharded_param.grad).abs().max()) for item in unit.trained]
    shares = cut(inputs.units, mesh.dp_shard or session.world_size, DEVICES["cpu-gloo"]).shares
    return {
        "exchanged": gathered,
        "exchanged, planned": sorted(
            {s.buffers.gather.total for s in shares if s.buffers.gather and s.weights}
        ),
        "kept": sorted(kept),
        "kept, planned": sorted(list(s.buffers.whole.sizes) for s in shares if s.weights),
        "narrow": len(narrow),
        "scales": {name: float(cast._precomputed_scale) for name, cast in scales.items()},
        "scales, expected": {name: 448.0 / float(whole[name].abs().max()) for name in narrow},
        "plain": all(type(part) is torch.Tensor for part in rows.values()),
        "zeros": zeros,
    }


@pytest.mark.distributed
@pytest.mark.parametrize(("world", "compiled"), [(1, False), (2, False), (4, False), (2, True)])
def test_emulated_float8_layers_shard_and_train(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, compiled: bool
) -> None:
    pytest.importorskip("torchao", reason="emulation is torchao's")
    recipe, folder = prepare_case(WIDE, tmp_path, "full")
    # Everything but the float8 layers in fp32, so that the plain loop computes the same.
    recipe = dataclasses.replace(recipe, sharding=Sharding(param_dtype="float32", compile=compiled))
    found = pool.run(train_emulated, world, folder, recipe, 5, timeout=300.0)[0]
    monkeypatch.setitem(CASES, "causal", WIDE)
    plain = reference.run("causal", recipe, found["before"], {}, steps=5)
    build = reference.plain_model

    def converted(*args: Any) -> nn.Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(emulate=True, pad_inner_dim=True)
        model: nn.Module = build(*args)
        convert_to_float8_training(model.model.layers, config=config)
        return model

    monkeypatch.setattr(reference, "plain_model", converted)
    expected = reference.run("causal", recipe, found["before"], {}, steps=5)
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)
    # Later a last bit of a sum moves a scale, and with it what rounds up and what rounds down.
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)
    assert abs(found["losses"][0] / plain["losses"][0] - 1) > 1e-5, "float8 rounds"
    trained = [
        name for name, value in found["before"].items() if not torch.equal(value, found["after"][name])
    ]
    assert any(name.endswith("q_proj.weight") for name in trained)
    # Equal blocks share their graphs, and the scales of another step need no others.
    assert (found["graphs"], found["breaks"]) == (1 if compiled else 0, 0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "mesh", "reshard", "narrow"),
    [
        (2, ParallelDims(), None, True),
        (4, ParallelDims(dp_replicate=2, dp_shard=2), None, True),
        # torch reshards no float8 weights to fewer ranks, and three ranks do not divide the rows.
        (4, ParallelDims(), 2, False),
        (3, ParallelDims(), None, False),
    ],
)
def test_weights_are_gathered_in_float8_with_scales_that_fit_them(
    pool: Pool, tmp_path: Path, world: int, mesh: ParallelDims, reshard: int | None, narrow: bool
) -> None:
    pytest.importorskip("torchao", reason="emulation is torchao's")
    recipe, folder = prepare_case(WIDE, tmp_path, "full")
    recipe = dataclasses.replace(recipe, sharding=Sharding(reshard_after_forward=reshard))
    for found in pool.run(gather_emulated, world, folder, recipe, mesh, timeout=300.0):
        assert found["narrow"] == (14 if narrow else 0)
        assert found["plain"], "optimizers and checkpoints see torch's own tensors"
        assert found["kept"] == found["kept, planned"]
        if reshard is None:
            assert found["exchanged"] == found["exchanged, planned"]
        assert found["scales"] == pytest.approx(found["scales, expected"], rel=1e-6)
        assert found["zeros"] == [0.0] * len(found["zeros"])


def work_emulated(folder: str) -> dict[str, Any]:
    """Run what a folder describes with emulated float8 layers."""
    with emulated():
        return recipe_runs.work_in(folder)


@pytest.mark.distributed
def test_a_float8_run_evaluates_averages_and_continues(pool: Pool, tmp_path: Path) -> None:
    """Its checkpoints hold fp32 weights, and four ranks continue what two began."""
    pytest.importorskip("torchao", reason="emulation is torchao's")
    examples = Path(__file__).parents[2] / "examples"
    text = (examples / "configs" / "two_cpu_processes.yaml").read_text(encoding="utf-8")

    def start(name: str, ranks: int, steps: int, resume: str | None = None) -> Path:
        def shortened(recipe: Recipe) -> Recipe:
            return dataclasses.replace(
                recipe,
                steps=steps,
                checkpoints=dataclasses.replace(recipe.checkpoints, every_steps=2),
                evaluation=dataclasses.replace(recipe.evaluation, every_steps=2, samples=0),
                ema=dataclasses.replace(recipe.ema, decay=0.5),
            )

        folder, recipe = tmp_path / name, examples / "recipes" / "decoder_full.yaml"
        config = tmp_path / "config.yaml"
        config.write_text(
            text.replace("num_processes: 2", f"num_processes: {ranks}").replace("'no'", "fp8"),
            encoding="utf-8",
        )
        recipe_runs.write_folder(folder, recipe, config, changed=shortened, resume=resume)
        ended = pool.run(work_emulated, ranks, str(folder), timeout=300.0)
        assert [(item["status"], item["step"]) for item in ended] == [("completed", steps)] * ranks
        return folder

    straight = losses_of(start("straight", 2, 4))
    half = start("half", 2, 2)
    narrow = read_inputs(half).units.float8
    found = newest_good(half / "checkpoints")
    assert found is not None
    saved = tensors_in(found[0])
    assert narrow
    assert {saved[f"{part}/{name}"] for part in ("model", "ema") for name in narrow} == {"F32"}
    continued = losses_of(start("half", 4, 4, resume="auto"))
    # Sums of four ranks round otherwise, and move scales.
    assert continued == pytest.approx(straight, rel=2e-3)


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl")]


def tensors_in(checkpoint: Path) -> dict[str, str]:
    """Return the dtype of every tensor in the files of a checkpoint."""
    found = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = file.get_slice(name).get_dtype()
    return found
