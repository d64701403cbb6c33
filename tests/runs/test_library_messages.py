"""What the libraries say of FSDP is known to ``diagnose``, or nobody can meet it."""

from __future__ import annotations

import copy
import json
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from library_messages import Message, library_messages

from fsdptool.records.diagnosis import FailureDiagnosis
from fsdptool.rules import signatures
from fsdptool.runs.logs import LogText
from fsdptool.runs.recognition import diagnose_logs

LISTED = Path(__file__).with_name("unreachable_messages.json")
VALUES = ("8", "model.layers.0.weight", "[Shard(dim=0), 'x y']")
"""What stands for the values of a message."""


def answer_to(text: str) -> FailureDiagnosis:
    return diagnose_logs("log", (LogText("log", text, len(text), len(text)),))


def codes(message: str, kind: str = "ValueError") -> list[str]:
    """Return the causes of a log that ends with an exception, as Python prints it."""
    log = f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n{kind}: {message}\n'
    return [item.code for item in answer_to(log).failures if not item.consequence]


@cache
def unreachable() -> dict[tuple[str, str], str]:
    """Return the messages that nobody needs an answer to, and why, by file and text."""
    table = json.loads(LISTED.read_text(encoding="utf-8"))
    return {
        (file, text): group["reason"]
        for group in table
        for file, texts in group["messages"].items()
        for text in texts
    }


READ = {"torch": "2.13.", "accelerate": "1.15.", "transformers": "5.23.", "peft": "0.21."}
"""The versions whose messages the table and the list follow."""


@pytest.fixture(scope="module")
def tested() -> None:
    for library, release in READ.items():
        if not version(library).startswith(release):
            pytest.skip(f"{library} {version(library)} says other things than {release}")


def told(message: Message) -> list[list[str]]:
    kind = "ValueError" if message.raised else "UserWarning"
    return [codes(message.filled(value), kind) for value in VALUES]


@pytest.mark.slow
@pytest.mark.usefixtures("tested")
def test_every_message_is_known_or_listed() -> None:
    messages = library_messages()
    assert len(messages) > 700
    assert len({message.file for message in messages}) > 50
    listed, wrong = unreachable(), []
    for message in messages:
        answers = told(message)
        known = (message.file, message.text) in listed
        # One cause, whatever the values are; or none, and a reason.
        right = not any(answers) if known else len(answers[0]) == 1 and answers == [answers[0]] * len(VALUES)
        if not right:
            wrong.append(f"{message.file}:{message.line}: {message.text[:100]!r}: {answers[0]}")
    assert not wrong, "\n".join(wrong)


SERIOUS = {"RUN035", "RUN068", "RUN128", "RUN131", "RUN138", "RUN145", "RUN146", "RUN147"}
"""Causes that a library warns of, and goes on to a failure or to wrong results."""


@pytest.mark.slow
@pytest.mark.usefixtures("tested")
def test_a_warning_is_not_taken_for_a_failure() -> None:
    depths = {item.code: item.depth for item in signatures()}
    for message in library_messages():
        for code in codes(message.filled("8"), "UserWarning") if not message.raised else ():
            assert (depths[code] == 4) != (code in SERIOUS), message
        for code in codes(message.filled("8")) if message.raised else ():
            assert depths[code] < 4, message


@pytest.mark.usefixtures("tested")
def test_nothing_is_listed_that_the_libraries_no_longer_say() -> None:
    said = {(message.file, message.text) for message in library_messages()}
    assert not set(unreachable()) - said
    assert all(reason.endswith(".") and len(reason) > 40 for reason in set(unreachable().values()))


FIELD = {
    "RuntimeError: No backend type associated with device type cpu": ("RUN104", "cpu:gloo,cuda:nccl"),
    "ValueError: Parameter 'model.embed_tokens.weight' is shared with a parameter already managed by another"
    " FSDP group. For shared/tied parameters, use fully_shard([module_a, module_b]) to place them in the same"
    " FSDP group.": ("RUN063", "accelerate 1.15"),
    "NotImplementedError: FSDP does not support uneven sharding on dim 1: torch.Size([3072, 100]) (world"
    " size: 8)": ("RUN064", "dimension 0"),
    "AssertionError: FSDP expects uniform reduce dtype but got {torch.bfloat16, None}": ("RUN029", "dtype"),
    # torch 2.4 to 2.7
    "AssertionError: FSDP requires the DP and TP mesh to have the same parent mesh but got: ": (
        "RUN073",
        "one mesh",
    ),
    "NotImplementedError: FSDP only supports 1D TP, not (Shard(dim=0), Replicate())": ("RUN073", "one mesh"),
    "[rank3]: AssertionError: _spmd_mesh.ndim can only be 2 or 3 but got 4.": ("RUN073", "one mesh"),
    # transformers 4
    "ValueError: The activation_checkpointing in FSDP config and the gradient_checkpointing in training arg"
    " can't be set to True simultaneously. Please use FSDP's activation_checkpointing logic when using"
    " FSDP.": ("RUN119", "gradient_checkpointing: false"),
    "ValueError: `--fsdp offload` can't work on its own. It needs to be added to `--fsdp full_shard` or"
    ' `--fsdp shard_grad_op`. For example, `--fsdp "full_shard offload"`.': ("RUN099", "validate"),
    "ValueError: You cannot perform fine-tuning on purely quantized models. Please attach trainable"
    " adapters on top of the quantized model": ("RUN107", "adapters"),
    "TypeError: fully_shard() got an unexpected keyword argument 'ignored_params'": ("RUN163", "torch 2.7"),
    "RuntimeError: Only Tensors of floating point and complex dtype can require gradients": (
        "RUN108",
        "bnb_4bit_quant_storage",
    ),
    "FileNotFoundError: [Errno 2] No such file or directory: '/out/step-500/.metadata'": (
        "RUN145",
        "earlier checkpoint",
    ),
    "    assert metadata is not None\nAssertionError": ("RUN145", "earlier checkpoint"),
}


