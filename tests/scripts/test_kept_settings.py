"""Settings that scripts keep in dictionaries, objects and modules before a trainer takes them."""

from __future__ import annotations

import pytest

from fsdptool.config.described import describe_run
from fsdptool.files.text import SourceText
from fsdptool.records.described_run import DescribedRun

HEAD = """
import argparse, copy, inspect
from dataclasses import asdict, dataclass
import torch
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", torch_dtype=torch.bfloat16)
given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16, "max_length": 3072}
"""
TRAIN = "SFTTrainer(model=model, args=SFTConfig(**taken)).train()\n"


def described(text: str, *words: str) -> DescribedRun:
    """Return the run of a script that starts one."""
    run = describe_run(SourceText(text, "train.py"), words=words)
    assert run is not None
    return run


@pytest.mark.parametrize(
    "lines",
    [
        "taken = {k: v for k, v in given.items() if k in inspect.signature(SFTConfig.__init__).parameters}",
        "known = set(inspect.signature(SFTConfig).parameters.keys()) - {'self'}\n"
        "taken = {key: given[key] for key in given if key in known}",
        "taken = {k: v for k, v in given.items() if k in SFTConfig.__dataclass_fields__}",
        "def kept(call, values):\n"
        "    found = inspect.signature(call).parameters\n"
        "    if any(p.kind == inspect.Parameter.VAR_KEYWORD for p in found.values()):\n"
        "        return values\n"
        "    return {k: v for k, v in values.items() if k in found}\n"
        "taken = kept(SFTConfig, given)",
        "taken = {k: v for k, v in {**given, 'optim': None}.items() if v is not None}",
        "taken = dict(given)",
        "taken = copy.deepcopy(given)",
        "taken = {'bf16': True} | given",
        "taken = {'seed': 1, **given.copy()}",
    ],
)
def test_a_dictionary_that_is_copied_or_filtered_keeps_its_settings(lines: str) -> None:
    run = described(f"{HEAD}{lines}\n{TRAIN}")
    assert (run.micro_batch, run.accumulation, run.sequence_length) == (2, 16, 3072)
    assert run.problems == ()


def test_a_name_that_has_a_new_one_is_not_taken() -> None:
    lines = """
known = inspect.signature(SFTConfig.__init__).parameters
taken = dict(given)
if "eval_strategy" not in known:
    taken["per_device_train_batch_size"] = 4
if "evaluation_strategy" in known:
    taken["gradient_accumulation_steps"] = 1
taken["max_seq_length" if "max_seq_length" in known else "max_length"] = 3072
"""
    run = described(HEAD + lines + TRAIN)
    assert (run.micro_batch, run.accumulation, run.sequence_length) == (2, 16, 3072)
    assert run.problems == ()


@pytest.mark.parametrize("how", ["vars(args)", "args.__dict__", "dict(vars(args))"])
def test_arguments_are_taken_from_their_dictionary(how: str) -> None:
    lines = f"""
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=3)
args = parser.parse_args()
settings = {how}
taken = {{**given, "per_device_train_batch_size": settings["rows"]}}
"""
    assert described(HEAD + lines + TRAIN).micro_batch == 3
    assert described(HEAD + lines + TRAIN, "--rows", "7").micro_batch == 7


@pytest.mark.parametrize(
    "how", ["vars(args).update(rows=9)", "args.__dict__['rows'] = 9", "held = vars(args)\nargs.rows = 9"]
)
def test_the_dictionary_of_arguments_is_no_copy(how: str) -> None:
    lines = f"""
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=3)
args = parser.parse_args()
held = args.__dict__
{how}
assert held["rows"] == 9
taken = {{**given, "per_device_train_batch_size": args.rows, "gradient_accumulation_steps": held["rows"]}}
"""
    run = described(HEAD + lines + TRAIN)
    assert (run.micro_batch, run.accumulation) == (9, 9)


