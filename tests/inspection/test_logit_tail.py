"""What the source of a forward says it does to its logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdptool.inspection.logit_tail import logit_tail
from fsdptool.records.anatomy import LogitTail


class _Output:
    def __init__(self, **values: Any) -> None:
        self.values = values


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(2, 3)
        self.logit_scale = 0.5
        self.config = SimpleNamespace(cap=30.0, scaling=8.0, none=None)


class Plain(_Model):
    def forward(self, x: Tensor, labels: Any = None) -> Any:
        logits = self.lm_head(x[:, slice(0, None), :]).float().contiguous()
        loss = None
        if labels is not None:
            logits = logits.float()
            loss = logits.sum()
        if self.config.none is not None:
            logits = logits + 1
        return _Output(loss=loss, logits=logits)


class Scaled(_Model):
    def forward(self, x: Tensor) -> Any:
        logits = self.logit_scale * self.lm_head(x)
        logits = logits / self.config.scaling
        return _Output(logits=logits)


class Capped(_Model):
    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        if (cap := self.config.cap) is not None:
            logits = logits / cap
            logits = torch.tanh(logits)
            logits = logits * cap
        return _Output(logits=logits)


class Biased(_Model):
    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        logits = logits + self.config.cap
        return _Output(logits=logits)


class Masked(_Model):
    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        logits[..., 0] = 0.0
        return _Output(logits=logits)


class InPlace(_Model):
    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        logits.mul_(2.0)
        return _Output(logits=logits)


class OtherCap(_Model):
    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        logits = torch.tanh(logits / self.config.cap) * self.config.scaling
        return _Output(logits=logits)


class Shortened(_Model):
    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        return _Output(logits=logits[..., :2])


class Twice(_Model):
    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        return _Output(logits=logits, first=logits)


class Repeated(_Model):
    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        more = self.lm_head(x)
        return _Output(logits=logits, more=more)


class Undecided(_Model):
    def forward(self, x: Tensor) -> Any:
        logits = self.lm_head(x)
        if x.shape[0] > 1:
            logits = logits * 2.0
        return _Output(logits=logits)


class Elsewhere(_Model):
    def forward(self, x: Tensor) -> Any:
        return self.lm_head.forward(x)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Plain, LogitTail()),
        (Scaled, LogitTail(scale=0.5 / 8.0)),
        (Capped, LogitTail(cap=30.0)),
        *((kind, None) for kind in (Biased, Masked, InPlace, OtherCap, Shortened)),
        *((kind, None) for kind in (Twice, Repeated, Undecided, Elsewhere)),
    ],
)
def test_tails(kind: type[_Model], expected: LogitTail | None) -> None:
    assert logit_tail(kind(), "lm_head") == expected


def test_a_model_without_a_head_has_no_tail() -> None:
    assert logit_tail(Plain(), None) is None
