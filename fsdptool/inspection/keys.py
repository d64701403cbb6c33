"""Configuration keys that the class will not read.

transformers 5.23 keeps unknown keys as attributes and diffusers 0.42 drops them, both silently, so
a misspelt ``hidden_sizes`` builds a model of the default width. Keys are compared with what the
class itself declares, never with a list of ours alone. A key of a file that nobody reads is a finding,
since published files are full of them. An override that nobody reads is refused: a person who sets a
value means it to count.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.spelling import nearest

if TYPE_CHECKING:
    from torch import nn


_CHOSEN_ELSEWHERE = {
    "model_type": 'choose the class by its name: architectures=["LlamaForCausalLM"]',
    "auto_map": 'choose the class by its name: architectures=["LlamaForCausalLM"]',
    "dtype": "set model.dtype in the recipe (--dtype of plan)",
    "torch_dtype": "set model.dtype in the recipe (--dtype of plan)",
    "quantization_config": "set method.lora.base in the recipe (nf4, int8 or float8)",
    "use_return_dict": "leave it out",
    "return_dict": "leave it out",
    "gradient_checkpointing": "set activation checkpointing in the accelerate YAML (--checkpointing of plan)",
    "transformers_version": "leave it out",
}
"""Keys that fsdptool, or the library that saved the file, decides."""

_CLASS_KEYS = {"transformers": "architectures", "diffusers": "_class_name"}
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_FREE = ("id2label", "label2id", "task_specific_params", "per_layer_config")
"""Mappings whose keys the model's user chooses."""

_ALWAYS_OVERRIDABLE = ("attn_implementation", "experts_implementation", "num_labels", "tie_word_embeddings")
"""Keys that transformers reads for every model, although its base configuration does not declare them."""

_TRANSLATED = ("tie_word_embeddings",)
"""Keys whose value a class may keep under another name (T5: whether outputs are scaled)."""

_ABSENT: Any = object()


