"""Load balance of mixture-of-experts routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def _text(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


def coefficient(model: nn.Module, wanted: float | None) -> float:
    """Return the weight of the auxiliary loss; 0 where the model has no router that reports.

    DeepSeek-V3 and its relatives balance by a bias instead and have no such setting.
    """
    config = _text(getattr(model, "config", None))
    if not hasattr(config, "output_router_logits") or not hasattr(config, "router_aux_loss_coef"):
        return 0.0
    return float(config.router_aux_loss_coef if wanted is None else wanted)


def balance(model: nn.Module, logits: Sequence[Tensor], weight: float) -> dict[str, Tensor]:
    """Return the weighted auxiliary loss and the tokens each expert received.

    The loss is that of Fedus et al. 2021 (Switch Transformer, equations 4 to 6) with the top-k
    counts of Mixtral: experts x sum over experts of (share of tokens) x (mean router probability),
    both over all layers and tokens.

    Args:
        logits: One [tokens, experts] tensor per sparse layer.
        weight: Its coefficient.
    """
    import torch

    from fsdptool.families.objectives.context_attention import everywhere

    config = _text(model.config)
    top = int(getattr(config, "num_experts_per_tok", 0) or getattr(config, "top_k", 0) or 1)
    own = torch.cat([layer for layer in logits if layer is not None and layer.dim() == 2], dim=0)
    # Of the whole sequence where its ranks hold parts of it; each rank then reports its share of the load.
    layers = everywhere(own)
    probabilities = torch.softmax(layers.float(), dim=-1)
    experts = probabilities.shape[-1]
    chosen = torch.topk(probabilities, min(top, experts), dim=-1).indices
    load = torch.zeros(experts, dtype=torch.float32, device=layers.device)
    load = load.scatter_add(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.float32))
    share = load / layers.shape[0]
    loss = experts * (share * probabilities.mean(dim=0)).sum() * weight
    return {
        "auxiliary": loss,
        "expert_load": load if layers is own else load * (own.shape[0] / layers.shape[0]),
    }
