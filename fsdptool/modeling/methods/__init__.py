"""Training methods: every parameter, adapters, or a student of a frozen teacher."""

from fsdptool.modeling.methods.apply import prepare_model, replicated_names

__all__ = ["prepare_model", "replicated_names"]
