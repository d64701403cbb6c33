"""The digests of traces and anatomies cover every module that makes them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdptool import cache as digests
from fsdptool.families.registry import files_reached_by_family
from fsdptool.records.codec import to_json
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Batch, Distillation, Lora, Method, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.source import resolve

TRACER, ANATOMY = "fsdptool.memory.tracing.tracer", "fsdptool.inspection.api"
LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
SD3 = {
    "num_layers": 2,
    "num_attention_heads": 2,
    "joint_attention_dim": 128,
    "caption_projection_dim": 128,
    "pooled_projection_dim": 64,
}
CHOICE = ModelChoice("llama3:8b", overrides=LLAMA)
FULL = FsdpSettings(num_processes=2, activation_checkpointing=True)
CASES: dict[str, tuple[str, dict[str, Any], Method, FsdpSettings]] = {
    "LoRA": ("llama3:8b", LLAMA, Method("lora", lora=Lora(rank=4)), FULL),
    "a quantised base": ("llama3:8b", LLAMA, Method("lora", lora=Lora(rank=4, base="nf4")), FULL),
    "distillation": ("llama3:8b", LLAMA, Method("distillation", distillation=Distillation(CHOICE)), FULL),
    "context parallelism": (
        "llama3:8b",
        LLAMA,
        Method(),
        FsdpSettings(num_processes=2, mesh=ParallelDims(cp=2)),
    ),
    "diffusion": ("sd3:medium", SD3, Method(), FULL),
}

SCRIPT = """
import importlib, json, sys
work = json.loads(sys.stdin.read())
def loaded():
    # How a run was decided shows in the run, which is part of every key.
    names = [name for name in sys.modules if name.partition(".")[0] == "fsdptool"]
    return [sys.modules[name].__file__ for name in names if name != "fsdptool.modeling.resolve"]
from fsdptool.families.registry import load_registry
load_registry()
snapshots = [loaded()]
if work["planted"]:
    from fsdptool.families import registry
    plain = registry.family_of
    registry.family_of = lambda *given: (importlib.import_module(work["planted"]), plain(*given))[1]
from fsdptool.records.codec import from_json
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.inspection.api import inspect
assert inspect(from_json(ModelSpec, work["cases"][0]["spec"]), refresh=True).parameters
snapshots.append(loaded())
for case in work["cases"] * work["trace"]:
    from fsdptool.memory.tracing.tracer import trace
    from fsdptool.modeling.resolve import resolve_run
    spec, recipe = from_json(ModelSpec, case["spec"]), from_json(Recipe, case["recipe"])
    settings = from_json(FsdpSettings, case["settings"])
    teacher = inspect(spec) if recipe.method.distillation else None
    made = trace(spec, resolve_run(recipe, settings), teacher=teacher, refresh=True)
    assert made.known, made.unknowns
print(json.dumps([*snapshots, loaded()]))
"""


def case_of(name: str) -> dict[str, Any]:
    """Return what a case asks of the model, as JSON."""
    reference, overrides, method, settings = CASES[name]
    text = {} if name == "diffusion" else {"sequence_length": 64}
    sizes: dict[str, int] = {"height": 64, "width": 64} if name == "diffusion" else {}
    recipe = Recipe(ModelChoice(reference, overrides=overrides), method, batch=Batch(**text, **sizes))
    spec = resolve(reference, overrides=overrides)
    return {"spec": to_json(spec), "recipe": to_json(recipe), "settings": to_json(settings)}


def unreached(names: tuple[str, ...], *, trace: bool = True, planted: str = "") -> tuple[set[str], set[str]]:
    """Return what a fresh process loads for an anatomy, and for traces, that no digest covers.

    Neither the digest of the module that makes it nor the family's covers these files.
    """
    work = {"trace": trace, "planted": planted, "cases": [case_of(name) for name in names]}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(work), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # Listing every installed family loads what other families need, too.
    listed, inspected, traced = (set(paths) for paths in json.loads(done.stdout.splitlines()[-1]))
    assert len(inspected - listed) > 10, inspected
    assert (len(traced - inspected) > 10) is trace, traced
    families = {str(case_of(name)["spec"]["family"]) for name in names}
    own: set[Path] = set().union(*map(files_reached_by_family, families))
    by_anatomy, by_trace = (
        {str(path) for path in own.union(digests.reached_files(module))} for module in (ANATOMY, TRACER)
    )
    return inspected - listed - by_anatomy, traced - listed - by_trace


# One process for all cases of a family: what covers one of them covers all.
@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [tuple(name for name in CASES if name != "diffusion"), ("diffusion",)],
    ids=["decoder", "diffusion"],
)
def test_the_digests_of_anatomies_and_traces_cover_what_makes_them(names: tuple[str, ...]) -> None:
    assert unreached(names) == (set(), set())


@pytest.mark.slow
def test_a_module_that_no_import_statement_names_is_noticed() -> None:
    missed, _ = unreached(("LoRA",), trace=False, planted="fsdptool.launch")
    assert [path for path in missed if path.endswith("fsdptool/launch/__init__.py")]


def test_a_familys_digest_covers_the_modules_its_package_imports() -> None:
    covered = {path.name for path in files_reached_by_family("sd3")}
    assert {"batches.py", "families.py", "features.py"} <= covered


def test_a_trace_depends_on_no_room_above_memory() -> None:
    rooms = {path.relative_to(digests._PACKAGE).parts[0] for path in digests.reached_files(TRACER)}
    above = {"api", "cli", "config", "distributed", "launch", "planning", "report", "runs", "training", "web"}
    assert not rooms & above
    assert {"memory", "modeling", "inspection", "families"} <= rooms


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let digests be taken of a copy of the package."""
    package = tmp_path / "fsdptool"
    shutil.copytree(digests._PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(digests, "_PACKAGE", package)
    forget()
    yield package
    forget()


def forget() -> None:
    """Let the next digest be taken anew."""
    kept = (
        digests.source_digest,
        digests.reached_files,
        digests._content,
        digests._files_of,
        digests._imported,
    )
    for function in kept:
        function.cache_clear()


def test_a_changed_byte_changes_the_digests_that_reach_it(copied: Path) -> None:
    def after_a_change(path: str) -> tuple[bool, bool]:
        before = [digests.source_digest(module) for module in (TRACER, ANATOMY)]
        with (copied / path).open("a", encoding="utf-8") as file:
            file.write("#")
        forget()
        now = [digests.source_digest(module) for module in (TRACER, ANATOMY)]
        return before[0] != now[0], before[1] != now[1]

    assert after_a_change("modeling/methods/__init__.py") == (True, False)
    assert after_a_change("memory/tracing/fake_tensors.py") == (True, False)
    assert after_a_change("inspection/walk.py") == (True, True)
    assert after_a_change("cli/app.py") == (False, False)
    assert after_a_change("planning/time/step_time.py") == (False, False)
