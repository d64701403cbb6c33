"""The files that the examples of the rules begin with."""

from __future__ import annotations

from fsdptool.records.diagnostic import Example

FSDP2 = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
FSDP1 = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 1\n"
TRAINER = "output_dir: out\nfsdp: true\nfsdp_config:\n  version: 2\n"
TRL = "model_name_or_path: m\ndataset_name: d\nbeta: 0.1\n"


def added(fails: str, passes: str = "", *, to: str = FSDP2, options: str = "") -> Example:
    """Return the example of lines that are added to a file; those of a block are indented."""
    return Example(to + fails, to + passes, options)


def classes(fails: str, passes: str = "LlamaDecoderLayer", options: str = "--model llama3:tiny") -> Example:
    """Return the example of wrap classes."""
    names = FSDP2 + "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: "
    return Example(f"{names}{fails}\n", f"{names}{passes}\n", options)


def sizes(**written: int | str) -> str:
    """Return a ``parallelism_config`` block."""
    lines = (
        f"  parallelism_config_{name}{'' if isinstance(size, str) else '_size'}: {size}\n"
        for name, size in written.items()
    )
    return "parallelism_config:\n" + "".join(lines)


def simpletuner(line: str) -> str:
    """Return SimpleTuner's file with a further line."""
    return f'{{"model_family": "flux", "fsdp_enable": true, "num_processes": 2,\n {line}}}\n'
