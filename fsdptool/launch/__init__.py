"""Starting a run: preflight, command lines, supervision, Slurm (docs/launch.md). Torch-free."""
