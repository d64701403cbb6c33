"""Finds configuration keys that the class will not read.

transformers 5.23 keeps unknown keys as attributes and diffusers 0.42 drops them, both silently, so
a misspelt ``hidden_sizes`` builds a model of the default width. Keys are compared with what the
class itself declares, never with a list of ours alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.spelling import nearest

if TYPE_CHECKING:
    from torch import nn

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
