"""LLaMA-Factory's YAML."""
