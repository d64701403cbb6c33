"""Rules on the training loop: forwards, gradients, clipping, accumulation, scaling and losses."""

from __future__ import annotations

import ast

from fsdptool.scripts.facts import Facts, label, unwrapped
from fsdptool.scripts.rules.table import BLOCKS, DIST, SHARD, TORCH, WRAP, Report, rule
from fsdptool.scripts.spans import Change
from fsdptool.scripts.values import (
    Class,
    Const,
    Event,
    Table,
    Thing,
    Value,
    constant,
    is_constant,
    made_by,
    origins,
    precedes,
)

_DEF = TORCH + SHARD + "\ndef main(model, batch, optimizer):\n" + BLOCKS
_OLD = (
    TORCH + WRAP + "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n\n"
    "def main(model, block, batch, optimizer, device):\n"
    "    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}), device_id=device)\n"
)
_TOWERS = (
    TORCH + SHARD + "\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.image = torch.nn.Linear(8, 8)\n\n    def encode(self, x):\n        return self.image(x)\n\n"
    "    def forward(self, x):\n        return self.encode(x)\n\nmodel = fully_shard(Net())\n"
)
_ACCUMULATE = (
    TORCH + "\ndef epoch(model, loader, optimizer, window=4):\n    for i, batch in enumerate(loader):\n"
)
_AFTER = (
    "        model.set_requires_gradient_sync(ready)\n        model(batch).backward()\n"
    "        if ready:\n            optimizer.step()\n            optimizer.zero_grad()\n"
)

