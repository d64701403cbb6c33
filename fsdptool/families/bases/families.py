"""The base class of families whose models transformers makes, and what the libraries of models are asked.

transformers' auto mappings live in a module that imports torch (1.8 CPU seconds in 5.23), so the
literal tables are taken out of the file's syntax tree instead (0.05 s).
"""

from __future__ import annotations

import ast
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError, ModelError
from fsdptool.families.bases.batches import listed_inputs
from fsdptool.families.bases.catalogue import CatalogueFamily
from fsdptool.families.protocol import Objective, TensorSpec
from fsdptool.spelling import nearest

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import Recipe


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
_CLASSIFIERS = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
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
        if name in (*_PREFERENCE, _CLASSIFIERS) and isinstance(node.value, ast.Call) and node.value.args:
            tables[name] = {key: _first(value) for key, value in ast.literal_eval(node.value.args[0])}
    return tables


def _first(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else value[0]


def classifier_for(model_type: str) -> str | None:
    """Return the class that labels whole texts for ``model_type``, or None if transformers has none."""
    return _tables().get(_CLASSIFIERS, {}).get(model_type)


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


def plain(value: Any) -> Any:
    """Return a default value as JSON has it."""
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value


class TransformersFamily(CatalogueFamily):
    """Builds through ``config_class(**config)`` and ``_from_config`` on whatever device is current.

    ``cls(config)`` would ignore the dtype (transformers 5.23), and ``init_empty_weights`` loses
    ties: both are avoided.
    """

    library = "transformers"
    default_objective = "causal_lm"
    quiet_dropouts = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
    """LayerDrop skips layers by a coin toss on the host: ranks would disagree on which units to
    gather, and fake tensors cannot decide. Built as 0."""
    code_folder: str | None = None
    """Folder of the model's own code, in a family that is bound to a model whose code may run."""

    def bind(self, spec: ModelSpec) -> TransformersFamily:
        """Return the family for one model: with its folder where the model's own code may run."""
        if not (spec.trust_remote_code and spec.folder and isinstance(spec.config.get("auto_map"), Mapping)):
            return self
        return self._with_code(spec.folder)

    def _with_code(self, folder: str | None) -> TransformersFamily:
        bound = copy(self)
        bound.code_folder = folder
        return bound

    def model_class(self, config: Mapping[str, Any]) -> str:
        """Return the configuration's own architecture, else the class people train for its type.

        Raises:
            ModelError: transformers has no class for the configuration's ``model_type``.
        """
        architectures = config.get("architectures")
        if isinstance(architectures, list | tuple) and architectures and isinstance(architectures[0], str):
            return architectures[0]
        model_type = config.get("model_type")
        if isinstance(model_type, str) and (name := class_for(model_type)):
            return name
        raise ModelError(
            f"no class is known for model_type {model_type!r}",
            help="set 'architectures' in the configuration",
        )

    def objective_for(self, config: Mapping[str, Any]) -> str:
        """Return the card's objective for the class, else that of the class's head, else the family's."""
        model_class = self.model_class(config)
        by_class: Mapping[str, str] = self.options.get("objectives", {})
        if model_class in by_class:
            return by_class[model_class]
        head = objective_for_class(model_class, config)
        return self.default_objective if head == "features" else head

    def config_object(self, config: Mapping[str, Any], model_class: str) -> Any:
        """Return the transformers configuration object of a raw configuration.

        Raises:
            ModelError: The class does not exist or refuses the values; one line.
        """
        raw = {
            key: _decoded(value)
            for key, value in config.items()
            if key not in ("architectures", "auto_map", "model_type", "transformers_version")
        }
        own = own_config(self.code_folder) if self.code_folder is not None else None
        config_class = type(own) if own is not None else load_class(self.library, model_class).config_class
        try:
            with quiet("transformers"):
                configuration = config_class(**raw)
        except Exception as error:
            raise ModelError(f"{config_class.__name__}: {one_line(error)}") from error
        if own is not None:
            # Where ``from_config`` looks for the code (transformers 5.23, ``models/auto/auto_factory.py``).
            configuration.auto_map, configuration._name_or_path = own.auto_map, self.code_folder
        configuration.architectures = [model_class]
        for key in self.quiet_dropouts:
            if getattr(configuration, key, 0):
                setattr(configuration, key, 0.0)
        return configuration

    def complete(self, config: Mapping[str, Any], model_class: str) -> dict[str, Any]:
        """Return the configuration with its class's defaults filled in."""
        full: dict[str, Any] = self.config_object(config, model_class).to_dict()
        return full

    def build(
        self,
        config: Mapping[str, Any],
        *,
        model_class: str,
        dtype: str = "float32",
        attention: str | None = None,
        folder: str | None = None,
        trust_remote_code: bool = False,
    ) -> nn.Module:
        """Build the model on the current device, in training mode.

        Raises:
            ModelError: The configuration cannot be built; the message is one line.
        """
        import torch

        remote = remote_class(config, model_class, folder, trust_remote_code)
        arguments: dict[str, Any] = {"dtype": getattr(torch, dtype)}
        # Asked for sdpa, transformers 5.23 refuses models without it; left to itself it takes sdpa
        # wherever a part of the model has it, and eager attention elsewhere.
        if attention not in (None, "sdpa"):
            arguments["attn_implementation"] = attention
        family = self if remote is None else self._with_code(folder)
        configuration = family.config_object(config, model_class)
        try:
            with quiet("transformers"):
                if remote is not None:
                    model = remote(configuration, **arguments)
                else:
                    model = load_class(self.library, model_class)._from_config(configuration, **arguments)
        except Exception as error:
            raise ModelError(f"{model_class}: {one_line(error)}") from error
        built: nn.Module = model.train()
        return built

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return the tensors that the recipe lists, else the inputs of its objective.

        Raises:
            ConfigError: The list is not one of tensors, or objective or sizes do not suit the model.
            ModelError: The configuration does not say what its inputs look like.
        """
        from fsdptool.families.objectives import TRANSFORMERS

        if (listed := recipe.objective.options.get("inputs")) is not None:
            return listed_inputs(listed, recipe.batch.micro_batch)
        name = recipe.objective.name or self.objective_for(config)
        configuration = self.config_object(config, self.model_class(config))
        if name not in TRANSFORMERS:
            raise ConfigError(
                f"objective {name!r} is not supported for {type(configuration).__name__}",
                help=f"choose one of: {', '.join(sorted(TRANSFORMERS))}",
            )
        try:
            return TRANSFORMERS[name].batch(configuration, recipe)
        except AttributeError as error:
            raise ModelError(
                f"{type(configuration).__name__} lacks what objective {name!r} needs: {error}",
                help="write a family plugin for the model (docs/how-to/add-a-family.md)",
            ) from error

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return the library's objectives for transformers models."""
        from fsdptool.families.objectives import TRANSFORMERS

        return TRANSFORMERS


def _decoded(value: Any) -> Any:
    """Return a value of a ``config.json`` with the floats that JSON cannot express.

    transformers writes infinity as ``{"__float__": "Infinity"}`` (5.23, ``configuration_utils.py``,
    ``_encode_special_floats``) and accepts it only from files that it reads itself.
    """
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def load_class(library: str, name: str) -> Any:
    """Return the class of a model by name, importing only the module that defines it.

    Raises:
        ModelError: The class does not exist or is something else (a pipeline, a configuration, an automatic
            class), or its module needs a package that is not installed.
    """
    import torch
    from torch import nn

    try:
        module = import_module(library)
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{name} is a class of {library}, which is not installed"
            if error.name == library
            else f"{name}: {one_line(error)}",
            help=f"pip install {error.name}",
        ) from error
    try:
        # diffusers loads bitsandbytes where it is installed, which remarks on CPUs' inference kernels.
        # A module that is imported while a model is built on meta keeps real tensors of its own.
        with quiet("bitsandbytes"), torch.device("cpu"):
            value = getattr(module, name)
    except AttributeError:
        own = "use --trust-remote-code if the model has its own code, or upgrade transformers"
        near = nearest(name, (item for item in dir(module) if item[:1].isupper()), cutoff=0.85)
        usual = own if library == "transformers" else None
        raise ModelError(
            f"{library} {module.__version__} has no class {name!r}",
            help=f"did you mean {near}?" if near else usual,
        ) from None
    except Exception as error:
        raise ModelError(f"{name}: {one_line(error)}") from error
    if isinstance(value, type) and issubclass(value, nn.Module):
        return value
    # A stand-in for a class whose packages are missing names them (transformers 5.23, diffusers 0.42).
    if needed := getattr(value, "_backends", None):
        absent = [name for name in needed if find_spec(name) is None] or needed
        raise ModelError(
            f"{name} needs {' and '.join(absent)}, which is not installed",
            help=f"pip install {' '.join(absent)}",
        )
    raise ModelError(
        f"{name} is not the class of a model",
        help="set 'architectures' or '_class_name' to the class that is trained",
    )


