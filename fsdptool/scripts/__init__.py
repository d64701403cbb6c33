"""Training scripts, judged from their text: they are parsed, and never imported or run."""

from __future__ import annotations

SCRIPTS = (".py", ".ipynb")
"""Endings of the files that are read as training scripts."""
