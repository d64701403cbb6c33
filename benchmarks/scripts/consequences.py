"""Show what rules on scripts warn of: tiny scripts on two gloo ranks, each in a failing and a passing form.

    python benchmarks/scripts/consequences.py [CODE ...]

Both forms are judged, too: the rule has to find the first and not the second. The result is
``results/consequences.json``: what both ranks saw, which is a value or an error. With codes, only theirs are new.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import torch
import torch._dynamo  # before the processes divide
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp

from fsdptool.files.text import SourceText
from fsdptool.scripts.judge import judge_script
from fsdptool.scripts.rules import RULES

HERE = Path(__file__).parent
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "peft": "0.21.2"}
WAIT = 4
"""Seconds after which a collective gives up."""

HEAD = """
import copy
import functools
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy, wrap, enable_wrap, CustomPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)

    def encode(self, x):
        return self.head(self.blocks[0](x))


rank = dist.get_rank()
path = os.environ["PLACE"]
torch.manual_seed(0)
x = torch.randn(4, 8) + rank
"""
SHARD = "for block in model.blocks:\n    fully_shard(block)\nfully_shard(model)\n"
MADE = f"model = Net()\n{SHARD}"
FIRST = "model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=CPU)\n"
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
TRAIN = "optimizer.zero_grad()\nmodel(x).pow(2).sum().backward()\noptimizer.step()\n"
HEAD_WEIGHT = "model.head.weight.full_tensor()"
GATHERED = 'get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["head.weight"]'
CHANGED = f"before = {GATHERED}\n{TRAIN}seen = ({GATHERED} - before).abs().max().item()\n"
MOVED = f"before = {HEAD_WEIGHT}.clone()\n{TRAIN}seen = ({HEAD_WEIGHT} - before).abs().max().item()\n"
DATA = "data = TensorDataset(torch.arange(8))\n"
SEEN = "own = [int(i) for (batch,) in loader for i in batch]\n"

CASES: dict[str, tuple[str, str, str]] = {
    "FSD601": (
        "largest change of a weight in a step",
        f"model = Net()\n{SGD}{SHARD}{MOVED}",
        f"{MADE}{SGD}{MOVED}",
    ),
    "FSD602": (
        "largest change of a weight in a step",
        f"model = Net()\nweights = list(model.parameters())\n{SHARD}"
        f"optimizer = torch.optim.SGD(weights, lr=0.1)\n{MOVED}",
        f"{MADE}weights = list(model.parameters())\noptimizer = torch.optim.SGD(weights, lr=0.1)\n{MOVED}",
    ),
    "FSD603": (
        "largest change of a weight of the root in a step",
        f"{MADE}model(x)\n{SGD}{CHANGED}",
        f"{MADE}{SGD}model(x)\n{CHANGED}",
    ),
    "FSD604": (
        "units of two modules",
        "model = Net()\nfully_shard(model)\nfor block in model.blocks:\n    fully_shard(block)\nmodel(x)\nseen = 'trains'\n",
        f"{MADE}model(x)\nseen = 'trains'\n",
    ),
    "FSD607": (
        "a forward after a cast",
        f"{MADE}model(x)\nmodel.to(torch.bfloat16)\nmodel(x.bfloat16())\nseen = 'runs'\n",
        f"model = Net()\nmodel.to(torch.bfloat16)\n{SHARD}model(x.bfloat16())\nseen = 'runs'\n",
    ),
    "FSD608": (
        "a copy of the model",
        f"{MADE}average = copy.deepcopy(model)\nseen = 'copied'\n",
        f"model = Net()\naverage = copy.deepcopy(model)\n{SHARD}seen = 'copied'\n",
    ),
    "FSD610": (
        "the call",
        "model = Net()\nfor block in model.blocks:\n    fully_shard(block, mixed_precision=MixedPrecisionPolicy())\n"
        "fully_shard(model)\nseen = 'sharded'\n",
        "model = Net()\nfor block in model.blocks:\n    fully_shard(block, mp_policy=MixedPrecisionPolicy())\n"
        "fully_shard(model)\nseen = 'sharded'\n",
    ),
    "FSD611": (
        "the call",
        "model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), cpu_offload=True, device_id=CPU)\nmodel(x)\nseen = 'runs'\n",
        f"{FIRST}model(x)\nseen = 'runs'\n",
    ),
    "FSD612": (
        "dtype of the outputs",
        "model = Net()\nfor block in model.blocks:\n    fully_shard(block)\n"
        "fully_shard(model, mp_policy=MixedPrecision())\nseen = str(model(x).dtype)\n",
        "model = Net()\nfor block in model.blocks:\n    fully_shard(block)\n"
        "fully_shard(model, mp_policy=MixedPrecisionPolicy())\nseen = str(model(x).dtype)\n",
    ),
    "FSD613": (
        "the import",
        "from torch.distributed.fsdp.wrap import default_auto_wrap_policy\nseen = 'imported'\n",
        "from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy\nseen = 'imported'\n",
    ),
    "FSD616": (
        "the call",
        "model = FSDP(Net(), auto_wrap_policy=transformer_auto_wrap_policy, device_id=CPU)\nseen = 'wrapped'\n",
        "policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})\n"
        "model = FSDP(Net(), auto_wrap_policy=policy, device_id=CPU)\nseen = 'wrapped'\n",
    ),
    "FSD617": (
        "number of units",
        "model = FSDP(Net(), auto_wrap_policy=size_based_auto_wrap_policy, device_id=CPU)\nseen = len(FSDP.fsdp_modules(model))\n",
        "policy = functools.partial(size_based_auto_wrap_policy, min_num_params=64)\n"
        "model = FSDP(Net(), auto_wrap_policy=policy, device_id=CPU)\nseen = len(FSDP.fsdp_modules(model))\n",
    ),
    "FSD618": (
        "class of the layer",
        "layer = wrap(nn.Linear(8, 8))\nseen = type(layer).__name__\n",
        "with enable_wrap(wrapper_cls=FSDP, device_id=CPU):\n    layer = wrap(nn.Linear(8, 8))\nseen = type(layer).__name__\n",
    ),
    "FSD619": (
        "the first unit",
        'mesh = init_device_mesh("cpu", (1, 2))\nmodel = Net()\nfor block in model.blocks:\n    fully_shard(block, mesh=mesh)\n'
        "fully_shard(model, mesh=mesh)\nseen = 'sharded'\n",
        'mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))\nmodel = Net()\n'
        "for block in model.blocks:\n    fully_shard(block, mesh=mesh)\nfully_shard(model, mesh=mesh)\nseen = 'sharded'\n",
    ),
    "FSD620": (
        "sum of the weights of the root after a step, on each rank",
        "model = Net()\nfor block in model.blocks:\n    fully_shard(block)\n"
        f"{SGD}{TRAIN}seen = model.head.weight.detach().sum().item()\n",
        f"{MADE}{SGD}{TRAIN}seen = {HEAD_WEIGHT}.sum().item()\n",
    ),
    "FSD623": (
        "the call",
        "model = Net()\nfully_shard(model.blocks)\nfully_shard(model)\nseen = 'sharded'\nfor block in model.blocks:\n    x = block(x)\n",
        f"{MADE}seen = 'sharded'\n",
    ),
    "FSD632": (
        "the call",
        "from torch.distributed.tensor import Replicate, Shard\nmodel = Net()\nfor block in model.blocks:\n    fully_shard(block)\n"
        "fully_shard(model, shard_placement_fn=lambda p: Replicate())\nmodel(x)\nseen = 'runs'\n",
        "from torch.distributed.tensor import Replicate, Shard\nmodel = Net()\nfor block in model.blocks:\n    fully_shard(block)\n"
        "fully_shard(model, shard_placement_fn=lambda p: Shard(0))\nmodel(x)\nseen = 'runs'\n",
    ),
    "FSD640": (
        "the first forward",
        f'with torch.device("meta"):\n    model = Net()\n{SHARD}model(x)\nseen = "runs"\n',
        f'with torch.device("meta"):\n    model = Net()\n{SHARD}model.to_empty(device="cpu")\n'
        'for layer in model.modules():\n    if isinstance(layer, nn.Linear):\n        layer.reset_parameters()\nmodel(x)\nseen = "runs"\n',
    ),
    "FSD643": (
        "loading a file",
        f"if rank == 0:\n    torch.save(Net().state_dict(), path)\ndist.barrier()\n{MADE}"
        "model.load_state_dict(torch.load(path))\nseen = 'loaded'\n",
        f"if rank == 0:\n    torch.save(Net().state_dict(), path)\ndist.barrier()\n{MADE}"
        "set_model_state_dict(model, torch.load(path), options=StateDictOptions(full_state_dict=True))\nseen = 'loaded'\n",
    ),
    "FSD644": (
        "loading on rank 0 alone",
        f"{MADE}state = Net().state_dict() if rank == 0 else {{}}\n"
        "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))\nseen = 'loaded'\n",
        f"{MADE}state = Net().state_dict() if rank == 0 else {{}}\n"
        "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))\nseen = 'loaded'\n",
    ),
    "FSD650": (
        "gathering the weights",
        f"{MADE}if rank == 0:\n    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))\n"
        "    torch.save(state, path)\ndist.barrier()\nseen = 'saved'\n",
        f"{MADE}state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))\nif rank == 0:\n"
        "    torch.save(state, path)\ndist.barrier()\nseen = 'saved'\n",
    ),
    "FSD651": (
        "rows of a weight of 8 rows in the file",
        f"{MADE}state = model.state_dict()\nif rank == 0:\n    torch.save(state, path)\ndist.barrier()\n"
        'weight = torch.load(path, weights_only=False)["head.weight"]\nseen = getattr(weight, "_local_tensor", weight).shape[0]\n',
        f"{MADE}state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))\n"
        "if rank == 0:\n    torch.save(state, path)\ndist.barrier()\n"
        'weight = torch.load(path, weights_only=False)["head.weight"]\nseen = getattr(weight, "_local_tensor", weight).shape[0]\n',
    ),
    "FSD654": (
        "a micro-step",
        f"{MADE}with model.no_sync():\n    model(x).sum().backward()\nseen = 'accumulated'\n",
        f"{MADE}model.set_requires_gradient_sync(False)\nmodel(x).sum().backward()\nmodel.set_requires_gradient_sync(True)\nmodel(x).sum().backward()\nseen = 'accumulated'\n",
    ),
    "FSD660": (
        "norm of the gradients, on each rank",
        f"{FIRST}model(x).sum().backward()\nseen = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()\n",
        f"{FIRST}model(x).sum().backward()\nseen = model.clip_grad_norm_(1.0).item()\n",
    ),
    "FSD661": (
        "norm of the gradients, on each rank",
        f"{MADE}model(x).sum().backward()\ntotal = 0.0\nfor p in model.parameters():\n"
        "    total += p.grad.norm().item() ** 2\nseen = total ** 0.5\n",
        f"{MADE}model(x).sum().backward()\nseen = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor().item()\n",
    ),
    "FSD662": (
        "the line of a log",
        f"{MADE}model(x).sum().backward()\nnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nseen = f'{{norm:.2f}}'\n",
        f"{MADE}model(x).sum().backward()\nnorm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\nseen = f'{{norm.full_tensor().item():.2f}}'\n",
    ),
    "FSD666": (
        "sum of the gradient of the bias",
        f"{MADE}loss = model(x).sum() / dist.get_world_size()\nloss.backward()\nseen = model.head.bias.grad.full_tensor().sum().item()\n",
        f"{MADE}loss = model(x).sum()\nloss.backward()\nseen = model.head.bias.grad.full_tensor().sum().item()\n",
    ),
    "FSD668": (
        "a backward",
        f"{MADE}loss = model(x).sum() + 0.1 * sum(p.pow(2).sum() for p in model.parameters())\nloss.backward()\nseen = 'trains'\n",
        f"{MADE}loss = model(x).sum()\nloss.backward()\nseen = 'trains'\n",
    ),
    "FSD669": (
        "a forward",
        f"{MADE}model.forward(x)\nseen = 'runs'\n",
        f"{MADE}model(x)\nseen = 'runs'\n",
    ),
    "FSD670": (
        "a call of encode",
        f"{MADE}model.encode(x)\nseen = 'runs'\n",
        "from torch.distributed.fsdp import register_fsdp_forward_method\n"
        f"{MADE}register_fsdp_forward_method(model, \"encode\")\nmodel.encode(x)\nseen = 'runs'\n",
    ),
    "FSD672": (
        "training after an evaluation",
        f"{MADE}{SGD}with torch.inference_mode():\n    model(x)\n{TRAIN}seen = 'trains'\n",
        f"{MADE}{SGD}with torch.no_grad():\n    model(x)\n{TRAIN}seen = 'trains'\n",
    ),
    "FSD683": (
        "samples of an epoch that this rank trains on, of 8",
        f"{MADE}{DATA}loader = DataLoader(data, batch_size=2, shuffle=True)\n{SEEN}for (batch,) in loader:\n    model(x).sum().backward()\nseen = len(set(own))\n",
        f"{MADE}{DATA}loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data))\n{SEEN}for (batch,) in loader:\n    model(x).sum().backward()\nseen = len(set(own))\n",
    ),
    "FSD684": (
        "different orders in four epochs",
        f"{MADE}{DATA}sampler = DistributedSampler(data, shuffle=True)\nloader = DataLoader(data, batch_size=4, sampler=sampler)\n"
        "orders = set()\nfor epoch in range(4):\n    for (batch,) in loader:\n        model(x).sum().backward()\n        orders.add(tuple(batch.tolist()))\nseen = len(orders)\n",
        f"{MADE}{DATA}sampler = DistributedSampler(data, shuffle=True)\nloader = DataLoader(data, batch_size=4, sampler=sampler)\n"
        "orders = set()\nfor epoch in range(4):\n    sampler.set_epoch(epoch)\n    for (batch,) in loader:\n        model(x).sum().backward()\n        orders.add(tuple(batch.tolist()))\nseen = len(orders)\n",
    ),
    "FSD685": (
        "making the loader",
        f"{DATA}loader = DataLoader(data, sampler=DistributedSampler(data), shuffle=True)\nseen = 'made'\n",
        f"{DATA}loader = DataLoader(data, sampler=DistributedSampler(data))\nseen = 'made'\n",
    ),
}
"""By code: what is looked at, the failing form and the passing one."""


def child(rank: int, store: str, text: str, answers: Any) -> None:
    """Run a script as one of two ranks and send what it saw."""
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    os.dup2(sys.stderr.fileno(), 2)
    os.environ["PLACE"] = f"{store}.pt"
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=WAIT)
    )
    names: dict[str, Any] = {}
    try:
        exec(compile(HEAD + text, "script", "exec"), names)
        seen = names["seen"]
    except Exception as error:
        seen = f"{type(error).__name__}: {re.sub(r'[^ ]*[/@][^ ]*', '...', str(error))[:90]}"
    answers.put((rank, round(seen, 6) if isinstance(seen, float) else seen))
    answers.close()
    answers.join_thread()
    os._exit(0)


def ranks(text: str) -> list[Any]:
    """Return what two ranks saw."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=child, args=(r, f"{folder}/store", text, answers)) for r in range(2)
        ]
        for process in processes:
            process.start()
        found: dict[int, Any] = {}
        try:
            for _ in processes:
                rank, seen = answers.get(timeout=60)
                found[rank] = seen
        except Exception:
            found.setdefault(0, "no answer")
            found.setdefault(1, "no answer")
        for process in processes:
            process.kill()
            process.join()
    return [found[0], found[1]]


def judged(code: str, text: str) -> bool:
    """Say whether a rule finds something in a script."""
    return code in {item.code for item in judge_script(SourceText(HEAD + text), VERSIONS).findings}


def cases(codes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is seen in both forms of each case."""
    titles = {rule.code: rule.title for rule in RULES}
    for code, (what, fails, passes) in CASES.items():
        if codes and code not in codes:
            continue
        bad, good = ranks(fails), ranks(passes)
        yield (
            code,
            {
                "rule": titles[code],
                "looked_at": what,
                "fails": bad,
                "passes": good,
                "differs": bad != good,
                "rule_finds": [judged(code, fails), judged(code, passes)],
            },
        )


if __name__ == "__main__":
    file = HERE / "results" / "consequences.json"
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["rules"] if file.exists() else {}
    for code, case in cases(sys.argv[1:]):
        results[code] = case
        print(code, json.dumps(case), flush=True)
    results = {code: results[code] for code in sorted(results) if code in CASES}
    shown = sum(case["differs"] and case["rule_finds"] == [True, False] for case in results.values())
    report = {"torch": torch.__version__, "cases": len(results), "shown": shown, "rules": results}
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
