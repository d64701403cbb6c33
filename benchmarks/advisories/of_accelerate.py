"""Reproductions of accelerate's advisories on gloo."""

from __future__ import annotations

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
    tokens,
)


@case("accelerate==1.13.0", "accelerate==1.14.0")
def accelerate_fp32_masters_lost() -> Seen:
    """Trained parameters of a model in bfloat16 stay in bfloat16."""
    made = accelerator(mixed_precision="bf16")
    model, optimizer = prepared(made, llama(torch.bfloat16))
    micro_batch(made, model, optimizer)
    return any(parameter.dtype is torch.bfloat16 for parameter in model.parameters())


@case("accelerate==1.12.0", "accelerate==1.13.0")
def accelerate_frozen_params_upcast() -> Seen:
    """Frozen parameters of a base in bfloat16 become float32."""
    model, _ = prepared(accelerator(mixed_precision="bf16"), lora(llama(torch.bfloat16)))
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return any(parameter.dtype is torch.float32 for parameter in frozen)


@case("accelerate==1.13.0", "accelerate==1.14.0")
def accelerate_mixed_trainable_dtypes() -> Seen:
    """The first forward stops where trained parameters of one unit have two dtypes."""
    made = accelerator(mixed_precision="bf16")
    model = llama(torch.bfloat16)
    model.model.layers[0].mlp.up_proj.to(torch.float32)
    return raised(lambda: micro_batch(made, *prepared(made, model)), "uniform original parameter dtype")


@case("accelerate==1.10.1", "accelerate==1.11.0")
def accelerate_no_sync_ignored() -> Seen:
    """Gradients are reduced after the first of two micro-batches."""
    made = accelerator(gradient_accumulation_steps=2)
    model, optimizer = prepared(made, llama())
    micro_batch(made, model, optimizer)
    return any(parameter.grad is not None for parameter in model.parameters())


@case("accelerate==1.11.0", "accelerate==1.10.1")
def accelerate_accumulation_whole_gradients() -> Seen:
    """Between micro-batches the whole gradient is held, unsharded."""
    made = accelerator(gradient_accumulation_steps=2)
    model, optimizer = prepared(made, llama())
    micro_batch(made, model, optimizer)
    groups = [
        module._get_fsdp_state()._fsdp_param_group
        for module in model.modules()
        if hasattr(module, "_get_fsdp_state")
    ]
    held = [each for group in groups if group for each in group.fsdp_params]
    return any(each.unsharded_accumulated_grad is not None for each in held) or any(
        getattr(each, "_unsharded_param", None) is not None and each._unsharded_param.grad is not None
        for each in held
    )


@case("accelerate==1.6.0", "accelerate==1.7.0")
def accelerate_full_state_dict_refused() -> Seen:
    """FSDP2 refuses FULL_STATE_DICT."""
    return raised(
        lambda: accelerator({"state_dict_type": "FULL_STATE_DICT"}), "only supports SHARDED_STATE_DICT"
    )


@case("accelerate==1.6.0", "accelerate==1.7.0")
def accelerate_size_wrap_numel() -> Seen:
    """Wrapping by size asks a module for the number of its elements."""
    made = accelerator({"auto_wrap_policy": "size_based_wrap", "min_num_params": 100_000_000})
    return raised(lambda: prepared(made, llama()), "'numel'")


@case("accelerate==1.10.1", "accelerate==1.11.0")
def accelerate_ignored_modules_dropped() -> Seen:
    """Parameters of ignored modules are sharded."""
    from torch.distributed.tensor import DTensor

    model = llama()
    model, _ = prepared(accelerator({"ignored_modules": [model.lm_head]}), model)
    return isinstance(model.lm_head.weight, DTensor)


@case("accelerate==1.14.0", "accelerate==1.15.0")
def accelerate_checkpointing_of_children() -> Seen:
    """Checkpointing wraps children of a layer, not the layer."""
    model, _ = prepared(accelerator({"activation_checkpointing": True}), llama())
    wrapped = [name for name, module in model.named_modules() if type(module).__name__ == "CheckpointWrapper"]
    return ", ".join(name for name in wrapped if ".layers.0." in name)


