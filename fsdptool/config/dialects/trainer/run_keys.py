"""The keys of transformers' TrainingArguments, which Trainer, TRL, LLaMA-Factory and ms-swift share.

Source: transformers 5.24.0 ``training_args.py`` (fields, defaults), and the fields of 4.x that files still
hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from fsdptool.config.dialects.run_reader import Learned, RunKeys, names, sides

DEFAULTS = {
    "per_device_train_batch_size": (8, "transformers training_args.py:777"),
    "gradient_accumulation_steps": (1, "transformers training_args.py:849"),
    "optim": ("adamw_torch_fused", "transformers training_args.py:806 (with torch 2.8 and newer)"),
    "gradient_checkpointing": (False, "transformers training_args.py:1544"),
    "num_train_epochs": (3.0, "transformers training_args.py"),
    "max_steps": (-1, "transformers training_args.py"),
    "bf16": (False, "transformers training_args.py:874"),
    "fp16": (False, "transformers training_args.py:880"),
    "torch_compile": (False, "transformers training_args.py"),
    "use_liger_kernel": (False, "transformers training_args.py"),
}

LEARNING: Mapping[str, Learned] = {
    "learning_rate": Learned("learning_rate", 5e-5),
    "weight_decay": Learned("weight_decay", 0.0),
    "adam_beta1": Learned("adam_beta1", 0.9),
    "adam_beta2": Learned("adam_beta2", 0.999),
    "adam_epsilon": Learned("adam_epsilon", 1e-8),
    "max_grad_norm": Learned("max_grad_norm", 1.0),
    "scheduler": Learned("lr_scheduler_type", "linear"),
    "warmup_steps": Learned("warmup_steps", 0),
    "warmup_ratio": Learned("warmup_ratio"),
    "seed": Learned("seed", 42),
    "neftune_noise_alpha": Learned("neftune_noise_alpha"),
    "output": Learned("output_dir"),
}
"""What TrainingArguments say of the learning (transformers 5.24 ``training_args.py``)."""

MEMORY = sides(
    less="optim_target_modules liger_kernel_config",
    more="batch_eval_metrics",
    either="""
    deepspeed parallelism_config auto_find_batch_size accelerator_config optim_args sharded_ddp use_cpu
""",
)
TIME = names("""
    torch_compile_backend torch_compile_mode torch_empty_cache_steps ddp_bucket_cap_mb ddp_static_graph
    dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers
    dataloader_pin_memory ddp_backend full_determinism
""")
NUMBERS = frozenset(["neftune_noise_alpha", "label_smoothing_factor"])
NO_EFFECT = names("""
    output_dir learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio
    weight_decay adam_beta1 adam_beta2 adam_epsilon average_tokens_across_devices max_grad_norm
    bf16_full_eval fp16_full_eval tf32 activation_checkpointing_kwargs gradient_checkpointing_kwargs
    use_cache logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
    trackio_* eval_* evaluation_strategy per_device_eval_batch_size prediction_loss_only
    include_for_metrics include_inputs_for_metrics save_* enable_jit_checkpoint push_to_hub* hub_*
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint seed data_seed dataloader_drop_last
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
    train_sampling_strategy group_by_length length_column_name ddp_find_unused_parameters
    ddp_broadcast_buffers ddp_timeout debug skip_memory_metrics do_train do_eval do_predict
    resume_from_checkpoint local_rank overwrite_output_dir logging_dir wandb_* no_cuda use_mps_device
    past_index torchdynamo ray_scope jit_mode_eval use_ipex tpu_* half_precision_backend fp16_opt_level
    fp16_backend split_batches dispatch_batches use_legacy_prediction_loop mp_parameters
    per_gpu_train_batch_size include_tokens_per_second torch_compile_options fsdp_config.state_dict_type
    fsdp_config.auto_wrap_policy fsdp_config.cpu_ram_efficient_loading fsdp_config.sync_module_states
    fsdp_config.use_orig_params fsdp_config.backward_prefetch fsdp_config.forward_prefetch
    fsdp_config.limit_all_gathers fsdp_config.fsdp_state_dict_type fsdp_config.fsdp_auto_wrap_policy
    fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_use_orig_params
    fsdp_config.fsdp_cpu_ram_efficient_loading fsdp_config.fsdp_backward_prefetch
    fsdp_config.fsdp_forward_prefetch fsdp_config.min_num_params fsdp_min_num_params fsdp_config.xla
    fsdp_config.xla_fsdp_v2 fsdp_config.xla_fsdp_grad_ckpt fsdp_config.xla_fsdp_settings
    per_gpu_eval_batch_size
