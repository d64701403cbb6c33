"""The stand-in for TRL's loss holds what TRL's own holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from memory_cases import allocation_peak
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from fsdptool.config.dialects.trl import Trl
from fsdptool.memory.tracing.tiled_loss import TiledLoss
from fsdptool.records.anatomy import LogitTail
from fsdptool.records.fused_loss import LossTiles

trl_loss = pytest.importorskip("trl.kernels.chunked_logprob")
utils = pytest.importorskip("trl.trainer.utils")

ROWS, POSITIONS, WIDTH = 3, 41, 24


@pytest.fixture(scope="module")
def halves() -> Iterator[DeviceMesh]:
    """Let this process be rank 0 of two whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("trained", "gathers"),
    [(True, False), (False, False), (False, True)],
    ids=["trained head", "frozen head", "sharded head"],
)
@pytest.mark.parametrize("vocabulary", [500, 1000])
def test_it_holds_what_trl_holds(vocabulary: int, trained: bool, gathers: bool, halves: DeviceMesh) -> None:
    """Within 2 %: several tiles of tokens and of entries, forward and backward. It multiplies as much."""
    tiles = LossTiles(50, 512)
    hidden = torch.randn(ROWS, POSITIONS, WIDTH, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH, requires_grad=trained)
    half = DTensor.from_local(weight.detach()[: vocabulary // 2], halves, [Shard(0)])
    labels = torch.randint(0, vocabulary, (ROWS, POSITIONS))

    def theirs() -> None:
        states = hidden[:, :-1].reshape(-1, WIDTH)
        aims = labels[:, 1:].clamp(min=0).reshape(-1)
        outputs = ("log_probs", "entropy", "is_top1")
        loss = trl_loss.ChunkedLogProbFunction.apply(
            states,
            half.full_tensor() if gathers else weight,
            None,
            aims,
            1.0,
            tiles.vocabulary,
            None,
            1.0,
            outputs,
        )[0]
        torch.autograd.backward(loss.sum())

    def ours() -> None:
        loss: Tensor = TiledLoss(tiles, triton=False, gathers=gathers)(
            hidden, weight, None, labels, 0, LogitTail()
        )
        torch.autograd.backward(loss)

    with FlopCounterMode(display=False) as products, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl_loss, "TOKEN_CHUNK_SIZE", tiles.tokens)
        expected = allocation_peak(theirs)
    hidden.grad = weight.grad = None
    with FlopCounterMode(display=False) as own_products:
        assert allocation_peak(ours) == pytest.approx(expected, rel=0.02)
    assert own_products.get_total_flops() == products.get_total_flops() > 0


def test_the_tiles_are_those_of_the_installed_version() -> None:
    tiles = Trl.programs[0].loop
    assert tiles is not None
    expected = LossTiles(trl_loss.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE)
    assert tiles.tiles == expected