@case("accelerate==1.13.0", "accelerate==1.14.0")
def accelerate_to_fsdp2_keeps_v1_keys() -> Seen:
    """``accelerate to-fsdp2`` keeps keys that FSDP2 does not have."""
    from accelerate.commands import to_fsdp2

    converted = to_fsdp2.convert_config_to_fsdp2(
        {
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 1,
                "fsdp_use_orig_params": True,
                "fsdp_sharding_strategy": "FULL_SHARD",
            },
        }
    )
    return "fsdp_use_orig_params" in converted["fsdp_config"]


@case("accelerate==1.8.0", "accelerate==1.8.1")
def accelerate_iterable_n_shard() -> Seen:
    """A stream that is not dispatched is asked for an attribute that it does not have."""
    from accelerate.data_loader import prepare_data_loader
    from datasets import Dataset
    from torch.utils.data import DataLoader

    stream = Dataset.from_dict({"a": list(range(8))}).to_iterable_dataset(num_shards=2)
    loader = DataLoader(stream, batch_size=1)
    return raised(
        lambda: prepare_data_loader(loader, num_processes=2, process_index=0, dispatch_batches=False),
        "n_shard",
    )


@case("accelerate==1.13.0", "accelerate==1.14.0")
def accelerate_stream_as_many_files_as_ranks() -> Seen:
    """The first of two ranks reads both files of a stream."""
    from accelerate.data_loader import prepare_data_loader
    from datasets import IterableDataset
    from torch.utils.data import DataLoader

    opened: list[str] = []

    def rows(files):  # type: ignore[no-untyped-def]
        for file in files:
            opened.append(file)
            yield from ({"a": index} for index in range(4))

    stream = IterableDataset.from_generator(rows, gen_kwargs={"files": ["first", "second"]})
    loader = prepare_data_loader(
        DataLoader(stream, batch_size=1),
        num_processes=2,
        process_index=0,
        dispatch_batches=False,
        put_on_device=False,
    )
    assert list(loader)
    return " and ".join(opened) if len(opened) > 1 else ""


@case("accelerate==1.14.0", "accelerate==1.15.0")
def accelerate_checkpoint_path_markers() -> Seen:
    """A state that was saved below a folder named after the optimizer cannot be loaded."""
    made = accelerator({"state_dict_type": "SHARDED_STATE_DICT"})
    micro_batch(made, *prepared(made, llama()))
    folder = str(shared_folder() / "optimizer_test" / "checkpoint-1")
    made.save_state(folder)
    return raised(lambda: made.load_state(folder), ".metadata", "metadata is None", "CheckpointException")


@case("accelerate==1.12.0", "accelerate==1.13.0")
def accelerate_sharded_optimizer_resume() -> Seen:
    """The optimizer state of a first run does not reach a new optimizer."""
    from accelerate.utils import fsdp_utils

    made = accelerator({"state_dict_type": "SHARDED_STATE_DICT"})
    model, optimizer = prepared(made, llama())
    micro_batch(made, model, optimizer)
    plugin, folder = made.state.fsdp_plugin, str(shared_folder())
    fsdp_utils.save_fsdp_optimizer(plugin, made, optimizer, model, folder)
    model, optimizer = prepared(made, llama())
    lost = raised(
        lambda: fsdp_utils.load_fsdp_optimizer(plugin, made, optimizer, model, folder),
        "Missing key in checkpoint state_dict",
    )
    return lost or ("no moments are loaded" if not optimizer.optimizer.state else "")


@case("accelerate==1.14.0", "accelerate==1.15.0")
def accelerate_clip_grad_norm_several_meshes() -> Seen:
    """Sharded gradients and those of an ignored module cannot be clipped together."""
    model = llama()
    made = accelerator({"ignored_modules": [model.lm_head]})
    model, _ = prepared(made, model)
    made.backward(model(input_ids=tokens(), labels=tokens()).loss)
    return raised(lambda: made.clip_grad_norm_(model.parameters(), 1.0), "mixed torch.Tensor and DTensor")


