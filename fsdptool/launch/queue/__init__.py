"""The queue of runs on this machine: its file, what entries need, their state, and what starts them."""
