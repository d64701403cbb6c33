"""The keys of a training process of ai-toolkit, by what they change, with the defaults of those that decide.

Source: ai-toolkit 0.12.26 (27a03a91) ``toolkit/config_modules.py``, ``jobs/process/BaseSDTrainProcess.py``.
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import RunKeys, names, sides

_MODULES = "toolkit/config_modules.py"

KEYS = RunKeys(
    program="ai-toolkit",
    version="0.12.26",
    defaults={
        "train.batch_size": (1, f"{_MODULES}:393"),
        "train.steps": (1000, f"{_MODULES}:380"),
        "train.optimizer": ("adamw", f"{_MODULES}:387"),
        "train.dtype": ("fp32", f"{_MODULES}:395"),
        "train.gradient_checkpointing": (True, f"{_MODULES}:413"),
        "train.gradient_accumulation": (1, f"{_MODULES}:460"),
        "train.attention_backend": ("native", f"{_MODULES}:399"),
        "network.linear": (4, f"{_MODULES}:181"),
        "model.quantize": (False, f"{_MODULES}:685"),
        "model.qtype": ("qfloat8", f"{_MODULES}:687"),
        "model.compile": (False, f"{_MODULES}:746"),
    },
    memory=sides(
        less="""
        model.low_vram model.layer_offloading model.layer_offloading_transformer_percent
        model.layer_offloading_text_encoder_percent train.unload_text_encoder train.cache_text_embeddings
        model.quantize_te
        """,
        more="""
        train.train_text_encoder train.diff_output_preservation
        train.do_prior_divergence network.conv train.blank_prompt_preservation model.assistant_lora_path
        train.do_guidance_loss
        """,
        either="network.network_kwargs model.model_kwargs adapter guidance slider",
    ),
    time=names("train.disable_sampling train.cudnn_benchmark"),
    numbers=names("""
    train.noise_offset train.min_snr_gamma train.weight_noise train.loss_type network.dropout
    train.content_or_style
    """),
    no_effect=names("""
    type training_folder device trigger_word performance_log_every sqlite_db_path save save.* sample
    sample.* logging logging.* name job meta train.* network.* model.* datasets log_dir
    """),
    unknown="dropped",
)
