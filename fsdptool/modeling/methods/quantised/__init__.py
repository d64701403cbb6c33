"""A frozen base in few bits: formats, the layer that computes with it, and what of a model it takes."""
