"""The run that a script starts; nothing is imported or run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import PurePath

from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.scripts.defaults import RunInterpreter, is_of_lightning
from fsdptool.scripts.facts import FSDP1, is_inside, text, unwrapped
from fsdptool.scripts.judge import parsed_script
from fsdptool.scripts.models import LOADING
from fsdptool.scripts.names import ARGUMENTS, short
from fsdptool.scripts.notebooks import Notebook
from fsdptool.scripts.parallelism import ParallelismReader
from fsdptool.scripts.settings import DTYPES, NamedClass, ScriptRun, Setting, plain_value
from fsdptool.scripts.state import TooLongError
from fsdptool.scripts.values import (
    Condition,
    Const,
    Event,
    Function,
    Items,
    Library,
    Table,
    Thing,
    Value,
    constant,
    flat,
    is_constant,
    made_by,
)

TRAINERS = {
    "SFTTrainer": "sft", "DPOTrainer": "dpo", "GRPOTrainer": "grpo", "KTOTrainer": "kto",
    "ORPOTrainer": "orpo", "RewardTrainer": "reward", "CPOTrainer": "cpo", "PPOTrainer": "ppo",
    "RLOOTrainer": "rloo",
    "Trainer": None, "Seq2SeqTrainer": None,
}  # fmt: skip
"""Trainers of transformers and TRL, with the objectives of those of TRL."""
_OF_TRAINERS = {
    "sft": ("max_seq_length", "packing"), "dpo": ("max_length", "max_prompt_length"),
    "kto": ("max_length", "max_prompt_length"), "orpo": ("max_length", "max_prompt_length"),
    "reward": ("max_length",),
}  # fmt: skip
"""Arguments of the trainers until TRL 0.12; unsloth still takes those of ``sft``."""
_LENGTHS = (
    "max_seq_length", "max_seq_len", "seq_length", "seq_len", "sequence_length", "max_length", "block_size",
    "context_length", "model_max_length", "cutoff_len", "seqlen",
)  # fmt: skip
_BATCHES = (
    "per_device_train_batch_size", "micro_batch_size", "batch_size_per_gpu", "train_batch_size", "batch_size",
    "micro_batch", "batch_size_training",
)  # fmt: skip
_ACCUMULATIONS = (
    "gradient_accumulation_steps", "grad_accum_steps", "grad_accumulation_steps", "accumulation_steps",
    "accum_steps", "grad_accum", "gradient_accumulation",
)  # fmt: skip
_DECIDED = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "fp16",
    "optim", "max_length", "packing", "fsdp", "max_steps", "num_train_epochs", "use_liger_kernel",
    "torch_compile", "activation_offloading", "loss_type", "fsdp_config.cpu_offload",
)  # fmt: skip
"""What arguments that are not read may decide of a trainer."""
_JOINS = re.compile(r"(?:^|_)(?:group|pack|packed|concat|concatenate|chunk|chunks|chunked)(?:_|$)")
"""Names of functions that join texts and cut them into full rows (``group_texts`` of transformers)."""
_SIDES = ("resolution", "image_size", "img_size")
_AUTOCAST = (
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
    "torch.amp.autocast_mode.autocast",
)
_CHECKPOINTING = ("apply_activation_checkpointing", "checkpoint_wrapper", "torch.utils.checkpoint.checkpoint")
_NO_GRADIENTS = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad")
_BEGIN = frozenset({
    *TRAINERS, *ARGUMENTS, "fully_shard", FSDP1, "Accelerator", "FullyShardedDataParallelPlugin",
    "DistributedDataParallel",
})  # fmt: skip


def read_script_run(
    source: SourceText,
    words: Sequence[str] = (),
    *,
    defaults: bool = True,
    load: Callable[[str], object] | None = None,
    processes: int | None = None,
) -> ScriptRun | None:
    """Return the run that a script starts; None where it starts none that is known.

    Args:
        source: The script, or a notebook.
        words: The arguments that the script is started with.
        defaults: Whether defaults of arguments, variables and fields count; else what they decide is open.
        load: Returns a file of settings that the script loads as plain data, or None.
        processes: Number of ranks that it is started on, or None.

    Raises:
        ConfigError: It does not parse, or takes too many steps to follow.
    """
    tree, notebook = parsed_script(source)
    if not isinstance(tree, ast.Module):
        message, line, _ = tree
        raise ConfigError(f"{source.path or 'the script'}:{line}: {message}")
    interpreter = partial(RunInterpreter, tree, words, defaults=defaults, load=load, processes=processes)
    try:
        return _run_of(interpreter(folder=str(PurePath(source.path or "script.py").parent)), notebook, words)
    except (TooLongError, RecursionError):
        pass  # perhaps by the modules that it imports
    try:
        return _run_of(interpreter(), notebook, words)
    except (TooLongError, RecursionError):
        raise ConfigError(
            f"{source.path or 'the script'} is too long to follow",
            help="give its model, and options, in place of the script",
        ) from None


def _is_default_of_trl(value: Value) -> bool:
    """Say whether a value is an argument of TRL's ``ModelConfig`` that nothing gives: its default counts."""
    of = value.parent if isinstance(value, Thing) and value.kind == "attribute" else None
    if of is None or of.kind != "ModelConfig" or not isinstance(value, Thing):
        return False
    return value.label not in of.keywords and of.parts.get(value.label, value) is value


