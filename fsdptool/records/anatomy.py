"""What a reference resolves to, and what the built model is made of. Torch-free: shapes and names only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from fsdptool.records.annotations import Count, Share
from fsdptool.records.diagnostic import Diagnostic

WrapReason = Literal[
    # Chosen.
    "repeated_block",  # repeated side by side in a list and not inside another chosen block
    "repeated_in_stages",  # the repeated block inside stages or wrappers that hold little else
    "hint",  # the family names it, with its reason
    "person",  # named with --wrap
    # Left out.
    "inside_block",  # lies inside a chosen block
    "stage",  # a stage or wrapper: the blocks inside it hold nearly all of its parameters
    "container",  # a bare container: its class name would match every other container
    "expert",  # one expert of a mixture: a unit of its own would gather each expert alone
    "once",  # occurs once: nothing repeats
    "unlisted",  # repeated, but not side by side in a list: a part of something else
    "different_each",  # no two instances have the same shapes
    "helper",  # a small helper without inner structure next to real blocks
    "too_small",  # below half a percent of the parameters: a collective of its own costs more than it saves
    "hookless",  # runs where FSDP2's hooks do not: as a unit it would not be gathered
    "passed_over",  # the user or the family chose other classes
    "excluded",  # left out with --exclude
]
"""Why a class was chosen as a wrap class, or left out. A code is stable within a major version."""

WrapConcern = Literal[
    "no_repeated_block",  # no class repeats: nothing can be wrapped by class
    "shared_block",  # one block is applied many times: it is one unit, gathered for every application
    "mostly_embedding",  # embedding tables hold the parameters; FSDP2 gathers a table whole
    "convolutional_stages",  # convolutional stages of different widths: no two blocks are alike
    "few_blocks",  # so few blocks that each is a large part of the model
    "large_head",  # one layer outside the blocks (a head, a projection) holds the parameters
    "uneven_blocks",  # blocks of one class differ so much in size that one dominates
    "shared_parameters",  # parameters shared between blocks must be one unit
    "many_parts",  # parameters outside the blocks add up although no single one is large
]
"""Why one unit keeps 35 % or more of the parameters whatever is wrapped."""

WrapOrigin = Literal["structure", "hint", "person"]
NoSplitStatus = Literal["right", "unsuitable", "absent"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, counted once however many names it has.

    Attributes:
        fqn: Its name, as ``named_parameters(remove_duplicate=True)`` reports it.
        shape: Global shape.
        dtype: torch dtype without the ``torch.`` prefix, for example ``bfloat16``.
        trainable: ``requires_grad``.
        aliases: Further names of the same tensor (ties), sorted.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, the canonical one first."""
        return (self.fqn, *self.aliases)


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer. ``persistent`` buffers are part of the state dict."""

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool


@dataclass(frozen=True, slots=True)
class Module:
    """One module, in registration (``named_modules``) order; the root's path is ``""``.

    Attributes:
        path: Fully qualified path.
        class_name: Unqualified class name.
        bases: Unqualified names of its nn.Module base classes, nearest first (accelerate
            matches wrap classes with ``isinstance``).
        listed: Whether its parent is a ModuleList, Sequential or ModuleDict.
        embedding: Whether it is an ``nn.Embedding`` (or subclass).
        forwards: Whether its class defines ``forward`` (``fully_shard`` refuses containers).
        aliases: Further paths of the same module object.
        sizes: Integers that the module computes with, by name: its own attributes, and as ``config.x`` those
            of its configuration that its methods read. Layers of torch itself have none.
        arguments: Names of the arguments of its ``forward``; layers of torch itself have none.
    """

    path: str
    class_name: str
    bases: tuple[str, ...] = ()
    listed: bool = False
    embedding: bool = False
    forwards: bool = True
    aliases: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WrapCandidate:
    """One class that was considered as a wrap class.

    Attributes:
        name: Class name.
        instances: How many modules of the class the model has.
        parameters_each: Parameters of one instance, smallest and largest.
        parameters_total: Unique parameters under all instances.
        share: ``parameters_total`` over the model's total, 0 to 1.
        paths: Up to five example paths.
        chosen: Whether it is a wrap class.
        reason_code: Why it was chosen or left out.
        reason: The same in a sentence that names numbers.
    """

    name: str
    instances: Count
    parameters_each: tuple[Count, Count]
    parameters_total: Count
    share: Share
    paths: tuple[str, ...]
    chosen: bool
    reason_code: WrapReason
    reason: str


@dataclass(frozen=True, slots=True)
class NoSplitEntry:
    """One entry of ``_no_split_modules``: ``right``, ``unsuitable`` or ``absent``, and why."""

    name: str
    status: NoSplitStatus
    reason: str


@dataclass(frozen=True, slots=True)
class WrapChoice:
    """The wrap classes and every class that was considered."""

    classes: tuple[str, ...]
    candidates: tuple[WrapCandidate, ...]
    no_split_modules: tuple[NoSplitEntry, ...] = ()
    origin: WrapOrigin = "structure"
    """``structure``, ``hint`` (the family names the classes) or ``person`` (``--wrap``)."""
    concern_code: WrapConcern | None = None
    """Why one unit keeps 35 % or more of the parameters; None if none does."""
    concern: str | None = None
    """The same in a sentence that names numbers."""


@dataclass(frozen=True, slots=True)
class LogitTail:
    """What a model does to the logits that its head returns.

    Attributes:
        scale: They are multiplied by it (Granite, Cohere).
        cap: Then they become ``cap * tanh(logits / cap)`` (Gemma 2); None leaves them.
    """

    scale: float = 1.0
    cap: float | None = None


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Everything the other rooms need to know of a built model.

    Attributes:
        spec: What was built.
        parameters: Unique parameters in ``named_parameters`` order.
        buffers: Buffers in ``named_buffers`` order.
        modules: Modules in ``named_modules`` order, each object once; the root first.
        wrap: The wrap choice.
        input_embedding: Path of ``get_input_embeddings()``, or None.
        output_embedding: Path of ``get_output_embeddings()``, or None.
        final_norm: Path of the base model's last direct-child norm (what accelerate 1.15 puts
            in its tail group: ``accelerate/utils/fsdp_utils.py:_find_final_norm``), or None.
        no_split_modules: The built instance's ``_no_split_modules``, sorted.
        repeated_blocks: diffusers' ``_repeated_blocks``.
        fsdp_plan_unmatched: Rules of transformers' own FSDP plan that do not match any module.
        class_modules: Python module that defines each class, by unqualified class name.
        weights_read: Paths of embeddings whose weight the model's code reads without calling them:
            they cannot be units of their own.
        hookless: Paths of modules that run where FSDP2's hooks do not: they cannot be units either.
        tensor_plan: The library's own tensor-parallel plan: style by pattern of module paths. A packed style
            of diffusers carries its proportions, ``packed_colwise:1:1``.
        expert_plan: The library's own expert-parallel plan, alike.
        family_plan: How the family says that layers are split: ``whole``, ``column`` or ``row`` by pattern.
        logit_tail: What the root's forward does to the logits of ``output_embedding``; None where its source
            does more than is known here, or does not call it.
        diagnostics: Findings of the inspection.
    """

    spec: ModelSpec
    parameters: tuple[Parameter, ...] = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    modules: tuple[Module, ...] = field(repr=False)
    wrap: WrapChoice = field(repr=False)
    input_embedding: str | None = None
    output_embedding: str | None = None
    final_norm: str | None = None
    no_split_modules: tuple[str, ...] = ()
    repeated_blocks: tuple[str, ...] = ()
    fsdp_plan_unmatched: tuple[str, ...] = ()
    class_modules: Mapping[str, str] = field(default_factory=dict, repr=False)
    weights_read: tuple[str, ...] = ()
    hookless: tuple[str, ...] = ()
    tensor_plan: Mapping[str, str] = field(default_factory=dict, repr=False)
    expert_plan: Mapping[str, str] = field(default_factory=dict, repr=False)
    family_plan: Mapping[str, str] = field(default_factory=dict, repr=False)
    logit_tail: LogitTail | None = None
    diagnostics: tuple[Diagnostic, ...] = field(default=(), repr=False)

    @property
    def total_parameters(self) -> int:
        """Unique parameters, by element count."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that share one tensor."""
        return tuple(parameter.names for parameter in self.parameters if parameter.aliases)


