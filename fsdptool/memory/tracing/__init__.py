"""The real step on fake tensors, written down as events."""