class Watched(Mapping[str, Any]):
    """A configuration that remembers which of its keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.read: set[str] = set()

    @classmethod
    def of(cls, spec: ModelSpec) -> Mapping[str, Any]:
        """Return the configuration of a model, watched where no library declares what it reads."""
        return cls(spec.config) if spec.overrides and spec.library not in _CLASS_KEYS else spec.config

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def check_overrides(spec: ModelSpec, model: nn.Module, read: Mapping[str, Any]) -> None:
    """Refuse overrides that ``model`` was not built with.

    Args:
        spec: What was built.
        model: The result.
        read: The configuration that it was built from.

    Raises:
        ConfigError: The first override that has no effect, with the nearest known key; the others follow.
    """
    if not spec.overrides:
        return
    config = getattr(model, "config", None)
    if isinstance(read, Watched):
        problems = _unwatched(spec, read)
    elif hasattr(type(config), "sub_configs"):
        problems = _Transformers(model).problems(spec.overrides, config)
    elif spec.library == "diffusers":
        problems = _diffusers(spec.overrides, model)
    else:
        return
    errors = [ConfigError(f"override {message}", help=advice) for message, advice in problems]
    if errors:
        raise ConfigError(errors[0].message, help=errors[0].help, others=tuple(errors[1:]))


Problem = tuple[str, str]
"""What is wrong with an override, and what to do."""


def _unread(path: str, reader: str, known: Mapping[str, str]) -> Problem:
    """Refuse a key; ``known`` has the path of each key by its last name, for keys that are misplaced."""
    last = path.rpartition(".")[2]
    alike = last if last in known else nearest(last, known, cutoff=0.7)
    near = known[alike] if alike is not None else None
    usual = "leave it out; the keys are those of the model's configuration class"
    return f"{path}: {reader} does not read this key", f"did you mean {near}?" if near else usual


def _unwatched(spec: ModelSpec, read: Watched) -> Iterator[Problem]:
    known = {key: key for key in read if key not in spec.overrides}
    for key in spec.overrides:
        if key not in read.read:
            yield _unread(key, spec.model_class, known)


def _diffusers(overrides: Mapping[str, Any], model: Any) -> Iterator[Problem]:
    reader = type(model).__name__
    known = [name for name in inspect.signature(type(model).__init__).parameters if name != "self"]
    for key, value in overrides.items():
        if key == _CLASS_KEYS["diffusers"]:
            continue
        if key == _CLASS_KEYS["transformers"]:
            yield (
                f"{key}: {reader} does not read this key",
                f"choose the class by its name: _class_name={reader}",
            )
        elif key not in known:
            yield _unread(key, reader, {name: name for name in known})
        elif _differs(value, live := dict(model.config).get(key, _ABSENT)):
            yield _overruled(key, reader, live)


def _overruled(path: str, reader: str, live: Any) -> Problem:
    advice = "another key of the configuration decides it: change that one"
    if path.endswith("layerdrop"):
        advice = "models are built without LayerDrop: ranks would disagree on which blocks to gather"
    return f"{path}: {reader} has the value {live!r} all the same", advice


def _live(config: Any, key: str) -> Any:
    try:
        return getattr(config, key, _ABSENT)
    except Exception:  # a value that differs by layer (transformers 5.23)
        return _ABSENT


def _differs(value: Any, live: Any) -> bool:
    """Say whether a number is certainly not the one the model has: texts may be old names of the value."""
    if live is _ABSENT or value is None:
        return False
    if live is None:
        return value is not False
    numbers = isinstance(value, int | float) and isinstance(live, int | float)
    return numbers and bool(value != live)


class _Transformers:
    """What a model of transformers reads: the keys that its configuration classes and its code name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @cached_property
    def _code(self) -> str:
        """The source of the modules that define the model's classes."""
        modules = {base.__module__ for part in self._model.modules() for base in type(part).__mro__}
        return "\n".join(_source(name) for name in sorted(modules) if _is_own(name))

    @cached_property
    def _read_by_code(self) -> frozenset[str]:
        found = re.findall(r"\b(\w*config)\.(\w+)", self._code)
        names = {name for owner, name in found if owner != "generation_config"}
        return frozenset(names) | frozenset(re.findall(r"getattr\(\s*[\w.]*config,\s*[\"'](\w+)", self._code))

    @cached_property
    def _rotates(self) -> bool:
        return bool(re.search(r"\bconfig\.(?:rope_\w+|rotary_\w+)|\bROPE_INIT_FUNCTIONS\b", self._code))

    def problems(self, overrides: Mapping[str, Any], config: Any, prefix: str = "") -> Iterator[Problem]:
        """Yield what is wrong with each override of ``config`` and of its parts."""
        for key, value in overrides.items():
            part = _live(config, key)
            if isinstance(value, Mapping) and hasattr(type(part), "sub_configs"):
                yield from self.problems(value, part, f"{prefix}{key}.")
            elif not (key == _CLASS_KEYS["transformers"] and not prefix):
                yield from self._judge(key, value, config, prefix + key)

    def _judge(self, key: str, value: Any, config: Any, path: str) -> Iterator[Problem]:
        reader = type(config).__name__
        if key in _CHOSEN_ELSEWHERE:
            yield f"{path}: it does not change the model that is built", _CHOSEN_ELSEWHERE[key]
        elif key == _CLASS_KEYS["diffusers"]:
            name = type(self._model).__name__
            yield f"{path}: {reader} does not read this key", f'choose the class: architectures=["{name}"]'
        elif key in _ROPE and (hasattr(config, "rope_parameters") or self._rotates):
            yield from self._rope(key, value, config, path)
        elif not self._knows(key, config):
            if not _reaches_a_part(key, value, config):
                yield _unread(path, reader, self._paths(config, path[: -len(key)]))
        elif isinstance(value, Mapping) and key not in _FREE:
            yield from self._nested(value, _live(config, key), path, reader)
        elif key not in _TRANSLATED and _differs(value, live := _live(config, key)):
            yield _overruled(path, reader, live)

    def _knows(self, key: str, config: Any) -> bool:
        if key in _ALWAYS_OVERRIDABLE or key in _keys_of(type(config)):
            return True
        # What a part declares, the code reads from that part.
        return key in self._read_by_code and not any(
            key in _keys_of(type(part)) for part in _parts(config).values()
        )

    def _rope(self, key: str, value: Any, config: Any, path: str) -> Iterator[Problem]:
        live = getattr(config, "rope_parameters", None)
        reader = type(config).__name__
        if isinstance(value, Mapping):
            yield from self._nested(value, live, path, reader)
        elif isinstance(live, Mapping):
            # One set of parameters, or one for each type of layer.
            sets = [item for item in live.values() if isinstance(item, Mapping)] or [live]
            found = [item[key] for item in sets if key in item]
            if found and all(_differs(value, item) for item in found):
                message, _ = _overruled(path, reader, found[0])
                yield message, f"override rope_parameters.{key}"

    def _nested(self, value: Mapping[str, Any], live: Any, path: str, reader: str) -> Iterator[Problem]:
        """Judge the keys of a mapping that is not a configuration of its own.

        Code may read such a mapping whole. Then only a key that resembles another one is refused.
        """
        known = {
            name: f"{path}.{name}"
            for name in (live if isinstance(live, Mapping) else ())
            if name not in value
        }
        rotary = any(part in _ROPE for part in path.split("."))
        code = self._code + self._config_code
        if rotary:
            code += _source("transformers.modeling_rope_utils")
            known |= {name: f"{path}.{name}" for name in re.findall(r'"(\w+)"', code) if name not in value}
        for key, item in value.items():
            inner = live.get(key) if isinstance(live, Mapping) else None
            if isinstance(item, Mapping):
                yield from self._nested(item, inner, f"{path}.{key}", reader)
            elif f'"{key}"' not in code and (rotary or nearest(key, known, cutoff=0.84)):
                yield _unread(f"{path}.{key}", reader, known)

    @cached_property
    def _config_code(self) -> str:
        config: Any = self._model.config
        return "\n".join(_source(base.__module__) for base in type(config).__mro__[:-1])

    def _paths(self, config: Any, prefix: str) -> dict[str, str]:
        """Return the path of every declared key by its name, those of parts after those of the whole."""
        paths: dict[str, str] = {}
        # Where several parts have a key, a person usually means the text model's.
        for name, part in sorted(_parts(config).items(), key=lambda item: "text" in item[0]):
            paths |= self._paths(part, f"{prefix}{name}.")
        return paths | {name: prefix + name for name in _keys_of(type(config)) if not name.startswith("_")}


