"""Every code of every table is raised: the smallest file for each, and nothing emitted without a page."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_reading_robustly import BOMBS, FOREIGN
from test_rules_against_accelerate import GOOD, MESHES, OURS, REFUSED, SILENT, change
from test_rules_against_transformers import CASES

import fsdptool
from fsdptool.api.validate import with_model
from fsdptool.cli.rule import all_rules
from fsdptool.config import read_settings
from fsdptool.config.rules import RULES
from fsdptool.config.rules.model import Hardware
from fsdptool.files.text import SIZE_LIMIT, SourceText
from fsdptool.inspection import inspect
from fsdptool.planning import load_gpu
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.source import resolve

TRAINER = "output_dir: o\nfsdp: true\nfsdp_config:\n  version: 2\n"
TRL = "model_name_or_path: m\ndataset_name: d\nbeta: 0.1\n"
SIMPLETUNER = '{"model_family": "flux",\n "fsdp_enable": true,\n "num_processes": 2,\n %s}'
TENSOR = GOOD + (
    "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 2\n"
)

# The smallest file for what no other test file has a case for: text and options of the reading.
SMALLEST: dict[str, tuple[str, dict[str, Any]]] = {
    "FSD105": (BOMBS["itself"] + "\n", {}),
    "FSD107": ("- a\n- b\n", {}),
    "FSD109": ("hello: world\nand: more\n", {}),
    "FSD110": (FOREIGN["xla"], {}),
    "FSD112": ("# fsdptool: ignore[FSD999]\n" + GOOD, {}),
    "FSD113": ('{"model_family": "flux",\n "model_type": "full"}', {}),
    "FSD114": ("# fsdptool: consumer=trainer\n" + GOOD, {}),
    "FSD116": ("accelerate launch --config_file absent.yaml --num_processes 2 train.py\n", {}),
    "FSD117": ("accelerate launch --use_fsdp --fsdp_version 2 train.py\n", {}),
    "FSD304": (GOOD + "deepspeed_config:\n  zero_stage: 3\n", {}),
    "FSD316": (
        change(("TRANSFORMER_BASED_WRAP", "NO_WRAP"), add="  fsdp_activation_checkpointing: true\n"),
        {},
    ),
    "FSD317": (TRAINER + "  activation_checkpointing: true\ngradient_checkpointing: true\n", {}),
    "FSD314": (GOOD + "use_cpu: true\n", {}),
    "FSD330": (change((": FSDP\n", ": MULTI_GPU\n")), {}),
    "FSD340": (TRAINER + "  state_dict_type: SHARDED_STATE_DICT\nsave_only_model: true\n", {}),
    "FSD341": (
        change(("  fsdp_state_dict_type: SHARDED_STATE_DICT\n", "")),
        {"environment": {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}},
    ),
    "FSD344": (GOOD, {"target": "accelerate==1.5"}),
    "FSD357": (GOOD + "dynamo_config:\n  dynamo_backend: INDUCTOR\n", {}),
    "FSD358": (
        change(("loading: false", "loading: true"), add="  fsdp_offload_params: true\n"),
        {"target": "accelerate==1.12"},
    ),
    "FSD359": (TRL + "use_liger_kernel: true\nloss_type: ipo\n", {"target": "trl==0.24"}),
    "FSD360": (TRL + "num_processes: 3\ngeneration_batch_size: 32\n", {}),
    "FSD361": ("[model]\nname = 'm'\n[parallelism]\nexpert_parallel_degree = 8\n", {}),
    "FSD362": ("model:\n  _component_: torchtune.models.llama3.llama3_8b\ndtype: bf16\n", {}),
    "FSD345": (SIMPLETUNER % '"optimizer": "optimi-adamw"', {}),
    "FSD346": (SIMPLETUNER % '"base_model_precision": "int8-quanto"', {}),
    "FSD349": (SIMPLETUNER % '"use_ema": true,\n "ema_cpu_only": true', {}),
    "FSD350": (
        SIMPLETUNER % '"fsdp_cpu_offload": true,\n "optimizer_cpu_offload_method": "torchao"',
        {},
    ),
    "FSD352": (change(("mixed_precision: bf16\n", "")), {}),
    "FSD354": (GOOD, {"target": "accelerate==1.14"}),
    "FSD356": (TENSOR, {}),
    "FSD363": (TENSOR, {"target": "accelerate==1.14,transformers==5.12"}),
    "FSD364": (TENSOR, {"target": "accelerate==1.12,transformers==5.0.0"}),
    "FSD370": ("base_model: m\ndatasets: [{path: a, type: alpaca}]\nload_in_4bit: true\n", {}),
    "FSD355": ('{"fsdp": true,\n "fsdp_config": {"version": 2}}', {}),
}  # fmt: skip


def found(text: str | Path, **options: Any) -> set[str]:
    """Return the codes of a text's findings."""
    return {item.code for item in read_settings(text, **options).diagnostics}