ReferenceKind = Literal["flavour", "hub", "folder", "config", "pipeline", "adapter", "import"]


@dataclass(frozen=True, slots=True)
class Reference:
    """How the user named the model.

    Attributes:
        kind: ``flavour`` (``family:flavour``), ``hub`` (a Hugging Face id), ``folder``,
            ``config`` (a bare ``config.json``), ``pipeline`` (a diffusers folder with
            ``model_index.json``), ``adapter`` (a PEFT folder; the spec is its base model's) or ``import``
            (``package.module:Class``).
        id: The reference as written, without a revision.
        revision: Commit hash or tag of a hub reference, or None.
    """

    kind: ReferenceKind
    id: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A resolved model: enough to build it on the meta device, and to find its weights.

    Attributes:
        reference: Where it came from.
        family: Registered family name, or ``generic``.
        flavour: Flavour name within the family, or None.
        library: ``transformers``, ``diffusers``, or the family's own name.
        model_class: Class to build, for example ``LlamaForCausalLM``.
        config: The raw configuration as read, with the overrides (never a config object).
        objective: Default training objective of the family, or None if unknown.
        folder: Local folder that holds configuration and weights, or the module to import; or None.
        weights: Local safetensors files that belong to this component, sorted; empty if none.
        component: Name of the pipeline component (``transformer``, ``unet``), or None.
        adapter: ``adapter_config.json`` of a PEFT reference, or None.
        adapter_weights: Local file with the weights of that adapter, or None.
        trust_remote_code: Whether the user allowed code from the reference to run.
        overrides: What the user replaced in ``config``; a key that the model does not read is refused.
        diagnostics: Findings of the resolution (misspelt config keys, ...).
    """

    reference: Reference
    family: str
    flavour: str | None
    library: str
    model_class: str
    config: Mapping[str, Any] = field(repr=False)
    objective: str | None = None
    folder: str | None = None
    weights: tuple[str, ...] = field(default=(), repr=False)
    component: str | None = None
    adapter: Mapping[str, Any] | None = None
    adapter_weights: str | None = None
    trust_remote_code: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict, repr=False)
    diagnostics: tuple[Diagnostic, ...] = field(default=())
