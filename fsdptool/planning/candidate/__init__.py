"""One configuration: its memory, its time, the ranges of both, and whether it fits."""
