"""What transformers and diffusers are asked: class names without an import, errors on one line.

transformers' auto mappings live in a module that imports torch (1.8 CPU seconds in 5.23), so the
literal tables are taken out of the file's syntax tree instead (0.05 s).
"""

from __future__ import annotations

import ast
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

_PREFERENCE = (
    # Heads people train, the most specific first.
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
# Encoders whose causal head exists but is not what their configuration is for, and
# encoder-decoders listed as causal only for their decoder (transformers 5.23).
_CAUSAL_LAST = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


@cache
def _tables() -> Mapping[str, Mapping[str, str]]:
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    path = Path(spec.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    if not path.is_file():
        return {}
    tables: dict[str, Mapping[str, str]] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name = node.targets[0].id
        if name in _PREFERENCE and isinstance(node.value, ast.Call) and node.value.args:
            tables[name] = {key: _first(value) for key, value in ast.literal_eval(node.value.args[0])}
    return tables


def _first(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else value[0]


def class_for(model_type: str) -> str | None:
    """Return the class that people train for ``model_type``, or None if transformers has none."""
    tables = _tables()
    order = list(_PREFERENCE)
    masked = model_type in tables.get("MODEL_FOR_MASKED_LM_MAPPING_NAMES", {})
    seq2seq = model_type in tables.get("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", {})
    speech = model_type in tables.get("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", {})
    if masked or seq2seq or speech:
        order.remove(_CAUSAL_LAST)
        order.append(_CAUSAL_LAST)
    if seq2seq:  # BART also has a masked-LM entry
        order.remove("MODEL_FOR_MASKED_LM_MAPPING_NAMES")
    for name in order:
        if model_class := tables.get(name, {}).get(model_type):
            return model_class
    return None


_OBJECTIVES = (
    ("ForCausalLM", "causal_lm"),
    ("LMHeadModel", "causal_lm"),
    ("ForMaskedLM", "masked_lm"),
    ("ForSequenceClassification", "classification"),
    ("ForTokenClassification", "token_classification"),
    ("ForImageClassification", "classification"),
    ("ForVideoClassification", "classification"),
    ("ForAudioClassification", "classification"),
    ("ForSpeechSeq2Seq", "seq2seq"),
    ("ForConditionalGeneration", "causal_lm"),
    ("ForPreTraining", "features"),
)


_TABLE_OBJECTIVES = (
    # BART's class is listed for masked tokens, too, and XLM's for the next token: the first table decides.
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "seq2seq"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "seq2seq"),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "masked_lm"),
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "causal_lm"),
)


def objective_for_class(model_class: str, config: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the objective a class is trained under; ``features`` if it has no head that is known.

    The auto mappings of transformers decide, then the ending of the name.

    Args:
        model_class: Name of a transformers class.
        config: Its raw configuration. The tables of sequence-to-sequence models also list decoders that read
            an encoder's states among their own tokens (transformers 5.23: Voxtral, Qwen2-Audio); their
            configurations have a ``text_config``, and they predict the next token.
    """
    for table, objective in _TABLE_OBJECTIVES:
        if model_class in _tables().get(table, {}).values():
            return "causal_lm" if objective == "seq2seq" and "text_config" in config else objective
    for ending, objective in _OBJECTIVES:
        if model_class.endswith(ending):
            return objective
    return "features"


_SPACE = re.compile(r"\s+")
_LIMIT = 300


def one_line(error: BaseException) -> str:
    """Return an error on one line: its root cause, and the package of an import error."""
    cause: BaseException = error
    while cause.__cause__ is not None and not str(cause).strip():
        cause = cause.__cause__
    text = _SPACE.sub(" ", str(cause)).strip() or type(cause).__name__
    if isinstance(cause, KeyError):
        text = f"missing key {text}"
    elif isinstance(cause, ImportError):
        text = f"a package is missing: {text}"
    elif isinstance(cause, MemoryError):
        text = f"too large to build: {text}"
    return text if len(text) <= _LIMIT else text[: _LIMIT - 1] + "…"


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Silence a library's logger and Python warnings below errors (both remark on valid models)."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
