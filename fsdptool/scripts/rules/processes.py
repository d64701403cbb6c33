"""Rules on processes and data: devices, rendezvous, samplers and the environment."""

from __future__ import annotations

import ast

from fsdptool.scripts.facts import FSDP1, Facts
from fsdptool.scripts.rules.table import DIST, SHARD, TORCH, WRAP, Report, rule
from fsdptool.scripts.spans import Change
from fsdptool.scripts.values import Const, Event, Thing, Value, constant, is_constant, made_by, origins

_DATA = "from torch.utils.data import DataLoader, DistributedSampler, TensorDataset\n"
_TRAIN = (
    TORCH
    + DIST
    + SHARD
    + _DATA
    + "\ndef main(model):\n    for block in model.blocks:\n        fully_shard(block)\n"
    "    fully_shard(model)\n    data = TensorDataset(torch.randn(64, 8))\n"
)
_START = TORCH + DIST + "import os\n"

RULES = (
    rule(680, "device-not-set", "warning",
         "Nothing chooses the GPU of the process before FSDP1 wraps the model or tensors go to `cuda`: "
         "every process of "
         "a node uses the first one.",
         'Call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` first.',
         _START + WRAP + "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n"
         "from transformers import GPT2Config, GPT2LMHeadModel\nfrom transformers.models.gpt2 import "
         "GPT2Block\n",
         'dist.init_process_group("nccl")\n'
         "model = FSDP(GPT2LMHeadModel(GPT2Config()), auto_wrap_policy=ModuleWrapPolicy({GPT2Block}))\n"
         "dist.destroy_process_group()\n",
         'dist.init_process_group("nccl")\ntorch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
         "model = FSDP(GPT2LMHeadModel(GPT2Config()), auto_wrap_policy=ModuleWrapPolicy({GPT2Block}))\n"
         "dist.destroy_process_group()\n"),
    rule(681, "process-group-left-open", "info",
         "Without `destroy_process_group`, torch warns at the end and the process may hang while it ends.",
         "Call `dist.destroy_process_group()` at the end.",
         _START + SHARD + 'dist.init_process_group("nccl")\nloss = torch.ones(1, requires_grad=True)\n',
         "loss.backward()\n", "loss.backward()\ndist.destroy_process_group()\n"),
    rule(682, "fixed-rendezvous", "error",
         "torchrun listens on a port of its own. With another one in `MASTER_PORT`, all processes connect "
         "to a port "
         "where nobody listens: DistNetworkError after the timeout.",
         'Leave `MASTER_PORT` to torchrun, or use `os.environ.setdefault("MASTER_PORT", ...)`.',
         _START, 'os.environ["MASTER_PORT"] = "29500"\n'
         'dist.init_process_group("nccl", rank=int(os.environ["RANK"]), '
         'world_size=int(os.environ["WORLD_SIZE"]))\n'
         "dist.destroy_process_group()\n",
         'os.environ.setdefault("MASTER_PORT", "29500")\n'
         'dist.init_process_group("nccl", rank=int(os.environ["RANK"]), '
         'world_size=int(os.environ["WORLD_SIZE"]))\n'
         "dist.destroy_process_group()\n"),
    rule(683, "loader-without-sampler", "warning",
         "Each rank shuffles the whole data set: with one seed all ranks train on the same samples, with "
         "several seeds "
         "on overlapping ones.",
         "Pass `sampler=DistributedSampler(data)` in place of `shuffle=True`.",
         _TRAIN, "    loader = DataLoader(data, batch_size=4, shuffle=True)\n    for batch in loader:\n"
         "        model(batch).backward()\n",
         "    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))\n    for batch in "
         "loader:\n"
         "        model(batch).backward()\n"),
    rule(684, "sampler-without-set-epoch", "warning",
         "Without `set_epoch` a shuffling DistributedSampler yields the same order in every epoch.",
         "Call `sampler.set_epoch(epoch)` at the beginning of each epoch.",
         _TRAIN + "    sampler = DistributedSampler(data)\n    loader = DataLoader(data, batch_size=4, "
                  "sampler=sampler)\n"
         "    for epoch in range(3):\n",
         "        for batch in loader:\n            model(batch).backward()\n",
         "        sampler.set_epoch(epoch)\n        for batch in loader:\n            "
         "model(batch).backward()\n"),
    rule(685, "sampler-and-shuffle", "error",
         "A DataLoader takes a sampler or `shuffle=True`, not both: ValueError.",
         "Keep the sampler; it shuffles.",
         _DATA + "\ndef main(data):\n",
         "    return DataLoader(data, sampler=DistributedSampler(data), shuffle=True)\n",
         "    return DataLoader(data, sampler=DistributedSampler(data))\n", safety="safe"),
    rule(686, "nccl-environment", "info",
         "The variable is for debugging: it makes collectives or kernels slow, or turns checks on.",
         "Remove it.",
         _START, 'os.environ["NCCL_P2P_DISABLE"] = "1"\n', 'os.environ["NCCL_DEBUG"] = "INFO"\n'),
)  # fmt: skip


def check(facts: Facts, report: Report) -> None:
    """Report how processes are set up, and how data is divided among them."""
    _device(facts, report)
    _group(facts, report)
    _port(facts, report)
    for event in facts.calls("DataLoader"):
        _loader(facts, event, report)
    _epochs(facts, report)


_SETS = (
    "torch.cuda.set_device", "torch.accelerator.set_device_index", "init_device_mesh", "fully_shard",
    "torch.cuda.device",
    "torch.accelerator.set_device_idx", "DeviceMesh", "torch.npu.set_device", "torch.xpu.set_device",
)  # fmt: skip


