"""A plain single-process PyTorch loop, written without the engine: what every run is held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from cases import CASES, MICRO_BATCHES, STEPS, Case, micro_batch
from torch import nn
from torch.nn import functional

from fsdptool.records.recipe import Recipe

Batch = dict[str, torch.Tensor]


def plain_model(case: Case, config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Build the real model with the library itself."""
    if "_class_name" in config:
        import diffusers

        cls = getattr(diffusers, config["_class_name"])
        model = cls.from_config({k: v for k, v in config.items() if not k.startswith("_")})
        # Past diffusers' own ``to``, which prints advice.
        return nn.Module.to(model, dtype).train()
    import transformers

    cls = getattr(transformers, config["architectures"][0])
    settings = transformers.AutoConfig.for_model(
        config["model_type"], **{k: v for k, v in config.items() if k != "model_type"}
    )
    return cls(settings).to(dtype).train()


def load(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy values in by name; every parameter must be there."""
    named = dict(model.named_parameters(remove_duplicate=False))
    assert set(named) == set(weights), sorted(set(named) ^ set(weights))[:5]
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(weights[name])


def adapted(case: Case, recipe: Recipe, model: nn.Module) -> nn.Module:
    """Wrap the model as a person who uses peft would."""
    from peft import LoraConfig, inject_adapter_in_model

    lora = recipe.method.lora
    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(case.lora),
        target_parameters=list(lora.target_parameters) or None,
    )
    return inject_adapter_in_model(settings, model)


def targets(case: Case, batch: Batch) -> torch.Tensor:
    """Return the labels aligned with the logits."""
    if case.objective == "causal_lm":
        return functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return batch["labels"]


def items(case: Case, batch: Batch) -> int:
    """Count what the loss is a mean over."""
    if "latents" in batch:
        return batch["latents"].shape[0]
    if case.objective == "classification":
        return batch["labels"].shape[0]
    return int((targets(case, batch) != -100).sum())


def forward(case: Case, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the prediction and whatever is added to the mean loss of a micro-batch."""
    if case.objective == "flow_matching":
        sigma = batch["sigma"].view(-1, 1, 1, 1)
        noisy = (1 - sigma) * batch["latents"] + sigma * batch["noise"]
        out = model(
            hidden_states=noisy,
            timestep=batch["sigma"] * 1000,
            encoder_hidden_states=batch["encoder_hidden_states"],
            pooled_projections=batch["pooled_projections"],
        )
        return out.sample, 0.0
    if "latents" in batch:
        kept, spread = _schedule(batch)
        out = model(
            kept * batch["latents"] + spread * batch["noise"],
            batch["timestep"],
            encoder_hidden_states=batch["encoder_hidden_states"],
            added_cond_kwargs={"text_embeds": batch["text_embeds"], "time_ids": batch["time_ids"]},
        )
        return out.sample, 0.0
    arguments: dict[str, Any] = {key: value for key, value in batch.items() if key != "labels"}
    if case.objective == "seq2seq":
        labels = batch["labels"]
        start = torch.zeros_like(labels[:, :1])
        arguments["decoder_input_ids"] = torch.cat((start, labels[:, :-1].clamp(min=0)), dim=1)
    if case.name == "packed":
        arguments["attention_mask"] = _block_diagonal(batch["position_ids"], next(model.parameters()).dtype)
    if "router_aux_loss_coef" in case.config:
        out = model(**arguments, output_router_logits=True, use_cache=False)
        return out.logits, case.config["router_aux_loss_coef"] * _balance(out.router_logits, case.config)
    return model(**arguments).logits, 0.0


def _block_diagonal(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask: causal, and only within a document."""
    documents = (positions == 0).cumsum(-1)
    same = documents[:, :, None] == documents[:, None, :]
    causal = torch.ones(positions.shape[1], positions.shape[1], dtype=torch.bool).tril()
    mask = torch.zeros(same.shape, dtype=dtype).masked_fill(~(same & causal), torch.finfo(dtype).min)
    return mask[:, None]


def _balance(router_logits: Any, config: dict[str, Any]) -> torch.Tensor:
    """Switch-Transformer load balance over all layers: experts x sum(share of tokens x mean probability)."""
    experts, top = config.get("num_experts", config.get("num_local_experts")), config["num_experts_per_tok"]
    probabilities = torch.cat(list(router_logits)).softmax(-1)
    chosen = functional.one_hot(probabilities.topk(top, -1).indices, experts).sum(1)
    return experts * (chosen.to(probabilities.dtype).mean(0) * probabilities.mean(0)).sum()


def _schedule(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    kept = (1 - betas).cumprod(0)[batch["timestep"]].view(-1, 1, 1, 1)
    dtype = batch["latents"].dtype
    return kept.sqrt().to(dtype), (1 - kept).sqrt().to(dtype)


def task_loss(case: Case, prediction: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the summed loss."""
    if "latents" in batch:
        aim = batch["noise"] - batch["latents"] if case.objective == "flow_matching" else batch["noise"]
        if case.objective == "v_prediction":
            kept, spread = _schedule(batch)
            aim = kept * batch["noise"] - spread * batch["latents"]
        return ((prediction - aim) ** 2).flatten(1).mean(1).sum()
    return functional.cross_entropy(
        prediction.flatten(0, -2), targets(case, batch).flatten(), reduction="sum"
    )


def distance(
    case: Case, ours: torch.Tensor, theirs: torch.Tensor, batch: Batch, temperature: float
) -> torch.Tensor:
    """Return the summed distillation distance."""
    if "latents" in batch:
        return ((ours - theirs) ** 2).flatten(1).mean(1).sum()
    student = (ours / temperature).log_softmax(-1)
    teacher = (theirs / temperature).softmax(-1)
    divergence = functional.kl_div(student, teacher, reduction="none").sum(-1) * temperature**2
    if case.objective == "classification":
        return divergence.sum()
    return divergence[targets(case, batch) != -100].sum()


def run(
    name: str,
    recipe: Recipe,
    before: dict[str, torch.Tensor],
    teacher_weights: dict[str, torch.Tensor],
    teacher_config: dict[str, Any] | None = None,
    *,
    steps: int = STEPS,
    count: int = MICRO_BATCHES,
    optimizer_of: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """Train a case, or a ``model`` that has its values, and return losses, norms and final weights."""
    case = CASES[name]
    dtype = torch.float64 if recipe.model.dtype == "float64" else torch.float32
    if model is None:
        model = plain_model(case, case.config, dtype)
        if recipe.method.lora is not None:
            model = adapted(case, recipe, model)
        load(model, before)
    teacher = None
    if recipe.method.distillation is not None:
        assert teacher_config is not None
        teacher = plain_model(case, teacher_config, dtype)
        load(teacher, teacher_weights)
        teacher.eval()
    optimizer = (optimizer_of or _adamw(recipe))(_groups(model, recipe))
    losses, norms = [], []
    for step in range(steps):
        batches = [micro_batch(case, step, index) for index in range(count)]
        batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in b.items()} for b in batches]
        total = sum(items(case, batch) for batch in batches)
        step_loss = 0.0
        for batch in batches:
            prediction, extra = forward(case, model, batch)
            loss = task_loss(case, prediction, batch) + extra * items(case, batch)
            if teacher is not None:
                with torch.no_grad():
                    theirs, _ = forward(case, teacher, batch)
                mixed = recipe.method.distillation
                apart = distance(case, prediction, theirs, batch, mixed.temperature)
                loss = (1 - mixed.alpha) * loss + mixed.alpha * apart
            (loss / total).backward()
            step_loss += float(loss.detach())
        trainable = [p for p in model.parameters() if p.requires_grad]
        limit = recipe.optimizer.clip_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(trainable, float("inf") if limit is None else limit)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_loss / total)
        norms.append(float(norm))
    after = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
    return {"losses": losses, "norms": norms, "after": after}