def _reaches_a_part(key: str, value: Any, config: Any) -> bool:
    """Say whether a part took the key of a flat configuration, as of older multimodal files."""
    parts = [part for part in _parts(config).values() if key in _keys_of(type(part))]
    return any(not _differs(value, _live(part, key)) for part in parts)


def _parts(config: Any) -> dict[str, Any]:
    named = {name: getattr(config, name, None) for name in type(config).sub_configs}
    return {name: part for name, part in named.items() if hasattr(type(part), "sub_configs")}


def _keys_of(config_class: Any) -> frozenset[str]:
    """Return the names that a configuration class reads (a class of any kind is a key of the cache)."""
    names: frozenset[str] = _names_of(config_class)
    return names


@cache
def _names_of(config_class: Any) -> frozenset[str]:
    """Return the names that a configuration class reads: fields, arguments, aliases, and old spellings."""
    names = set(config_class.attribute_map) | set(config_class.sub_configs)
    if dataclasses.is_dataclass(config_class):
        names |= {item.name for item in dataclasses.fields(config_class)}
    for base in config_class.__mro__:
        names |= {name for name, value in vars(base).items() if isinstance(value, property)}
        if "__init__" in vars(base) and base is not object:
            arguments = inspect.signature(base.__init__).parameters.values()
            names |= {item.name for item in arguments if item.kind is not item.VAR_KEYWORD}
        if _is_own(base.__module__):
            names |= set(
                re.findall(r"(?:pop|get|hasattr)\([^)\n]*?[\"'](\w+)[\"']", _source(base.__module__))
            )
    return frozenset(names) - {"self"}


def _is_own(module: str) -> bool:
    """Say whether a module belongs to a model, and not to what all models share."""
    shared = module.partition(".")[0] in ("transformers", "torch", *sys.stdlib_module_names)
    return module.startswith("transformers.models.") or not shared


def _source(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module]) if module in sys.modules else ""
    except (OSError, TypeError):
        return ""


MISSPELT = "DET120"
UNREAD = "DET121"
OTHER_CLASS = "DET122"
OTHER_TYPE = "DET123"

_NEAR = 0.84

_COMMON = """
    _name_or_path _commit_hash _attn_implementation_autoset _diffusers_version model_type architectures
    auto_map torch_dtype dtype transformers_version quantization_config compression_config name_or_path
    attn_implementation experts_implementation use_cache output_attentions output_hidden_states
    return_dict torchscript gradient_checkpointing is_decoder add_cross_attention tie_encoder_decoder
    tie_word_embeddings cross_attention_hidden_size pruned_heads finetuning_task task_specific_params
    tokenizer_class prefix problem_type num_labels id2label label2id use_bfloat16 tf_legacy_loss
    rope_theta rope_scaling rope_parameters partial_rotary_factor bos_token_id eos_token_id pad_token_id
    sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id max_length min_length
    do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate suppress_tokens begin_suppress_tokens
    exponential_decay_length_penalty remove_invalid_values chunk_size_feed_forward is_encoder_decoder
    pretraining_tp initializer_range per_layer_config adapters language unsloth_version unsloth_fixed
    peft_type _flash_attn_2_enabled onnx_export sparsity_config base_model_tp_plan base_model_pp_plan
"""
"""Keys written into files by the libraries, the Hub and training tools, or read for every model by
transformers' base configuration and generation code (5.23)."""
_EVERYWHERE = frozenset(_COMMON.split())


