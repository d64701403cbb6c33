"""Formats that are somebody else's: recognised, named and refused rather than guessed at."""

from __future__ import annotations

from fsdptool.files.tree import Node, to_python

XLA = "XLA FSDP settings (torch_xla on TPU), not FSDP2"


def refuse(root: Node, path: str) -> str | None:
    """Return what the mapping is, when it is not one of the dialects; None when it is not known either."""
    keys = {str(entry.key) for entry in root.entries}
    # oumi's files also have a section fsdp, so they are told by model and training first.
    model, training = root.get("model"), root.get("training")
    if model is not None and training is not None and model.node.kind == "map":
        if model.node.get("model_name") is not None or "fsdp" in keys or "peft" in keys:
            return "an oumi training configuration"
        return "a training description of another program (sections model and training)"
    section = root.get("fsdp")
    if section is not None and section.node.kind == "map":
        return "a training description whose section fsdp is its program's own (NeMo AutoModel writes it so)"
    if "model" in keys and any(_is_component(entry.node) for entry in root.entries):
        return "a torchtune (or other _component_) configuration"
    if "accelerate_launch_args" in keys:
        return "a job description (fms-hf-tuning); FSDP settings are nested under accelerate_launch_args"
    if {"job", "model"} <= keys and keys & {"parallelism", "activation_checkpoint", "profiling", "training"}:
        return "a torchtitan job configuration"
    if {"apiVersion", "kind"} <= keys:
        return "a Kubernetes object"
    if "zero_optimization" in keys or "zero_stage" in keys:
        return "a DeepSpeed configuration"
    if "$schema" in keys and "properties" in keys:
        return "a JSON Schema"
    return _nested(root)


def is_xla(root: Node) -> bool:
    """Whether the mapping switches torch_xla's own FSDP on, in whatever file."""
    config = root.get("fsdp_config")
    for node in (root, config.node if config is not None and config.node.kind == "map" else None):
        entry = node.get("xla") if node is not None else None
        if entry is not None and str(entry.node.value).lower() in ("true", "1", "yes"):
            return True
    return False


def _is_component(node: Node) -> bool:
    return node.kind == "map" and node.get("_component_") is not None


def _nested(root: Node) -> str | None:
    """A whole accelerate file, or FSDP settings, under some other key."""
    for entry in root.entries:
        if entry.node.kind != "map":
            continue
        inner = {str(item.key) for item in entry.node.entries}
        if "distributed_type" in inner or "fsdp_config" in inner:
            return f"a file whose accelerate settings are nested under {entry.key}"
        if any(key.startswith("fsdp_") for key in inner) and entry.key not in ("fsdp_config",):
            return f"a file whose FSDP settings are nested under {entry.key}"
        value = to_python(entry.node)
        if isinstance(value, dict) and any(
            isinstance(item, dict) and ("fsdp_config" in item or "fsdp" in item) for item in value.values()
        ):
            return f"a file whose FSDP settings are nested under {entry.key}"
    return None