RULES = (
    rule(660, "clip-of-shards", "error",
         "torch's function sees only the shards of this rank of FSDP1: the norm is too small and differs "
         "by rank (0.315 "
         "instead of 0.831 on two ranks), so that each rank scales its gradients differently.",
         "Call `model.clip_grad_norm_(max_norm)`. With FSDP2 torch's function is right.",
         _OLD, "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
         "    model.clip_grad_norm_(1.0)\n"),
    rule(661, "norm-of-shards", "warning",
         "`norm().item()` of a sharded tensor is this rank's part: 0.61 and 0.56 on two ranks instead of "
         "0.83.",
         "Use what `clip_grad_norm_` returns, with `.full_tensor()`, or sum the squares over the ranks.",
         _DEF, "    model(batch).backward()\n    print(sum(p.grad.norm().item() for p in "
               "model.parameters()))\n",
         "    model(batch).backward()\n    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
         "    print(norm.full_tensor().item())\n"),
    rule(662, "dtensor-format", "error",
         "With FSDP2 `clip_grad_norm_` returns a DTensor, which has no format specifier: TypeError (torch "
         "2.13).",
         "Format `.item()` of it.",
         _DEF, "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
         '    print(f"{norm:.3f}")\n',
         "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
         '    print(f"{norm.item():.3f}")\n'),
    rule(663, "clip-without-gradients", "warning",
         "On micro-batches whose gradients are not synchronised, FSDP2 holds them unsharded and `.grad` "
         "is None: the "
         "norm is 0.0 and nothing is clipped.",
         "Clip on the last micro-batch, before the step.",
         TORCH + "\ndef epoch(model, loader, optimizer, window):\n    for i, batch in enumerate(loader, 1):\n"
         "        ready = i % window == 0 or i == len(loader)\n        "
         "model.set_requires_gradient_sync(ready)\n"
         "        model(batch).backward()\n",
         "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        if ready:\n"
         "            optimizer.step()\n",
         "        if ready:\n            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
         "            optimizer.step()\n"),
    rule(664, "accumulation-remainder", "warning",
         "If the number of micro-batches is not a multiple of the window, the last ones of an epoch stay "
         "unreduced inside "
         "FSDP2. `zero_grad` does not clear them: they enter the next update (52 % off in a test).",
         "Synchronise on the last micro-batch as well (`or i + 1 == len(loader)`), or drop the remainder.",
         _ACCUMULATE, "        ready = (i + 1) % window == 0\n" + _AFTER,
         "        ready = (i + 1) % window == 0 or i + 1 == len(loader)\n" + _AFTER),
    rule(665, "grad-scaler-class", "warning",
         "With FSDP1 each rank looks for inf in its own shards: the ranks disagree about skipping a step "
         "and about the "
         "scale (4.0 and 2.0 in a test). With FSDP2 `torch.amp.GradScaler` is right.",
         "Use `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`, bf16, or FSDP2.",
         _OLD + "    loss = model(batch)\n",
         '    scaler = torch.amp.GradScaler("cuda")\n    scaler.scale(loss).backward()\n    '
         'scaler.step(optimizer)\n',
         "    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
         "    scaler = ShardedGradScaler()\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n"),
    rule(666, "loss-divided-by-world-size", "warning",
         "FSDP averages gradients over the ranks. A loss that is divided by their number makes them that "
         "much too small "
         "(halved on two ranks).",
         "Drop the division. Weighting by tokens multiplies by the number of ranks.",
         _DEF.replace(TORCH, TORCH + DIST), "    loss = model(batch) / dist.get_world_size()\n    "
                                            "loss.backward()\n",
         "    loss = model(batch)\n    loss.backward()\n"),
    rule(667, "loss-reduced-before-backward", "warning",
         "`all_reduce` changes the loss in place before its backward. The gradients stay those of this "
         "rank's loss, and "
         "the value that is logged is another one than is trained.",
         "Reduce a detached copy after the backward.",
         _DEF.replace(TORCH, TORCH + DIST),
         "    loss = model(batch)\n    dist.all_reduce(loss)\n    loss.backward()\n",
         "    loss = model(batch)\n    loss.backward()\n    shown = loss.detach().clone()\n    "
         "dist.all_reduce(shown)\n"),
    rule(668, "penalty-outside-forward", "error",
         "A sum over the sharded parameters is a DTensor; added to the loss it raises `got mixed "
         "torch.Tensor and "
         "DTensor` (torch 2.13).",
         "Use the weight decay of the optimizer.",
         _DEF, "    penalty = sum(p.square().sum() for p in model.parameters())\n"
         "    loss = model(batch).mean() + 0.1 * penalty\n    loss.backward()\n",
         "    loss = model(batch).mean()\n    loss.backward()\n"),
    rule(669, "forward-called-directly", "error",
         "Only a call of the module runs FSDP2's hooks. `forward` meets sharded parameters: `got mixed "
         "torch.Tensor and "
         "DTensor` (torch 2.13).",
         "Call the module itself.",
         _DEF, "    return model.forward(batch)\n", "    return model(batch)\n", safety="safe"),
    rule(670, "method-not-registered", "error",
         "Only a call of the module runs FSDP2's hooks. Another method that uses its parameters meets "
         "sharded ones: `got "
         "mixed torch.Tensor and DTensor` (torch 2.13).",
         'Call `register_fsdp_forward_method(model, "encode")`, or go through the forward.',
         _TOWERS, "latent = model.encode(torch.randn(2, 8))\n",
         "from torch.distributed.fsdp import register_fsdp_forward_method\n"
         'register_fsdp_forward_method(model, "encode")\nlatent = model.encode(torch.randn(2, 8))\n'),
    rule(671, "submodule-forward", "warning",
         "A part of a sharded root is called outside of the root's forward. Before any forward it fails "
         "on mixed "
         "tensors; after one it works by luck, until the root is sharded again.",
         "Go through the root's forward.",
         _TOWERS.replace(", register_fsdp_forward_method", ""), "latent = model.image(torch.randn(2, 8))\n",
         "latent = model(torch.randn(2, 8))\n"),
    rule(672, "inference-mode", "warning",
         "A forward under `torch.inference_mode` leaves inference tensors in the units: training on fails "
         "with "
         "`Inplace update to inference tensor outside InferenceMode`.",
         "Use `torch.no_grad()`.",
         _DEF, "    with torch.inference_mode():\n        model(batch)\n    model(batch).backward()\n",
         "    with torch.no_grad():\n        model(batch)\n    model(batch).backward()\n"),
    rule(673, "plain-backward", "warning",
         "Inside `accelerator.accumulate`, `loss.backward()` neither divides by the accumulation steps "
         "nor scales for "
         "fp16.",
         "Call `accelerator.backward(loss)`.",
         "from accelerate import Accelerator\n\ndef main(model, optimizer, loader):\n"
         "    accelerator = Accelerator(gradient_accumulation_steps=4)\n"
         "    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n    for batch in "
         "loader:\n"
         "        with accelerator.accumulate(model):\n            loss = model(**batch).loss\n",
         "            loss.backward()\n", "            accelerator.backward(loss)\n"),
    rule(674, "fsdp-config-ignored", "warning",
         "transformers 5.23 drops `fsdp_config` without `fsdp`, and keys that FSDP2 does not have, "
         "without a message.",
         "Set `fsdp=True`, and use the keys of FSDP2: `cpu_offload`, `reshard_after_forward`.",
         "from transformers import TrainingArguments\n",
         'args = TrainingArguments("out", fsdp=True, fsdp_config={"offload_to_cpu": True})\n',
         'args = TrainingArguments("out", fsdp=True, fsdp_config={"cpu_offload": True})\n'),
    rule(675, "offload-needs-gloo", "error",
         "With CPU offload the gradients lie on the CPU, and clipping reduces their norm there: `No "
         "backend type "
         "associated with device type cpu` with NCCL alone.",
         'Start the processes with `init_process_group("cpu:gloo,cuda:nccl")`.',
         TORCH + DIST + "from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard\n\ndef "
                        "main(model):\n",
         '    dist.init_process_group("nccl")\n' + BLOCKS.replace("ck)",
         "ck, offload_policy=CPUOffloadPolicy())")
         .replace("el)", "el, offload_policy=CPUOffloadPolicy())")
         + "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    dist.destroy_process_group()\n",
         '    dist.init_process_group("cpu:gloo,cuda:nccl")\n'
         + BLOCKS.replace("ck)", "ck, offload_policy=CPUOffloadPolicy())")
         .replace("el)", "el, offload_policy=CPUOffloadPolicy())")
         + "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    dist.destroy_process_group()\n"),
)  # fmt: skip


