"""Latents and text embeddings, made once before a diffusion run (docs/how-to/train-on-pictures.md)."""

from fsdptool.training.precompute.run import Done, Work, plan_work, precompute_report, run_work

__all__ = ["Done", "Work", "plan_work", "precompute_report", "run_work"]