def remote_class(
    config: Mapping[str, Any], model_class: str, folder: str | None, trust_remote_code: bool
) -> Callable[..., Any] | None:
    """Return a constructor from the reference's own code, or None to use the library's class.

    Raises:
        ModelError: Only the reference's code has the class, and it may not run.
    """
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    import transformers

    if not trust_remote_code:
        if hasattr(transformers, model_class):
            return None
        raise ModelError(
            f"{model_class} exists only as code that comes with the model",
            help="read that code, then use --trust-remote-code to run it",
        )
    if folder is None:
        raise ModelError(
            f"{model_class}: the model's own code is not available locally",
            help="use the folder that contains the configuration and the code",
        )
    auto = next((name for name, target in auto_map.items() if _last(target) == model_class), None)
    if auto is None:
        raise ModelError(
            f"auto_map does not contain class {model_class!r}",
            help=f"it has: {', '.join(sorted(_last(target) for target in auto_map.values()))}",
        )
    return partial(getattr(transformers, auto).from_config, trust_remote_code=True)


def own_config(folder: str) -> Any:
    """Return the configuration object of a folder, from the code in it that may run.

    Raises:
        ModelError: The code fails; one line.
    """
    import transformers

    try:
        with quiet("transformers"):
            return transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    except Exception as error:
        raise ModelError(f"the code in {folder}: {one_line(error)}") from error


def _last(target: Any) -> str:
    text = target[0] if isinstance(target, list | tuple) and target else target
    return str(text).rsplit(".", 1)[-1]
