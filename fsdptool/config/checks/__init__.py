"""What settings do together: in themselves, on a mesh, with a model, on hardware."""
