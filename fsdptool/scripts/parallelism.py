"""How ranks of a script share the model: FSDP, accelerate's plugin and mesh, strategies of Lightning."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from math import prod

from fsdptool.scripts.facts import FSDP1
from fsdptool.scripts.models import ModelReader
from fsdptool.scripts.settings import NamedClass, plain_value
from fsdptool.scripts.values import (
    Class,
    Const,
    Event,
    Items,
    Library,
    Partial,
    Thing,
    Value,
    flat,
    is_constant,
    made_by,
)
from fsdptool.spelling import integer

_OF_MESH = {
    "dp_replicate": "dp_replicate", "replicate": "dp_replicate", "dp_shard": "dp_shard", "shard": "dp_shard",
    "dp": "dp_shard", "fsdp": "dp_shard", "tp": "tp", "cp": "cp",
}  # fmt: skip
_LIGHTNING = {
    "accumulate_grad_batches": "gradient_accumulation_steps", "max_steps": "max_steps",
    "max_epochs": "num_train_epochs",
}  # fmt: skip
_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
_PLUGIN = (
    "fsdp_version", "reshard_after_forward", "activation_checkpointing", "cpu_offload", "sharding_strategy",
    "transformer_cls_names_to_wrap", "auto_wrap_policy", "mixed_precision_policy",
)  # fmt: skip

_STRATEGY = (
    "auto_wrap_policy", "activation_checkpointing_policy", "activation_checkpointing", "cpu_offload",
    "mixed_precision", "sharding_strategy", "device_mesh", "data_parallel_size", "tensor_parallel_size",
)  # fmt: skip
_FP8 = ("AORecipeKwargs", "TERecipeKwargs", "MSAMPRecipeKwargs", "FP8RecipeKwargs")
"""Handlers with which accelerate trains in float8."""
_SHARDED = ("reshard_after_forward", "cpu_offload", "param_dtype", "reduce_dtype")
_MOST_DEVICES = 100_000
_LAYERS = ("layers", "layer", "h", "blocks", "block", "decoder_layers")
"""Attributes that hold the layers of a model."""
_NAMED_LAYERS = "_no_split_modules"


def _devices(given: object) -> int | None:
    """Return how many devices ``devices`` names; None where Lightning takes all that there are."""
    if isinstance(given, str) and "," in given:
        given = [word for word in given.split(",") if word.strip()]
    count = len(given) if isinstance(given, list) else integer(given)
    return count if count is not None and 0 < count <= _MOST_DEVICES else None


def _is_but_last(value: Value | None, loops: Sequence[ast.AST]) -> bool:
    """Say whether a test is true of all layers that a loop goes over, the last perhaps left out."""
    test = value.node if isinstance(value, Thing) else None
    loop = loops[-1] if loops else None
    if not isinstance(test, ast.Compare) or not isinstance(loop, ast.For) or len(test.ops) != 1:
        return False
    number = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) else loop.target
    end = test.comparators[0]
    counted = end.left if isinstance(end, ast.BinOp) and isinstance(end.op, ast.Sub) else None
    if not isinstance(counted, ast.Call) or not counted.args or ast.unparse(counted.func) != "len":
        return False
    return (
        isinstance(test.ops[0], ast.Lt | ast.LtE | ast.NotEq)
        and ast.unparse(test.left) == ast.unparse(number)
        and isinstance(end, ast.BinOp)
        and ast.unparse(end.right) == "1"
        and ast.unparse(counted.args[0]) in ast.unparse(loop.iter)
    )


def _is_of_layers(value: Value | None) -> bool:
    """Say whether a value is the class of the model's layers, as the model itself names or holds them."""
    if not isinstance(value, Thing):
        return False
    if value.kind == "comprehension":
        generators = getattr(value.node, "generators", ())
        tests = [test for one in generators for test in one.ifs]
        named = all(
            isinstance(test, ast.Compare)
            and isinstance(test.ops[0], ast.In)
            and ast.unparse(test.comparators[-1]).endswith(f".{_NAMED_LAYERS}")
            for test in tests
        )
        return len(generators) == 1 and named and (bool(tests) or _is_of_layers(value.inner))
    if value.kind == "get_module_class_from_name":
        return len(value.args) > 1 and _is_of_layers(value.args[1])
    asked = value.args[0] if value.kind == "builtins.type" and value.args else None
    if isinstance(asked, Thing):
        return asked.kind == "item" and asked.parent is not None and asked.parent.label in _LAYERS
    whole = value.parent if value.kind == "item" else value
    return whole is not None and whole.label == _NAMED_LAYERS