@case("accelerate==1.14.0", "accelerate==1.15.0")
def accelerate_tied_embeddings_two_groups() -> Seen:
    """The first forward of a model with tied embeddings stops."""
    made = accelerator()
    model, optimizer = prepared(made, llama(tie_word_embeddings=True))
    return raised(lambda: micro_batch(made, model, optimizer), "already managed by another FSDP group")


@case("accelerate==1.7.0", "accelerate==1.8.0")
def accelerate_ram_loading_cuda_only() -> Seen:
    """RAM-efficient loading on another device than CUDA's stops."""
    made = accelerator({"cpu_ram_efficient_loading": True})
    return raised(lambda: prepared(made, llama()), "not compiled with CUDA", "NVIDIA driver")


@case("accelerate==1.10.1", "accelerate==1.11.0")
def accelerate_hsdp_ram_loading() -> Seen:
    """Weights cannot be distributed to a model on a mesh of two dimensions."""
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    made, model = accelerator(), llama()
    whole = model.state_dict()
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model.to("meta"), mesh=mesh)
    return raised(lambda: fsdp2_load_full_state_dict(made, model, whole), "`mesh_dim` needs to be specified")


@case("accelerate==1.15.0", None)
def accelerate_persistent_buffers_ram_loading() -> Seen:
    """RAM-efficient loading of a model with a persistent buffer stops."""
    model = llama()
    model.model.register_buffer("steps", torch.zeros(1))
    made = accelerator({"cpu_ram_efficient_loading": True})
    return raised(lambda: prepared(made, model), "'device_mesh'")


@case("accelerate==1.14.0", "accelerate==1.15.0", ranks=2)
def accelerate_peft_full_state_dict() -> Seen:
    """After a whole state is saved and loaded, rows of the adapter differ from those that were saved."""
    from accelerate.utils import fsdp_utils

    made = accelerator({"state_dict_type": "FULL_STATE_DICT"})
    model, _ = prepared(made, lora(llama(), init_lora_weights=False))
    plugin, folder = made.state.fsdp_plugin, str(shared_folder())
    saved = {
        name: value.full_tensor().clone() for name, value in model.named_parameters() if value.requires_grad
    }
    fsdp_utils.save_fsdp_model(plugin, made, model, folder, adapter_only=True)
    made.wait_for_everyone()
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.zero_()
    fsdp_utils.load_fsdp_model(plugin, made, model, folder, adapter_only=True)
    loaded = {name: value.full_tensor() for name, value in model.named_parameters() if value.requires_grad}
    wrong = sum(int((loaded[name] != value).sum()) for name, value in saved.items())
    return f"{wrong} of {sum(value.numel() for value in saved.values())} elements" if wrong else ""


@case("accelerate==1.14.0", "accelerate==1.15.0")
def accelerate_resume_epoch_order() -> Seen:
    """A loader that skips batches of the second epoch draws the order of the first."""
    from accelerate.data_loader import prepare_data_loader, skip_first_batches
    from torch.utils.data import DataLoader

    data: Any = list(range(64))

    def order(resumes: bool) -> list[int]:
        loader = prepare_data_loader(
            DataLoader(data, batch_size=1, shuffle=True),
            num_processes=1, process_index=0, use_seedable_sampler=True, data_seed=3, put_on_device=False,
        )  # fmt: skip
        if not resumes:
            list(loader)
            return [int(item) for item in loader][8:]
        loader.iteration = 1
        return [int(item) for item in skip_first_batches(loader, 8)]

    return order(resumes=True) != order(resumes=False)


@case("accelerate==1.13.0", "accelerate==1.14.0")
def accelerate_ram_loading_by_position() -> Seen:
    """A whole state dict with one more key than the sharded model cannot be distributed."""
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    from torch.distributed.fsdp import fully_shard

    made, model = accelerator(), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    whole = {"0.absmax": torch.zeros(4, 4), **model.state_dict()}
    fully_shard(model.to("meta"))
    return raised(lambda: fsdp2_load_full_state_dict(made, model, whole), "absmax")
