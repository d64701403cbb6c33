"""A training run as a file or a command line of some program describes it, with that program's defaults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

ChangedThing = Literal["memory", "time", "numbers"]
"""What a setting that is not modelled changes: memory, the time of a step, or only what is learnt."""


@dataclass(frozen=True, slots=True)
class DescribedMesh:
    """Sizes of a device mesh; -1 takes the ranks that the others leave, null is open.

    Attributes:
        dp_replicate: Groups that hold a copy each.
        dp_shard: Ranks that share one copy.
        cp: Ranks that divide each sequence, by ring attention or by Ulysses.
        tp: Ranks that divide each layer.
        ep: Ranks that divide the experts of each layer.
        pp: Stages of a pipeline.
    """

    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = 1
    tp: int | None = 1
    ep: int | None = 1
    pp: int | None = 1


TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""dtypes of a described run, and the names of torch."""
QUANTISED_BASES: Mapping[str, Literal["nf4", "int8"]] = {"qlora": "nf4", "lora8bit": "int8"}
"""Methods with a quantised base, and its format."""
TOKEN_OBJECTIVES = ("sft", "pretrain", "dpo", "orpo", "simpo", "kto", "grpo", "ppo")
"""Objectives whose loss is computed from logits of every token."""
OWN_UNITS = ("torchtitan", "torchtune", "automodel", "verl")
"""Programs that take the layers of a model without being told, by classes that are partly their own."""

Side = Literal["less", "more"]
"""Whether a run needs less or more memory for a setting that is not modelled."""


@dataclass(frozen=True, slots=True)
class UnmodelledKey:
    """A setting of the file that no plan takes into account.

    Attributes:
        key: The key.
        changes: What it changes.
        side: For memory: whether the run needs less or more than without the setting; null if that depends.
        decides: Facts of the run that change with the key, where its value cannot be read; those of the mesh
            as ``mesh.tp``; empty if that is not known. Null where the value is read.
    """

    key: str
    changes: ChangedThing
    side: Side | None = None
    decides: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class FileKeys:
    """Every key of the file, by what becomes of it.

    Attributes:
        used: Keys that decide a fact of the run.
        no_effect: Keys that change neither memory nor speed, or that the program itself does not read.
        not_modelled: Keys that change the run in a way that no plan takes into account.
        learning: Those of the keys above that :attr:`DescribedRun.learning` holds.
        lines: Line of each key, where a script describes the run; empty for other files.
    """

    used: tuple[str, ...] = ()
    no_effect: tuple[str, ...] = ()
    not_modelled: tuple[UnmodelledKey, ...] = ()
    learning: tuple[str, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)

    def placed(self, key: str) -> str:
        """Return a key with its line, where that is known."""
        return f"{key} on line {self.lines[key]}" if key in self.lines else key

    def unmodelled_by_section(self) -> tuple[UnmodelledKey, ...]:
        """Return what is not modelled; three keys or more of one section, alike, become ``section.*``."""

        def section(item: UnmodelledKey) -> tuple[str, str, Side | None]:
            return item.key.rpartition(".")[0], item.changes, item.side

        sizes = Counter(section(item) for item in self.not_modelled if item.decides is None)
        found: dict[str, UnmodelledKey] = {}
        for item in self.not_modelled:
            name = section(item)[0]
            joined = bool(name) and item.decides is None and sizes[section(item)] >= 3
            key = f"{name}.*" if joined else item.key
            found.setdefault(f"{key} {item.changes} {item.side}", replace(item, key=key))
        return tuple(found.values())


@dataclass(frozen=True, slots=True)
class TakenDefault:
    """A value that the file leaves out and that the program sets.

    Attributes:
        key: The key that the file does not hold.
        value: The program's default.
        source: File and line of the program's source.
    """

    key: str
    value: str | float | bool | None
    source: str


Masters = Literal["none", "whole", "remainders"]
"""What an optimizer keeps of fp32 weights beside those of 16 bits that the model has."""