@pytest.mark.parametrize(
    "taken", ["dict(given, **elsewhere())", "Own('o', per_device_train_batch_size=2).to_dict()"]
)
def test_a_dictionary_with_fields_that_are_not_known_is_not_whole(taken: str) -> None:
    lines = f"""
@dataclass
class Own(SFTConfig):
    max_length: int = 3072
taken = {taken}
"""
    run = described(HEAD + lines + TRAIN)
    assert (run.micro_batch, run.sequence_length, run.gradient_checkpointing) == (2, 3072, None)
    assert any("takes further arguments" in problem for problem in run.problems)


def test_a_body_of_a_class_whose_names_use_one_another_is_followed_once() -> None:
    sums = "".join(f"    a{at} = {' + '.join(f'a{one}' for one in range(at))}\n" for at in range(1, 18))
    lines = f"class Own:\n    a0 = 1\n{sums}taken = {{'per_device_train_batch_size': Own.a4}}\n"
    lines += "taken['max_length'] = Own.a17\n"
    run = described(HEAD + lines + TRAIN)
    assert (run.micro_batch, run.sequence_length) == (8, 65536)


@pytest.mark.parametrize("how", ["asdict(Own())", "vars(Own())", "Own().__dict__"])
def test_an_object_of_settings_fills_a_call(how: str) -> None:
    lines = f"""
@dataclass
class Own:
    per_device_train_batch_size: int = 6
    max_length: int = 512
taken = {how}
"""
    run = described(HEAD + lines + TRAIN)
    assert (run.micro_batch, run.sequence_length, run.problems) == (6, 512, ())


def test_a_class_of_settings_uses_its_own_names() -> None:
    lines = """
class Own:
    rows = 5
    taken = {"per_device_train_batch_size": rows}
taken = Own.taken
"""
    assert described(HEAD + lines + TRAIN).micro_batch == 5


def test_arguments_that_are_not_read_leave_open_what_they_decide() -> None:
    text = HEAD.replace("torch_dtype=torch.bfloat16", "**elsewhere()") + "taken = elsewhere()\n" + TRAIN
    lora = text.replace("import copy", "import copy, peft").replace("argparse, copy", "argparse, copy, peft")
    run = described(lora.replace("args=", "peft_config=peft.LoraConfig(**elsewhere()), args="))
    assert (run.micro_batch, run.accumulation, run.sequence_length) == (None, None, None)
    assert (run.optimizer, run.gradient_checkpointing, run.base_dtype) == (None, None, None)
    assert (run.method, run.lora_rank, run.lora_targets) == (None, None, None)
    assert len(run.problems) == 3
    assert run.model == "Qwen/Qwen3-4B"

    whole = described(
        "from trl import SFTConfig, SFTTrainer\nSFTTrainer('gpt2', args=SFTConfig(**other())).train()"
    )
    assert (whole.activation_offloading, whole.cpu_offload, whole.fused_loss) == (None, None, None)
    assert (whole.base_dtype, whole.attention, whole.documents_joined) == (None, None, None)


@pytest.mark.parametrize(
    "args",
    ["args = elsewhere()", "args = dataclasses.replace(args, packing=True)", "args = copy.copy(args)"],
)
def test_arguments_of_a_trainer_that_are_made_elsewhere_are_left_open(args: str) -> None:
    lines = f"import dataclasses\nargs = SFTConfig('o', max_length=64)\n{args}\n"
    run = described(f"{HEAD}{lines}SFTTrainer(model=model, args=args).train()\n")
    assert (run.micro_batch, run.accumulation, run.sequence_length) == (None, None, None)
    assert (run.packing, run.gradient_checkpointing, run.optimizer) == (None, None, None)
    assert run.problems == ("line 12: the arguments of SFTTrainer are not read",)


