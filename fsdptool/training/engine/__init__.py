"""From a sharded model to a trained one: its assembly, the loop, a step, optimizers, evaluation."""