@dataclass(frozen=True, slots=True)
class DescribedRun:
    """A run that a file describes; null is what the file and the program leave open.

    Attributes:
        program: Program that reads the file.
        program_version: Version whose defaults are taken.
        model: Hub id, path or name that the file gives the model.
        family: Family and size of fsdptool's catalogue that the model is known to be, as ``llama3:8b``.
        method: ``full``, ``lora``, ``qlora`` (4 bits), ``lora8bit``, or the program's own word.
        lora_rank: Rank of the adapters.
        lora_dropout: Probability with which inputs of adapters are dropped; each adapter then keeps its own.
        lora_targets: Names of the adapted modules, a regular expression, or ``all-linear``.
        lora_modules_to_save: Modules of which a copy is trained whole beside the adapters.
        base_dtype: dtype in which the model is loaded; ``checkpoint`` is the dtype of its files.
        quantisation: Format of a quantised base in words; ``none`` without one.
        stored_dtype: dtype in which the trained parameters are stored.
        compute_dtype: dtype of matrix products.
        reduce_dtype: dtype in which gradients are reduced across ranks.
        objective: What is minimised: ``sft``, ``pretrain``, ``dpo``, ``grpo``, ``diffusion``, ...
        sequence_length: Tokens of a row.
        height, width, frames: Pixels and frames of a sample.
        pixel_area: Pixels of the largest image or frame, where its sides vary.
        packing: Whether samples are joined into full rows.
        full_rows: Whether rows that are not packed are all padded to the sequence length; false: only to the
            longest of their batch; null: the file does not say.
        takes_mask: Whether the model uses the mask of padding that its loop makes.
        documents_joined: Whether the samples of a row attend to one another.
        micro_batch: Samples (or rows) of one forward pass of a data-parallel rank.
        accumulation: Forward passes of an optimizer step.
        global_batch: Samples (or rows) of an optimizer step on all ranks.
        optimizer: Name that the program gives the optimizer.
        optimizer_state_bits: Bits of an element of an optimizer state.
        optimizer_masters: What the optimizer adds to weights of 16 bits: a copy in fp32 (``whole``), or the
            16 bits that such a copy has beyond them (``remainders``); ``none`` where it updates them alone.
        momentum: Momentum of SGD, which keeps a state for it.
        gradient_checkpointing: What is recomputed in backward; ``offload`` keeps the inputs in host memory.
        activation_offloading: Whether activations are kept in host memory between forward and backward.
        attention: Attention implementation.
        ema: Whether the device holds an exponential moving average of the trained parameters.
        fused_loss: Whether logits are kept whole (``none``), or the loss is fused or computed in chunks.
        loss_in_forward: Whether the model computes the loss from its labels, or the loop from the logits.
        keeps_logits: Whether the loop holds what the model returned until backward ends.
        fused_kernels: Which kernels of its blocks are fused, by the names of ``plan --assume``: they change
            the time of a step.
        compile: Whether ``torch.compile`` is used.
        compiled_loss: Whether the loss is compiled, which then makes no copy of the logits in fp32.
        processes: Number of ranks.
        nodes: Number of machines that the launch puts them on.
        fsdp: Version of FSDP, or ``none``.
        wrap_classes: Classes that become FSDP units, as the file names them.
        reshard: Whether parameters are resharded after forward; a number is a number of ranks.
        cpu_offload: Whether parameters, gradients and optimizer states live in host memory.
        mesh: Sizes of the device mesh.
        steps: Optimizer steps.
        epochs: Passes over the data set.
        learning: What decides the learning and neither memory nor speed, under names that all programs share
            (``learning_rate``, ``scheduler``, ``lora_alpha``, ``dataset``), with the program's defaults.
        keys: What becomes of every key of the file.
        defaults: What the file leaves out, with the program's values.
        notes: What else a reader of the file should know.
        problems: What the program would refuse, and what cannot be read; one line each.
        unresolved: Those of the problems that stand for variables and files which are not read.
    """

    program: str
    program_version: str | None = None
    model: str | None = None
    family: str | None = None
    method: str | None = None
    lora_rank: int | None = None
    lora_dropout: float | None = None
    lora_targets: tuple[str, ...] | str | None = None
    lora_modules_to_save: tuple[str, ...] = ()
    base_dtype: str | None = None
    quantisation: str | None = None
    stored_dtype: str | None = None
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    objective: str | None = None
    sequence_length: int | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    pixel_area: int | None = None
    packing: bool | None = None
    full_rows: bool | None = None
    takes_mask: bool = True
    documents_joined: bool | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    optimizer: str | None = None
    optimizer_state_bits: int | None = None
    optimizer_masters: Masters | None = None
    momentum: float | None = None
    gradient_checkpointing: Literal["none", "full", "selective", "offload"] | None = None
    activation_offloading: bool | None = None
    attention: str | None = None
    ema: bool | None = None
    fused_loss: Literal["none", "liger", "cce", "chunked"] | None = None
    loss_in_forward: bool | None = None
    keeps_logits: bool | None = None
    fused_kernels: tuple[str, ...] = ()
    compile: bool | None = None
    compiled_loss: bool | None = None
    processes: int | None = None
    nodes: int | None = None
    fsdp: Literal["none", 1, 2] | None = None
    wrap_classes: tuple[str, ...] | None = None
    reshard: bool | int | None = None
    cpu_offload: bool | None = None
    mesh: DescribedMesh = DescribedMesh()
    steps: int | None = None
    epochs: float | None = None
    learning: Mapping[str, str | float | bool] = field(default_factory=dict)
    keys: FileKeys = FileKeys()
    defaults: tuple[TakenDefault, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()


LIGER_KERNELS = ("fused_glu", "fused_norm", "fused_rope")
"""What Liger patches in a model by default (0.8.5 ``transformers/monkey_patch.py``), beside its loss."""

NOT_FACTS = frozenset(
    {
        "program", "program_version", "keys", "defaults", "notes", "problems", "unresolved", "learning",
        "fused_kernels", "nodes", "loss_in_forward", "keeps_logits",
    }
)  # fmt: skip
"""Members of a described run that are not compared: they change no memory, or only a loop has them."""