def check_keys(spec: ModelSpec, model: nn.Module) -> tuple[Diagnostic, ...]:
    """Return findings about keys and class names of ``spec`` that the built model ignores."""
    findings: list[Diagnostic] = []
    raw = spec.config
    named = raw.get("_class_name")
    built = type(model).__name__
    if isinstance(named, str) and named != built:
        findings.append(
            _finding(OTHER_CLASS, "warning", f"the configuration says _class_name {named}, {built} was built")
        )
    config = getattr(model, "config", None)
    config_class: Any = type(config)
    if hasattr(config_class, "sub_configs") and hasattr(config_class, "model_type"):
        stated, real = raw.get("model_type"), config_class.model_type
        if isinstance(stated, str) and real and stated != real and not spec.trust_remote_code:
            findings.append(
                _finding(
                    OTHER_TYPE,
                    "warning",
                    f"the configuration says model_type {stated}, {built} reads it as {real}",
                )
            )
        findings += _transformers(raw, config, "", type(model).__module__)
    elif spec.library == "diffusers":
        known = frozenset(inspect.signature(type(model).__init__).parameters) - {"self", "args", "kwargs"}
        given = [key for key in raw if not key.startswith("_")]
        findings += _compare(given, known, "", built, "drops")
    return tuple(findings)


def _transformers(
    raw: Mapping[str, Any], config: Any, prefix: str, model_module: str
) -> Iterator[Diagnostic]:
    config_class = type(config)
    known = _declared(config_class)
    unknown = [key for key in raw if key not in known and key not in _EVERYWHERE and not key.startswith("_")]
    if unknown:
        # Old spellings a class still translates appear only in its code; read it only when needed.
        known |= _mentioned(config_class)
        # Old multimodal files are flat: the text model's keys lie at the top.
        for name in config_class.sub_configs:
            inner = type(getattr(config, name, None))
            if hasattr(inner, "sub_configs"):
                known |= _declared(inner)
        # The model may look at an undeclared key itself (``getattr(config, "head_dim", ...)``).
        known |= _words(sys.modules.get(model_module))
        yield from _compare(unknown, known, prefix, config_class.__name__, "does not know", present=raw)
    for name in config_class.sub_configs:
        # The live part: its class is often chosen by the raw part's own model_type.
        value, part = raw.get(name), getattr(config, name, None)
        if isinstance(value, Mapping) and hasattr(type(part), "sub_configs"):
            yield from _transformers(value, part, f"{prefix}{name}.", model_module)


def _declared(config_class: Any) -> frozenset[str]:
    names = set(config_class.attribute_map) | set(config_class.sub_configs)
    if dataclasses.is_dataclass(config_class):
        names |= {item.name for item in dataclasses.fields(config_class)}
    for base in config_class.__mro__:
        names |= {name for name in vars(base) if not name.startswith("__")}
        if "__init__" in vars(base):
            names |= set(inspect.signature(base.__init__).parameters)
    return frozenset(names)


def _mentioned(config_class: Any) -> frozenset[str]:
    """Return the words in the class's own code that may be keys it pops, gets or renames."""
    names: set[str] = set()
    for base in config_class.__mro__:
        if base.__module__.startswith("transformers.models"):
            names |= _words(sys.modules.get(base.__module__))
    return frozenset(names)


def _words(module: Any) -> frozenset[str]:
    """Return the quoted words and the attributes of ``config`` in a module's source text."""
    try:
        text = inspect.getsource(module)
    except (OSError, TypeError):
        return frozenset()
    pairs = re.findall(r"[\"'](\w+)[\"']|\bconfig\.(\w+)", text)
    return frozenset(word for pair in pairs for word in pair if word)


def _compare(
    given: list[str],
    known: frozenset[str],
    prefix: str,
    reader: str,
    does: str,
    *,
    present: Mapping[str, Any] | None = None,
) -> Iterator[Diagnostic]:
    unread = []
    for key in given:
        if key in known:
            continue
        taken = set(present if present is not None else given)
        choices = [name for name in known if name not in taken and not name.startswith("_")]
        near = nearest(key, choices, cutoff=_NEAR)
        if near:
            yield _finding(
                MISSPELT,
                "warning",
                f"{reader} {does} the key {prefix}{key}; it knows {near}",
                f"write {near} if that is meant; currently the default is used",
            )
        else:
            unread.append(prefix + key)
    if unread:
        listed = ", ".join(unread[:8]) + (f" and {len(unread) - 8} more" if len(unread) > 8 else "")
        yield _finding(UNREAD, "info", f"{reader} {does}: {listed}", "harmless unless one of them is a size")


def _finding(code: str, severity: Any, message: str, help: str | None = None) -> Diagnostic:
    return Diagnostic(code=code, severity=severity, message=message, help=help or "correct the configuration")