def _groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": recipe.optimizer.weight_decay},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]


def _adamw(recipe: Recipe) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    wanted = recipe.optimizer

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if wanted.name == "sgd":
            return torch.optim.SGD(groups, lr=wanted.learning_rate, momentum=wanted.momentum)
        if wanted.name == "adafactor":
            return torch.optim.Adafactor(groups, lr=wanted.learning_rate, foreach=False)
        return torch.optim.AdamW(
            groups, lr=wanted.learning_rate, betas=wanted.betas, eps=wanted.epsilon, foreach=False
        )

    return make


def compare(found: dict[str, Any], expected: dict[str, Any]) -> tuple[float, float, float]:
    """Return the worst relative loss error, the relative global weight difference and the worst tensor's.

    A tensor may be nothing but rounding: BERT's key biases start at zero, and no loss depends on them. A
    difference below fp64's rounding of the whole model is none.
    """
    losses = max(
        abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found["losses"], expected["losses"], strict=True)
    )
    pairs = [(found["after"][name].double(), tensor.double()) for name, tensor in expected["after"].items()]
    gaps = [float((ours - theirs).norm()) for ours, theirs in pairs]
    scales = [float(theirs.norm()) for _, theirs in pairs]
    apart, size = math.hypot(*gaps), math.hypot(*scales)
    rounding = torch.finfo(torch.float64).eps * size
    worst = max(
        gap / max(scale, 1e-12) if gap > rounding else 0.0 for gap, scale in zip(gaps, scales, strict=True)
    )
    return losses, apart / size, worst
