"""How a model is trained: one YAML format, one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from fsdptool.records.annotations import Count, Keywords, Positive, Text
from fsdptool.records.checkpointing import Checkpointing
from fsdptool.records.sharding import Grouping, Layout

AtLeastZero = Annotated[float, Keywords(minimum=0)]
AboveZero = Annotated[float, Keywords(exclusiveMinimum=0)]
BelowOne = Annotated[float, Keywords(minimum=0, exclusiveMaximum=1)]
Ratio = Annotated[float, Keywords(minimum=0, maximum=1)]

Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
MethodName = Literal["full", "lora", "distillation"]
OptimizerName = Literal["adamw", "adamw8bit", "adafactor", "sgd", "muon"]
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow"]
Implementation = Literal["auto", "fused", "foreach", "for_loop"]
GradientAccumulation = Literal["sharded", "unsharded"]


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What to train. ``weights: auto`` loads local weights when there are any, else random ones."""

    reference: str
    revision: str | None = None
    component: str | None = None
    variant: str | None = None
    """Variant of the pretrained weights, as ``from_pretrained`` takes it: ``fp16``."""
    weights: Literal["auto", "pretrained", "random"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """dtype of the stored (master) parameters. ``auto`` is fp32; where the whole model is frozen (LoRA's
    base, a teacher) it is the dtype that the model computes in."""
    attention: Attention = "sdpa"
    """Names of transformers. A plan needs none of the packages, and takes FlexAttention as compiled."""
    trust_remote_code: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Configuration keys to change, for example ``num_hidden_layers: 4``."""


FUSED_ATTENTION = ("flash_attention_2", "flash_attention_3", "flex_attention")
"""Attention that runs on GPUs alone, by kernels that never store a score or a mask of all positions."""


MAX_LORA_RANK = 1 << 16
"""Beyond the width of every published layer: an adapter would be larger than the layer it adapts."""


@dataclass(frozen=True, slots=True)
class Lora:
    """LoRA (Hu et al. 2021), with the settings of peft's ``LoraConfig`` (0.21) under its names."""

    rank: Annotated[int, Keywords(minimum=1, maximum=MAX_LORA_RANK)] = 16
    alpha: float = 32.0
    dropout: BelowOne = 0.0
    targets: tuple[str, ...] | str | None = None
    """Suffixes of modules, a regular expression, or ``all-linear``; None takes the family's, and ``default``
    what peft chooses for the type of the model."""
    target_parameters: tuple[str, ...] = ()
    """Fused parameters that are adapted themselves (experts)."""
    exclude_modules: tuple[str, ...] | str | None = None
    """Suffixes of modules that are not adapted, or a regular expression; None takes the family's."""
    layers_to_transform: tuple[int, ...] | None = None
    """Numbers of the blocks whose modules are adapted; None adapts all."""
    layers_pattern: tuple[str, ...] = ()
    """Names of the lists of blocks that ``layers_to_transform`` counts; empty takes any."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Ranks of modules whose names end with a key, which may be a regular expression."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    """Modules of which a copy is trained whole and saved with the adapter: new embeddings, a new head."""
    trainable_token_indices: tuple[int, ...] | Mapping[str, tuple[int, ...]] = ()
    """Rows of the input embedding that are trained, or of several tables by their names."""
    ensure_weight_tying: bool = False
    """Whether the copies of tied modules, or their trained rows, are tied as well."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the base are trained."""
    lora_bias: bool = False
    """Whether the second matrix of an adapter has a bias."""
    use_rslora: bool = False
    """Scale adapters by ``alpha / sqrt(rank)`` instead of ``alpha / rank``."""
    use_dora: bool = False
    """Also train the magnitudes of the adapted weights (Liu et al. 2024)."""
    init_lora_weights: Literal["default", "gaussian"] = "default"
    """How adapters that do not continue from a file start."""
    adapters: Literal["replicated", "sharded"] = "sharded"
    base: Literal["unchanged", "nf4", "int8", "float8"] = "unchanged"
    """How the frozen weights are stored."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """KL(teacher || student) at ``temperature``, mixed with the task loss by ``alpha``."""

    teacher: ModelChoice
    temperature: AboveZero = 2.0
    alpha: Ratio = 0.5


@dataclass(frozen=True, slots=True)
class Method:
    """What is trained: every parameter, adapters, or a student of a frozen teacher."""

    name: MethodName = "full"
    lora: Lora | None = None
    distillation: Distillation | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss. ``name`` None takes the family's default; ``options`` are the objective's own."""

    name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    fused: bool | None = None
    """Whether the head of a language model computes the loss in chunks, without whole logits; None: on GPUs,
    where that takes less memory."""


Padding = Literal["packed", "length", "longest"]
"""How samples of text share a shape: ``packed`` into whole sequences, padded to the sequence length, or to
the longest sample of their micro-batch."""

PADDING_MULTIPLE = 8
"""Tokens to whose multiples micro-batches are padded under ``longest``."""

SYNTHETIC_SAMPLES = 1024
"""Generated samples of an epoch, unless ``data.options.samples`` says otherwise."""

SHUFFLE_BUFFER = 256
"""Consecutive samples of a stream that are shuffled among themselves, unless ``data.options.shuffle_buffer``
says otherwise: each loading process holds as many."""

Source = Literal["text", "jsonl", "parquet", "dataset", "images", "latents", "python", "synthetic"]
"""Kinds of data. ``python`` is your own code: ``data.path`` names it as ``package.module:name``."""


class DataOptions(TypedDict, total=False):
    """Options of particular data sources and of sampling; an option that is left out has its default."""

    name: str
    """Configuration of the dataset, as ``datasets.load_dataset`` takes it."""
    data_files: str | tuple[str, ...] | Mapping[str, str | tuple[str, ...]]
    """Files of the dataset, as ``datasets.load_dataset`` takes them."""
    revision: str
    """Revision of the dataset on the Hub."""
    document: Literal["file", "paragraph", "line"]
    """What is one document of text: a whole file by default."""
    samples: Positive
    """Samples in an epoch of synthetic data (1024), or of a stream of your own code."""
    shuffle_buffer: Positive
    """Consecutive samples of a stream that are shuffled among themselves (256)."""
    start_method: Literal["forkserver", "spawn", "fork"]
    """How data workers start: ``forkserver`` by default."""
    messages_column: str
    """Column of conversations: ``messages`` by default."""
    assistant_turns: tuple[Text, Text]
    """The texts that begin and end a turn of the assistant."""
    prompt_column: str
    """Column of prompts, which are not trained."""
    chosen_column: str
    """Column of preferred answers: ``chosen`` by default."""
    rejected_column: str
    """Column of rejected answers: ``rejected`` by default."""
    source_column: str
    """Column of an encoder's texts: ``source`` by default."""
    target_column: str
    """Column of a decoder's texts: ``target`` by default."""
    prefix: str
    """Text placed before every source."""
    label_column: str
    """Column of labels: ``label`` by default."""
    labels: tuple[str | int | float | bool, ...]
    """Names of the classes, in the order of their numbers."""
    packing: Literal["wrap", "fit"]
    """Whether a document may continue in the next sequence (``wrap``) or stays within one (``fit``)."""
    mask_share: Annotated[float, Keywords(exclusiveMinimum=0, maximum=1)]
    """Share of the tokens that a masked language model predicts (0.15)."""
    pipeline: str
    """Folder of the diffusers pipeline whose VAE and text encoders are used."""
    latents: str
    """Folder for precomputed latents."""
    shard_size: Positive
    """Pictures per file of latents."""
    buckets: Literal["aspect"] | Annotated[tuple[tuple[Positive, Positive], ...], Keywords(minItems=1)]
    """Training sizes: all aspect ratios, or a list of ``[height, width]``."""
    fps: AboveZero | Literal["spread"]
    """Frames per second taken from a clip; ``spread`` spaces them over the whole video."""
    posterior: Literal["mean", "draw"]
    """What is taken from the VAE's distribution: its mean by default, or a draw."""
    prompts: tuple[str, ...]
    """Prompts that the samples of an evaluation continue."""
    sample_steps: Positive
    """Denoising steps of a sample (20)."""
    sample_tokens: Positive
    """Tokens that a sample adds to its prompt (32)."""
    temperature: AtLeastZero
    """Sampling temperature; 0, the default, takes the most likely token."""


@dataclass(frozen=True, slots=True)
class Data:
    """Where samples come from. ``synthetic`` makes them from the family's batch spec."""

    source: Source = "synthetic"
    path: str | None = None
    split: str = "train"
    text_column: str = "text"
    tokenizer: str = "auto"
    """``auto`` (the model's), ``bytes``, or a folder or hub id."""
    packing: bool = True
    padding: Literal["length", "longest"] = "length"
    """Without packing: pad to ``batch.sequence_length``, or to the longest sample of a micro-batch."""
    document_mask: bool = True
    assistant_only_loss: bool = False
    workers: Count = 0
    shuffle: bool = True
    options: DataOptions = field(default_factory=DataOptions)

    @property
    def padded(self) -> Padding:
        """How samples of text share a shape."""
        return "packed" if self.packing else self.padding


@dataclass(frozen=True, slots=True)
class Batch:
    """Sizes of a step. Exactly one of ``accumulation`` and ``global_batch`` decides the other."""

    micro_batch: Positive = 1
    sequence_length: Positive | None = None
    """Tokens per sample of text; None for families without one."""
    height: Positive | None = None
    width: Positive | None = None
    frames: Positive | None = None
    """Pixels and frames of image and video families."""
    accumulation: Positive = 1
    global_batch: Positive | None = None


@dataclass(frozen=True, slots=True)
class Muon:
    """Options of ``optimizer.name: muon``, with the defaults of ``torch.optim.Muon`` (torch 2.13)."""

    momentum: BelowOne = 0.95
    nesterov: bool = True
    newton_schulz_steps: Annotated[int, Keywords(minimum=1, maximum=99)] = 5
    newton_schulz_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    epsilon: AboveZero = 1e-7
    """Added to the norm that a momentum is divided by."""
    adjust_learning_rate: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on the rate of an A x B matrix: ``0.2 sqrt(max(A, B))``, or ``sqrt(max(1, A / B))``."""
    adamw_learning_rate: AtLeastZero | None = None
    """Rate of the parameters that AdamW updates; None is ``learning_rate``. Both follow the schedule."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimizer. ``implementation`` auto is the fused kernel on every device."""

    name: OptimizerName = "adamw"
    learning_rate: AtLeastZero = 1e-4
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    epsilon: AtLeastZero = 1e-8
    weight_decay: AtLeastZero = 0.1
    momentum: BelowOne = 0.0
    implementation: Implementation = "auto"
    clip_grad_norm: AboveZero | None = 1.0
    scale_learning_rate: Literal["none", "linear", "sqrt"] = "none"
    """How the rate follows the world size; ``none`` keeps it (the global batch is explicit)."""
    muon: Muon | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning-rate schedule over optimizer steps."""

    name: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: Count = 0
    minimum_ratio: Ratio = 0.0


@dataclass(frozen=True, slots=True)
class Sharding:
    """What accelerate's YAML cannot express."""

    layout: Layout = "native"
    param_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """None: what the YAML's ``mixed_precision`` says."""
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = "float32"
    output_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    reshard_after_forward: Positive | None = None
    """Reshard to this many ranks after forward; None leaves the YAML's boolean."""
    prefetch: Count | None = None
    """FSDP units to prefetch; 1 is FSDP2's implicit prefetch. None: 2 with expert parallelism, else 1."""
    accumulation: GradientAccumulation = "sharded"
    """Accumulated gradients: reduced after every micro-batch, or kept unsharded (no sync)."""
    checkpointing: Checkpointing | None = None
    compile: bool | None = None
    """Whether blocks are compiled; None: on GPUs, where that is known to work."""
    grouping: Grouping = field(default_factory=Grouping)
    """Which parameters outside the blocks form units, in the native layout."""
    expert_parallel: Positive = 1
    """Ranks over which the experts of each layer are distributed; divides ``dp_shard`` x ``cp`` x ``tp``."""
    sequence_parallel: bool = False
    """Whether the ranks of a tensor-parallel group also divide the hidden states between its regions."""

    @property
    def units_ahead(self) -> int:
        """FSDP units that are prefetched."""
        if self.prefetch is not None:
            return self.prefetch
        # The exchange of tokens makes the host wait in each layer: the next all-gather is issued before it.
        return 2 if self.expert_parallel > 1 else 1


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """When training state is written and what is kept."""

    every_steps: Positive | None = None
    keep_last: Positive = 2
    keep_every: Positive | None = None
    mode: Literal["async", "sync"] = "async"
    at_end: bool = True


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Validation during training; ``data`` None holds out ``holdout`` of the training data."""

    every_steps: Positive | None = None
    batches: Positive = 8
    holdout: BelowOne = 0.0
    data: Data | None = None
    samples: Count = 0

    @property
    def wanted(self) -> bool:
        """Whether the run validates while it trains: it says when, and has something to validate on."""
        return self.every_steps is not None and (self.data is not None or self.holdout > 0.0)

    @property
    def sampled(self) -> bool:
        """Whether the run writes samples while it trains."""
        return self.every_steps is not None and self.samples > 0


@dataclass(frozen=True, slots=True)
class Ema:
    """Sharded exponential moving average of the trained parameters; decay None switches it off."""

    decay: BelowOne | None = None


@dataclass(frozen=True, slots=True)
class Tracking:
    """Experiment services that receive every ``log_every``-th step in addition to ``metrics.jsonl``."""

    backends: tuple[TrackerName, ...] = ()
    log_every: Positive = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training run. Processes, mesh, wrapping, offload and precision are the accelerate YAML's."""

    model: ModelChoice
    method: Method = Method()
    objective: Objective = Objective()
    data: Data = Data()
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    sharding: Sharding = Sharding()
    checkpoints: Checkpoints = Checkpoints()
    evaluation: Evaluation = Evaluation()
    ema: Ema = Ema()
    tracking: Tracking = Tracking()
    steps: Positive | None = None
    epochs: AboveZero | None = None
    seed: int = 0
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
