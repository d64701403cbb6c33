"""Turning a run's checkpoint into folders other libraries load (docs/how-to/export.md)."""
