"""What accelerate really makes of a file, a command line or an environment, run in this process.

Its own loader, launch validation, launch environment, torchrun's checks, the plugin, ``ParallelismConfig``
and the preparation of wrap policies. Only the questions about devices are answered (a CUDA device exists).
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
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


def run_accelerate(
    path: Path, *flags: str, environment: Mapping[str, str] | None = None, prepare: bool = False
) -> Outcome:
    """Load, launch-validate, export and build, as ``accelerate launch --config_file PATH`` would.

    Args:
        path: The file.
        flags: Further flags of the launcher.
        environment: Variables that the launcher inherits.
        prepare: Also start torchrun's checks and prepare a model, whose blocks are :data:`BLOCKS`.
    """
    with clean_environment(environment), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _launch(["--config_file", str(path), *flags, "script.py"], path, prepare)


def run_flags(text: str, *, environment: Mapping[str, str] | None = None) -> Outcome:
    """Parse the words of an ``accelerate launch`` line, launch-validate, export, build and prepare."""
    words = shlex.split(text.replace("\\\n", " "))
    with clean_environment(environment), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _launch(words[2:] if words[:2] == ["accelerate", "launch"] else words, None, True)


def run_environment(text: str) -> Outcome:
    """Build the plugin and the mesh from ``export NAME=value`` lines, and prepare a model.

    There are as many processes as the mesh is for.
    """
    values = dict(word.split("=", 1) for word in shlex.split(text, comments=True) if word != "export")
    with clean_environment(values), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
            mesh = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false") == "true"
            return Outcome(_build(mesh, None, precision, True), fsdp=True)
        except Exception as error:
            return Outcome({}, "build", f"{type(error).__name__}: {error}")


def clean_environment(
    values: Mapping[str, str] | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Leave nothing of the caller's environment that FSDP reads, and set ``values``."""
    base = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_"))
    }
    return _environment({**base, **(values or {})})


def _launch(words: list[str], path: Path | None, prepare: bool) -> Outcome:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils.launch import prepare_multi_gpu_env

    stage = "load"
    said = io.StringIO()
    try:
        if path is not None:
            load_config_from_file(str(path))
        stage = "launch"
        with contextlib.redirect_stderr(said), devices():
            args = _parser().parse_args(words)
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
        if not args.use_fsdp or args.cpu:
            return Outcome(top, fsdp=False)
        stage = "export"
        exported = prepare_multi_gpu_env(args)
        if prepare:
            stage = "torchrun"
            with devices():
                _torchrun(args)
        stage = "build"
        with _environment(exported):
            built = _build(
                bool(args.use_parallelism_config),
                args.num_processes,
                str(args.mixed_precision).lower(),
                prepare,
            )
        return Outcome({**built, **top}, fsdp=True)
    except SystemExit:
        return Outcome({}, "parse", said.getvalue().strip().rpartition("error: ")[2])
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


@contextlib.contextmanager
def devices() -> Iterator[None]:
    """Answer the questions about devices: eight of CUDA."""
    from unittest.mock import patch

    import torch

    with (
        patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
        patch("accelerate.commands.launch.is_bf16_available", return_value=True),
        patch.object(torch.cuda, "current_device", return_value=0),
        patch.object(torch.cuda, "is_available", return_value=True),
        patch.object(torch.cuda, "device_count", return_value=8),
    ):
        yield


def _torchrun(args: Any) -> None:
    """Make of the arguments what ``multi_gpu_launcher`` hands to torchrun, up to the start of workers."""
    import torch.distributed.run as distrib_run
    from accelerate.utils import _filter_args
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters, registry
    from torch.distributed.launcher.api import _get_addr_and_port

    script = ["--training_script", args.training_script, "--training_script_args", args.training_script_args]
    config, command, _ = distrib_run.config_from_args(
        _filter_args(args, distrib_run.get_args_parser(), script)
    )
    rendezvous = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        **config.rdzv_configs,
    )
    address, port = _get_addr_and_port(rendezvous)
    handler = registry.get_rendezvous_handler(rendezvous)
    WorkerSpec(
        config.role,
        config.nproc_per_node,
        entrypoint=command,
        rdzv_handler=handler,
        master_addr=address,
        master_port=port,
    )


BLOCKS = ("LlamaDecoderLayer", "A", "B")


@functools.cache
def _blocks() -> tuple[type, ...]:
    import torch

    def forward(self: Any, x: Any) -> Any:
        return self.proj(x)

    def build(self: Any) -> None:
        torch.nn.Module.__init__(self)
        self.proj = torch.nn.Linear(4, 4)

    return tuple(type(name, (torch.nn.Module,), {"__init__": build, "forward": forward}) for name in BLOCKS)


def prepare_model(plugin: Any) -> None:
    """Look the classes up and apply the policies, as ``Accelerator.prepare_model`` does."""
    from types import SimpleNamespace

    import torch
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_auto_wrap_policy

    model = torch.nn.Sequential(*(block() for block in _blocks()))
    if plugin.ignored_modules is not None:
        re.compile(plugin.ignored_modules)
    if plugin.fsdp_version == 2:
        fsdp2_prepare_auto_wrap_policy(plugin, model)
        if plugin.activation_checkpointing:
            fsdp2_apply_ac(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)), model)
    else:
        plugin.set_auto_wrap_policy(model)


def _build(parallelism: bool, processes: int | None, precision: str, prepare: bool) -> dict[str, Any]:
    from accelerate import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    with devices():
        plugin = FullyShardedDataParallelPlugin()
        if precision != "no":
            plugin.set_mixed_precision(precision)
    settings = plugin_settings(plugin)
    settings["mixed_precision"] = precision
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
        if prepare:
            validate_mesh(mesh, plugin.fsdp_version == 2, processes or mesh.total_size)
    if prepare:
        prepare_model(plugin)
    return settings


def validate_mesh(mesh: Any, fsdp2: bool, processes: int) -> None:
    """Run accelerate's check of a mesh against an accelerator of so many FSDP processes."""
    from types import SimpleNamespace

    from accelerate.utils import DistributedType

    accelerator = SimpleNamespace(
        num_processes=processes,
        multi_device=False,
        is_fsdp2=fsdp2,
        is_main_process=True,
        distributed_type=DistributedType.FSDP,
    )
    mesh._validate_accelerator(accelerator)


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


_TRAVELS_AS_TEXT = (
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
)  # fmt: skip


def differences(explained: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that are explained otherwise.

    A number of the launch may be text, a truth or a float to the launcher, which passes it on as text; one
    machine needs neither its count nor its rank.
    """
    different = {}
    alone = not (settings.get("num_machines") or 1) > 1
    for key, value in settings.items():
        shown = explained[key]
        plain = list(value) if isinstance(value, tuple) else value
        if alone and key in ("num_machines", "machine_rank"):
            continue
        if key in _TRAVELS_AS_TEXT:
            plain = int(plain) if isinstance(plain, bool | float) else plain
            same = str(shown) == str(plain).strip()
        else:
            same = shown == plain and isinstance(shown, bool) == isinstance(plain, bool)
        if not same:
            different[key] = plain
    return different


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
    different = differences(explained, outcome.settings)
    if different:
        assert reading.errors, f"{path.name}: {different}, explained otherwise"
    return str(different) if different else None
