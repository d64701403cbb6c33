"""FSDP2's schedule and the allocator, played over a trace. Torch-free."""
