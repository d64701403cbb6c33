"""Recordings of runs that torch writes: profiler traces, flight records, memory snapshots. Torch-free."""
