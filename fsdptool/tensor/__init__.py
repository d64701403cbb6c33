"""Which layers a tensor- or expert-parallel group divides, and where parameters then lie. Torch-free."""