class ParallelismReader(ModelReader):
    """Reads how a script shards its model, and over how many ranks."""

    @property
    def _by_lightning(self) -> bool:
        return self.run.form == "lightning"

    def _lightning(self, event: Event) -> None:
        """Read ``Trainer`` or ``Fabric`` of Lightning, and the strategy that it is given.

        Defaults and dtypes: Lightning 2.6 ``pytorch/trainer/trainer.py``, ``pytorch/strategies/fsdp.py``,
        ``fabric/plugins/precision/fsdp.py``.
        """
        kind = event.name.rpartition(".")[2]
        for name, ours in _LIGHTNING.items():
            self.put(ours, event.keywords.get(name), event.places.get(name, event.node), f"{kind}.{name}")
        strategy, at = event.keywords.get("strategy"), event.places.get("strategy", event.node)
        word = str(plain_value(strategy)[1]) if strategy is not None else "auto"
        made = strategy if isinstance(strategy, Thing) else None
        named = made.kind.rpartition(".")[2] if made is not None else ""
        if named == "FSDPStrategy" or word.startswith("fsdp"):
            self.run.fsdp = 1
            self.say("cpu_offload", "offload" in word, at, f"{kind}.strategy") if made is None else None
            if made is None or "auto_wrap_policy" not in made.keywords:
                self.say("one_unit", "the whole model", at, f"{kind}.strategy")
        elif made is None and strategy is not None and not plain_value(strategy)[0]:
            self.put("fsdp_plugin", strategy, at, f"{kind}.strategy")
        elif "eepspeed" in word + named:
            self.say("Accelerator.deepspeed_plugin", named or word, at, f"{kind}.strategy")
        if made is not None:
            self._strategy_of_lightning(made, named)
        self._precision_of_lightning(event, kind)
        given = event.keywords
        devices = _devices(plain_value(given.get("devices", given.get("gpus")))[1])
        nodes = 1 if "num_nodes" not in given else _devices(plain_value(given["num_nodes"])[1])
        if devices is not None and nodes is not None:
            self.run.processes, self.run.nodes = devices * nodes, nodes
        if named == "ModelParallelStrategy" and made is not None:
            self._sizes_of_lightning(made, {"data_parallel_size": nodes, "tensor_parallel_size": devices})
        self.rest(event, kind, (*_LIGHTNING, "strategy", "precision", "devices", "gpus", "num_nodes"))

    def _strategy_of_lightning(self, made: Thing, named: str) -> None:
        places, given = self.places(made), made.keywords
        for name in ("auto_wrap_policy", "activation_checkpointing_policy", "activation_checkpointing"):
            policy, at = given.get(name), places.get(name, made.node)
            if name == "auto_wrap_policy" and isinstance(policy, Items):
                self._classes(policy, at, named)
            elif name == "auto_wrap_policy":
                self._policy(policy, at, named)
            elif policy is not None and not is_constant(policy, None):
                self.say("gradient_checkpointing", True, at, f"{named}.{name}")
        offload = given.get("cpu_offload")
        if isinstance(offload, Const):
            self.put("cpu_offload", offload, places.get("cpu_offload", made.node), f"{named}.cpu_offload")
        else:
            self._offload(offload, places.get("cpu_offload", made.node), named)
        self._precision(given.get("mixed_precision"), places.get("mixed_precision"), "MixedPrecision")
        self._strategy(given.get("sharding_strategy"), places.get("sharding_strategy", made.node), named)
        mesh = given.get("device_mesh")
        if isinstance(mesh, Items) and len(mesh.values) == 2:
            for name, size in zip(("dp_replicate", "dp_shard"), mesh.values, strict=True):
                self.put(f"mesh.{name}", size, places.get("device_mesh", made.node), f"{named}.device_mesh")
        elif mesh is not None and not is_constant(mesh, None):
            self.put("fsdp_plugin", mesh, places.get("device_mesh", made.node), f"{named}.device_mesh")
        self.rest(self.event_of(made) or made, named, _STRATEGY)

    def _sizes_of_lightning(self, made: Thing, sizes: Mapping[str, int | None]) -> None:
        """Read the mesh of ``ModelParallelStrategy``: by default a node is one tensor-parallel group.

        Source: Lightning 2.6 ``pytorch/strategies/model_parallel.py`` (``setup_environment``).
        """
        for (name, size), axis in zip(sizes.items(), ("dp_shard", "tp"), strict=True):
            given: Value | None = made.keywords.get(name)
            if given is None or is_constant(given, "auto"):
                given = Const(size) if size is not None else Thing("unknown", node=made.node)
            self.put(f"mesh.{axis}", given, made.node, f"ModelParallelStrategy.{name}")

    def _precision_of_lightning(self, event: Event, kind: str) -> None:
        """Read ``precision``: ``bf16-mixed`` is autocast, ``bf16-true`` casts the weights, too.

        FSDP casts the weights of ``32-true``, the default, too. Versions before 2.6 gather those of
        ``bf16-mixed`` in fp32.
        """
        value, at = event.keywords.get("precision"), event.places.get("precision", event.node)
        known, word = plain_value(value)
        if not known:
            self.put("autocast", value, at, f"{kind}.precision")
            return
        dtype, _, how = str(word).partition("-")
        found = {"bf16": "bfloat16", "16": "float16"}.get(dtype)
        if word in (None, 32, "32", "32-true"):
            if self.run.fsdp != 1:
                return
            found, how = "float32", "true"
        elif found is None:
            self.put(f"{kind}.precision", value, at, f"{kind}.precision")
            return
        if how == "true":
            self.say("dtype", found, at, f"{kind}.precision")
        if self.run.fsdp == 1:
            self.say("param_dtype", found, at, f"{kind}.precision")
            self.say("reduce_dtype", found, at, f"{kind}.precision")
        else:
            self.say("autocast", found, at, f"{kind}.precision")

    def _accelerator(self, event: Event) -> None:
        for name in ("mixed_precision", "gradient_accumulation_steps"):
            self.put(
                name, event.keywords.get(name), event.places.get(name, event.node), f"Accelerator.{name}"
            )
        plugin = event.keywords.get("fsdp_plugin")
        made = made_by(plugin, "FullyShardedDataParallelPlugin")
        if plugin is not None and made is None and not isinstance(plugin, Const):
            self.put("fsdp_plugin", plugin, event.node, "Accelerator.fsdp_plugin")
        taken = ["mixed_precision", "gradient_accumulation_steps", "fsdp_plugin"]
        taken += self._compiled_by_accelerate(event)
        for handler in flat(event.keywords.get("kwargs_handlers")):
            if isinstance(handler, Thing) and handler.kind in _FP8:
                self.say("Accelerator.fp8", handler.kind, handler.node, handler.kind)
        if self._mesh_of_accelerate(event.keywords.get("parallelism_config")):
            taken.append("parallelism_config")
        self.rest(event, "Accelerator", taken)
        self.further(event, "Accelerator", ("mixed_precision", "gradient_accumulation_steps"))
        if made is None:
            return
        places = self.places(made)
        version = made.keywords.get("fsdp_version")
        self.run.fsdp = 2 if isinstance(version, Const) and version.value == 2 else 1
        for name, ours in (
            ("fsdp_version", "fsdp_version"), ("reshard_after_forward", "reshard_after_forward"),
            ("activation_checkpointing", "gradient_checkpointing"),
        ):  # fmt: skip
            self.put(ours, made.keywords.get(name), places.get(name, made.node), f"{made.kind}.{name}")
        self._offload(made.keywords.get("cpu_offload"), places.get("cpu_offload", made.node), made.kind)
        names = made.keywords.get("transformer_cls_names_to_wrap")
        if names is not None:
            self._classes(names, places.get("transformer_cls_names_to_wrap", made.node), made.kind)
        self._policy(
            made.keywords.get("auto_wrap_policy"), places.get("auto_wrap_policy", made.node), made.kind
        )
        self._strategy(
            made.keywords.get("sharding_strategy"), places.get("sharding_strategy", made.node), made.kind
        )
        policy = made.keywords.get("mixed_precision_policy")
        self._precision(policy, places.get("mixed_precision_policy"), f"{made.kind}.mixed_precision_policy")
        self.rest(self.event_of(made) or made, "FullyShardedDataParallelPlugin", _PLUGIN)
        self.further(self.event_of(made), made.kind, (*_SHARDED, "wrap_classes", "gradient_checkpointing"))

    def _compiled_by_accelerate(self, event: Event) -> tuple[str, ...]:
        """Read whether ``prepare`` compiles the model; return the arguments that say so.

        Source: accelerate 1.15 ``utils/dataclasses.py`` (``TorchDynamoPlugin``: no backend, no compilation).
        """
        plugin, backend = event.keywords.get("dynamo_plugin"), event.keywords.get("dynamo_backend")
        made = made_by(plugin, "TorchDynamoPlugin")
        if made is not None:
            backend = made.keywords.get("backend", made.args[0] if made.args else Const(None))
        name = "dynamo_plugin" if backend is None or made is not None else "dynamo_backend"
        at = event.places.get(name, event.node)
        known, word = plain_value(backend if backend is not None else plugin)
        if not known:
            self.put("torch_compile", backend or plugin, at, f"Accelerator.{name}")
        elif str(word).lower() not in ("none", "no"):
            self.say("torch_compile", True, at, f"Accelerator.{name}")
        return ("dynamo_plugin", "dynamo_backend")

    def _mesh_of_accelerate(self, value: Value | None) -> bool:
        """Read accelerate's ``ParallelismConfig``; False where it decides what a mesh here does not hold.

        Source: accelerate 1.15 ``parallelism_config.py``: a size is 1 unless it is given, and the product
        is the number of processes; where all are 1, the launch decides it.
        """
        made = made_by(value, "ParallelismConfig")
        event = self.event_of(made) if made is not None else None
        if made is None or event is None or event.partly or made.args or "sp_size" in made.keywords:
            return False
        sizes = {name: made.keywords.get(f"{name}_size") or Const(1) for name in _AXES}
        numbers = [plain_value(size)[1] for size in sizes.values()]
        if any(isinstance(number, int) and number < 1 for number in numbers):
            return False
        for name, size in sizes.items():
            self.put(
                f"mesh.{name}", size, event.places.get(f"{name}_size", event.node), f"{made.kind}.{name}_size"
            )
        if all(type(number) is int for number in numbers) and prod(numbers) > 1:
            self.run.processes = prod(numbers)
        taken = {f"{name}_size": "" for name in _AXES}
        self.rest(event, made.kind, taken)
        return True

    def _fully_shard(self) -> None:
        shardings = self.facts.shardings
        first = shardings[0][0]
        for event, thing in shardings:
            for guard in event.guards:
                test = made_by(guard.test, "builtins.isinstance")
                if test is not None and len(test.args) > 1:
                    self._classes(test.args[1], test.node, "isinstance")
            if thing is not shardings[-1][1]:
                first = event
        reshards, at = first.keywords.get("reshard_after_forward"), first.places.get("reshard_after_forward")
        if _is_but_last(reshards, first.loops):
            reshards = Const(True)  # all layers but the last: ``index < len(layers) - 1``
        self.put("reshard_after_forward", reshards, at or first.node, "fully_shard.reshard_after_forward")
        self._offload(
            first.keywords.get("offload_policy"),
            first.places.get("offload_policy", first.node),
            "fully_shard",
        )
        self._precision(
            first.keywords.get("mp_policy"), first.places.get("mp_policy"), "MixedPrecisionPolicy"
        )
        partly = next((event for event, _ in shardings if event.partly), None)
        self.further(partly, "fully_shard", _SHARDED)
        if len({id(thing) for _, thing in shardings}) == 1 and not any(
            made_by(thing, "item", "attribute") or event.loops for event, thing in shardings
        ):
            self.say("one_unit", "the whole model", first.node, "fully_shard")

    def _fsdp1(self) -> None:
        event, _ = self.facts.wrappers[-1]
        at = event.places
        self._offload(event.keywords.get("cpu_offload"), at.get("cpu_offload", event.node), FSDP1)
        self._precision(event.keywords.get("mixed_precision"), at.get("mixed_precision"), "MixedPrecision")
        self._strategy(
            event.keywords.get("sharding_strategy"), at.get("sharding_strategy", event.node), FSDP1
        )
        policy = event.get("auto_wrap_policy", 4)
        if policy is None or (isinstance(policy, Const) and policy.value is None):
            if len(self.facts.wrappers) == 1 and not event.partly:
                self.say("one_unit", "the whole model", event.node, FSDP1)
        else:
            self._policy(policy, at.get("auto_wrap_policy", event.node), FSDP1)
        self.further(event, FSDP1, (*_SHARDED, "wrap_classes"))

    def _policy(self, policy: Value | None, node: ast.AST | None, kind: str) -> None:
        if isinstance(policy, Partial) and isinstance(policy.function, Library):
            classes = policy.keywords.get("transformer_layer_cls")
            if classes is not None:
                self._classes(classes, node, kind)
                return
        made = made_by(policy, "ModuleWrapPolicy")
        if made is not None and made.args:
            self._classes(made.args[0], node, kind)
        elif isinstance(policy, Const) and str(policy.value).lower() in ("transformer_based_wrap", "none"):
            return
        elif policy is not None:
            self.put("auto_wrap_policy", policy, node, f"{kind}.auto_wrap_policy")

    def _classes(self, value: Value, node: ast.AST | None, kind: str) -> None:
        line = getattr(node, "lineno", 1)
        items = value.values if isinstance(value, Items) else [value]
        named = [made_by(item, "get_module_class_from_name") for item in items]
        items = [
            made.args[1] if made and len(made.args) > 1 else item
            for made, item in zip(named, items, strict=True)
        ]
        found: list[NamedClass] = []
        for item in items:
            if isinstance(item, Library) and not item.name.startswith("builtins."):
                module, _, name = item.name.rpartition(".")
                found.append(NamedClass(name, module, line))
            elif isinstance(item, Class):
                found.append(NamedClass(item.node.name, "__main__", line))
            elif isinstance(item, Const) and isinstance(item.value, str):
                found += [NamedClass(name.strip(), "", line) for name in item.value.split(",")]
            elif _is_of_layers(item):
                continue  # what a plan takes where no class is named
            else:
                self.put("wrap_classes", item, node, f"{kind}.classes")
                return
        if not found:
            return
        self.run.classes += tuple(found)
        self.say("wrap_classes", [item.name for item in self.run.classes], node, f"{kind}.classes")

    def _precision(self, value: Value | None, at: ast.AST | None, kind: str) -> None:
        policy = made_by(value, "MixedPrecisionPolicy", "MixedPrecision")
        if policy is not None:
            places = self.places(policy)
            for index, name in enumerate(("param_dtype", "reduce_dtype")):
                given = policy.keywords.get(name) or (
                    policy.args[index] if index < len(policy.args) else None
                )
                self.put(name, given, places.get(name, policy.node), f"{kind}.{name}")
            self.rest(self.event_of(policy) or policy, kind, ("param_dtype", "reduce_dtype"))
        elif value is not None and not (isinstance(value, Const) and value.value is None):
            self.put("param_dtype", value, getattr(value, "node", None) or at, kind)

    def _strategy(self, value: Value | None, node: ast.AST | None, kind: str) -> None:
        word = str(plain_value(value)[1]).upper() if value is not None else ""
        if "SHARD_GRAD_OP" in word or "HYBRID_SHARD_ZERO2" in word or "_ZERO2" in word:
            self.say("reshard_after_forward", False, node, f"{kind}.sharding_strategy")
        elif value is not None and not plain_value(value)[0]:
            self.put("reshard_after_forward", value, node, f"{kind}.sharding_strategy")
        elif "FULL_SHARD" in word:
            self.say("reshard_after_forward", True, node, f"{kind}.sharding_strategy")
        if "HYBRID" in word:
            self.say("sharding_strategy", word, node, f"{kind}.sharding_strategy")

    def _offload(self, value: Value | None, node: ast.AST | None, kind: str) -> None:
        if value is None or (isinstance(value, Const) and value.value is None):
            return
        name = f"{kind}.{'offload_policy' if kind == 'fully_shard' else 'cpu_offload'}"
        if made_by(value, "CPUOffloadPolicy") is not None:
            self.say("cpu_offload", True, node, name)
        elif made_by(value, "OffloadPolicy") is not None:
            self.say("cpu_offload", False, node, name)
        elif (made := made_by(value, "CPUOffload")) is not None:
            given = made.keywords.get("offload_params") or (made.args[0] if made.args else Const(False))
            self.put("cpu_offload", given, node, name)
        else:
            self.put("cpu_offload", value, node, name)

    def _mesh(self) -> None:
        for event in self.facts.calls("init_device_mesh"):
            sizes, names = event.get("mesh_shape", 1), event.get("mesh_dim_names", 2)
            if not isinstance(sizes, Items) or not isinstance(names, Items):
                continue
            for size, name in zip(sizes.values, names.values, strict=False):
                ours = _OF_MESH.get(str(plain_value(name)[1]))
                many = len(sizes.values) > 1
                if ours is not None and many and isinstance(size, Const):
                    self.put(f"mesh.{ours}", size, event.node, f"init_device_mesh.{ours}")
