"""The architecture: plain torch, no transformers (after Dauphin et al. 2017)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GatedConvBlock(nn.Module):
    """A causal convolution whose output is gated, with a residual connection.

    Args:
        width: Channels.
        kernel: Taps; a position sees itself and ``kernel - 1`` positions before it.
        dilation: Distance between taps.
    """

    def __init__(self, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.reach = (kernel - 1) * dilation
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, 2 * width, kernel, dilation=dilation)
        self.out = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """Map [batch, positions, width] to the same shape."""
        past = nn.functional.pad(self.norm(states).transpose(1, 2), (self.reach, 0))
        value, gate = self.conv(past).transpose(1, 2).chunk(2, dim=-1)
        result: Tensor = states + self.out(value * torch.sigmoid(gate))
        return result


class GatedConvLM(nn.Module):
    """Predicts the next byte from the bytes before it."""

    def __init__(self, vocabulary: int, width: int, blocks: int, kernel: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GatedConvBlock(width, kernel, 2 ** (i % 6)) for i in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map bytes [batch, positions] to logits [batch, positions, vocabulary]."""
        states = self.embedding(input_ids)
        for block in self.blocks:
            states = block(states)
        logits: Tensor = self.head(self.norm(states))
        return logits
