"""The stand-in for TRL's loss holds what TRL's own holds."""

from __future__ import annotations

import pytest
import torch
from memory_cases import allocation_peak
from torch import Tensor

from fsdptool.config.dialects.trl import Trl
from fsdptool.memory.tracing.tiled_loss import TiledLoss
from fsdptool.records.anatomy import LogitTail
from fsdptool.records.fused_loss import LossTiles

trl_loss = pytest.importorskip("trl.kernels.chunked_logprob")
utils = pytest.importorskip("trl.trainer.utils")

ROWS, POSITIONS, WIDTH = 3, 41, 24


@pytest.mark.parametrize("trained", [True, False], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("vocabulary", [500, 1000])
def test_it_holds_what_trl_holds(vocabulary: int, trained: bool) -> None:
    """Within 2 %: several tiles of tokens and of entries, forward and backward."""
    tiles = LossTiles(50, 512)
    hidden = torch.randn(ROWS, POSITIONS, WIDTH, requires_grad=True)
    weight = torch.randn(vocabulary, WIDTH, requires_grad=trained)
    labels = torch.randint(0, vocabulary, (ROWS, POSITIONS))

    def theirs() -> None:
        states = hidden[:, :-1].reshape(-1, WIDTH)
        aims = labels[:, 1:].clamp(min=0).reshape(-1)
        outputs = ("log_probs", "entropy", "is_top1")
        loss = trl_loss.ChunkedLogProbFunction.apply(
            states, weight, None, aims, 1.0, tiles.vocabulary, None, 1.0, outputs
        )[0]
        torch.autograd.backward(loss.sum())

    def ours() -> None:
        loss: Tensor = TiledLoss(tiles, triton=False)(hidden, weight, None, labels, 0, LogitTail())
        torch.autograd.backward(loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl_loss, "TOKEN_CHUNK_SIZE", tiles.tokens)
        expected = allocation_peak(theirs)
    hidden.grad = weight.grad = None
    assert allocation_peak(ours) == pytest.approx(expected, rel=0.02)


def test_the_tiles_are_those_of_the_installed_version() -> None:
    tiles = Trl.programs[0].loop
    assert tiles is not None
    expected = LossTiles(trl_loss.TOKEN_CHUNK_SIZE, utils._CHUNKED_LOGPROB_CHUNK_SIZE)
    assert tiles.tiles == expected
