"""Models of which each sample uses other parts, and what the ranks do with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cases import Case, inputs_for, recipe_for, write_model
from context_cases import Numbered
from pool import Pool
from ranks import replica_hash, weights_of
from torch import nn

from fsdptool.distributed.session import Session, open_session
from fsdptool.records.checkpointing import Checkpointing
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Checkpoints, Optimizer, Recipe, Sharding
from fsdptool.runs.events import EventLog
from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
from fsdptool.training.evaluate import evaluate
from fsdptool.training.state import RunState
from fsdptool.training.trainer import assemble

COUNT = 4
"""Micro-batches of a global step: of two samples, over one, two or four ranks."""
HYBRID = ParallelDims(dp_replicate=2, dp_shard=2)


class Expert(nn.Linear):
    """One expert, a module of its own."""


class Block(nn.Module):
    """A layer and experts of which only those run that a row of the batch is for."""

    def __init__(self, width: int = 16, experts: int = 3) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.experts = nn.ModuleList(Expert(width, width, bias=False) for _ in range(experts))

    def forward(self, x: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        """Add to each row what its expert says."""
        hidden = self.lin(x)
        out = torch.zeros_like(hidden)
        # The first expert of a batch is the one of its first row: ranks differ in the order, too.
        for index in dict.fromkeys(kind.tolist()):
            rows = (kind == index).nonzero().flatten()
            out = out.index_add(0, rows, self.experts[index](hidden[rows]))
        return x + out


class Tower(nn.Module):
    """What runs for samples that have a picture."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features."""
        for block in self.blocks:
            x = block(x, torch.zeros(len(x), dtype=torch.int64))
        return x


