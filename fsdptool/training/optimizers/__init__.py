"""Optimizers over each rank's own rows."""
