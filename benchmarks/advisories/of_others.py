"""Reproductions of the advisories of transformers, PEFT, TRL, datasets, bitsandbytes and torchao."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from reproductions import (
    Seen,
    accelerator,
    case,
    llama,
    lora,
    micro_batch,
    prepared,
    raised,
    shared_folder,
    start_gloo,
    tokens,
)

_TRANSFORMERS_4 = "datasets==4.0.0 huggingface_hub==0.36.2 tokenizers=="
"""What releases of transformers before 5.0 need."""

_HTTPX = "httpx==0.28.1 httpcore==1.0.9"
_TRANSFORMERS_5 = f"huggingface_hub==1.5.0 tokenizers==0.22.1 {_HTTPX}"
"""What the first releases of transformers 5 need."""


def _plugin_of_trainer(**fsdp_config: Any) -> Any:
    """Return the plugin that the Trainer makes of ``fsdp_config``."""
    from accelerate import FullyShardedDataParallelPlugin
    from transformers import TrainingArguments

    start_gloo()
    fsdp_config |= {"cpu_ram_efficient_loading": "false", "sync_module_states": "false"}
    given = TrainingArguments(
        output_dir=str(shared_folder()),
        fsdp="full_shard",
        fsdp_config=fsdp_config,
        use_cpu=True,
        report_to="none",
    )
    # The Trainer passes the arguments on where there are any; earlier releases leave them in the environment.
    return FullyShardedDataParallelPlugin(**(getattr(given, "fsdp_plugin_args", None) or {}))


@case(f"transformers==4.57.6 {_TRANSFORMERS_4}0.22.1", f"transformers==5.0.0 {_TRANSFORMERS_5}")
def transformers_fsdp_version_ignored() -> Seen:
    """A file that names version 2 runs FSDP1."""
    return bool(_plugin_of_trainer(version=2).fsdp_version == 1)


@case("transformers==5.10.1", "transformers==5.9.0", beside=_TRANSFORMERS_5)
def transformers_trainer_defaults_to_fsdp2() -> Seen:
    """A file that names no version runs FSDP2."""
    return bool(_plugin_of_trainer().fsdp_version == 2)


@case("transformers==5.9.0", "transformers==5.10.1", beside=_TRANSFORMERS_5)
def transformers_trainer_state_dict_type_ignored() -> Seen:
    """``state_dict_type`` of ``fsdp_config`` does not reach the plugin."""
    chosen = _plugin_of_trainer(version=2, state_dict_type="FULL_STATE_DICT").state_dict_type
    return "" if "FULL" in str(chosen) else str(chosen)


def _trained(model: Any, **arguments: Any) -> Any:
    """Return a Trainer of one step over eight sequences."""
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": tokens()[0], "labels": tokens()[0]} for _ in range(8)]
    given = {"max_steps": 1, "per_device_train_batch_size": 1, "report_to": "none", "save_strategy": "no"}
    return Trainer(
        model, TrainingArguments(output_dir=str(shared_folder()), use_cpu=True, **(given | arguments)),
        train_dataset=rows,
    )  # fmt: skip


@case(
    f"transformers==4.46.2 {_TRANSFORMERS_4}0.20.3",
    f"transformers==4.46.3 {_TRANSFORMERS_4}0.20.3",
    beside="accelerate==1.2.1",
)
def transformers_no_sync_on_wrong_micro_batch() -> Seen:
    """Synchronisation is switched off for the last of two micro-batches."""
    trainer = _trained(llama(), gradient_accumulation_steps=2)
    order: list[str] = []
    no_sync, step = trainer.accelerator.no_sync, trainer.training_step

    def recorded_no_sync(model: Any) -> Any:
        order.append("without")
        return no_sync(model)

    def recorded_step(*arguments: Any, **named: Any) -> Any:
        order.append("step")
        return step(*arguments, **named)

    trainer.accelerator.no_sync, trainer.training_step = recorded_no_sync, recorded_step
    trainer.train()
    return " ".join(order) if order != ["without", "step", "step"] else ""


def _loaded_on_other_rank(sizes: dict[str, Any]) -> Any:
    """Return what the second of two ranks holds after RAM-efficient loading; the first returns None."""
    from transformers import LlamaForCausalLM

    start_gloo()
    folder = shared_folder() / "model"
    rank = torch.distributed.get_rank()
    if rank == 0:
        llama(**sizes).save_pretrained(folder)
    torch.distributed.barrier()
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_VERSION": "2",
    }
    before = _resident_bytes()
    model = LlamaForCausalLM.from_pretrained(folder)
    grown = _resident_bytes() - before
    torch.distributed.barrier()
    return SimpleNamespace(model=model, grown=grown) if rank else None


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@case("transformers==5.5.0", "transformers==5.6.0", beside=_TRANSFORMERS_5, ranks=2)
def transformers_ram_loading_nan_on_other_ranks() -> Seen:
    """The second rank holds memory that nothing has written, which torch is told to fill with NaN."""
    torch.use_deterministic_algorithms(True)
    loaded = _loaded_on_other_rank({})
    return loaded is not None and any(bool(value.isnan().any()) for value in loaded.model.parameters())


@case("transformers==5.3.0", "transformers==5.4.0", beside=_TRANSFORMERS_5, ranks=2)
def transformers_ram_loading_reinitialises() -> Seen:
    """The second rank holds random initial values."""
    torch.use_deterministic_algorithms(True)
    loaded = _loaded_on_other_rank({})
    return loaded is not None and 0.01 < float(loaded.model.lm_head.weight.std()) < 0.04


@case("transformers==5.22.2", "transformers==5.23.0", beside=_HTTPX, ranks=2)
def transformers_ram_loading_commits_host_memory() -> Seen:
    """Loading a model of 131 MB makes the second rank's resident memory grow by as much."""
    loaded = _loaded_on_other_rank({"vocab_size": 64_000, "hidden_size": 256, "tie_word_embeddings": False})
    if loaded is None:
        return ""
    size = sum(value.numel() * 4 for value in loaded.model.parameters())
    return f"{loaded.grown / 1e6:.0f} of {size / 1e6:.0f} MB" if loaded.grown > 0.8 * size else ""


