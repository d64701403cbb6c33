"""``fully_shard`` really takes the reported units: one shrunk copy of each model class, trained once.

One process stands for two ranks (torch's ``fake`` process group): every collective has its real
shapes, so what is tested is grouping, forward, backward and that nothing stays unsharded. Values
gathered from the rank that is not there are meaningless, so losses are not looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdptool.families.protocol import Family, Flavour
from fsdptool.families.registry import load_registry
from fsdptool.inspection.api import describe
from fsdptool.inspection.census import unit_plan
from fsdptool.testing.families import small_model


def one_of_each_class() -> list[tuple[Family, Flavour]]:
    """Return the first flavour of every model class that ships."""
    results: dict[tuple[str, str], tuple[Family, Flavour]] = {}
    for family in load_registry().all():
        for flavour in family.flavours().values():
            results.setdefault((family.library, flavour.model_class), (family, flavour))
    return list(results.values())


CASES = one_of_each_class()


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.sampled(every=12, whole=3)
@pytest.mark.parametrize(("family", "flavour"), CASES, ids=[f"{f.name}:{v.name}" for f, v in CASES])
def test_units_shard_and_train(family: Family, flavour: Flavour, mesh: DeviceMesh) -> None:
    small = small_model(family, flavour)
    anatomy = describe(small.model, small.spec)
    plan = unit_plan(anatomy)
    whole = {parameter.fqn for parameter in plan.ignored}
    assert whole == {parameter.fqn for parameter in anatomy.parameters if not parameter.shape}
    listed = [parameter.fqn for unit in plan.units for parameter in unit.parameters] + list(whole)
    assert sorted(listed) == sorted(parameter.fqn for parameter in anatomy.parameters)
    for unit in plan.units:
        modules = [small.model.get_submodule(path) for path in unit.modules]
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=unit.reshard_after_forward,
            ignored_params={small.model.get_parameter(name) for name in whole} or None,
        )
    loss = small.objective.loss(small.objective.predict(small.model, small.batch), small.batch)
    loss.backward()  # type: ignore[no-untyped-call]
    plain = [name for name, p in small.model.named_parameters() if not isinstance(p, DTensor)]
    assert set(plain) == whole, "fully_shard takes everything but scalars"
    trained = [p for p in small.model.parameters() if p.grad is not None]
    assert trained
    assert all(isinstance(p.grad, DTensor) for p in trained if p.dim())
    del small, loss, trained
    gc.collect(0)


def test_every_class_is_tried() -> None:
    assert len({flavour.model_class for _, flavour in CASES}) >= 101
    assert torch.distributed.is_available()
