"""Starting a run: preflight, command lines, supervision, Slurm. Torch-free.

See docs/explanation/launching.md.
"""