@pytest.mark.parametrize("code", SMALLEST)
def test_the_smallest_file_shows_it(code: str) -> None:
    text, options = SMALLEST[code]
    assert code in found(text, **options)


def test_every_code_of_a_file_alone_has_a_case(tmp_path: Path) -> None:
    """All cases are read again: what counts is what the tool says, not how a case is called."""
    texts = [text for text, _ in (REFUSED | SILENT).values()] + list(OURS.values())
    for switch, config, _ in CASES.values():
        texts.append(json.dumps({"output_dir": "o", "fsdp": switch, "fsdp_config": config}, indent=1))
    for version, sizes in MESHES.values():
        block = "".join(f"  parallelism_config_{key}_size: {size}\n" for key, size in sizes.items())
        texts.append(change(("fsdp_version: 2", version), add="parallelism_config:\n" + block))
    (tmp_path / "latin.yaml").write_bytes("# caf\xe9\n".encode("latin-1"))
    (tmp_path / "big.yaml").write_bytes(b" " * (SIZE_LIMIT + 1))
    raised = found(tmp_path / "absent.yaml") | found(tmp_path / "latin.yaml") | found(tmp_path / "big.yaml")
    for text in texts:
        raised |= found(text)
    for text, options in SMALLEST.values():
        raised |= found(text, **options)
    # No file raises FSD115, a plugin does: test_dialects.py.
    files = {code for code, rule in RULES.items() if rule.family not in ("model", "hardware")} - {"FSD115"}
    assert raised == files


