"""The run folder and what a run's processes share: events, stop signals, manifests, trackers. Torch-free."""
