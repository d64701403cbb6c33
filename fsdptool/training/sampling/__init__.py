"""Samples of a model in training: every rank runs the forwards, rank 0 writes (docs/data.md)."""

from fsdptool.training.sampling.sampler import Sampler, open_sampler

__all__ = ["Sampler", "open_sampler"]