def tiny(folder: Path, model_type: str, architecture: str, **sizes: Any) -> str:
    """Write a small configuration; return the reference."""
    folder.mkdir()
    config = {"model_type": model_type, "architectures": [architecture], **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


LLAMA = {
    "hidden_size": 64, "vocab_size": 512, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 64,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
}  # fmt: skip
DISTIL = {
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}
NO_NAMES = change(("  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n", ""))


def named(*classes: str) -> str:
    """Return the good file with other wrap classes."""
    return change(("LlamaDecoderLayer", ",".join(classes)))


def test_every_code_about_a_model_has_a_case(tmp_path: Path) -> None:
    llama = inspect(resolve(tiny(tmp_path / "llama", "llama", "LlamaForCausalLM", **LLAMA)))
    bart = inspect(resolve(tiny(tmp_path / "bart", "bart", "BartForConditionalGeneration", **BART)))
    distil = inspect(resolve(tiny(tmp_path / "distil", "distilbert", "DistilBertForMaskedLM", **DISTIL)))
    mistral = inspect(
        resolve(tiny(tmp_path / "mistral", "mistral", "MistralForCausalLM", **LLAMA, sliding_window=32))
    )
    t5 = inspect(resolve(
        tiny(tmp_path / "t5", "t5", "T5ForConditionalGeneration",
             d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=128)
    ))  # fmt: skip
    tied = inspect(
        resolve(tiny(tmp_path / "tied", "llama", "LlamaForCausalLM", **LLAMA, tie_word_embeddings=True))
    )
    switch = inspect(resolve(
        tiny(tmp_path / "switch", "switch_transformers", "SwitchTransformersForConditionalGeneration",
             d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=128, num_experts=4)
    ))  # fmt: skip
    cp = "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_cp_size: 2\n"
    by_size = change(
        ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP"),
        ("fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer", "fsdp_min_num_params: 1000"),
    )
    ram = named("BartEncoderLayer", "BartDecoderLayer").replace("loading: false", "loading: true")
    cases: dict[str, tuple[str, Any]] = {
        "FSD401": (named("LlamaDecoderLayr"), llama),
        "FSD402": (named("LlamaForCausalLM"), llama),
        "FSD403": (named("LlamaModel"), llama),
        "FSD404": (ram, bart),
        "FSD405": (named("T5Block"), t5),
        "FSD406": (NO_NAMES, distil),
        "FSD407": (named("MistralDecoderLayer") + cp, mistral),
        "FSD408": (named("LlamaMLP"), llama),
        "FSD409": (by_size, llama),
        "FSD410": (NO_NAMES, _llava(tmp_path / "llava")),
        "FSD411": (GOOD + "  fsdp_ignored_modules: lm_head\n", llama),
        "FSD412": (GOOD, tied),
        "FSD413": (named("SwitchTransformersBlock"), switch),
        "FSD414": (named("LlamaDecoderLayer"), _llava(tmp_path / "tower")),
    }
    for code, (text, anatomy) in cases.items():
        target = "accelerate==1.14" if code == "FSD412" else None
        assert code in found(text, model=anatomy, target=target), code
    assert set(cases) == {code for code, rule in RULES.items() if rule.family == "model"}
    for code in ("FSD413", "FSD414"):
        text, anatomy = cases[code]
        assert code not in found("# fsdptool: consumer=fsdptool\n" + text, model=anatomy)
    assert "FSD404" not in found(ram.replace("loading: true", "loading: false"), model=bart)


@pytest.mark.parametrize(
    ("target", "severity"),
    [
        ("accelerate==1.13.0", None),
        ("accelerate==1.14.0", "error"),
        ("accelerate==1.14.1,torch==2.13.0", "error"),
        ("accelerate==1.14,torch==2.12.0+cu126", "error"),
        ("accelerate==1.14,torch==2.11.0", None),
        ("accelerate==1.15.0,torch==2.13", None),
    ],
)
def test_tied_embeddings_need_accelerate_and_torch_that_agree(
    target: str, severity: str | None, tmp_path: Path
) -> None:
    def finding(text: str, reference: str, **options: Any) -> Diagnostic | None:
        reading = read_settings(SourceText(text), model=inspect(resolve(reference)), **options)
        return next((item for item in reading.diagnostics if item.code == "FSD412"), None)

    tied = tiny(tmp_path / "tied", "llama", "LlamaForCausalLM", **LLAMA, tie_word_embeddings=True)
    own = tiny(tmp_path / "own", "llama", "LlamaForCausalLM", **LLAMA)
    seen = finding(GOOD, tied, target=target)
    assert (seen.severity if seen else None) == severity
    if seen is not None:
        assert "torch 2.1" in seen.message
        rule = RULES["FSD412"]
        assert "accelerate 1.15" in rule.fix
        assert "torch below" in rule.fix
    assert finding(GOOD, own, target=target) is None, "untied"
    fsdp1 = change(("  fsdp_version: 2\n", "  fsdp_version: 1\n"))
    assert finding(fsdp1, tied, target=target) is None
    assert finding(GOOD, tied, consumer="fsdptool") is None


def test_torch_refuses_the_units_of_accelerate_1_14_and_not_those_of_1_13(tmp_path: Path) -> None:
    """The units of both versions, as their prepare makes them, with the installed torch."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from fsdptool.inspection import build

    tied = resolve(tiny(tmp_path / "tied", "llama", "LlamaForCausalLM", **LLAMA, tie_word_embeddings=True))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for tail in (True, False):
            model = build(tied).to_empty(device="cpu")
            model.tie_weights()
            if tail:
                fully_shard([model.model.norm, model.model.embed_tokens], mesh=mesh)
            fully_shard(model, mesh=mesh)
            if tail:
                with pytest.raises(ValueError, match="already managed by another FSDP group"):
                    model(torch.tensor([[1]]))
            else:
                model(torch.tensor([[1]]))
    finally:
        dist.destroy_process_group()


def _llava(folder: Path) -> Any:
    vision = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 32,
              "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 8, "patch_size": 4, "projection_dim": 8}  # fmt: skip
    text = {"model_type": "llama", **LLAMA}
    return inspect(
        resolve(
            tiny(folder, "llava", "LlavaForConditionalGeneration", vision_config=vision, text_config=text)
        )
    )


def test_accelerate_stops_at_names_the_model_lacks_and_wraps_nothing_without_names(tmp_path: Path) -> None:
    """FSD410 and FSD406: the plugin itself, on the models of the cases above."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy

    from fsdptool.inspection import build
    from fsdptool.source import resolve

    def policy(model: torch.nn.Module) -> Callable[[torch.nn.Module], bool]:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        plugin.set_auto_wrap_policy(model)
        made = fsdp2_prepare_auto_wrap_policy(plugin, model)
        assert callable(made)
        return made

    _llava(tmp_path / "llava")
    with pytest.raises(ValueError, match="Could not find the transformer layer class"):
        policy(build(resolve(str(tmp_path / "llava"))))
    distil = build(resolve(tiny(tmp_path / "distil", "distilbert", "DistilBertForMaskedLM", **DISTIL)))
    wraps = policy(distil)
    assert not [module for module in distil.modules() if wraps(module)]


def test_accelerate_crashes_on_persistent_buffers() -> None:
    """FSD404: what accelerate broadcasts must be a DTensor; one process is enough to see it fail."""
    import torch
    import torch.distributed as dist
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.fsdp import fully_shard

    class Accelerator:
        is_main_process = True
        device = torch.device("cpu")

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        fully_shard(model)
        with pytest.raises(AttributeError, match="device_mesh"):
            fsdp2_load_full_state_dict(Accelerator(), model, whole)
    finally:
        dist.destroy_process_group()


def test_every_code_about_hardware_has_a_case(tmp_path: Path) -> None:
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    anatomy = inspect(resolve(tiny(tmp_path / "large", "llama", "LlamaForCausalLM", **large)))
    offload = change(("num_processes: 8", "num_processes: 2"), add="  fsdp_offload_params: true\n")
    two = change(("num_processes: 8", "num_processes: 2"), ("bf16", "fp16"))
    v100 = load_gpu("V100-SXM2-16GB")
    cases: dict[str, tuple[str, Hardware]] = {
        "FSD501": (GOOD, Hardware(v100, 8, None)),
        "FSD502": (offload, Hardware(None, 2, 2**34, anatomy)),
        "FSD503": (two, Hardware(v100, 2, None, anatomy)),
        "FSD504": (GOOD, Hardware(None, 4, None)),
        "FSD505": (change(("bf16", "fp8")), Hardware(v100, 8, None)),
        "FSD506": (change(("num_processes: 8\n", "")), Hardware(v100, None, None, anatomy)),
    }
    for code, (text, hardware) in cases.items():
        assert code in found(text, hardware=with_model(hardware, hardware.anatomy)), code
    assert set(cases) == {code for code, rule in RULES.items() if rule.family == "hardware"}
    fits = change(("num_processes: 8", "num_processes: 64"), ("bf16", "fp16"))
    assert "FSD503" not in found(fits, hardware=with_model(Hardware(load_gpu("H100-80GB-SXM"), 64), anatomy))


def test_every_code_in_the_source_has_a_page_and_every_page_a_code() -> None:
    root = Path(fsdptool.__file__).parent
    form = re.compile(r"(FSD|DET|PLN|DOC|CACHE|[A-Z]{3})\d{3}")
    emitted = set()
    for path in root.rglob("*.py"):
        if path.stem == "rules" or path.parent.name == "rules":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and form.fullmatch(node.value):
                emitted.add(node.value)
    # The failures of runs are data: each with the patterns that recognise it.
    failures = (root / "runs" / "failures.json").read_text(encoding="utf-8")
    emitted.update(re.findall(r'"code": "([A-Z]{3}\d{3})"', failures))
    assert emitted == set(all_rules())