def check(facts: Facts, report: Report) -> None:
    """Report what a training loop does that FSDP does not do as it seems."""
    _clipping(facts, report)
    _norms(facts, report)
    _accumulation(facts, report)
    _scalers(facts, report)
    _losses(facts, report)
    _forwards(facts, report)
    _methods(facts, report)
    _trainer(facts, report)


def _clipping(facts: Facts, report: Report) -> None:
    backends = [event.get("backend", 0) for event in facts.calls("dist.init_process_group")]
    for event in facts.calls("clip_grad_norm_"):
        given = made_by(event.argument or event.get("parameters"), "parameters")
        model = given.parent if given is not None else facts.module_of(event.argument)
        generation = facts.generation(model, event)
        if generation == 1 and given is not None:
            report("FSD660", event.node, "the norm is of this rank's shards; use model.clip_grad_norm_")
        if generation != 2 or model is None:
            continue
        offloads = [
            made_by(item.get("offload_policy"), "CPUOffloadPolicy")
            for item, thing in facts.shardings
            if thing is model
        ]
        if len(backends) == 1 and is_constant(backends[0], "nccl") and any(offloads):
            report("FSD675", event.node, "the gradients are on the CPU, and NCCL is the only backend")
        for shown in facts.of_kind("format"):
            if shown.target is not None and shown.target is event.result:
                report("FSD662", shown.node, "the norm is a DTensor; format its .item()")
    for event in facts.methods("set_requires_gradient_sync"):
        flag = event.get("requires_gradient_sync", 0)
        if not event.loops or not isinstance(flag, Thing) or flag.kind != "test":
            continue
        for clip in facts.calls("clip_grad_norm_"):
            inside = bool(clip.loops) and clip.loops[-1] is event.loops[-1] and clip.order > event.order
            if inside and len(clip.guards) <= len(event.guards) and clip.stack == event.stack:
                report(
                    "FSD663", clip.node, "micro-batches without synchronised gradients are clipped as well"
                )


