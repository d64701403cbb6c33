"""Scripts of FSDP1 become scripts of FSDP2 by edits; what cannot be migrated is named by its line."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

from fsdptool.cli.app import run
from fsdptool.files.text import SourceText
from fsdptool.scripts.judge import judge_script
from fsdptool.scripts.migrate import MigratedScript, migrate_script

VERSIONS = {"torch": "2.13.0"}
SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks/scripts/fsdp1").glob("*.py"))
WRAP = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"


def migrated(text: str) -> MigratedScript:
    """Return what a text becomes."""
    return migrate_script(SourceText(text), VERSIONS)


def body(text: str) -> str:
    """Return the lines of the function ``main`` of a migrated text."""
    result = migrated(text)
    assert result.text is not None, result.blocked
    return result.text.partition("def main")[2].partition("\n")[2]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_that_were_run_are_migrated_whole(path: Path) -> None:
    """Their losses before and after are in the results of benchmarks/scripts/migrated.py."""
    text = path.read_text(encoding="utf-8")
    result = migrated(text)
    assert result.text is not None
    assert result.uses_fsdp1
    ast.parse(result.text)
    assert "FullyShardedDataParallel" not in result.text
    judged = judge_script(SourceText(result.text), VERSIONS).findings
    assert [item for item in judged if item.severity == "error"] == []
    again = migrated(result.text)
    assert (again.text, again.uses_fsdp1) == (result.text, False)
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    ]
    dropped = "# keeps the CPU from running ahead"
    assert [comment for comment in comments if comment not in result.text] in ([], [dropped])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "    model = FSDP(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, device_id=rank)\n",
            "    fully_shard(model, reshard_after_forward=False)\n",
        ),
        (
            "    net = FSDP(model.cuda(), device_mesh=mesh)\n",
            "    net = model.cuda()\n    fully_shard(net, mesh=mesh)\n",
        ),
        (
            "    return FSDP(model, cpu_offload=CPUOffload(offload_params=True))\n",
            "    fully_shard(model, offload_policy=CPUOffloadPolicy())\n    return model\n",
        ),
        (
            "    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={mesh})\n"
            "    model = FSDP(model, auto_wrap_policy=policy, cpu_offload=None)\n",
            "    for module in reversed(list(model.modules())):\n"
            "        if isinstance(module, mesh):\n"
            "            fully_shard(module)\n"
            "    fully_shard(model)\n",
        ),
        (
            "    model = FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD)\n",
            "    gpus_per_node = torch.cuda.device_count()\n"
            "    fsdp_mesh = init_device_mesh(\n"
            '        "cuda",\n'
            "        (torch.distributed.get_world_size() // gpus_per_node, gpus_per_node),\n"
            '        mesh_dim_names=("replicate", "shard"),\n'
            "    )\n"
            "    fully_shard(model, mesh=fsdp_mesh)\n",
        ),
        (
            "    model = FSDP(model)\n"
            "    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):\n"
            "        state = {'model': model.state_dict(), 'optim': FSDP.optim_state_dict(model, rank)}\n",
            "    fully_shard(model)\n"
            "    state = {'model': get_model_state_dict(model), "
            "'optim': get_optimizer_state_dict(model, rank)}\n",
        ),
        (
            "    model = FSDP(model)\n"
            "    kind, alone = StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(rank0_only=True)\n"
            "    with FSDP.state_dict_type(model, kind, None, alone):\n"
            "        state = FSDP.optim_state_dict(model, rank)\n",
            "    fully_shard(model)\n"
            "    kind, alone = StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(rank0_only=True)\n"
            "    state = get_optimizer_state_dict("
            "model, rank, options=StateDictOptions(full_state_dict=True, cpu_offload=True))\n",
        ),
        (
            "    model = FSDP(model)\n"
            "    state = FSDP.optim_state_dict_to_load(model, rank, mesh)\n"
            "    rank.load_state_dict(state)\n"
            "    model.load_state_dict(mesh, strict=False)\n",
            "    fully_shard(model)\n"
            "    set_optimizer_state_dict("
            "model, rank, mesh, options=StateDictOptions(full_state_dict=True))\n"
            "    set_model_state_dict("
            "model, mesh, options=StateDictOptions(full_state_dict=True, strict=False))\n",
        ),
        (
            "    model = FSDP(model)\n"
            "    for i in range(8):\n"
            "        context = nullcontext() if i % 4 == 3 else model.no_sync()\n"
            "        with context:\n"
            "            model.module(i).backward()\n",
            "    fully_shard(model)\n"
            "    for i in range(8):\n"
            "        model.set_requires_gradient_sync(i % 4 == 3)\n"
            "        model(i).backward()\n",
        ),
        (
            "    optimizer = torch.optim.AdamW(model.parameters())  # first\n"
            "    model = FSDP(model, use_orig_params=True)\n",
            "    fully_shard(model)\n    optimizer = torch.optim.AdamW(model.parameters())  # first\n",
        ),
    ],
)
def test_a_form_of_fsdp1_has_its_form_of_fsdp2(before: str, after: str) -> None:
    head = (
        "import torch\nfrom contextlib import nullcontext\nfrom functools import partial\n" + WRAP
        + "from torch.distributed.fsdp import CPUOffload, ShardingStrategy, StateDictType\n"
        "from torch.distributed.fsdp import FullOptimStateDictConfig\n"
        "from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy\n\n"
        "def main(model, mesh, rank):\n"
    )  # fmt: skip
    assert body(head + before) == after
    # Line endings are those of the script.
    windows = migrated((head + before).replace("\n", "\r\n")).text or ""
    assert windows.replace("\r\n", "\n") == migrated(head + before).text
    assert windows.count("\n") == windows.count("\r\n")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("model = FSDP(model, auto_wrap_policy=size_based_auto_wrap_policy)", "wraps by size"),
        ("model = FSDP(model, sharding_strategy=ShardingStrategy.NO_SHARD)", "DistributedDataParallel"),
        ("model = FSDP(model, sharding_strategy=strategy)", "decided at run time"),
        ("model = FSDP(model, **options)", "decided at run time by options"),
        ("model = FSDP(model, mixed_precision=options)", "not made in this script"),
        ("units = FSDP.fsdp_modules(model)", "FSDP.fsdp_modules has no counterpart"),
        (
            "for net in (FSDP(model), DistributedDataParallel(model)):\n"
            "        with net.no_sync(): net(1).backward()",
            "may be DistributedDataParallel",
        ),
        ("register(FSDP)", "used as a value"),
        ("with enable_wrap(wrapper_cls=FSDP): pass", "enable_wrap has no counterpart"),
        ("with FSDP.summon_full_params(model): model.weight.fill_(0)", "writes to the full parameters"),
    ],
)
def test_what_cannot_be_migrated_is_named_by_line(line: str, why: str) -> None:
    text = (
        WRAP + "from torch.distributed.fsdp import ShardingStrategy\n"
        "from torch.distributed.fsdp.wrap import enable_wrap, size_based_auto_wrap_policy\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        f"def main(model, options, strategy):\n    {line}\n"
    )
    result = migrated(text)
    assert result.text is None
    assert any(item.startswith("line ") and why in item for item in result.blocked), result.blocked
    assert {item.partition(":")[0] for item in result.blocked} <= {"line 6", "line 7"}


def test_the_command_shows_and_writes_the_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    text = WRAP + "\n\ndef main(net):  # ours\n    return FSDP(net, use_orig_params=True)  # last\n"
    path.write_text(text)
    assert run(["migrate", str(path), "--diff"]) == 1
    assert "+    fully_shard(net)\n" in capsys.readouterr().out
    assert path.read_text() == text
    assert run(["migrate", str(path), "--check"]) == 1
    assert run(["migrate", str(path), "-o", str(tmp_path / "new.py")]) == 0
    assert run(["migrate", str(path)]) == 0
    assert path.read_text() == (tmp_path / "new.py").read_text() == (
        "from torch.distributed.fsdp import fully_shard\n\n\ndef main(net):  # ours\n    fully_shard(net)\n"
        "    return net  # last\n"
    )  # fmt: skip
    assert run(["migrate", str(path), "--check"]) == 0
    path.write_text(text.replace("use_orig_params=True", "**other()"))
    capsys.readouterr()
    assert run(["migrate", str(path)]) == 1
    assert "line 5: its arguments are decided elsewhere" in capsys.readouterr().err
    assert run(["migrate", str(path), "--to", "accelerate"]) == 1
    capsys.readouterr()