LOOP = """
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
model, kw = AutoModelForCausalLM.from_pretrained("gpt2"), elsewhere()
LINE
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(rows, batch_size=2):
    model(**batch).loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fully_shard(model, **kw)", (2, 1, None, None)),
        ("model = FullyShardedDataParallel(model, **kw)", (2, 1, None, None)),
        ("model = Accelerator(**kw).prepare(model)", (2, None, True, False)),
        ("rows = 1", (2, 1, None, False)),
        ("rows, batch_size = 1, 4", (None, 1, None, False)),
    ],
)
def test_calls_with_further_arguments_leave_open_what_these_decide(
    line: str, expected: tuple[int | None, int | None, bool | None, bool | None]
) -> None:
    text = LOOP.replace("LINE", line)
    text = text.replace("batch_size=2", "**kw") if expected[0] is None else text
    run = described(text)
    assert (run.micro_batch, run.accumulation, run.reshard, run.cpu_offload) == expected
    assert bool(run.problems) == (line != "rows = 1")


def test_further_arguments_of_unsloth_are_left_open() -> None:
    run = described("""
from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Llama-3.2-1B", **one())
model = FastLanguageModel.get_peft_model(model, **two())
SFTTrainer(model=model, args=SFTConfig("o", per_device_train_batch_size=2)).train()
""")
    assert (run.micro_batch, run.lora_rank, run.lora_targets) == (2, None, None)
    assert (run.method, run.sequence_length, run.gradient_checkpointing) == (None, None, None)
    assert len(run.problems) == 2


@pytest.mark.parametrize("test", ["LoraConfig is not None", "use and LoraConfig is not None", "found()"])
def test_a_library_that_a_script_asks_for_is_there(test: str) -> None:
    lines = f"""
try:
    from peft import LoraConfig
except ImportError:
    LoraConfig = None
from transformers.utils import is_peft_available as found
use, adapter, taken = True, None, given
if {test}:
    adapter = LoraConfig(r=24)
"""
    run = described(HEAD + lines + TRAIN.replace("args=", "peft_config=adapter, args="))
    assert (run.method, run.lora_rank, run.problems) == ("lora", 24, ())


WRAPPED = """
import torch
from functools import partial
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
from transformers.trainer_pt_utils import get_module_class_from_name
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B")
CLASSES
model = FSDP(model, auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls=classes))
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(rows, batch_size=2):
    model(**batch).loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("classes = {type(model.model.layers[0])}", None),
        ("classes = {type(m) for m in model.modules() if type(m).__name__ in model._no_split_modules}", None),
        ("classes = {get_module_class_from_name(model, n) for n in model._no_split_modules}", None),
        ("classes = {get_module_class_from_name(model, 'Qwen3DecoderLayer')}", ("Qwen3DecoderLayer",)),
    ],
)
def test_classes_that_the_model_names_are_its_layers(lines: str, expected: tuple[str, ...] | None) -> None:
    run = described(WRAPPED.replace("CLASSES", lines))
    assert (run.fsdp, run.wrap_classes, run.problems) == (1, expected, ())