def _run_of(interpreter: RunInterpreter, notebook: Notebook | None, words: Sequence[str]) -> ScriptRun | None:
    """Return the run of a script that is followed; errors of an interpreter go through."""
    paths = interpreter.paths()
    events = [path.events[path.own or 0 :] for path in paths]
    # A module that is imported may make arguments that the script does not use.
    scores = [_score([one for one in found if not interpreter.is_of_import(one)]) for found in events]
    if not any(scores):
        scores = [_score(found) for found in events]
    chosen = interpreter.chosen(paths, scores)
    if chosen is None:
        return None
    run = _Reader(paths[chosen], interpreter).read()
    unknown = sorted(interpreter.unknown_flags()) if words else []
    run.problems += interpreter.problems
    run.problems += [f"the script has no option --{name}" for name in unknown]
    if notebook is not None:
        places = notebook.places
        run.settings = {
            key: Setting(
                item.name, item.value, places[item.line - 1][2] or item.line, item.unread, item.option
            )
            for key, item in run.settings.items()
        }
        run.classes = tuple(
            NamedClass(item.name, item.module, places[item.line - 1][2] or item.line) for item in run.classes
        )
    return run


def _score(events: Sequence[Event]) -> int:
    """Return how much of a training run events hold; a plain loop counts less than any other."""
    named = 2 * sum(event.name in _BEGIN or is_of_lightning(event.result) for event in events)
    updates = any(event.kind == "call" and _is_optimizer(event.name) for event in events)
    return named or int(updates and any(event.name == "backward" for event in events))


