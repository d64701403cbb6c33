"""Recordings of runs that torch writes: profiler traces and flight records. Torch-free."""