@pytest.mark.parametrize(
    "lines",
    [
        "classes = {type(model.model.layers[0].mlp)}",
        "classes = {type(m) for m in model.modules() if 'Attention' in type(m).__name__}",
        "classes = {type(m) for m in model.modules()}",
    ],
)
def test_other_classes_of_a_model_are_left_open(lines: str) -> None:
    run = described(WRAPPED.replace("CLASSES", lines))
    assert "classes is not read" in run.problems[0]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("index < len(model.transformer.h) - 1", True),
        ("index != len(model.transformer.h) - 1", True),
        ("index == len(model.transformer.h) - 1", None),
        ("len(other) == 1", None),
        ("index < len(other) - 1", None),
        ("other < len(model.transformer.h) - 1", None),
    ],
)
def test_layers_are_resharded_where_a_test_is_true_of_all_but_the_last(
    test: str, expected: bool | None
) -> None:
    run = described(f"""
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2")
for index, layer in enumerate(model.transformer.h):
    fully_shard(layer, reshard_after_forward={test})
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(rows, batch_size=2):
    model(**batch).loss.backward()
    optimizer.step()
""")
    assert run.reshard is expected
    assert bool(run.problems) == (expected is None)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("for one in ('q_proj', 'v_proj'):\n    names.append(one)", ("q_proj", "v_proj")),
        ("names.append('q_proj')\nnames.extend(['v_proj', 'k_proj'])", ("q_proj", "v_proj", "k_proj")),
        ("for one in other():\n    names.append('q_proj')", None),
        ("while other():\n    names.append('q_proj')", None),
        ("if other():\n    names.append('q_proj')", None),
    ],
)
@pytest.mark.parametrize("taken", ["names", "[name for name in names]"])
def test_a_list_that_a_loop_fills_is_known_where_the_loop_is(
    lines: str, expected: tuple[str, ...] | None, taken: str
) -> None:
    made = f"""
from peft import LoraConfig
taken, names = given, []
{lines}
adapter = LoraConfig(target_modules={taken})
"""
    run = described(HEAD + made + TRAIN.replace("args=", "peft_config=adapter, args="))
    assert (run.lora_targets, bool(run.problems)) == (expected, expected is None)


def test_what_is_popped_is_gone() -> None:
    lines = """
@dataclass
class Inner:
    rows: int = 2
    length: int = 640

@dataclass
class Own:
    inner: Inner
    steps: int = 1

given = {"inner": {"rows": 4}, "steps": 9}
own = Own(inner=Inner(**given.pop("inner")), **given)
taken = {"per_device_train_batch_size": own.inner.rows, "max_length": own.inner.length}
taken["gradient_accumulation_steps"] = own.steps
"""
    run = described(HEAD + lines + TRAIN)
    assert (run.micro_batch, run.sequence_length, run.accumulation, run.problems) == (4, 640, 9, ())


def test_a_list_on_the_command_line_of_fire_is_a_list() -> None:
    text = """
import fire
from peft import LoraConfig, get_peft_model, prepare_model_for_int8_training
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def train(targets=("q_proj", "v_proj")):
    model = AutoModelForCausalLM.from_pretrained("gpt2", load_in_8bit=True)
    model = get_peft_model(prepare_model_for_int8_training(model), LoraConfig(target_modules=targets))
    Trainer(model, TrainingArguments("o")).train()

fire.Fire(train)
"""
    run = described(text, "--targets", "[k_proj, 'o_proj']")
    assert (run.model, run.method, run.lora_targets) == ("gpt2", "lora8bit", ("k_proj", "o_proj"))
    assert run.gradient_checkpointing == "full"


def test_what_is_assigned_to_arguments_behind_their_call_counts() -> None:
    lines = """
args = SFTConfig("o", per_device_train_batch_size=8, gradient_accumulation_steps=2, max_length=64)
args.per_device_train_batch_size = 2
args.packing = True
if args.gradient_checkpointing:
    args.max_length = 256
"""
    run = described(HEAD + lines + "SFTTrainer(model=model, args=args).train()\n")
    assert (run.micro_batch, run.accumulation, run.packing) == (2, 2, True)


