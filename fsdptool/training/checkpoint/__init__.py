"""Checkpoints: safetensors and JSON only, written aside, digested and renamed (docs/explanation/runs.md)."""
