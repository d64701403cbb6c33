"""What the pool's ranks do with sequences that are split over them."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import (
    BERT,
    CASES,
    LLAMA,
    MOE,
    SD3,
    T5,
    WINDOWS,
    Case,
    inputs_for,
    micro_batch,
    recipe_for,
    write_model,
)
from ranks import replica_hash, share, weights_of
from torch import nn

from fsdptool.distributed.session import Session, open_session
from fsdptool.errors import FsdptoolError
from fsdptool.families.registry import family_of
from fsdptool.families.synthetic import synthesise
from fsdptool.modeling.divided_dropout import agree
from fsdptool.modeling.tensor_parallel import by_name
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Batch, Checkpoints, Data, Evaluation, Objective, Recipe, Sharding
from fsdptool.runs.events import EventLog
from fsdptool.runs.manifest import Kind
from fsdptool.source import resolve
from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
from fsdptool.training.checkpoint.split_tensors import Division
from fsdptool.training.evaluate import evaluate
from fsdptool.training.memory_meter import CpuMeter, live_bytes
from fsdptool.training.sampling import open_sampler
from fsdptool.training.state import Assembled, RunState
from fsdptool.training.trainer import assemble


def _opened(folder: Path, recipe: Recipe, mesh: ParallelDims, name: str) -> tuple[Any, Any]:
    session, assembled, _ = _divided(folder, recipe, mesh, name)
    return session, assembled


def _divided(
    folder: Path, recipe: Recipe, mesh: ParallelDims, name: str
) -> tuple[Session, Assembled, Division]:
    torch.manual_seed(recipe.seed)
    inputs = inputs_for(CASES[name], folder, recipe, mesh=mesh)
    session = open_session(inputs.settings, recipe.sharding.expert_parallel)
    return session, assemble(inputs, session), Division(session.tensor, by_name(inputs.units.placements))


def validated(folder: Path, recipe: Recipe, mesh: ParallelDims) -> dict[str, Any]:
    """Return the validation loss before training, its items, the tokens of a step and experts' load."""
    session, assembled = _opened(folder, recipe, mesh, "moe")
    data = [share(session, step, "moe", 4, torch.float32) for step in range(2)]
    found = evaluate(assembled.model, assembled.objective, data, session, assembled.stepper.order)
    outcome = assembled.stepper.run(data[0], rate=assembled.rate)
    return {
        "loss": found.loss,
        "items": found.items,
        "weight": outcome.weight,
        "load": outcome.metrics["expert_load"],
    }


def measured(
    folder: Path, recipe: Recipe, mesh: ParallelDims, name: str = "causal", balanced: bool = False
) -> int:
    """Return the bytes alive at the peak of a step, once optimizer states exist.

    Batches are what the family says that a run of the recipe has. The least of three steps counts: the
    profiler may miss a release by gloo's own threads, never an allocation. What the process holds from
    earlier cases does not count.

    Args:
        folder, recipe, mesh, name: What is trained.
        balanced: Whether routers send every expert equally many tokens, as plans suppose.
    """
    gc.collect()
    before = live_bytes()
    session, assembled = _opened(folder, recipe, mesh, name)
    if balanced:
        _balance(assembled.model, recipe.sharding.expert_parallel)
    spec = resolve(recipe.model.reference)
    specs = family_of(spec).batch_spec(spec.config, recipe)
    generator = torch.Generator().manual_seed(session.data_rank)
    peaks = []
    for step in range(4):
        batches = [_padded(synthesise(specs, generator)) for _ in range(recipe.batch.accumulation)]
        meter = CpuMeter()
        with meter.step(step + 1):
            assembled.stepper.run(batches, rate=assembled.rate)
        peaks.append(meter.last()[0])
    return min(peak for peak in peaks[1:] if peak is not None) - before


