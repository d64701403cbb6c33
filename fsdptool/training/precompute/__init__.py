"""Latents and text embeddings, made once before a diffusion run (docs/data.md)."""

from fsdptool.training.precompute.run import Done, Work, done_json, plan_work, run_work

__all__ = ["Done", "Work", "done_json", "plan_work", "run_work"]
