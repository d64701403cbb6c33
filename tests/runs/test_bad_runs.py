"""Mistakes in a run: one clear line, the exit code, nothing started and nothing overwritten."""

from __future__ import annotations

import json
import os
import signal
from importlib import import_module
from pathlib import Path

import pytest
from real_runs import CONFIG, RECIPE, Work

from fsdptool.cli.app import run
from fsdptool.errors import ConfigError
from fsdptool.launch.prepare import PreparedRun, prepare
from fsdptool.launch.start import check_folder, lock_run
from fsdptool.records.run import Start
from fsdptool.runs.folder import default_folder, write_start


@pytest.fixture
def place(tmp_path: Path) -> Work:
    return Work(tmp_path)


def complain(place: Work, capsys: pytest.CaptureFixture[str], *options: str, code: int = 2) -> str:
    """Run, expect the exit code, and return the one line and its help."""
    place.folder.joinpath("model").exists()
    before = sorted(place.folder.rglob("*"))
    assert run(place.arguments("run", *options)) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) <= 2
    assert sorted(place.folder.rglob("*")) == before, "nothing is written"
    return error


def recipe(place: Work, **changes: str) -> None:
    text = RECIPE.replace("WORKERS", "0").replace("reference: model", f"reference: {place.folder / 'model'}")
    text = text.replace("path: text.txt", f"path: {place.folder / 'text.txt'}")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (place.folder / "recipe.yaml").write_text(text)


