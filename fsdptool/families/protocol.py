"""What a family of models must offer. Authors subclass :class:`Family` (docs/how-to/add-a-family.md).

Listing, matching and facts are plain data and import nothing heavy. torch and the model
libraries are imported inside ``build`` and inside the objectives only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import Recipe

API_VERSION = 1

Generated = Literal["continuation", "translation", "latents"]
"""What a trained model writes during validation: the rest of a text, a target, or latents."""

Fill = Literal["tokens", "labels", "mask", "positions", "normal", "uniform", "timesteps", "constant"]


@dataclass(frozen=True, slots=True)
class Flavour:
    """One published size of a family.

    Attributes:
        name: Name within the family, for example ``8b``.
        config: Raw configuration: only what differs from the config class's defaults is needed.
        model_class: Class to build.
        hub_id: Hugging Face id, or None.
        parameters: Exact unique parameter count, or None if never established.
        component: Pipeline component the class is (``transformer``, ``unet``), or None.
        facts: Anything else worth showing (published totals and why they differ, source).
    """

    name: str
    config: Mapping[str, Any]
    model_class: str
    hub_id: str | None = None
    parameters: int | None = None
    component: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """A family's claim on a raw configuration.

    ``score`` 1.0: the configuration names this family; 0.5: its class is one of ours; the generic
    family answers 0.1. Equal top scores of two families are an error, never last-wins.
    """

    score: float
    evidence: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a micro-batch, for tracing and for synthetic training.

    Attributes:
        name: Key in the batch.
        shape: Full shape, the micro-batch dimension first.
        dtype: torch dtype name; floating inputs follow the compute dtype when ``compute`` is set.
        fill: How synthetic values are drawn (``docs/how-to/add-a-family.md``).
        high: Exclusive upper bound for ``tokens``, ``labels`` and ``timesteps``.
        compute: Whether a floating tensor is cast to the run's parameter dtype.
        values: The first entries of each sample, row-major, whatever the fill (image placeholders
            at the head of ``tokens``, ...). ``constant`` is zero behind them.
        low: Inclusive lower bound for ``tokens`` and ``labels``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    fill: Fill
    high: int | None = None
    compute: bool = False
    values: tuple[int | float, ...] = ()
    low: int = 0


@dataclass(frozen=True, slots=True)
class LoraTargets:
    """Module suffixes and fused parameters that LoRA adapts by default.

    ``exclude`` is a regular expression of module paths that LoRA never adapts, whatever the suffix: layers of
    another type that have the same name.
    """

    modules: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    exclude: str | None = None


@dataclass(frozen=True, slots=True)
class WrapHint:
    """Wrap classes where structure alone would err, and why it would."""

    classes: tuple[str, ...]
    reason: str


class Objective(ABC):
    """One training objective: the same code is traced by ``plan`` and run by ``train``.

    Losses are **sums** over ``weight`` items (valid tokens, samples); the trainer divides by the
    global weight over ranks and accumulation, so results do not depend on the number of ranks.
    """

    name: str
    unit: str = "tokens"
    """What ``weight`` counts."""
    divides_vocabulary: bool = False
    """Whether the loss takes logits of a part of the vocabulary, which tensor-parallel ranks divide
    (``families/objectives/vocabulary.py``)."""
    fuses_head: bool = False
    """Whether its loss is one sum of cross-entropies over tokens, which a model's head can compute itself
    (``families/objectives/fused_head.py``)."""
    scores_tokens: bool = False
    """Whether it takes the loss of each token from a head that computes it, and not their sum."""
    samples: str | None = None
    """What its samples of data are made of: ``latents``, or a kind of text (``training/data/text/``).
    None: it is trained on generated samples only."""
    generates: Generated | None = None
    """What ``evaluation.samples`` writes; None: nothing."""
    sequences: int = 1
    """Sequences in a sample of text."""
    single_length: bool = True
    """Whether a sample of text has one length: micro-batches can then be padded to their longest sample."""
    splits_sequences: bool = False
    """Whether ranks can divide its sequences (context parallelism)."""
    needs_teacher: bool = False
    """Whether it compares with a second, frozen model: the teacher of method ``distillation``."""

    @classmethod
    def batch(cls, config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return the micro-batch of a transformers model; a family may have another.

        Args:
            config: A transformers configuration object.
            recipe: Its sizes.

        Raises:
            ConfigError: The objective has no batch for it, or the recipe's sizes do not suit the model.
        """
        raise ConfigError(
            f"objective {cls.name!r} is not supported for {type(config).__name__}",
            help="name another objective, or list its tensors in objective.options.inputs",
        )

    @abstractmethod
    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of items the loss of ``batch`` sums over: int64 scalar, no model needed."""

    @abstractmethod
    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run the model. The main prediction is under ``"prediction"``; auxiliary terms beside it."""

    @abstractmethod
    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss as an fp32 scalar."""

    @abstractmethod
    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return the summed distillation distance (fp32 scalar) between two predictions."""

    def metrics(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return summed extra metrics (expert load, ...) as detached tensors; none by default."""
        return {}


class Family(ABC):
    """Makes models of one architecture. Subclass it and name it under ``fsdptool.families``.

    An entry point names a Family class, a Family instance, or a callable without arguments that
    yields Family instances.
    """

    api_version: int = API_VERSION
    name: str
    title: str = ""
    library: str
    default_objective: str
    precedence: int = 0
    """Breaks no ties: only the generic family has a negative one, so that it is asked last."""
    exact_inputs: tuple[str, ...] = ()
    """Arguments of forward that keep their dtype when the others are cast to the compute dtype: times,
    which bfloat16 would round to eight bits, where the model embeds them in fp32 as its pipeline does."""
    encoded_data: str | None = None
    """``MODULE:OBJECT`` of an ``EncodedData`` (``training/data/encoded.py``), which encodes samples before
    training and reads them; None: the models are not trained on encoded samples."""

    @abstractmethod
    def flavours(self) -> Mapping[str, Flavour]:
        """Return the published sizes by name; empty if there are none."""

    @abstractmethod
    def match(self, config: Mapping[str, Any]) -> Match | None:
        """Say whether a raw configuration is this family's. Imports nothing heavy."""

    @abstractmethod
    def model_class(self, config: Mapping[str, Any]) -> str:
        """Return the class that trains this configuration under the default objective."""

    @abstractmethod
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
        """Build the model on whatever device is current (the caller enters ``torch.device("meta")``).

        Raises:
            ModelError: The configuration cannot be built; the message is one line.
        """

    @abstractmethod
    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return the tensors of one micro-batch.

        Raises:
            ConfigError: The recipe's sizes do not suit the model (a sequence beyond its positions).
        """

    @abstractmethod
    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return the objectives this family trains under: name to factory taking the recipe's options."""

    def bind(self, spec: ModelSpec) -> Family:
        """Return the family as it serves one resolved model.

        It is the family itself, unless the configuration alone does not tell all: code in the model's folder
        that the user allowed to run.
        """
        return self

    def objective_for(self, config: Mapping[str, Any]) -> str:
        """Return the default objective of one configuration; the family's own unless it serves many."""
        return self.default_objective

    def untouched(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return prefixes of trainable parameters that the default objective gives no gradient."""
        return ()

    def lora_targets(self, config: Mapping[str, Any]) -> LoraTargets:
        """Return what LoRA adapts by default; empty means: no default, ask the person."""
        return LoraTargets(())

    def wrap_hint(self, config: Mapping[str, Any]) -> WrapHint | None:
        """Return the wrap classes where structure alone would err, else None."""
        return None

    def tensor_plan(self, config: Mapping[str, Any]) -> Mapping[str, str]:
        """Return how layers are split over a tensor-parallel group where structure alone would err.

        ``whole``, ``column`` or ``row`` by module path, with ``*`` for numbers. Any module may stay whole;
        column and row layers are linear, and every column layer's input and row layer's output are whole.
        """
        return {}