class _Reader(ParallelismReader):
    """Reads the settings of one way through a script."""

    def read(self) -> ScriptRun:
        trainer = self._trainer()
        if trainer is not None:
            self._of_trainer(*trainer)
        else:
            self._of_loop()
        starters = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
        for event in self.facts.calls(*starters, "notebook_launcher"):
            count = event.get("num_processes" if event.name == "notebook_launcher" else "nprocs", 2)
            if isinstance(count, Const) and type(count.value) is int:
                self.run.processes = count.value
        return self.run

    # Trainers

    def _trainer(self) -> tuple[str, Event] | None:
        found = None
        for event in self.facts.events:
            if event.kind == "call" and event.name in TRAINERS:
                found = event.name, event
            elif event.kind == "make" and isinstance(event.result, Thing) and event.result.owner is not None:
                bases = [short(name) for name in event.result.owner.library_bases]
                kind = next((name for name in bases if name in TRAINERS), None)
                if kind is not None:
                    found = kind, event
        return found

    def _of_trainer(self, kind: str, event: Event) -> None:
        objective = TRAINERS[kind]
        self.run.form = "trainer" if objective is None else "trl"
        self.run.objective = objective
        arguments = event.get("args", None if objective is None else 1) or event.get("args", 1)
        given = made_by(arguments, *ARGUMENTS)
        if given is None:
            call = next((item for item in reversed(self.facts.events) if item.name in ARGUMENTS), None)
            given = (
                call.result
                if call is not None and isinstance(call.result, Thing) and arguments is None
                else None
            )
        if given is not None:
            self._arguments(given, objective)
        elif arguments is not None:
            line = getattr(event.node, "lineno", 1)
            self.run.problems.append(f"line {line}: the arguments of {kind} are not read")
            self.run.further += _DECIDED
        for name in _OF_TRAINERS.get(objective or "", ()):
            self.put(name, event.keywords.get(name), event.places.get(name, event.node), name)
        adapter = event.get("peft_config")
        if adapter is not None:
            self._adapter(adapter, event.places.get("peft_config", event.node))
        model = event.get("model", 0)
        if model is not None:
            self._model(model, event.places.get("model", event.node), loads=objective is not None)
            named = any(item.name.startswith("model_init_kwargs") for item in self.run.settings.values())
            if isinstance(model, Const) and _DECIDED[0] in self.run.further and not named:
                self.run.further += tuple(dict.fromkeys(LOADING.values()))
        self._frozen(model)
        if objective is None and self.run.own_class is None:
            self.run.objective = self._objective()
        self._adapters_by_hand()
        reference = event.keywords.get("ref_model")
        if "use_peft" in self.run.settings and reference is not None and not is_constant(reference, None):
            self.say("Trainer.ref_model", "a second model", event.node, f"{kind}.ref_model")
        self._checkpointing(given or arguments)
        if "max_length" not in self.run.settings and "max_seq_length" not in self.run.settings:
            self._length(named=objective is None)

    def _arguments(self, given: Thing, objective: str | None) -> None:
        places, event = self.places(given), self.event_of(given)
        self.run.own_fields = self.interpreter.fields_of(given)
        changed = {  # ``args.max_length = 512`` behind the call
            name: value
            for name, value in given.parts.items()
            if isinstance(name, str) and name != "[]" and made_by(value, "attribute") is None
            if name != "model_init_kwargs" or not is_constant(value, None)
        }
        for name, value in {**given.keywords, **changed}.items():
            node = places.get(name, given.node)
            if name == "max_seq_length" and "max_length" in given.keywords:  # each for other versions of TRL
                continue
            if name in ("fsdp_config", "model_init_kwargs") and isinstance(value, Table):
                for key, item in value.items.items():
                    at = value.nodes.get(key, node)
                    if name == "fsdp_config":
                        self.put(f"fsdp_config.{key}", item, at, f"fsdp_config.{key}")
                    elif _is_default_of_trl(item):
                        continue
                    elif str(key) in LOADING:
                        self.put(LOADING[str(key)], item, at, f"model_init_kwargs.{key}")
                    elif key == "quantization_config":
                        self._quantisation(item, at)
                continue
            self.put(name, value, node, name)
        for key in ("fsdp_config.transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap"):
            wrapped = self.run.settings.get(key)
            if wrapped is not None:
                listed = wrapped.value if isinstance(wrapped.value, list) else [wrapped.value]
                words = [word for entry in listed if isinstance(entry, str) for word in entry.split(",")]
                self.run.classes += tuple(NamedClass(word.strip(), "", wrapped.line) for word in words)
        self.further(event, given.kind, _DECIDED)
        other = given.parts.get("[]")  # ``setattr(args, name, value)``
        if other is not None and not (isinstance(other, Thing) and other.parent is given):
            self.leave_open(given.node, given.kind, _DECIDED)
        if objective is not None and given.kind == "TrainingArguments":
            # TRL keeps what TrainingArguments decide, whose defaults are other ones than those of its own.
            for name in ("gradient_checkpointing", "bf16"):
                self.say(name, False, given.node, f"TrainingArguments.{name}")

    # Loops

    def _of_loop(self) -> None:
        facts = self.facts
        accelerator = next(facts.calls("Accelerator"), None)
        if accelerator is not None:
            self.run.form = "accelerate"
            self._accelerator(accelerator)
        lightning = next((event for event in facts.of_kind("call") if is_of_lightning(event.result)), None)
        if lightning is not None:
            self.run.form = "lightning"
        if facts.shardings:
            self.run.fsdp = 2
            self._fully_shard()
        elif facts.wrappers:
            self.run.fsdp = 1
            self._fsdp1()
        elif accelerator is None:
            self.run.fsdp = "none"
        if lightning is not None:
            self._lightning(lightning)
        model = self._trained()
        if model is not None:
            self._model(model, getattr(model, "node", None) or self.facts.path.tree)
        self._adapters_by_hand()
        self._frozen(model)
        self.run.objective = self._objective()
        if self.run.objective == "diffusion":  # whose plans say that text encoders and VAE are left out
            self._by_name("resolution", _SIDES)
        else:
            self._beside(model)
        self._casts(model)
        self._optimizer()
        self._checkpointing()
        self._loss(model)
        self._batch()
        self._length(named=True)
        self._mesh()
        for event in facts.calls("torch.compile"):
            self.say("torch_compile", True, event.node, "torch.compile")
        for event in facts.methods("compile"):
            self.say("torch_compile", True, event.node, "compile")

    def _trained(self) -> Value | None:
        """Return what is trained: the outermost module that is sharded, prepared or optimised."""
        facts = self.facts
        if facts.shardings:
            things = [thing for _, thing in facts.shardings]
            roots = [one for one in things if not any(is_inside(one, two) for two in things)]
            return roots[-1] if roots else things[-1]
        if facts.wrappers:
            return facts.wrappers[-1][1]
        prepared = ("prepare", "prepare_model", *(("fit", "setup", "setup_module") * self._by_lightning))
        given = [value for event in facts.methods(*prepared) for value in event.args]
        given += [value for event in facts.calls("DistributedDataParallel") for value in event.args[:1]]
        given += [event.argument for event in facts.optimizers if event.argument is not None]
        for value in given:
            if isinstance(value, Thing):
                module = facts.module_of(value) or value
                if module.owner is not None or not module.kind.startswith(("optim.", "DataLoader")):
                    return module
        return None

    def _casts(self, model: Value | None) -> None:
        """The dtype that weights are cast to, and autocast."""
        for event in self.facts.methods("to", "bfloat16", "half"):
            dtype: Value = Const("bfloat16" if event.name == "bfloat16" else "float16")
            given = [dtype] if event.name != "to" else [*event.args, *event.keywords.values()]
            for value in given:
                known = value is dtype or any(
                    isinstance(item, Library) and short(item.name) in DTYPES for item in flat(value)
                )
                target = unwrapped(event.target) if isinstance(event.target, Thing) else None
                if known and isinstance(model, Thing) and target is unwrapped(model):
                    self.run.settings.pop("dtype", None)
                    self.put("dtype", value, event.node, "model.to")
        for event in self.facts.calls(*_AUTOCAST):
            off = event.keywords.get("enabled")
            if isinstance(off, Const) and off.value is False:
                continue
            given_dtype = event.get("dtype", 0 if event.name == "torch.cuda.amp.autocast" else 1)
            if given_dtype is None or (
                isinstance(given_dtype, Const) and isinstance(given_dtype.value, bool)
            ):
                given_dtype = Const("float16")
            self.put("autocast", given_dtype, event.places.get("dtype", event.node), "autocast.dtype")

    def _optimizer(self) -> None:
        made = [event for event in self.facts.of_kind("call") if _is_optimizer(event.name)]
        if not made:
            return
        event = made[-1]
        name = event.name.rpartition(".")[2]
        fused = event.keywords.get("fused")
        known = plain_value(fused)[1] if fused is not None else None
        words = "adamw_torch_fused" if known is True and name in ("AdamW", "Adam") else name
        self.say("optimizer", words, event.node, name)
        if name == "SGD":
            self.put(
                "momentum", event.get("momentum", 2), event.places.get("momentum", event.node), "SGD.momentum"
            )
        self.rest(event, name, ("fused", "momentum"))

    def _loss(self, model: Value | None) -> None:
        """Read who computes the loss, and whether a name holds what the model returned during backward."""
        backward = [*self.facts.methods("backward")]
        if not isinstance(model, Thing) or self.run.objective != "sft" or not backward:
            return
        root, inside = unwrapped(model), set[bool | None]()
        for event in self.facts.of_kind("use"):
            made, called = event.result, event.target
            if not isinstance(called, Thing) or unwrapped(called) is not root or not isinstance(made, Thing):
                continue
            apart = any(made_by(item, *_NO_GRADIENTS) for item in event.contexts)
            if apart or event.order > backward[-1].order:
                continue
            by_model = "labels" in event.keywords or "loss" in made.parts
            inside.add(True if by_model else False if "logits" in made.parts else None)
            after = next((item for item in backward if item.stack == event.stack), None)
            if after is not None and self.run.keeps_logits is None:
                self.run.keeps_logits = self._held(made, after)
        if inside == {True} or inside == {False}:
            self.run.loss_in_forward = inside.pop()
        else:
            self.run.keeps_logits = None

    def _held(self, made: Thing, backward: Event) -> bool | None:
        """Say whether a name stands for what a model returned, or its logits, when backward begins.

        None where that cannot be told: it is unpacked, indexed, stored elsewhere, deleted or bound anew.
        """
        values = [made, *(made.parts[name] for name in ("logits",) if name in made.parts)]
        stored = any(
            value is one for event in self.facts.of_kind("store") for value in event.args for one in values
        )
        if stored or self.interpreter.unpacks(made) or made.parts.keys() - {"loss", "logits", "aux_loss"}:
            return None
        tree = self.facts.path.tree
        if not any(node is backward.node for node in ast.walk(tree)):
            return None  # in a module whose lines are not known
        deleted = {
            target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Delete)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        line = getattr(backward.node, "lineno", 0)
        found = False
        for name, bound in self.interpreter.holders(values):
            others = [node for value, node in bound if all(value is not one for one in values)]
            first = min((getattr(node, "lineno", 0) for value, node in bound if value in values), default=0)
            if name in deleted or any(first < getattr(node, "lineno", 0) <= line for node in others):
                return None
            found = True
        return found

    def _checkpointing(self, arguments: Value | None = None) -> None:
        """Read what recomputes; the ``arguments`` of a trainer decide it by themselves."""
        for event in self.facts.of_kind("call"):
            if event.name in _CHECKPOINTING:
                self.say("gradient_checkpointing", True, event.node, event.name.rpartition(".")[2])
        enabled = [*self.facts.methods("gradient_checkpointing_enable", "enable_gradient_checkpointing")]
        # peft 0.21 utils/other.py enables it, too, unless it is told not to.
        enabled += [
            event
            for event in self.facts.calls(
                "prepare_model_for_kbit_training", "prepare_model_for_int8_training"
            )
            if not is_constant(event.get("use_gradient_checkpointing", 1), False)
        ]
        for event in enabled:
            asked = next((guard.test for guard in event.guards if _asks_for_it(guard)), None)
            if isinstance(asked, Thing) and arguments is not None and asked.parent is arguments:
                continue
            before = self.run.settings.get("gradient_checkpointing")
            if asked is not None and before is not None and before.value:
                continue
            self.run.settings.pop("gradient_checkpointing", None)
            self.put("gradient_checkpointing", asked or Const(True), event.node, event.name)

    def _batch(self) -> None:
        for event in self.facts.calls("DataLoader"):
            data = text(event.node.args[0]) if isinstance(event.node, ast.Call) and event.node.args else ""
            if any(word in data.lower() for word in ("val", "eval", "test")):
                continue
            size = event.get("batch_size", 1)
            if size is None and event.partly:
                size = Thing("unknown", node=event.node)
            elif size is None and "batch_sampler" not in event.keywords:
                size = Const(1)
            self.put("batch_size", size, event.places.get("batch_size", event.node), "DataLoader.batch_size")
            self.rest(event, "DataLoader", ("batch_size",))
        shape = self._shape()
        if shape is not None:
            self.put("batch_size", shape[0], shape[2], shape[3])
        self._by_name("batch_size", _BATCHES)
        self._of_letters()
        for event in self.facts.methods("step"):
            for guard in event.guards:
                self._every(guard, event)
        self._by_name("gradient_accumulation_steps", _ACCUMULATIONS)

    def _every(self, guard: Condition, event: Event) -> None:
        """Read the accumulation of ``if (step + 1) % 8 == 0: optimizer.step()``."""
        compared = made_by(guard.test, "test")
        wanted = "Eq" if guard.branch else "NotEq"
        if compared is None or compared.label != wanted or not isinstance(event.target, Thing):
            return
        rest = made_by(compared.args[0], "binary")
        if rest is not None and rest.label == "Mod" and event.target.kind.startswith("optim."):
            count = rest.args[1]
            if isinstance(count, Const) and type(count.value) is int and count.value > 0:
                self.put("gradient_accumulation_steps", count, rest.node, text(rest.node or event.node))

    def _length(self, *, named: bool) -> None:
        for event in self.facts.of_kind("use"):
            target = event.target
            if not isinstance(target, Thing) or "max_length" not in event.keywords:
                continue
            if "okenizer" in target.kind or "Processor.from" in target.kind:
                at = event.places.get("max_length", event.node)
                self.put("max_length", event.keywords["max_length"], at, "tokenizer.max_length")
                padding = event.keywords.get("padding")
                if isinstance(padding, Const) and padding.value == "max_length":
                    self.say("padding", "max_length", event.node, "tokenizer.padding")
        if not named:
            return
        for event in self.facts.methods("map", "from_generator"):
            made = event.argument
            if isinstance(made, Function) and _JOINS.search(getattr(made.node, "name", "")):
                self.say("packing", True, event.node, f"{event.name}({getattr(made.node, 'name', '')})")
        shape = self._shape()
        if shape is not None and shape[1] is not None:
            self.put("max_length", shape[1], shape[2], shape[3])
        self._by_name("max_length", _LENGTHS)

    def _shape(self) -> tuple[Value, Value | None, ast.AST, str] | None:
        """Return the rows and columns of random token ids."""
        for event in self.facts.calls("torch.randint"):
            size = event.get("size", 2) or event.get("size", 1)
            if isinstance(size, Items) and len(size.values) == 2:
                return size.values[0], size.values[1], event.node, "torch.randint.size"
        return None

    def _of_letters(self) -> None:
        """Take the rows and columns of a batch from numbers that are called ``B`` and ``T``.

        Copies of build-nanogpt give them to the loader of their own.
        """
        pair = [
            [(value, node) for value, node in self.interpreter.named(name) if type(constant(value)) is int]
            for name in "BT"
        ]
        if (
            all(pair)
            and _is_size(pair[0][0][0])
            and _is_size(pair[1][0][0], 8)
            and not {"batch_size", "max_length"} & self.run.settings.keys()
        ):
            for key, name, found in zip(("batch_size", "max_length"), "BT", pair, strict=True):
                self.put(key, *found[0], name)

    def _by_name(self, key: str, names: Sequence[str]) -> None:
        """Take a setting from an argument, a field or a constant that is called so."""
        if key in self.run.settings:
            return
        for name in names:
            for value, node in self.interpreter.named(name):
                if _is_size(value) or not plain_value(value)[0]:
                    self.put(key, value, node, name)
                    return


def _is_size(value: Value, least: int = 1) -> bool:
    """Say whether a value is a whole number that may count rows or tokens."""
    number = plain_value(value)[1]
    return type(number) is int and number >= least


def _is_optimizer(name: str) -> bool:
    last = name.rpartition(".")[2]
    return name.startswith("optim.") or (
        name.startswith(("torchao.", "deepspeed.", "apex.")) and "Adam" in last
    )


def _asks_for_it(guard: Condition) -> bool:
    """Whether something happens only if a setting asks for checkpointing, whose value is not known."""
    test = guard.node.test if isinstance(guard.node, ast.If) else None
    return guard.branch and isinstance(test, ast.Attribute) and test.attr == "gradient_checkpointing"