def _norms(facts: Facts, report: Report) -> None:
    if facts.mentions("full_tensor", "all_reduce", "reduce", "to_local") or not facts.uses_fsdp:
        return
    for event in facts.events:
        if event.kind == "method" and event.name == "norm":
            value = event.target
        elif event.kind == "call" and event.name in (
            "torch.norm",
            "torch.linalg.vector_norm",
            "torch.linalg.norm",
        ):
            value = event.argument
        else:
            continue
        gradient = value if isinstance(value, Thing) and value.label in ("grad", "data") else None
        parameter = gradient.parent if gradient is not None else value
        source = parameter.parent if isinstance(parameter, Thing) and parameter.kind == "item" else None
        if source is None or source.kind not in ("parameters", "named_parameters"):
            continue
        if facts.generation(source.parent, event) and _is_read(facts, event):
            report("FSD661", event.node, "the norm is of this rank's part of the tensor")


def _is_read(facts: Facts, event: Event) -> bool:
    """Say whether a norm becomes a number."""
    return any(item.target is event.result for item in facts.methods("item")) or any(
        item.argument is event.result for item in facts.calls("builtins.float")
    )


def _accumulation(facts: Facts, report: Report) -> None:
    flags = list(facts.methods("set_requires_gradient_sync"))
    for event in flags:
        flag = event.get("requires_gradient_sync", 0)
        if not _is_remainder(flag) or not event.loops or not isinstance(event.loops[-1], ast.For):
            continue
        if any(other.order > event.order and _always(other) for other in flags if other is not event):
            continue
        if _runs_over(event.loops[-1]):
            report("FSD664", event.node, "the last micro-batches of an epoch may stay unsynchronised")
    for event in facts.methods("no_sync"):
        if facts.generation(event.target, event) == 1 and event.loops and event.guards:
            guard = event.guards[-1]
            if (
                _is_remainder(guard.test)
                and isinstance(event.loops[-1], ast.For)
                and _runs_over(event.loops[-1])
            ):
                report("FSD664", event.node, "the last micro-batches of an epoch may stay unsynchronised")


def _always(event: Event) -> bool:
    flag = event.get("requires_gradient_sync", 0)
    return flag is None or is_constant(flag, True)


def _is_remainder(value: Value | None) -> bool:
    """Say whether a flag is ``(i + 1) % k == 0`` or its opposite, and nothing else."""
    test = made_by(value, "test")
    if test is not None and test.label == "not":
        return _is_remainder(test.sources[0])
    if test is None or test.label not in ("Eq", "NotEq") or len(test.args) != 2:
        return made_by(value, "binary") is not None and isinstance(value, Thing) and value.label == "Mod"
    left, right = test.args
    binary = made_by(left, "binary")
    return binary is not None and binary.label == "Mod" and isinstance(right, Const | Thing)


def _runs_over(loop: ast.For) -> bool:
    """Say whether a loop takes every batch of a loader, however many there are."""
    call = loop.iter
    if not isinstance(call, ast.Call) or getattr(call.func, "id", "") != "enumerate" or not call.args:
        return False
    inner = call.args[0]
    if isinstance(inner, ast.Call) and getattr(inner.func, "id", getattr(inner.func, "attr", "")) == "tqdm":
        inner = inner.args[0] if inner.args else inner
    return isinstance(inner, ast.Name | ast.Attribute)