class Net(nn.Module):
    """Blocks with experts. The last expert of each is never used; ``turns`` says how often a tower runs."""

    def __init__(self, width: int = 16, experts: int = 4, tower: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, experts) for _ in range(2))
        # After the layers, though it runs before them.
        self.tower = Tower(width) if tower else None
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, kind: torch.Tensor, turns: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits."""
        if self.tower is not None and turns is not None:
            for _ in range(int(turns.max())):
                x = x + self.tower(x)
        for layer in self.layers:
            x = layer(x, kind)
        return self.head(x)


SWITCH = {
    "model_type": "switch_transformers",
    "architectures": ["SwitchTransformersForConditionalGeneration"],
    "vocab_size": 96,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "num_heads": 4,
    "num_experts": 8,
    "expert_capacity": 64,
    "dropout_rate": 0.0,
    "router_jitter_noise": 0.0,
    "decoder_start_token_id": 0,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_TEXT = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 90,
    "vision_feature_layer": -1,
    "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **_VISION},
    "text_config": {"model_type": "llama", **_TEXT},
}
QWEN2_VL = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "image_token_id": 90,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "vision_config": {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 24,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "text_config": {
        "model_type": "qwen2_vl_text",
        **_TEXT,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0},
    },
}

Batch = dict[str, torch.Tensor]


def _module_batch(step: int, index: int, generator: torch.Generator) -> Batch:
    first = (step + index) % 3
    kind = torch.tensor([first, (first + (step % 2)) % 3])
    return {
        "x": torch.randn(2, 16, generator=generator),
        "kind": kind,
        "labels": torch.randint(0, 4, (2,), generator=generator),
    }


def _tower_batch(step: int, index: int, generator: torch.Generator) -> Batch:
    batch = _module_batch(step, index, generator)
    turns = (0, 1, 0, 2)[(step + index) % 4]
    return {**batch, "turns": torch.full((2,), turns)} if turns else batch


def _text_to_text(step: int, index: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(3, 96, (2, 6), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[:, :3].clone()}


def _text_or_image(step: int, index: int, generator: torch.Generator, *, qwen: bool = False) -> Batch:
    """Text alone in most micro-batches, and in all of every third step."""
    tokens = torch.randint(3, 80, (2, 12), generator=generator)
    labels = tokens.clone()
    batch = {"input_ids": tokens, "labels": labels}
    if step % 3 == 1 or (step + index) % 3:
        return {**batch, **({"mm_token_type_ids": torch.zeros_like(tokens)} if qwen else {})}
    tokens[:, :4], labels[:, :4] = 90, -100
    if not qwen:
        return {**batch, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    types = torch.zeros_like(tokens)
    types[:, :4] = 1
    return {
        **batch,
        "pixel_values": torch.randn(2, 16, 96, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": types,
    }


def _qwen_batch(step: int, index: int, generator: torch.Generator) -> Batch:
    return _text_or_image(step, index, generator, qwen=True)


INPUTS = {
    "x": {"shape": [16]},
    "kind": {"shape": [], "dtype": "int64", "high": 3},
    "labels": {"shape": [], "dtype": "int64", "high": 4},
}
SETTINGS: dict[str, Any] = {"experts": 4}
EXPERTS = Case(
    "experts", {}, ("Block",), "module", ("lin", "experts.0", "experts.1"), options={"inputs": INPUTS}
)
UNEVEN: dict[str, tuple[Case, Callable[[int, int, torch.Generator], Batch]]] = {
    "experts": (EXPERTS, _module_batch),
    "experts alone": (dataclasses.replace(EXPERTS, wrap=("Block", "Expert")), _module_batch),
    "tower": (dataclasses.replace(EXPERTS, lora=("lin",)), _tower_batch),
    "switch": (
        Case("switch", SWITCH, ("SwitchTransformersBlock",), "seq2seq", ("q", "wi")),
        _text_to_text,
    ),
    "llava": (
        Case("llava", LLAVA, ("CLIPEncoderLayer", "LlamaDecoderLayer"), "causal_lm", ("q_proj", "fc1")),
        _text_or_image,
    ),
    "qwen2-vl": (
        Case(
            "qwen2-vl",
            QWEN2_VL,
            ("Qwen2VLVisionBlock", "Qwen2VLDecoderLayer"),
            "causal_lm",
            ("q_proj", "qkv"),
        ),
        _qwen_batch,
    ),
}
"""Each model and its micro-batches, by step and index."""

PLAIN = Optimizer(learning_rate=2e-3, betas=(0.9, 0.99), epsilon=1e-6, weight_decay=0.05, clip_grad_norm=None)
CLIPPED = dataclasses.replace(PLAIN, clip_grad_norm=0.3)


@dataclass(frozen=True)
class Way:
    """A way to train a model that has to give what one rank gives."""

    ranks: int = 2
    count: int = 2
    mesh: ParallelDims | None = None
    method: str = "full"
    optimizer: Optimizer = PLAIN
    sharding: Sharding = field(default_factory=Sharding)
    settings: dict[str, Any] = field(default_factory=dict)
    stop: int | None = None
    """Save after this step and go on in new processes."""


WAYS: dict[str, Way] = {
    "two ranks": Way(),
    "accumulation": Way(count=8),
    "unsharded accumulation": Way(count=8, sharding=Sharding(accumulation="unsharded")),
    "clipping": Way(count=4, optimizer=CLIPPED),
    "LoRA": Way(count=4, method="lora"),
    "replicated LoRA": Way(count=4, method="lora_replicated", optimizer=CLIPPED),
    "hybrid": Way(4, 4, HYBRID),
    "hybrid, accumulation": Way(4, 8, HYBRID, optimizer=CLIPPED),
    "hybrid, unsharded accumulation": Way(4, 8, HYBRID, sharding=Sharding(accumulation="unsharded")),
    "replicas alone": Way(2, 4, ParallelDims(dp_replicate=2, dp_shard=1)),
    "no reshard": Way(count=4, settings={"reshard_after_forward": False}),
    "reshard to two": Way(4, 4, sharding=Sharding(reshard_after_forward=2)),
    "prefetch two": Way(count=4, sharding=Sharding(prefetch=2)),
    "checkpointing": Way(count=4, settings={"activation_checkpointing": True}),
    "every second block": Way(
        count=4,
        sharding=Sharding(checkpointing=Checkpointing(mode="every_n", every_n=2)),
        settings={"activation_checkpointing": True},
    ),
    "offload": Way(count=4, settings={"cpu_offload": True}),
    "resume": Way(count=4, stop=3),
    "hybrid, resume": Way(4, 4, HYBRID, stop=3),
}


def micro_batch(name: str, step: int, index: int) -> Batch:
    """Return micro-batch ``index`` of a step."""
    return UNEVEN[name][1](step, index, torch.Generator().manual_seed(1000 * step + index))


def recipe(name: str, way: Way, folder: Path) -> Recipe:
    """Write the model and return its recipe."""
    case = UNEVEN[name][0]
    reference = write_model(folder / "model", case.config) if case.config else "uneven_cases:Net"
    return recipe_for(case, reference, way.method, optimizer=way.optimizer, sharding=way.sharding)


def _resolve(name: str) -> Callable[[str], Any]:
    """A module of one's own: its reference, with its arguments, may be imported."""
    from fsdptool.source import resolve

    def own(reference: str) -> Any:
        spec = resolve(reference, trust_remote_code=True)
        return dataclasses.replace(spec, config={**SETTINGS, "tower": name == "tower"})

    return own if not UNEVEN[name][0].config else resolve


