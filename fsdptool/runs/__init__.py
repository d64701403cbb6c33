"""What surrounds the steps of a worker: its folder, events, signals, measurements, failures."""
