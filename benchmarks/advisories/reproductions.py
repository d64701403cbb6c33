"""The registry of reproductions, and what they share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Seen = bool | str
"""Whether the effect is seen; a text says what was seen, and the empty text that it was not."""


@dataclass(frozen=True, slots=True)
class Case:
    """How an advisory is reproduced.

    Attributes:
        show: Returns what is seen; its docstring says what is looked at.
        affected: Packages and versions with the bug.
        other: The same packages without it: repaired, or from before the bug; None where none runs.
        ranks: Number of gloo processes.
    """

    show: Callable[[], Seen]
    affected: Mapping[str, str]
    other: Mapping[str, str] | None
    ranks: int


CASES: dict[str, Case] = {}
"""Cases by the names of the advisories."""


def case(
    affected: str, other: str | None, *, beside: str = "", ranks: int = 1
) -> Callable[[Callable[[], Seen]], Callable[[], Seen]]:
    """Register a function under the advisory of its name.

    Args:
        affected: Affected packages, as ``name==version`` with blanks between them.
        other: The same without the bug; None where all later releases have it.
        beside: Packages that both sides need.
        ranks: Number of gloo processes.
    """

    def register(show: Callable[[], Seen]) -> Callable[[], Seen]:
        second = None if other is None else _pins(f"{other} {beside}")
        CASES[show.__name__.replace("_", "-")] = Case(show, _pins(f"{affected} {beside}"), second, ranks)
        return show

    return register


def _pins(text: str) -> dict[str, str]:
    return dict(pin.split("==") for pin in text.split())


def start_gloo() -> None:
    """Join the gloo group of the process: one rank, or those that the environment names."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {
        name: os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))
    }
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    world = int(os.environ["WORLD_SIZE"])
    store = dist.HashStore() if world == 1 else dist.FileStore(os.environ["STORE"], world)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=world)


def raised(call: Callable[[], object], *messages: str) -> Seen:
    """Return the first line of the error that a call ends with, or the empty text where it passes.

    Raises:
        Exception: The call ends with another error than one that has one of the messages.
    """
    try:
        call()
    except BaseException as error:  # CheckpointException of torch is not an Exception
        text = f"{type(error).__name__}: {error}"
        if not any(message in text for message in messages):
            raise
        return text.strip().splitlines()[0][:160]
    return ""


def accelerator(plugin: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return an accelerator that shards on the CPU: accelerate itself promotes device types alone to FSDP."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    start_gloo()
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    given = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "cpu_ram_efficient_loading": False,
    }
    given |= {"transformer_cls_names_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
    made = FullyShardedDataParallelPlugin(**(given | (plugin or {})))
    accelerator = Accelerator(cpu=True, **options)
    if accelerator.mixed_precision != "no":
        made.set_mixed_precision(accelerator.mixed_precision)
    for state in (AcceleratorState._shared_state, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = made
    return accelerator


def llama(dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """Return a Llama of two layers and 32 features."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(size | {"num_key_value_heads": 4, "vocab_size": 64} | sizes))).to(
        dtype
    )


def lora(model: Any, **options: Any) -> Any:
    """Return a model with adapters of rank 4 on two projections."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**({"r": 4, "target_modules": ["q_proj", "v_proj"]} | options)))


def prepared(accelerator: Any, model: Any) -> tuple[Any, Any]:
    """Return a model and its optimizer after accelerate's preparation."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3))  # type: ignore[no-any-return]


def tokens() -> torch.Tensor:
    """Return one sequence of 16 tokens."""
    return torch.arange(16).reshape(1, 16)


def micro_batch(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Train one micro-batch."""
    with accelerator.accumulate(model):
        accelerator.backward(model(input_ids=tokens(), labels=tokens()).loss)
        optimizer.step()


def shared_folder() -> Path:
    """Return a folder that all ranks of the case see."""
    store = os.environ.get("STORE")
    return Path(store).parent if store else Path(tempfile.mkdtemp())
