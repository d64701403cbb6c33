"""``plan`` and ``train`` accept and refuse the same groups of ranks, for every shipped family."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fsdptool.errors import FsdptoolError
from fsdptool.families.protocol import Family
from fsdptool.families.registry import load_registry
from fsdptool.inspection import inspect
from fsdptool.launch.prepare import prepare
from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.point import point_of
from fsdptool.records.cluster import Cluster
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import ModelChoice, Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings, UnitPlan
from fsdptool.source import resolve
from fsdptool.testing.families import small_spec

QUICK = ("llama3", "gpt2", "falcon", "mixtral", "mamba", "t5", "flux.1", "wan2.1")
FAMILIES = [family.name for family in load_registry().all() if family.flavours()]
GROUPS = ((2, 1), (3, 1), (1, 2))
"""Sizes of the tensor-parallel and of the expert-parallel group."""
WORLD = 6

CONFIG = """\
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: {world}
use_cpu: true
fsdp_config: {{fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}}
parallelism_config:
  parallelism_config_dp_shard_size: {shard}
  parallelism_config_tp_size: {tp}
"""


def models(family: Family, folder: Path) -> Iterator[str]:
    """Yield folders with the configurations of shrunk copies, one for each class of a family."""
    for flavour in {item.model_class: item for item in family.flavours().values()}.values():
        spec = small_spec(family, flavour)
        place = folder / flavour.name
        place.mkdir()
        named = {"_class_name": spec.model_class} if family.library == "diffusers" else {}
        config = {"architectures": [spec.model_class], **spec.config, **named}
        (place / "config.json").write_text(json.dumps(config))
        yield str(place)


def planned(reference: str, tp: int, ep: int) -> UnitPlan | str:
    """Return the units that a plan computes with, or its refusal."""
    recipe = Recipe(ModelChoice(reference, weights="random"), sharding=Sharding(expert_parallel=ep), steps=1)
    settings = FsdpSettings(
        mixed_precision="no",
        use_cpu=True,
        num_processes=WORLD,
        mesh=ParallelDims(dp_shard=WORLD // tp, tp=tp),
    )
    cluster = Cluster(None, WORLD)
    try:
        spec = resolve(reference)
        run = resolve_run(recipe, settings)
        return Estimator(spec, inspect(spec), run, profile="cpu-gloo").units_of(point_of(run), cluster)
    except FsdptoolError as error:
        return error.message


def trained(reference: str, folder: Path, tp: int, ep: int) -> UnitPlan | str:
    """Return the units that the preflight of a run makes, or its refusal."""
    recipe, config = folder / "recipe.yaml", folder / "accelerate.yaml"
    config.write_text(CONFIG.format(world=WORLD, shard=WORLD // tp, tp=tp))
    recipe.write_text(
        f"model: {{reference: {json.dumps(reference)}, weights: random}}\n"
        f"data: {{source: synthetic}}\nsharding: {{expert_parallel: {ep}}}\nsteps: 1\n"
    )
    try:
        return prepare(recipe, config, with_prediction=False, with_data=False).units
    except FsdptoolError as error:
        return error.message


def answers(name: str, folder: Path) -> list[bool]:
    """Hold both answers for all classes of a family against each other; return which groups are accepted."""
    accepted = []
    for reference in models(load_registry().get(name), folder):
        for tp, ep in GROUPS:
            plan, run = planned(reference, tp, ep), trained(reference, folder, tp, ep)
            assert plan == run, (reference, tp, ep)
            accepted.append(isinstance(plan, UnitPlan))
            if isinstance(plan, str):
                assert ("tp_size" if tp > 1 else "sharding.expert_parallel") in plan
    return accepted


def test_points_of_one_search_have_the_units_that_each_has_alone() -> None:
    """What a search keeps for further points is kept by all that the units depend on."""
    spec = resolve("mixtral:8x7b", overrides={"num_hidden_layers": 2, "vocab_size": 512})
    anatomy, cluster = inspect(spec), Cluster(None, 8)
    recipe = Recipe(ModelChoice("mixtral:8x7b", weights="random"), steps=1)
    run = resolve_run(recipe, FsdpSettings(mixed_precision="no", use_cpu=True, num_processes=8))
    points = [
        replace(point_of(run), dp_shard=8 // tp, tp=tp, ep=ep, sequence_parallel=sequence)
        for tp, ep, sequence in ((1, 1, False), (2, 1, False), (2, 1, True), (4, 1, False), (1, 2, False))
    ]
    shared = Estimator(spec, anatomy, run)
    found = [shared.units_of(point, cluster) for point in points]
    for index, point in enumerate(points):
        assert found[index] == Estimator(spec, anatomy, run).units_of(point, cluster)
        assert not any(found[index] == other for other in found[:index])


@pytest.mark.parametrize("name", QUICK)
def test_plan_and_train_agree(name: str, tmp_path: Path) -> None:
    accepted = answers(name, tmp_path)
    assert any(accepted) is (name != "mamba")


@pytest.mark.slow
@pytest.mark.sampled(every=3, whole=3)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in QUICK])
def test_plan_and_train_agree_on_every_family(name: str, tmp_path: Path) -> None:
    answers(name, tmp_path)