def _padded(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad a sample, where there is a mask: transformers drops one that masks nothing."""
    if "attention_mask" in batch:
        batch["attention_mask"][0, -1] = 0
    return batch


def _balance(model: nn.Module, ranks: int) -> None:
    """Let the tokens of each micro-batch choose all experts of a mixture in turn."""

    def choose(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, index, *rest = args
        held = next(module.parameters()).shape[0]
        return hidden, torch.arange(index.numel()).remainder(held * ranks).view_as(index), *rest

    for path, module in model.named_modules():
        if path.rpartition(".")[2] == "experts":
            module.register_forward_pre_hook(choose)


def dropping(folder: Path, recipe: Recipe, mesh: ParallelDims, recomputed: bool) -> dict[str, Any]:
    """Train a model that drops elements; return losses, weights, and the random numbers inside a region."""
    torch.manual_seed(recipe.seed + dist.get_rank())
    inputs = inputs_for(CASES["gpt2"], folder, recipe, mesh=mesh, activation_checkpointing=recomputed)
    session = open_session(inputs.settings)
    assembled = assemble(inputs, session)
    agree(session.tensor)
    block = assembled.model.transformer.h[0]
    numbers: dict[str, list[str]] = {"divided": [], "whole": []}
    for name, module in (("divided", block.attn.c_proj), ("whole", block.attn.resid_dropout)):

        def note(*_: Any, name: str = name) -> None:
            numbers[name].append(replica_hash([torch.get_rng_state()]))

        module.register_forward_pre_hook(note)
    losses = [
        assembled.stepper.run(share(session, step, "gpt2", 4, torch.float32), rate=assembled.rate).loss
        for step in range(3)
    ]
    whole = [p for name, p in sorted(weights_of(assembled).items()) if ".ln_" in name or "wpe" in name]
    return {"losses": losses, "whole": replica_hash(whole), "numbers": numbers}


class Prompts:
    """Examples to continue, as a loader hands them out."""

    samples_per_epoch = 4

    def example(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample ``index`` of the causal case."""
        return {key: value[:1] for key, value in micro_batch(CASES["causal"], 0, index).items()}


def continued(folder: Path, recipe: Recipe, mesh: ParallelDims) -> str:
    """Return what is generated after a step."""
    session, assembled = _opened(folder, recipe, mesh, "causal")
    assembled.stepper.run(share(session, 0, "causal", 4, torch.float32), rate=assembled.rate)
    wanted = dataclasses.replace(
        recipe, evaluation=Evaluation(samples=1), data=Data(source="synthetic", options={"sample_tokens": 7})
    )
    loader: Any = Prompts()
    sampler = open_sampler(
        wanted, resolve(recipe.model.reference), assembled.objective, session, folder, loader
    )
    assert sampler is not None
    written = sampler.write(sampler.make(assembled.model), session.world_size)
    return written[0].read_text() if session.is_main else ""


def resumed(
    folder: Path,
    recipe: Recipe,
    mesh: ParallelDims,
    run: str | None,
    until: int,
    name: str = "causal",
    kind: Kind = "sharded",
) -> dict[str, Any]:
    """Train from the newest checkpoint of ``run`` (None keeps none) to step ``until`` and save.

    Returns losses, the number of steps and the whole weights (rank 0 only).
    """
    session, assembled, division = _divided(folder, recipe, mesh, name)
    data = Numbered(session, name)
    state = RunState(
        assembled.model, assembled.optimizer, data, recipe.seed, session.rank, assembled.scaler, assembled.ema
    )
    saver = None
    if run is not None:
        events = EventLog(Path(run), session.rank, 0)
        saver = RunCheckpointer(
            Path(run, "checkpoints"),
            Checkpoints(),
            kind=kind,
            events=events,
            resume="auto",
            division=division,
        )
        saver.load(state)
    losses = []
    while state.step < until:
        outcome = assembled.stepper.run(next(data), rate=assembled.rate)
        losses.append(outcome.loss)
        state.step += 1
    if saver is not None:
        saver.save(state, wait=True)
        saver.close()
    after = weights_of(assembled, division)
    return {"losses": losses, "steps": len(losses), "after": after if session.is_main else None}


class Numbered:
    """Micro-batches of a case, with a position."""

    samples_per_epoch = 64

    def __init__(self, session: Any, name: str) -> None:
        self.session, self.name, self.at = session, name, 0

    @property
    def samples(self) -> int:
        return 8 * self.at

    @property
    def epoch(self) -> float:
        return self.samples / self.samples_per_epoch

    def __iter__(self) -> Numbered:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        self.at += 1
        return share(self.session, self.at - 1, self.name, 4, torch.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]

    def close(self) -> None:
        """Nothing to end."""


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
GEMMA2 = {
    **LLAMA,
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 6,
}
SINKS = {
    **MOE,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
MAMBA = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 16,
    "state_size": 4,
    "num_hidden_layers": 2,
}
JAMBA = {**LLAMA, "model_type": "jamba", "architectures": ["JambaForCausalLM"], "use_mamba_kernels": False}
BLOOM = {
    "model_type": "bloom",
    "architectures": ["BloomForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 24,
    "n_layer": 2,
    "n_head": 4,
}

UNSPLIT: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "recurrent": (MAMBA, "causal_lm", {}),
    "mixed": (JAMBA, "causal_lm", {}),
    "soft caps": (GEMMA2, "causal_lm", {}),
    "sinks": (SINKS, "causal_lm", {"objective": Objective("causal_lm", {"auxiliary": 0})}),
    "encoder": (BERT, "masked_lm", {}),
    "seq2seq": (T5, "seq2seq", {}),
    "denoiser": (SD3, "flow_matching", {}),
    "eager": (LLAMA, "causal_lm", {"attention": "eager"}),
    "compiled": (LLAMA, "causal_lm", {"sharding": Sharding(compile=True)}),
    "long rope": ({**LLAMA, "rope_parameters": ROPE}, "causal_lm", {}),
    "no positions": (BLOOM, "causal_lm", {}),
    "passed round, packed": (LLAMA, "causal_lm", {}),
    "passed round, windows": (WINDOWS, "causal_lm", {"data": Data(packing=False)}),
    "passed round, dropping": (
        {**LLAMA, "attention_dropout": 0.1},
        "causal_lm",
        {"data": Data(packing=False)},
    ),
    "experts, filled up": (MOE, "causal_lm", {"batch": Batch(micro_batch=2, sequence_length=14)}),
}


def refused(folder: str, what: str) -> str:
    """Return how a run that cannot split its sequences is refused, before or in its first forward."""
    config, objective, changes = UNSPLIT[what]
    case = Case(what, config, (), objective, ("q_proj",))
    changes = dict(changes)
    attention = changes.pop("attention", None)
    rank = dist.get_rank()
    reference = write_model(Path(folder, f"model-{rank}"), config)
    recipe = recipe_for(case, reference, "full", **changes)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, attention=attention))
    strategy = {"cp_comm_strategy": "alltoall"} if what.startswith("passed round") else {}
    try:
        inputs = inputs_for(
            case, Path(folder), recipe, mesh=ParallelDims(dp_shard=1, cp=2), wrap_policy="none", **strategy
        )
        session = open_session(inputs.settings)
        assembled = assemble(inputs, session)
        assembled.stepper.run([micro_batch(case, 0, 0)], rate=assembled.rate)
    except FsdptoolError as error:
        return error.message
    return "not refused"
