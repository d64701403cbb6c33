"""What a plan says of estimates that nothing has verified, and of what is planned only."""

from __future__ import annotations

from fsdptool.records.plan import BESIDE_TP, TrainingLoop

CONTEXT_PARALLEL = (
    "context parallelism on GPUs is unverified: the attention kernel follows torch's rules, and the memory"
    " that NCCL keeps for the group is not known"
)

TENSOR_PARALLEL = (
    "tensor parallelism on GPUs is unverified: no collective of the group is assumed to overlap with"
    " computation"
)

_ASSUMED = {
    "compile": "compiled blocks",
    "float8": "linear layers of the blocks in float8",
    "async_tp": "collectives of tensor parallelism that overlap with products as much as they can (async TP)",
    "fused_norm": "norms in one kernel",
    "fused_rope": "rotary embeddings in one kernel",
    "fused_glu": "gated activations in one kernel",
    "fused_lora": "adapters in the products of their layers",
    "float8_rowwise": "float8 scaled by row",
    "mxfp8": "float8 scaled by blocks of 32",
}

EXPERT_PARALLEL = (
    "expert parallelism on GPUs is unverified: routing is assumed to be balanced, and no all-to-all is"
    " assumed to overlap with computation"
)


def assumed_note(loop: TrainingLoop) -> str:
    """Return what a plan says of a loop that does more than fsdptool's own."""
    names = [_ASSUMED[name] for name in loop.assumed]
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    beside = " beside tensor parallelism" if set(loop.assumed) <= set(BESIDE_TP) else ""
    return (
        f"planned only: the step time assumes {listed}, which fsdptool train does not do{beside}; memory is"
        " that of eager blocks"
    )