def test_a_typo_in_the_recipe_names_the_nearest_key(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(place, checkpoints="checkpoint")
    assert "checkpoints" in complain(place, capsys)


def test_a_recipe_without_an_end(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(place, **{"steps: 14\n": ""})
    assert "neither steps nor epochs" in complain(place, capsys)


def test_a_file_that_is_not_there(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    (place.folder / "accelerate.yaml").unlink()
    assert "accelerate.yaml does not exist" in complain(place, capsys)


def test_a_file_that_is_not_text(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    (place.folder / "recipe.yaml").write_bytes(b"model: \xff\xfe")
    assert "recipe.yaml is not UTF-8" in complain(place, capsys)


def test_a_config_for_gpus_where_there_are_none(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(place)
    (place.folder / "accelerate.yaml").write_text(CONFIG.replace("use_cpu: true\n", ""))
    assert "is for 2 GPUs but this machine has none" in complain(place, capsys)


def test_a_dry_run_on_a_login_node(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    """What needs the GPUs is left out and named; every other mistake is found."""
    recipe(place)
    config = place.folder / "accelerate.yaml"
    config.write_text(CONFIG.replace("use_cpu: true\n", ""))
    assert run([*place.arguments("run"), "--dry-run", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["unchecked"] == ["gpus", "memory", "data"]
    assert "CUDA_VISIBLE_DEVICES" not in document["nodes"][0]["environment"]
    config.write_text(config.read_text().replace("num_processes: 2", "num_processes: 16\nnum_machines: 2"))
    assert run([*place.arguments("run"), "--dry-run", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["unchecked"] == ["gpus", "memory", "data", "rendezvous"]
    assert "node0:29500" in " ".join(document["nodes"][0]["argv"])
    config.write_text(CONFIG.replace("use_cpu: true\n", ""))
    config.write_text(config.read_text().replace("num_processes: 2\n", ""))
    assert "does not set num_processes" in complain(place, capsys, "--dry-run")
    (place.folder / "text.txt").write_text("")
    assert "text.txt has no rows" in complain(place, capsys, "--dry-run", "--processes", "2")


def test_a_config_for_another_number_of_processes(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(place)
    assert "is for 2 processes and the launch has 4" in complain(place, capsys, "--processes", "4")


def test_data_without_the_column(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    (place.folder / "rows.jsonl").write_text('{"body": "x"}\n')
    recipe(place, **{"source: text": "source: jsonl", "text.txt": "rows.jsonl"})
    assert "rows.jsonl:1: no column 'text'; there is body" in complain(place, capsys)


def test_empty_data(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    (place.folder / "text.txt").write_text("")
    recipe(place)
    assert "text.txt" in complain(place, capsys)


def test_a_tokenizer_larger_than_the_model(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((place.folder / "model" / "config.json").read_text())
    (place.folder / "model" / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    recipe(place)
    assert "262 tokens, the model" in complain(place, capsys)


def test_a_tokenizer_that_is_not_there(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(place, **{"tokenizer: bytes": "tokenizer: auto"})
    assert "no tokenizer can be loaded" in complain(place, capsys)


def test_a_tracking_backend_that_is_not_installed(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(place, **{"steps: 14": "steps: 14\ntracking: {backends: [trackio]}"})
    assert "trackio is not installed" in complain(place, capsys)


def test_a_global_batch_that_does_not_divide(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(place, **{"accumulation: 2": "global_batch: 6"})
    assert "batch.global_batch 6 is not a multiple of" in complain(place, capsys)


def test_an_objective_or_an_option_of_it_that_is_not_there(
    place: Work, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe(place, **{"steps: 14": "objective: {name: causal_lmm}\nsteps: 14"})
    assert "did you mean causal_lm?" in complain(place, capsys)
    recipe(place, **{"steps: 14": "objective: {options: {chunkk: 3}}\nsteps: 14"})
    assert "causal_lm has no option 'chunkk'" in complain(place, capsys)
    recipe(place, **{"steps: 14": "objective: {options: {arguments: 3}}\nsteps: 14"})
    assert "it has: chunk, document_mask, auxiliary" in complain(place, capsys)


def test_a_teacher_for_something_else(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    taught = "{name: distillation, distillation: {teacher: {reference: bert:base-uncased}}}"
    recipe(place, **{"steps: 14": f"method: {taught}\nsteps: 14"})
    assert "is a model for masked_lm, the student one for causal_lm" in complain(place, capsys)


def test_a_run_is_never_overwritten_unasked(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    (place.folder / "run").mkdir()
    (place.folder / "run" / "run.json").write_text('{"schema": "run"}')
    assert "already contains a run" in complain(place, capsys)
    assert "cannot be combined" in complain(place, capsys, "--resume", "auto", "--force")


def test_recipes_of_one_name_have_folders_of_their_own(tmp_path: Path) -> None:
    project = tmp_path / "project"
    recipes = [project / name / "recipe.yaml" for name in ("small", "large")]
    for path in recipes:
        path.parent.mkdir(parents=True)
        path.write_text("")
    runs = project / "runs"

    def folder_of(path: Path, root: Path = runs) -> str:
        return default_folder(path, root).name

    def start(folder: Path, path: Path) -> None:
        folder.mkdir(parents=True)
        write_start(folder, Start(1, "cpu", recipe=os.path.relpath(path, folder)), None)

    small, large = recipes
    assert folder_of(small) == folder_of(large) == "recipe"
    start(runs / "recipe", small)
    assert (folder_of(small), folder_of(large)) == ("recipe", "large-recipe")
    start(runs / "large-recipe", large)
    assert (folder_of(small), folder_of(large)) == ("recipe", "large-recipe")
    moved = project.rename(tmp_path / "moved")
    assert folder_of(moved / "large" / "recipe.yaml", moved / "runs") == "large-recipe", "it can be continued"
    (moved / "small").rename(moved / "tiny")
    assert folder_of(moved / "tiny" / "recipe.yaml", moved / "runs") == "recipe", "its recipe was renamed"


def test_a_dry_run_does_not_mind_a_run_that_exists(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(place)
    folder = place.folder / "run"
    folder.mkdir()
    write_start(folder, Start(2, "cpu"), None)
    assert run([*place.arguments("run"), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert f"note: {folder} already contains a run: add --resume auto to continue it" in said.err
    assert run([*place.arguments("run"), "--dry-run", "--resume", "auto"]) == 0
    assert "note:" not in capsys.readouterr().err
    (folder / "run.json").write_text('{"schema": "run", "world_')
    assert run([*place.arguments("run"), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert f"note: {folder / 'run.json'} is damaged" in said.err
    assert "add --force to replace it" in said.err
    assert "torch.distributed.run" in said.out or "torchrun" in said.out
    assert run([*place.arguments("run"), "--dry-run", "--resume", "auto"]) == 2
    capsys.readouterr()
    (folder / "run.json").write_text('{"experiment": "mine"}')
    for options in ((), ("--force",)):
        assert run([*place.arguments("run"), "--dry-run", *options]) == 2, "another program wrote it"
        refusal = capsys.readouterr().err
        assert "is not empty and does not contain a run" in refusal and "--force" not in refusal


def test_a_folder_of_somebody_elses_is_left_alone(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    (place.folder / "run").mkdir()
    (place.folder / "run" / "thesis.tex").write_text("x")
    assert "is not empty and does not contain a run" in complain(place, capsys)
    assert "does not contain a run" in complain(place, capsys, "--force")


def test_a_start_that_ended_half_way_is_started_again(place: Work) -> None:
    folder = place.folder / "run"
    with lock_run(folder):
        (folder / "recipe.json").write_text('{"half')
    assert check_folder(folder, resume=None, force=False) == 0
    assert check_folder(folder, resume="auto", force=False) == 0
    (folder / ".lock").unlink()
    with pytest.raises(ConfigError, match="does not contain a run"):
        check_folder(folder, resume="auto", force=False)


def test_a_run_that_came_and_went_meanwhile_is_not_overwritten(
    place: Work, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(place)
    made = place.folder / "run" / "run.json"

    def slowly(*arguments: object, **options: object) -> PreparedRun:
        prepared = prepare(*arguments, **options)  # type: ignore[arg-type]
        made.parent.mkdir()
        made.write_text('{"schema": "run"}')
        return prepared

    monkeypatch.setattr("fsdptool.launch.start.prepare", slowly)
    assert run(place.arguments("run")) == 2
    assert "already contains a run" in capsys.readouterr().err
    assert made.read_text() == '{"schema": "run"}'


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_while_the_memory_is_predicted(
    place: Work, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Not a reason why the memory could not be predicted, whatever a library makes of it."""

    def predicts(*arguments: object, **options: object) -> None:
        try:
            os.kill(os.getpid(), number)
        except Exception as error:
            raise ConfigError("nothing is known") from error

    recipe(place)
    before = signal.getsignal(number)
    # By its module: the package has a function of that name.
    monkeypatch.setattr(import_module("fsdptool.planning.candidate.estimator"), "predict", predicts)
    arguments = [item for item in place.arguments("run") if item != "--no-predict"]
    assert run(arguments) == (130 if number == signal.SIGINT else 75)
    if number != signal.SIGINT:
        assert f"{number.name} was received before the run was started" in capsys.readouterr().err
    assert not (place.folder / "run").exists()
    assert signal.getsignal(number) == before


def test_a_run_folder_that_cannot_be_made(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    recipe(place)
    (place.folder / "run").write_text("a file")
    assert "run is a file" in complain(place, capsys)


def test_a_checkpoint_that_is_none(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a complete checkpoint" in complain(place, capsys, "--resume", str(place.folder / "model"))


def test_two_runs_in_one_folder(place: Work) -> None:
    with lock_run(place.folder / "run"), pytest.raises(ConfigError, match="another process trains in"):  # noqa: SIM117
        with lock_run(place.folder / "run"):
            pass


def test_exporting_what_is_no_run(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(place.folder / "model")]) == 2
    assert "error: " in capsys.readouterr().err
    assert not (place.folder / "model" / "export").exists()


def test_exporting_over_what_is_no_export(place: Work, capsys: pytest.CaptureFixture[str]) -> None:
    trained = place.folder / "trained"
    trained.mkdir()
    (trained / "run.json").touch()
    assert run(["export", str(trained), "-o", str(place.folder / "model"), "--force"]) == 2
    assert "is not an fsdptool export" in capsys.readouterr().err
    assert (place.folder / "model" / "config.json").exists()
