"""Seconds of a step: a roofline for operators, and the overlap of compute with collectives."""