def _scalers(facts: Facts, report: Report) -> None:
    if facts.shardings or not facts.wrappers:
        return
    for event in facts.calls(
        "torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.amp.grad_scaler.GradScaler"
    ):
        steps = [item for item in facts.methods("step") if item.target is event.result]
        if steps and "enabled" not in event.keywords and len(event.args) < 6:
            report("FSD665", event.node, "each rank looks for inf in its own shards only")


def _losses(facts: Facts, report: Report) -> None:
    for event in facts.methods("backward"):
        loss = event.target
        if not isinstance(loss, Thing) or loss.kind == "Accelerator":
            continue
        if any(made_by(item, "Accelerator") for item in _accumulates(event)):
            report("FSD673", event.node, "accelerator.accumulate is around a plain backward")
        for reduced in facts.calls("dist.all_reduce"):
            if reduced.argument is loss and precedes(reduced, event) and facts.uses_fsdp:
                report("FSD667", reduced.node, "the loss is reduced before its backward")
        chain = list(origins(loss))
        models = [item for item in chain if made_by(item, "output") and _calls_sharded(facts, item, event)]
        if not models:
            continue
        _divided(chain, report)
        _penalty(facts, event, chain, report)


def _accumulates(event: Event) -> list[Value]:
    return [
        context.inner
        for context in event.contexts
        if isinstance(context, Thing) and context.label == "accumulate" and context.inner is not None
    ]


def _calls_sharded(facts: Facts, output: Value, event: Event) -> int | None:
    function = output.sources[0] if output.sources else None
    return facts.generation(function, event)


def _divided(chain: list[Value], report: Report) -> None:
    operations = [item for item in chain if isinstance(item, Thing) and item.kind == "binary"]
    if any(item.label == "Mult" and any(_is_world(part) for part in item.args) for item in operations):
        return
    for item in operations:
        if item.label == "Div" and len(item.args) == 2 and _is_world(item.args[1]) and item.node is not None:
            report("FSD666", item.node, "FSDP averages over the ranks already")


def _is_world(value: Value) -> bool:
    return (
        isinstance(value, Thing)
        and "world" in value.tags
        and value.kind in ("world", "variable", "attribute", "parameter")
    )


_REDUCES = ("item", "full_tensor", "to_local", "detach")


def _penalty(facts: Facts, event: Event, chain: list[Value], report: Report) -> None:
    for item in chain:
        if not isinstance(item, Thing) or item.kind != "binary" or item.label != "Add" or item.node is None:
            continue
        for index in (0, 1):
            one, other = list(origins(item.args[index])), list(origins(item.args[1 - index]))
            if any(isinstance(part, Thing) and part.label in _REDUCES for part in one):
                continue
            sharded = any(
                isinstance(part, Thing)
                and part.kind == "parameters"
                and facts.generation(part.parent, event) == 2
                for part in one
            )
            plain = any(made_by(part, "output") and _calls_sharded(facts, part, event) == 2 for part in other)
            computed = any(made_by(part, "output") for part in one)
            if sharded and plain and not computed:
                report("FSD668", item.node, "the penalty is a DTensor and the loss is not")


def _forwards(facts: Facts, report: Report) -> None:
    for event in facts.methods("forward"):
        if facts.generation(event.target, event) == 2 and not _in_module(facts, event):
            called = event.node.func if isinstance(event.node, ast.Call) else None
            change = Change(called, by=called.value) if isinstance(called, ast.Attribute) else None
            report("FSD669", event.node, f"{label(event.target)}.forward runs without FSDP's hooks", change)
    trained = [event.order for event in facts.methods("backward")]
    for event in facts.of_kind("use"):
        target = event.target
        if not isinstance(target, Thing):
            continue
        modes = [
            item
            for item in event.contexts
            if made_by(item, "torch.inference_mode", "torch.autograd.grad_mode.inference_mode")
        ]
        if modes and facts.generation(target, event) and any(order > event.order for order in trained):
            report("FSD672", event.node, "a forward under inference_mode comes before training")
    if facts.mentions("unshard", "register_fsdp_forward_method"):
        return
    for event in facts.events:
        root, name = event.target, event.name
        if event.kind == "use" and isinstance(root, Thing) and root.kind.startswith("nn."):
            parts = root.parent.parts if root.parent is not None else {}
            name = next((str(key) for key, part in parts.items() if part is root), "")
            root = root.parent
        elif event.kind != "method":
            continue
        if not isinstance(root, Thing) or facts.generation(root, event) != 2 or _in_module(facts, event):
            continue
        made = facts.class_of(root)
        if made is not None and name in _modules_of(made):
            report("FSD671", event.node, f"{name} is called outside of the forward of {label(root)}")