@pytest.mark.parametrize(
    ("lines", "rows", "length"),
    [
        ("taken = copy.deepcopy(given)\ngiven['max_length'] = 1", 2, 3072),
        (
            "kept = {'x': given}\ncopied = copy.deepcopy(kept)\ncopied['x']['max_length'] = 1\n"
            "taken = kept['x']",
            2,
            3072,
        ),
        ("taken = dict(given)\ndel taken['max_length']\ntaken = {k: v for k, v in taken.items()}", 2, 1024),
        ("taken = dict(given)\nif other():\n    taken.pop('max_length')", 2, None),
        ("taken = {'max_length': 9}\nif other():\n    taken['per_device_train_batch_size'] = 2", None, 9),
        ("taken = dict(given)\nfor key in other():\n    taken.pop(key, None)", None, None),
        ("taken = dict(given)\nfor key in other():\n    del taken[key]", None, None),
        ("taken = dict(given)\ntaken.update(**other())", None, None),
        ("taken = dict(given)\ntaken.clear()", 8, 1024),
        (
            "known = set(inspect.signature(SFTConfig).parameters) - {'max_length'}\n"
            "taken = {k: v for k, v in given.items() if k in known}",
            2,
            1024,
        ),
        (
            "known = {k for k in inspect.signature(SFTConfig).parameters if k != 'max_length'}\n"
            "taken = {k: v for k, v in given.items() if k in known}",
            None,
            None,
        ),
        ("taken = dict(given)\nif torch.version.hip is not None:\n    taken['max_length'] = 1", 2, None),
    ],
)
def test_what_is_taken_away_or_set_elsewhere_is_no_fact(
    lines: str, rows: int | None, length: int | None
) -> None:
    run = described(f"{HEAD}{lines}\n{TRAIN}")
    assert (run.micro_batch, run.sequence_length) == (rows, length)
    assert bool(run.problems) == (None in (rows, length))


@pytest.mark.parametrize(
    ("lines", "rows", "length"),
    [
        ("args = SFTConfig('o', max_length=64)\nif other():\n    args.max_length = 256", 8, None),
        ("args = SFTConfig('o')\nif other():\n    args.per_device_train_batch_size = 1", None, 1024),
        (
            "args = SFTConfig('o', max_length=64)\nfor name, item in other():\n    setattr(args, name, item)",
            None,
            None,
        ),
        (
            "@dataclass\nclass Own(SFTConfig):\n    more: int = 1\nargs = Own('o', max_length=64)\n"
            "args.max_length = 256\nargs.per_device_train_batch_size = 2",
            2,
            256,
        ),
        (
            "class Own:\n    rows = 8\nown = Own()\nif other():\n    own.rows = 1\n"
            "args = SFTConfig('o', per_device_train_batch_size=own.rows, max_length=9)",
            None,
            9,
        ),
        (
            "class Own:\n    def __init__(self):\n        self.rows = 4\nown = Own()\n"
            "new = copy.deepcopy(own)\nnew.rows = 1\n"
            "args = SFTConfig('o', per_device_train_batch_size=own.rows, max_length=9)",
            4,
            9,
        ),
        (
            "@dataclass\nclass Base:\n    x: int = 1\n    y: int = 2\n@dataclass\nclass Own(Base):\n"
            "    x: int = 3\n    z: int = 4\nown = Own(7, 8, 9)\n"
            "args = SFTConfig('o', per_device_train_batch_size=own.x, max_length=own.z)",
            7,
            9,
        ),
    ],
)
def test_attributes_that_are_set_in_one_branch_are_left_open(
    lines: str, rows: int | None, length: int | None
) -> None:
    run = described(f"{HEAD}{lines}\nSFTTrainer(model=model, args=args).train()\n")
    assert (run.micro_batch, run.sequence_length) == (rows, length)
    assert bool(run.problems) == (None in (rows, length))


def test_a_copy_of_a_model_is_another_one_and_a_call_may_take_any_argument() -> None:
    frozen = """
import copy, torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
model = Net()
average = copy.deepcopy(model)
average.requires_grad_(False)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(rows, batch_size=2):
    model(batch).mean().backward()
    optimizer.step()
"""
    assert "requires_grad" not in [item.key for item in described(frozen).keys.not_modelled]
    lines = """
taken, loading = given, {}
found = inspect.signature(AutoModelForCausalLM.from_pretrained).parameters
if any(item.kind == item.VAR_KEYWORD for item in found.values()):
    loading["torch_dtype"] = torch.bfloat16
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", **loading)
"""
    assert described(f"{HEAD}{lines}{TRAIN}").base_dtype is None