""")


MODELS = ("model_name_or_path", "model_name", "base_model", "model_id", "model_path")
"""Flags with which scripts name the model."""


class Script(NamedTuple):
    """What an example of transformers trains.

    Attributes:
        objective: What is minimised.
        key: The flag of its length in tokens; None: its samples are not texts.
        length: Its default, or None: the longest sample of a batch.
        packing: Whether texts are joined and cut into full rows.
        padded: Whether every row is padded to the length unless ``--pad_to_max_length`` is false.
        pictures: Whether samples are pictures, whose size the model's processor decides.
        model: The model without ``--model_name_or_path``.
    """

    objective: str
    key: str | None = None
    length: int | None = None
    packing: bool = False
    padded: bool = False
    pictures: bool = False
    model: str | None = None


_VIT = "google/vit-base-patch16-224-in21k"
SCRIPTS = {
    "run_clm": Script("pretrain", "block_size", 1024, packing=True),
    "run_fim": Script("pretrain", "block_size", 1024, packing=True),
    "run_mlm": Script("pretrain", "max_seq_length", 512, packing=True),
    "run_plm": Script("pretrain", "max_seq_length", 512, packing=True),
    "run_glue": Script("classification", "max_seq_length", 128, padded=True),
    "run_xnli": Script("classification", "max_seq_length", 128, padded=True),
    "run_classification": Script("classification", "max_seq_length", 128, padded=True),
    "run_qa": Script("classification", "max_seq_length", 384, padded=True),
    "run_ner": Script("classification", "max_seq_length"),
    "run_swag": Script("classification", "max_seq_length"),
    "run_seq2seq_qa": Script("sft", "max_seq_length", 384),
    "run_summarization": Script("sft", "max_source_length", 1024),
    "run_translation": Script("sft", "max_source_length", 1024),
    "run_speech_recognition_ctc": Script("sft"),
    "run_speech_recognition_ctc_adapter": Script("sft"),
    "run_speech_recognition_seq2seq": Script("sft"),
    "run_audio_classification": Script("classification"),
    "run_image_classification": Script("classification", pictures=True, model=_VIT),
    "run_semantic_segmentation": Script("segmentation", pictures=True, model="nvidia/mit-b0"),
    "run_object_detection": Script("detection", pictures=True, model="facebook/detr-resnet-50"),
    "run_mae": Script("pretrain", pictures=True),
    "run_mim": Script("pretrain", pictures=True),
    "run_clip": Script("contrastive", "max_seq_length", 128, padded=True),
}
"""transformers' ``examples/pytorch/*/run_*.py`` (5.24.0) that use Trainer: ``DataTrainingArguments``."""


def script_of(name: str) -> Script | None:
    """Return the example that a script is, or is a copy of by its name (``2b_run_glue``)."""
    last = name.rpartition(".")[2]
    found = [word for word in SCRIPTS if re.search(rf"(?:^|_){word}(?:_|$)", last)]
    return SCRIPTS[max(found, key=len)] if found else None


KEYS = RunKeys(
    program="trainer",
    version="5.24.0",
    defaults=DEFAULTS,
    memory=MEMORY
    | sides(
        less="""
        freeze_feature_encoder freeze_feature_extractor freeze_encoder freeze_base_model freeze_vision_model
        freeze_text_model tune_mm_mlp_adapter freeze_backbone freeze_llm freeze_vision_tower freeze_merger
        freeze_mm_mlp_adapter freeze_vision_modules freeze_visual_encoder
        """,
        more="vision_tower use_dora",
        either="""
        tune_mm_vision tune_mm_mlp tune_mm_llm peft_type train_adapter adapter_config apply_adapter
        apply_sparse
        """,
    ),
    time=TIME,
    numbers=NUMBERS
    | names("""
    layerdrop attention_dropout activation_dropout feat_proj_dropout hidden_dropout final_dropout mask_*
    mlm_probability plm_probability max_span_length num_beams
    """),
    no_effect=NO_EFFECT
    | names("""
    dataset_name dataset_config_name train_file validation_file validation_split_percentage
    max_train_samples max_eval_samples max_predict_samples tokenizer_name config_name
    cache_dir use_fast_tokenizer model_revision token
    trust_remote_code streaming overwrite_cache preprocessing_num_workers keep_linebreaks data_path
    eval_data_path train_dataset eval_dataset lazy_preprocess low_cpu_mem_usage use_auth_token test_file
    train_dir validation_dir predict_with_generate generation_max_length generation_num_beams
    generation_config text_column summary_column source_prefix val_max_target_length source_lang target_lang
    forced_bos_token ignore_pad_token_for_loss task_name text_column_name audio_column_name label_column_name
    length_column_name image_column_name train_split_name eval_split_name chars_to_ignore language task
    eval_metrics max_duration_in_seconds min_duration_in_seconds doc_stride version_2_with_negative
    n_best_size null_score_diff_threshold do_lower_case ignore_mismatched_sizes max_answer_length
    max_train_steps resize_position_embeddings label_all_tokens return_entity_level_metrics
    half_precision_backend fp16_opt_level
"""),
    unknown="script",
    learning={**LEARNING, "dataset": Learned("dataset_name")},
)
OLD = "4.x"
"""Version of transformers to judge for where a file holds words that 5.x no longer has."""