@pytest.mark.parametrize("line", FIELD)
def test_a_message_that_people_paste(line: str) -> None:
    code, change = FIELD[line]
    (cause,) = (item for item in answer_to(f"step 1 loss 5.2\n{line}\n").failures if not item.consequence)
    assert cause.code == code
    assert change in cause.change


def test_the_ways_out_of_a_tied_parameter_in_two_units_are_both_named() -> None:
    tied = next(item for item in signatures() if item.code == "RUN063")
    assert "accelerate 1.15 or newer, or a torch below 2.12" in tied.change


WARNING = "UserWarning: FSDP is switching to use `NO_SHARD` instead of FULL_SHARD since the world size is 1."


def test_a_warning_counts_only_where_nothing_failed() -> None:
    alone = answer_to(f"step 1 loss 5.2\n{WARNING}\n  warnings.warn(\nstep 2 loss 5.1\n")
    assert [item.code for item in alone.failures] == ["RUN143"]
    assert not alone.failed
    beside = answer_to(f"{WARNING}\nRuntimeError: mat1 and mat2 shapes cannot be multiplied (3x3 and 4x2)\n")
    assert [item.code for item in beside.failures] == ["RUN032"]
    unknown = answer_to(f"{WARNING}\nKeyError: 'the moon'\n")
    assert unknown.failures == ()
    assert unknown.exception is not None


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except BaseException:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


@pytest.mark.usefixtures("alone")
def test_mistakes_with_the_installed_torch(tmp_path: Path) -> None:
    """The messages come from real calls, so that the table follows what torch really says."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, two = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    one = torch.ones(1, 4)

    def sharded(module: Any = None, **options: Any) -> Any:
        return fully_shard(module or torch.nn.Linear(4, 4), **{"mesh": mesh, **options})

    def tied() -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        sharded(model[0])
        sharded(model)(torch.tensor([[1]]))

    class Scalar(torch.nn.Module):
        def __init__(self, parameter: Any) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(parameter)

        def forward(self, x: Any) -> Any:
            return x * self.scale

    def inner_first() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        sharded(model[0])(one)
        sharded(model)(one)

    def both() -> None:
        layer = parallelize_module(torch.nn.Linear(4, 4), init_device_mesh("cpu", (1,)), ColwiseParallel())
        fully_shard(layer, mesh=mesh)

    def saved_twice() -> None:
        for _ in range(2):
            dcp.save(
                {"a": torch.ones(1)},
                storage_writer=dcp.FileSystemWriter(tmp_path / "twice", overwrite=False),
            )

    (tmp_path / "empty").mkdir()
    for code, act in {
        "RUN063": tied,
        "RUN065": lambda: sharded(shard_placement_fn=lambda p: Shard(7)),
        "RUN066": lambda: sharded(Scalar(torch.tensor(1.0))),
        "RUN067": lambda: sharded(Scalar(torch.ones(4, 2).t())),
        "RUN068": lambda: sharded(torch.nn.ModuleList([torch.nn.Linear(2, 2)])),
        "RUN069": lambda: sharded(mesh=init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))),
        "RUN070": lambda: sharded(reshard_after_forward="yes"),
        "RUN162": both,
        "RUN074": inner_first,
        "RUN075": lambda: sharded(sharded()),
        "RUN076": lambda: copy.deepcopy(sharded()),
        "RUN078": lambda: sharded().set_modules_to_forward_prefetch([torch.nn.Linear(2, 2)]),
        "RUN112": saved_twice,
        "RUN145": lambda: dcp.load({"a": torch.ones(1)}, checkpoint_id=tmp_path / "empty"),
        "RUN148": lambda: get_optimizer_state_dict(
            sharded(), [], options=StateDictOptions(full_state_dict=True)
        ),
        "RUN155": lambda: two["pp"],
    }.items():
        log = raised(act)
        causes = [item.code for item in answer_to(log).failures if not item.consequence]
        assert causes == [code], log
