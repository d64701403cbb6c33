"""The model of a script, how it is loaded, and the adapters that are trained on it."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

from fsdptool.scripts.facts import FSDP1, HARMLESS, above, belongs, text, unwrapped
from fsdptool.scripts.names import UNSLOTH
from fsdptool.scripts.settings import SettingsReader, plain_value
from fsdptool.scripts.values import Choice, Const, Event, Thing, Value, flat, is_constant, made_by

_QUANTISATION = {
    "load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit",
    "bnb_4bit_quant_type": "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant": "use_bnb_nested_quant", "bnb_4bit_quant_storage": "bnb_4bit_quant_storage",
}  # fmt: skip
_LORA = {
    "r": "lora_r", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save", "lora_alpha": "lora_alpha",
}  # fmt: skip
LOADING = {"dtype": "dtype", "torch_dtype": "dtype", "attn_implementation": "attn_implementation",
            "load_in_4bit": "load_in_4bit", "load_in_8bit": "load_in_8bit"}  # fmt: skip
"""Arguments of ``from_pretrained`` that decide a run, and the names of the settings."""


_LOADS_MODEL = re.compile(r"(Model|LM|LMHeadModel|For[A-Z]\w+|Model\w*Projection)$")
"""Classes of transformers that load a model: no tokenizer, no configuration."""
_RUNS = ("generate", "forward")
_ORDINALS = {2: "second", 3: "third", 4: "fourth"}
PARTS_OF_UNSLOTH = (
    "finetune_vision_layers", "finetune_language_layers", "finetune_attention_modules",
    "finetune_mlp_modules",
)  # fmt: skip
"""Arguments of unsloth that leave adapters out of a part of the model."""
_NOT_4BIT = ("load_in_8bit", "load_in_16bit", "full_finetuning", "load_in_fp8")
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RECOMPUTED_BY_UNSLOTH = "use_gradient_checkpointing"
"""How a model that unsloth loaded is recomputed: a setting that only such models have."""


class ModelReader(SettingsReader):
    """Reads the model of a script."""

    def _model(self, value: Value, node: ast.AST, *, loads: bool = False, depth: int = 0) -> None:
        """Read the model: its name, how it is loaded, and what it is wrapped in.

        Args:
            value: What the script calls its model.
            node: Where it says so.
            loads: Whether a name stands for the model.
            depth: Wrappers around it.
        """
        if depth > 12 or "model_name_or_path" in self.run.settings:
            return
        named = {self._named(option) for option in value.options} if isinstance(value, Choice) else set()
        if isinstance(value, Choice) and len(named) == 1 and named != {None}:
            self._model(value.options[0], node, loads=loads, depth=depth + 1)
        elif isinstance(value, Choice) or (loads and (isinstance(value, Const) or made_by(value, "missing"))):
            self.put("model_name_or_path", value, node, "model")
        elif isinstance(value, Thing):
            self._made(value, node, depth)
        if depth == 0 and "model_name_or_path" not in self.run.settings and self.run.own_class is None:
            shown = node.value if isinstance(node, ast.keyword) else node
            line, written = getattr(node, "lineno", 1), self.run.model_type or text(shown)
            sizes = "a model of the script's own sizes" if self.run.model_type else "which is not read"
            self.run.problems.append(f"line {line}: the model is {written}, {sizes}")

    def _made(self, value: Thing, node: ast.AST, depth: int) -> None:
        """Read a model by what made it."""
        owner, _, made = value.kind.rpartition(".")
        first = value.args[0] if value.args else None
        if made == "from_pretrained" and owner != "PeftModel":
            self._pretrained(value, owner)
        elif made in ("from_config", "_from_config"):
            self._configured(first or value.keywords.get("config"), value, owner)
        elif value.owner is not None:
            self._own(value)
        elif isinstance(value.inner, Thing):
            if owner == "PeftModel" and is_constant(value.keywords.get("is_trainable"), True):
                self._loaded_adapter(value)
            config = value.keywords.get("peft_config") or (value.args[1] if len(value.args) > 1 else None)
            if value.kind == "get_peft_model" and config is not None:
                self._adapter(config, value.node)
            elif made == "get_peft_model" and owner in UNSLOTH:
                self._adapter_of_unsloth(value)
            self._model(value.inner, node, depth=depth + 1)
        elif value.parent is not None and value.kind in ("item", "attribute"):
            self._model(value.parent, node, depth=depth + 1)
        elif isinstance(first, Thing) and first.kind.endswith(("Config", "Config.from_pretrained")):
            self._configured(first, value, value.kind)

    def _named(self, value: Value) -> object:
        if isinstance(value, Thing):
            while value.kind in ("get_peft_model", FSDP1, "prepare_model_for_kbit_training") and isinstance(
                value.inner, Thing
            ):
                value = value.inner
            if value.kind.endswith(".from_pretrained") and value.args:
                return plain_value(value.args[0])[1]
        return None

    def _own(self, value: Thing) -> None:
        """A class of the script: its model, if it only holds one, or the class itself."""
        if value.owner is None:
            return
        inner = [part for part in value.parts.values() if isinstance(part, Thing)]
        loaded = [
            part for part in inner if part.kind.endswith(".from_pretrained") and "okenizer" not in part.kind
        ]
        if loaded:
            self._pretrained(loaded[0], loaded[0].kind.rpartition(".")[0])
        else:
            self.run.own_class = value.owner.node.name
            self.say("model class", value.owner.node.name, value.node, "class")

    def _pretrained(self, value: Thing, kind: str) -> None:
        places = self.places(value)
        name = value.args[0] if value.args else None
        for key in ("pretrained_model_name_or_path", "model_name", "model_name_or_path", "model_id"):
            name = name or value.keywords.get(key)
        self.put("model_name_or_path", name, value.node, "from_pretrained")
        self.say("model class", kind, value.node, "class")
        for key, ours in LOADING.items():
            self.put(ours, value.keywords.get(key), places.get(key, value.node), f"from_pretrained.{key}")
        self._quantisation(
            value.keywords.get("quantization_config"), places.get("quantization_config", value.node)
        )
        own = ("max_length", RECOMPUTED_BY_UNSLOTH) if kind in UNSLOTH else ()
        self.further(self.event_of(value), "from_pretrained", (*dict.fromkeys(LOADING.values()), *own))
        if kind in UNSLOTH:
            self._loaded_by_unsloth(value, places)
        # diffusers 0.42 models/model_loading_utils.py: without a dtype, weights become what the class makes.
        default = "float32" if kind.startswith("diffusers.") else "auto"
        self.say("dtype", default, value.node, "from_pretrained.dtype")
        taken = (
            *(*LOADING, "quantization_config", "pretrained_model_name_or_path", "model_name"),
            *("max_seq_length", "use_gradient_checkpointing"),
        )
        event = self.event_of(value)
        self.rest(event or value, "from_pretrained", taken)

    def _loaded_by_unsloth(self, value: Thing, places: Mapping[str, ast.AST]) -> None:
        """Read what a loader of unsloth decides, which stands after what the script says.

        Defaults: unsloth 2025.11 ``models/loader.py``, ``from_pretrained``.
        """
        given, node = value.keywords, value.node
        others = [plain_value(given.get(name)) for name in _NOT_4BIT]
        if all(known and not there for known, there in others):
            self.say("load_in_4bit", True, node, "from_pretrained.load_in_4bit")
        self.say("bnb_4bit_quant_type", "nf4", node, "from_pretrained.load_in_4bit")
        self.say("bnb_4bit_quant_storage", "uint8", node, "from_pretrained.load_in_4bit")
        self.say("use_bnb_nested_quant", True, node, "from_pretrained.load_in_4bit")
        if is_constant(given.get("dtype"), None):
            self.run.settings.pop("dtype", None)
        self.say("dtype", "bfloat16", node, "from_pretrained.dtype")
        length = given.get("max_seq_length") or Const(2048)
        if "max_seq_length" not in self.run.settings:
            self.put(
                "max_length", length, places.get("max_seq_length", node), "from_pretrained.max_seq_length"
            )
        recompute = given.get("use_gradient_checkpointing") or Const("unsloth")
        at = places.get("use_gradient_checkpointing", node)
        self.put(RECOMPUTED_BY_UNSLOTH, recompute, at, "use_gradient_checkpointing")

    def _adapter_of_unsloth(self, value: Thing) -> None:
        """Read ``get_peft_model`` of unsloth (defaults: 2025.11 ``models/llama.py``, ``vision.py``)."""
        places = self.places(value)
        self.say("use_peft", True, value.node, "get_peft_model")
        for key, ours in _LORA.items():
            self.put(ours, value.keywords.get(key), places.get(key, value.node), f"get_peft_model.{key}")
        self.further(self.event_of(value), "get_peft_model", [*_LORA.values(), RECOMPUTED_BY_UNSLOTH])
        self.say("lora_r", 16, value.node, "get_peft_model.r")
        self.say("lora_dropout", 0.0, value.node, "get_peft_model.lora_dropout")
        targets = list(_TARGETS) if value.kind.startswith("FastLanguageModel") else "all-linear"
        self.say("lora_target_modules", targets, value.node, "get_peft_model.target_modules")
        recompute = value.keywords.get("use_gradient_checkpointing") or Const("unsloth")
        at = places.get("use_gradient_checkpointing", value.node)
        self.put(RECOMPUTED_BY_UNSLOTH, recompute, at, "use_gradient_checkpointing")
        for name in PARTS_OF_UNSLOTH:
            if is_constant(value.keywords.get(name), False):
                self.say(f"weights.{name}", "false", places.get(name, value.node), name)
        taken = (*_LORA, "use_gradient_checkpointing", "max_seq_length", *PARTS_OF_UNSLOTH)
        self.rest(self.event_of(value) or value, "get_peft_model", taken)

    def _configured(self, config: Value | None, value: Thing, kind: str) -> None:
        """A model that is made from a configuration: of a checkpoint, or of sizes."""
        self.say("model class", kind, value.node, "class")
        for key in ("dtype", "torch_dtype", "attn_implementation"):
            self.put(LOADING[key], value.keywords.get(key), value.node, f"{kind}.{key}")
        if not isinstance(config, Thing):
            return
        if config.kind.endswith(".from_pretrained"):
            name = config.args[0] if config.args else config.keywords.get("pretrained_model_name_or_path")
            self.put("model_name_or_path", name, config.node, "from_pretrained")
            self.say("dtype", "auto", value.node, "from_config.dtype")
            changed = {
                **config.keywords,
                **{str(k): v for k, v in config.parts.items() if isinstance(v, Const)},
            }
        elif config.kind.endswith("Config"):
            self.run.model_type = config.kind
            self.say("dtype", "float32", value.node, "from_config.dtype")
            changed = {
                **config.keywords,
                **{str(k): v for k, v in config.parts.items() if isinstance(v, Const)},
            }
        else:
            return
        places = self.places(config)
        for word in ("attn_implementation", "_attn_implementation"):
            self.put("attn_implementation", changed.pop(word, None), config.node, f"{config.kind}.{word}")
        for word, item in changed.items():
            self.put(f"config.{word}", item, places.get(word, config.node), f"{config.kind}.{word}")

    def _quantisation(self, value: Value | None, node: ast.AST | None) -> None:
        config = made_by(value, "BitsAndBytesConfig")
        if config is None:
            if value is not None and not (isinstance(value, Const) and value.value is None):
                self.put("load_in_4bit", value, node, "quantization_config")
            return
        places = self.places(config)
        for key, ours in _QUANTISATION.items():
            self.put(
                ours, config.keywords.get(key), places.get(key, config.node), f"BitsAndBytesConfig.{key}"
            )
        self.further(self.event_of(config), "BitsAndBytesConfig", list(_QUANTISATION.values()))
        if "load_in_4bit" in config.keywords:
            for name, word in (("quant_type", "fp4"), ("quant_storage", "uint8")):
                self.say(f"bnb_4bit_{name}", word, config.node, f"BitsAndBytesConfig.bnb_4bit_{name}")
        self.rest(self.event_of(config) or config, "BitsAndBytesConfig", _QUANTISATION)

    def _adapter(self, value: Value, node: ast.AST | None) -> None:
        if isinstance(value, Const) and value.value is None:
            return
        config = made_by(value, "LoraConfig")
        if config is None:
            self.put("use_peft", value, node, "peft_config")
            return
        if "use_peft" in self.run.settings:
            return
        self.say("use_peft", True, config.node, "LoraConfig")
        places = self.places(config)
        for key, ours in _LORA.items():
            self.put(ours, config.keywords.get(key), places.get(key, config.node), f"LoraConfig.{key}")
        self.further(self.event_of(config), "LoraConfig", list(_LORA.values()))
        self.say("lora_r", 8, config.node, "LoraConfig.r")
        self.say("lora_dropout", 0.0, config.node, "LoraConfig.lora_dropout")
        self.rest(self.event_of(config) or config, "LoraConfig", _LORA)

    def _loaded_adapter(self, value: Thing) -> None:
        """Note an adapter that goes on training: its own files say its rank and its layers."""
        self.say("use_peft", True, value.node, "PeftModel.from_pretrained")
        for key in ("lora_r", "lora_target_modules", "lora_dropout"):
            self.put(key, Thing("unknown", node=value.node), value.node, f"PeftModel.{key}")

    def _adapters_by_hand(self) -> None:
        for event in self.facts.calls("get_peft_model"):
            config = event.get("peft_config", 1)
            if config is not None:
                self._adapter(config, event.node)
        for event in self.facts.methods("add_adapter"):
            if event.argument is not None:
                self._adapter(event.argument, event.node)

    def _frozen(self, model: Value | None) -> None:
        """Note where the script freezes weights of its model: a plan trains all of them."""
        if "use_peft" in self.run.settings or not isinstance(model, Thing):
            return
        root = unwrapped(model)
        switched = [
            (event, event.args[0] if event.args else None)
            for event in self.facts.of_kind("store")
            if event.name == "requires_grad"
        ]
        switched += [(event, event.get("requires_grad", 0)) for event in self.facts.methods("requires_grad_")]
        switched += [
            (event, Const(False))
            for event in self.facts.of_kind("method")
            if event.name == "freeze" or event.name.startswith("freeze_")
        ]
        frozen: tuple[Event, Value] | None = None
        for event, value in sorted(switched, key=lambda pair: pair[0].order):
            if value is None or is_constant(value, True):
                frozen = None if event.target is root else frozen
            elif any(belongs(item, root) for item in flat(event.target) if item is not None):
                frozen = frozen or (event, value)
        if frozen is not None:
            word = "false" if is_constant(frozen[1], False) else "decided at run time"
            self.say("weights.requires_grad", word, frozen[0].node, "requires_grad")

    def _beside(self, model: Value | None) -> None:
        """Note the other models that run before the last backward: a teacher, a reference, an encoder."""
        seen = [unwrapped(model)] if isinstance(model, Thing) else []
        last = max((event.order for event in self.facts.methods("backward")), default=-1)
        for event in self.facts.events:
            target = event.target
            runs = event.kind == "method" and (event.name not in HARMLESS or event.name in _RUNS)
            if not (runs or event.kind == "use") or event.order > last or not isinstance(target, Thing):
                continue
            whole = list(above(target))[-1]
            owner, _, made = whole.kind.rpartition(".")
            if made not in ("from_pretrained", "from_config") or not _LOADS_MODEL.search(owner):
                continue
            if all(item is not whole for item in seen):
                seen.append(whole)
                known, name = plain_value(whole.args[0] if whole.args else None)
                told = str(name) if known and isinstance(name, str) else owner
                number = _ORDINALS.get(len(seen), f"{len(seen)}th")
                self.say(f"beside.{len(seen)}", told, whole.node, f"{number} model")

    def _objective(self) -> str | None:
        named = self.run.settings.get("model class")
        kind = str(named.value) if named is not None else ""
        if kind.startswith("diffusers."):
            return "diffusion"
        if "CausalLM" in kind or "LMHead" in kind:
            return "sft"
        return "classification" if "Classification" in kind else None
