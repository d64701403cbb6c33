"""What accelerate really makes of a file: its own loader, launcher and plugin, run in this process.

Only the device look-up is stubbed (``sync_module_states`` asks for a current device under FSDP1).
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Settings by our canonical names, or where and how accelerate stopped."""

    settings: Mapping[str, Any]
    stage: str = "done"
    error: str | None = None
    fsdp: bool = False


@functools.cache
def _parser() -> Any:
    from accelerate.commands.launch import launch_command_parser

    return launch_command_parser()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_accelerate(path: Path, *flags: str, environment: Mapping[str, str] | None = None) -> Outcome:
    """Load, launch-validate, export and build, as ``accelerate launch --config_file PATH`` would."""
    base = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_"))
    }
    base.update(environment or {})
    with _environment(base), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(path, flags)


def _run(path: Path, flags: tuple[str, ...]) -> Outcome:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils.launch import prepare_multi_gpu_env

    stage = "load"
    try:
        load_config_from_file(str(path))
        stage = "launch"
        args = _parser().parse_args(["--config_file", str(path), *flags, "script.py"])
        args, _, _ = _validate_launch_command(args)
        top = {
            "num_processes": args.num_processes,
            "num_machines": args.num_machines,
            "mixed_precision": str(args.mixed_precision).lower(),
            "machine_rank": args.machine_rank,
            "gpu_ids": args.gpu_ids,
            "main_process_ip": args.main_process_ip,
            "main_process_port": args.main_process_port,
            "rdzv_backend": args.rdzv_backend,
            "use_cpu": bool(args.cpu or args.use_cpu),
            "debug": bool(args.debug),
        }
        if not args.use_fsdp:
            return Outcome(top, fsdp=False)
        stage = "export"
        args.main_process_port = 29999  # no port is opened in this test
        exported = prepare_multi_gpu_env(args)
        stage = "build"
        with _environment(exported):
            return Outcome({**top, **_build(bool(args.use_parallelism_config))}, fsdp=True)
    except Exception as error:
        return Outcome({}, stage, f"{type(error).__name__}: {error}")


def exported(path: Path, *flags: str) -> dict[str, str]:
    """Return the variables of FSDP that ``accelerate launch --config_file PATH`` sets for its script."""
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils.launch import prepare_multi_gpu_env

    args, _, _ = _validate_launch_command(
        _parser().parse_args(["--config_file", str(path), *flags, "script.py"])
    )
    args.main_process_port = 29999
    found: dict[str, str] = prepare_multi_gpu_env(args)
    return {key: value for key, value in found.items() if key.startswith(("FSDP_", "ACCELERATE_"))}


def _build(parallelism: bool) -> dict[str, Any]:
    from unittest.mock import patch

    import torch
    from accelerate import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    with (
        patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
        patch.object(torch.cuda, "current_device", return_value=0),
    ):
        plugin = FullyShardedDataParallelPlugin()
    settings = plugin_settings(plugin)
    settings.update(dp_replicate=1, dp_shard=None, tp=1, cp=1, sp=1)
    if parallelism:
        mesh = ParallelismConfig()
        settings.update(
            dp_replicate=mesh.dp_replicate_size,
            dp_shard=mesh.dp_shard_size,
            tp=mesh.tp_size,
            cp=mesh.cp_size,
            sp=mesh.sp_size,
        )
        if mesh.cp_size > 1:
            settings["cp_comm_strategy"] = mesh.cp_handler.cp_comm_strategy
        if mesh.sp_size > 1:
            settings.update(vars(mesh.sp_handler))
    return settings


def plugin_settings(plugin: Any) -> dict[str, Any]:
    """Return a plugin's settings by our canonical names."""
    policy = getattr(plugin.auto_wrap_policy, "__name__", None)
    settings: dict[str, Any] = {
        "fsdp_version": plugin.fsdp_version,
        "wrap_policy": {
            "transformer_auto_wrap_policy": "transformer",
            "size_based_auto_wrap_policy": "size",
            None: "none",
        }[policy],
        "state_dict_type": plugin.state_dict_type.name.split("_")[0].lower(),
        "cpu_offload": plugin.cpu_offload is not None
        and type(plugin.cpu_offload).__name__ != "OffloadPolicy"
        and getattr(plugin.cpu_offload, "offload_params", True),
        "cpu_ram_efficient_loading": bool(plugin.cpu_ram_efficient_loading),
        "activation_checkpointing": bool(plugin.activation_checkpointing),
        "activation_checkpointing_offload": bool(plugin.activation_checkpointing_offload),
        "ignored_modules": plugin.ignored_modules,
    }
    settings["wrap_classes"] = tuple(plugin.transformer_cls_names_to_wrap or ())
    settings["min_num_params"] = plugin.min_num_params if settings["wrap_policy"] == "size" else None
    if plugin.fsdp_version == 2:
        settings["reshard_after_forward"] = plugin.reshard_after_forward
    else:
        settings["sharding_strategy"] = plugin.sharding_strategy.name.lstrip("_").lower()
        settings["backward_prefetch"] = plugin.backward_prefetch.name if plugin.backward_prefetch else None
        settings["forward_prefetch"] = bool(plugin.forward_prefetch)
        settings["use_orig_params"] = bool(plugin.use_orig_params)
        settings["sync_module_states"] = bool(plugin.sync_module_states)
    return settings


def check_explained(path: Path) -> str | None:
    """Assert that accelerate and our reading of ``path`` agree in every setting.

    A file without a process count is launched with ``--num_processes 8``, as it must be.

    Returns:
        None when all is as explained; how accelerate stopped, or the settings it took otherwise, for a
        file in which we found an error, too.
    """
    from fsdptool.config import read_settings

    reading = read_settings(path, consumer="accelerate")
    counted = reading.facts.get("num_processes") is not None
    outcome = run_accelerate(path, *(() if counted else ("--num_processes", "8")))
    if outcome.error is not None:
        assert reading.errors, f"{path.name}: accelerate refuses it ({outcome.error}) and we do not"
        return outcome.error
    if not outcome.fsdp:
        assert reading.version is None, f"{path.name}: FSDP does not start, explained as it does"
        return None
    explained = {item.key: item.value for item in reading.effective}
    if not counted:
        explained["num_processes"] = 8
    explained["gpu_ids"] = explained["gpu_ids"] or "all"
    # Rotation has no value where nothing rotates.
    unread = {"cp_comm_strategy"} if explained["cp"] == 1 else set()
    assert (set(explained) ^ set(outcome.settings)) <= unread, path.name
    plain = {
        key: list(value) if isinstance(value, tuple) else value for key, value in outcome.settings.items()
    }
    different = {key: value for key, value in plain.items() if explained[key] != value}
    if different:
        assert reading.errors, f"{path.name}: {different}, explained otherwise"
    return str(different) if different else None
