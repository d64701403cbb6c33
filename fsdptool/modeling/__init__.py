"""What is done to a model before its first step, by the tracer and the trainer alike."""
