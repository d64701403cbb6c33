"""From a model on the meta device to a sharded one with values, proven."""