def _fsdp1(model: Any, **options: Any) -> Any:
    """Return a model sharded by FSDP1, a unit for each layer."""
    import functools

    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    given: dict[str, Any] = {"auto_wrap_policy": policy, "use_orig_params": True} | options
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **given)


@case("peft==0.18.1", "peft==0.19.0", ranks=2)
def peft_disable_adapter_fsdp() -> Seen:
    """A forward without the adapter, as for reference log-probabilities, stops under SHARD_GRAD_OP."""
    from torch.distributed.fsdp import ShardingStrategy

    start_gloo()
    model = _fsdp1(lora(llama()), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)

    def step() -> None:
        model(input_ids=tokens())
        with model.module.disable_adapter(), torch.no_grad():
            model(input_ids=tokens())

    return raised(step, "leaf")


@case("peft==0.20.0", "peft==0.21.0", ranks=2)
def peft_incomplete_adapter_saved() -> Seen:
    """A file with empty or flat tensors is written without a warning."""
    import warnings

    start_gloo()
    model = _fsdp1(lora(llama()))
    held = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        written = shared_folder() / f"adapter-{torch.distributed.get_rank()}"
        model.module.save_pretrained(
            written, state_dict={name: value.detach() for name, value in held.items()}
        )
    from safetensors.torch import load_file

    flat = [
        name for name, value in load_file(written / "adapter_model.safetensors").items() if value.ndim < 2
    ]
    warned = any("lora" in str(item.message).lower() for item in caught)
    return f"{len(flat)} tensors without two dimensions" if flat and not warned else ""


@case("peft==0.20.0", "peft==0.21.0", ranks=2)
def peft_lora_on_sharded_model() -> Seen:
    """The forward of an adapter that is added after sharding stops."""
    from torch.distributed.fsdp import fully_shard

    start_gloo()
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    made = lora(model)
    return raised(lambda: made(input_ids=tokens()), "shape", "size", "mixed torch.Tensor and DTensor")


@case("peft==0.16.0", "peft==0.17.0", beside=f"transformers==4.57.6 {_TRANSFORMERS_4}0.22.1", ranks=2)
def peft_trainable_tokens_fsdp() -> Seen:
    """The adapter cannot be written from the whole state dict."""
    from peft import get_peft_model_state_dict
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    start_gloo()
    model = _fsdp1(lora(llama(), trainable_token_indices={"embed_tokens": [1, 2]}))
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()
    ):
        state = model.state_dict()
    return raised(lambda: get_peft_model_state_dict(model, state_dict=state), "KeyError")


@case("datasets==3.6.0", "datasets==4.0.0")
def datasets_repeated_stream_by_node() -> Seen:
    """A stream that is repeated and divided among ranks stops."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    stream = Dataset.from_dict({"a": list(range(8))}).to_iterable_dataset(num_shards=2).repeat(None)
    return raised(
        lambda: next(iter(split_dataset_by_node(stream, rank=0, world_size=2))), "TypeError", "num_shards"
    )


@case("datasets==5.0.0", "datasets==4.8.5", beside=_HTTPX)
def datasets_shuffled_stream_shards() -> Seen:
    """A stream of eight files has fewer after it is shuffled."""
    from datasets import Dataset

    stream = Dataset.from_dict({"a": list(range(64))}).to_iterable_dataset(num_shards=8).shuffle(seed=0)
    return f"{stream.num_shards} of 8" if stream.num_shards < 8 else ""


def _nf4(**options: Any) -> Any:
    """Return a linear layer of 64 features that bitsandbytes has quantised on the CPU."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4", **options)
    layer.load_state_dict({"weight": torch.randn(64, 64)})
    return layer.to("cpu")


