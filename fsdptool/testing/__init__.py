"""Conformance tests for authors of families and dialects."""