def _device(facts: Facts, report: Report) -> None:
    starts = [event for event in facts.calls("dist.init_process_group") if not event.guards]
    if len(starts) != 1 or "device_id" in starts[0].keywords or facts.imports("accelerate", "deepspeed"):
        return
    start = starts[0]
    if constant(start.get("backend", 0)) not in (None, "nccl") or facts.mentions("CUDA_VISIBLE_DEVICES"):
        return
    for event in facts.events:
        if event.kind == "call" and event.name in _SETS:
            return
        if _is_unknown(event):
            return
        chooses = "device_id" in event.keywords or event.partly
        wraps = event.kind == "call" and event.name == FSDP1 and not chooses
        if event.order > start.order and (wraps or _moves(event)) and not event.guards:
            report("FSD680", start.node, f"no GPU is chosen before {facts.place(event.node)}")
            return


def _moves(event: Event) -> bool:
    if event.kind != "method":
        return False
    if event.name == "cuda":
        return not event.args
    return event.name == "to" and bool(event.args) and is_constant(event.args[0], "cuda")


def _is_unknown(event: Event) -> bool:
    """Say whether a function that is not known is called: it may do anything."""
    if event.kind == "call":
        return isinstance(event.result, Thing) and event.result.outside
    return event.kind in ("use", "method") and isinstance(event.target, Thing) and event.target.outside


def _group(facts: Facts, report: Report) -> None:
    if (
        facts.path.own is not None
        or facts.mentions("destroy_process_group")
        or not facts.mentions("backward")
    ):
        return
    for event in facts.calls("dist.init_process_group"):
        if not event.guards:
            report("FSD681", event.node, "nothing ends the process group")


def _port(facts: Facts, report: Report) -> None:
    if facts.mentions("spawn", "Process", "start_processes", "mp", "multiprocessing", "Popen"):
        return
    reads = {event.name for event in facts.of_kind("environment read")}
    for event in facts.of_kind("environment"):
        if (
            event.name == "MASTER_PORT"
            and event.args
            and isinstance(event.args[0], Const)
            and not event.guards
        ):
            if reads & {"RANK", "LOCAL_RANK"}:
                report("FSD682", event.node, "MASTER_PORT is fixed in a script for torchrun")
        elif event.name in _DEBUGGING and event.args and constant(event.args[0]) == "1" and not event.guards:
            report("FSD686", event.node, f"{event.name} is left over from debugging")


_DEBUGGING = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "CUDA_LAUNCH_BLOCKING", "TORCH_USE_CUDA_DSA")
_OTHER_LOOPS = (
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "deepspeed",
    "composer",
    "ignite",
    "ray",
    "torchdata",
)


def _loader(facts: Facts, event: Event, report: Report) -> None:
    shuffle, sampler = event.get("shuffle", 2), event.get("sampler", 3)
    if is_constant(shuffle, True) and made_by(sampler, "DistributedSampler") is not None:
        place, call = event.places.get("shuffle"), event.node
        change = Change(place, None, call) if place is not None and isinstance(call, ast.Call) else None
        report("FSD685", call, "the loader has a sampler and shuffle=True", change)
    if (
        not is_constant(shuffle, True)
        or sampler is not None
        or "batch_sampler" in event.keywords
        or event.partly
    ):
        return
    if (
        facts.imports(*_OTHER_LOOPS)
        or facts.mentions("Trainer", "SFTTrainer")
        or any(facts.calls("DistributedSampler"))
    ):
        return
    data = event.argument or event.get("dataset")
    if not facts.uses_fsdp or not _is_whole(data) or not isinstance(event.result, Thing):
        return
    loops = [item for item in facts.of_kind("iterate") if _goes_over(item.target, event.result)]
    trained = any(other.name == "backward" and other.loops for other in facts.of_kind("method"))
    if loops and trained:
        report("FSD683", event.node, "every rank shuffles the whole data set")


def _goes_over(value: Value | None, loader: Thing) -> bool:
    return any(item is loader for item in origins(value))


def _is_whole(data: Value | None) -> bool:
    """Say whether a data set is certainly not a rank's part of another one."""
    for item in origins(data):
        if "rank" in item.tags:
            return False
        if isinstance(item, Thing) and (item.outside or item.kind in ("parameter", "unknown")):
            return False
    return isinstance(data, Thing)


def _epochs(facts: Facts, report: Report) -> None:
    if facts.mentions("set_epoch") or facts.imports("accelerate", "lightning", "pytorch_lightning"):
        return
    for event in facts.calls("DistributedSampler"):
        sampler = event.result
        if not isinstance(sampler, Thing) or event.partly:
            continue
        shuffle = event.get("shuffle", 3)
        if shuffle is not None and not is_constant(shuffle, True):
            continue
        loaders = [item.result for item in facts.calls("DataLoader") if item.get("sampler", 3) is sampler]
        for loader in loaders:
            if not isinstance(loader, Thing) or facts.is_given_away(loader) or facts.is_given_away(sampler):
                continue
            if any(_goes_over(item.target, loader) and _in_epochs(item) for item in facts.of_kind("iterate")):
                report("FSD684", event.node, "every epoch has the same order: set_epoch is never called")


def _in_epochs(event: Event) -> bool:
    """Say whether a loop over batches runs again and again."""
    for loop in event.loops:
        if isinstance(loop, ast.While):
            return True
        if isinstance(loop, ast.For):
            name = next((node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)), "")
            if "epoch" in name or "epoch" in ast.unparse(loop.iter):
                return True
    return False