@case("bitsandbytes==0.49.2", "bitsandbytes==0.50.0", beside="accelerate==1.10.1")
def bitsandbytes_hf_initialized_kwarg() -> Seen:
    """accelerate cannot move a quantised parameter that transformers 5 has marked."""
    import bitsandbytes
    from accelerate.utils import set_module_tensor_to_device

    with torch.device("meta"):
        layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False)
    layer.weight._is_hf_initialized = True
    return raised(
        lambda: set_module_tensor_to_device(layer, "weight", "cpu", value=torch.randn(64, 64)),
        "_is_hf_initialized",
    )


@case("bitsandbytes==0.49.2", "bitsandbytes==0.50.0")
def bitsandbytes_params4bit_attribute_names() -> Seen:
    """torch cannot name the tensors of a quantised layer."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = torch.nn.Sequential(_nf4())
    return raised(lambda: get_model_state_dict(model), "has no attribute 'absmax'")


@case("bitsandbytes==0.46.1", "bitsandbytes==0.47.0")
def bitsandbytes_params4bit_chunk() -> Seen:
    """Pieces of a quantised parameter have no quantisation state."""
    pieces = torch.chunk(_nf4().weight, 2)
    return ", ".join(
        {type(piece).__name__ for piece in pieces if getattr(piece, "quant_state", None) is None}
    )


@case("torchao==0.15.0", "torchao==0.16.0")
def torchao_stochastic_rounding_dtensor() -> Seen:
    """The first step of a sharded model with stochastic rounding stops."""
    from torch.distributed.fsdp import fully_shard
    from torchao.optim import _AdamW

    start_gloo()
    model = torch.nn.Linear(32, 32, bias=False).to(torch.bfloat16)
    fully_shard(model)
    optimizer = _AdamW(model.parameters(), bf16_stochastic_round=True)
    model(torch.ones(1, 32, dtype=torch.bfloat16)).sum().backward()
    return raised(optimizer.step, "DTensor", "sharding strategy")


@case("torchao==0.6.1", "torchao==0.7.0", ranks=2)
def torchao_low_bit_optimizer_uneven() -> Seen:
    """The state of a parameter with 513 rows on two ranks has another shape than the parameter."""
    from torch.distributed.fsdp import fully_shard
    from torchao.prototype.low_bit_optim import AdamW8bit

    start_gloo()
    model = torch.nn.Linear(256, 513, bias=False)
    fully_shard(model)
    optimizer = AdamW8bit(model.parameters())
    state = optimizer._new_buffer(model.weight, True)
    local = state.to_local().shape
    weight: Any = model.weight
    return f"{tuple(local)}" if local != weight.to_local().shape or state.shape != weight.shape else ""


@case("trl==0.28.0", "trl==0.29.0")
def trl_reference_model_fsdp2() -> Seen:
    """The forward of a reference model that TRL has prepared stops."""
    from trl.models.utils import prepare_fsdp

    made = accelerator(mixed_precision="bf16")
    return raised(
        lambda: prepare_fsdp(llama(torch.bfloat16), made)(input_ids=tokens()), "'_module_classes_to_ignore'"
    )


class _Received:
    """Keeps the names that are sent to the server of vLLM."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def update_named_param(self, name: str, weights: torch.Tensor) -> None:
        self.names.append(name)

    def reset_prefix_cache(self) -> None:
        """Do nothing: nothing is cached."""


def _synced(model: Any) -> Any:
    """Return a call that gives the names under which parameters of a prepared model are sent to vLLM."""
    from trl.generation.vllm_generation import VLLMGeneration

    client = _Received()
    generation = VLLMGeneration.__new__(VLLMGeneration)
    made = accelerator()
    model, _ = prepared(made, model)
    vars(generation).update(model=model, accelerator=made, vllm_client=client, mode="server")

    def names() -> list[str]:
        if hasattr(generation, "_iter_fsdp2_params"):  # from 1.11 on
            return [name for name, _ in generation._iter_fsdp2_params(model)]
        generation._sync_fsdp2_params_to_vllm(model)
        return client.names

    return names


@case("trl==1.9.2", "trl==1.10.0")
def trl_vllm_sync_cuda_only() -> Seen:
    """Parameters on the CPU are sent to CUDA by name."""
    return raised(_synced(llama()), "not compiled with CUDA", "NVIDIA driver")


@case("trl==1.15.0", "trl==1.16.0")
def trl_vllm_tied_head_sent_twice() -> Seen:
    """The tied head is sent beside the embedding."""
    names = _synced(llama(tie_word_embeddings=True))()
    assert names
    return next((name for name in names if name == "lm_head.weight"), "")


@case("trl==1.6.0", "trl==1.7.0")
def trl_chunked_nll_lora_mixed_tensors() -> Seen:
    """The first step with an adapter and the chunked loss stops."""
    from trl.trainer import sft_trainer

    made, model = accelerator(), lora(llama())
    sft_trainer._patch_chunked_ce_lm_head(model.get_base_model(), chunk_size=8)
    return raised(lambda: micro_batch(made, *prepared(made, model)), "mixed torch.Tensor and DTensor")