class Messages:
    """Counts the messages by which ranks agree, and steps without any."""

    def __init__(self, assembled: Any) -> None:
        order, self.sent = assembled.stepper.order, 0
        exchange = order._exchange

        def counted(wanted: Any) -> Any:
            self.sent += 1
            return exchange(wanted)

        order._exchange = counted

    def take(self) -> int:
        """Return the messages since the last call."""
        sent, self.sent = self.sent, 0
        return sent


def train(
    name: str,
    way: Way,
    folder: Path,
    chosen: Recipe,
    steps: int,
    run: str | None = None,
    evaluated: bool = False,
    batch_of: Callable[[str, int, int], Batch] = micro_batch,
) -> dict[str, Any]:
    """Train to step ``steps``, from the newest checkpoint of ``run`` if there is one, and save into it."""
    torch.manual_seed(chosen.seed)
    with mock.patch("cases.resolve", _resolve(name)):
        inputs = inputs_for(UNEVEN[name][0], folder, chosen, mesh=way.mesh, **way.settings)
    session = open_session(inputs.settings)
    assembled = assemble(inputs, session)
    messages = Messages(assembled)
    before = weights_of(assembled)
    data = Numbered(session, "causal")
    state = RunState(assembled.model, assembled.optimizer, data, chosen.seed, session.rank)
    saver = None
    if run is not None:
        saver = RunCheckpointer(
            Path(run, "checkpoints"),
            Checkpoints(),
            kind="sharded",
            events=EventLog(Path(run), session.rank, 0),
            resume="auto",
        )
        saver.load(state)
    found: dict[str, Any] = {"losses": [], "norms": [], "messages": [], "evaluations": []}
    while state.step < steps:
        batches = share(session, way.count, lambda index: batch_of(name, state.step, index))
        outcome = assembled.stepper.run(batches, rate=assembled.rate)
        found["losses"].append(outcome.loss)
        found["norms"].append(outcome.grad_norm)
        found["messages"].append(messages.take())
        state.step += 1
        data.at += 1
        if evaluated:
            held_out = [share(session, way.count, lambda index: batch_of(name, 900 + state.step, index))]
            result = evaluate(
                assembled.model, assembled.objective, held_out, session, assembled.stepper.order
            )
            found["evaluations"].append(result.loss)
            messages.take()
    if saver is not None:
        saver.save(state, wait=True)
        saver.close()
    after = weights_of(assembled)
    states = assembled.optimizer.torch_optimizer.state
    unused = [
        key for key, part in assembled.optimizer._stand_ins.items() if not float(states[part].get("step", 0))
    ]
    return {
        **found,
        "hash": replica_hash([after[key] for key in sorted(after)]),
        "unused": sorted(unused),
        "before": before if session.is_main else None,
        "after": after if session.is_main else None,
    }


def share(session: Session, count: int, of: Callable[[int], Batch]) -> list[Batch]:
    """Return this rank's micro-batches of a global step."""
    return [of(index) for index in range(count) if index % session.data_ranks == session.data_rank]


def on_one_rank(pool: Pool, name: str, way: Way, folder: Path, chosen: Recipe, steps: int) -> dict[str, Any]:
    """Train the same global batches on one rank, where no collective is."""
    alone = Way(1, way.count, method=way.method, optimizer=way.optimizer)
    found: dict[str, Any] = pool.run(
        train, 1, name, alone, folder, dataclasses.replace(chosen, sharding=Sharding()), steps
    )[0]
    return found


def on_ranks(
    pool: Pool, name: str, way: Way, folder: Path, chosen: Recipe, steps: int
) -> list[dict[str, Any]]:
    """Train on the way's ranks; with a stop, in two processes each."""
    if way.stop is None:
        return pool.run(train, way.ranks, name, way, folder, chosen, steps)
    run = folder / "run"
    run.mkdir()
    before = pool.run(train, way.ranks, name, way, folder, chosen, way.stop, str(run))
    after = pool.run(train, way.ranks, name, way, folder, chosen, steps, str(run))
    return [
        {**later, **{key: earlier[key] + later[key] for key in ("losses", "norms")}}
        for earlier, later in zip(before, after, strict=True)
    ]