def _in_module(facts: Facts, event: Event) -> bool:
    """Say whether an event is in a method of a module of the script."""
    line = getattr(event.node, "lineno", 0)
    return any(
        made.library_bases and made.node.lineno <= line <= (made.node.end_lineno or 0)
        for made in facts.path.classes
    )


def _methods(facts: Facts, report: Report) -> None:
    registered = list(facts.calls("register_fsdp_forward_method"))
    for event in facts.methods(*{event.name for event in facts.of_kind("method")}):
        target = event.target
        made = unwrapped(target).owner if isinstance(target, Thing) else None
        if made is None or not isinstance(target, Thing) or event.name in ("forward", "__init__"):
            continue
        if (
            facts.generation(target, event) != 2
            or _in_module(facts, event)
            or not _uses_parameters(made, event.name)
        ):
            continue
        names = [constant(item.get("method_name", 1)) for item in registered if item.argument is target]
        if event.name not in names and None not in names:
            report(
                "FSD670",
                event.node,
                f"{event.name} uses the parameters of {label(target)} without FSDP's hooks",
            )


def _uses_parameters(made: Class, name: str, depth: int = 0) -> bool:
    """Say whether a method calls parts of its module without going through the module."""
    found = made.lookup(name)
    if found is None or depth > 4:
        return False
    modules = _modules_of(made)
    uses = False
    for node in ast.walk(found[1]):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in (
                "self",
                "fully_shard",
                "FSDP",
                "checkpoint_wrapper",
            ):
                return False
            if isinstance(node.func, ast.Attribute) and _is_self(node.func.value):
                inner = node.func.attr
                uses = (
                    uses or inner in modules or (inner != name and _uses_parameters(made, inner, depth + 1))
                )
    return uses


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _modules_of(made: Class) -> frozenset[str]:
    """Return the attributes of a class that are certainly modules with parameters."""
    from fsdptool.scripts.facts import called_name, stores_of

    layers = (
        "Linear",
        "Embedding",
        "LayerNorm",
        "Sequential",
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "MultiheadAttention",
        "RMSNorm",
    )
    return frozenset(
        name for owner in made.line() for name, value in stores_of(owner) if called_name(value) in layers
    )


_DROPPED = frozenset({
    "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states", "mixed_precision",
    "device_id",
    "offload_to_cpu", "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params",
    "fsdp_sync_module_states", "fsdp_offload_params",
})  # fmt: skip


def _trainer(facts: Facts, report: Report) -> None:
    from fsdptool.scripts.signatures import is_older

    for event in facts.calls("TrainingArguments", "SFTConfig", "Seq2SeqTrainingArguments"):
        table = event.keywords.get("fsdp_config")
        if not isinstance(table, Table) or event.partly:
            continue
        place = event.places["fsdp_config"]
        fsdp = event.keywords.get("fsdp")
        if fsdp is None or (isinstance(fsdp, Const) and not fsdp.value):
            report("FSD674", place, "fsdp_config is dropped: fsdp is not set")
            continue
        version = table.items.get("version") or table.items.get("fsdp_version")
        if is_older(facts.versions.get("transformers", "5.23"), "5.23") or (
            version is not None and constant(version) != 2
        ):
            continue
        for key, node in table.nodes.items():
            if key in _DROPPED:
                report("FSD674", node, f"{key} does not exist in FSDP2 and is dropped")
