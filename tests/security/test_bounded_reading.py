"""Files that never end, unfold without end or hold numbers without end are refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks import CONFIG, RECIPE, Answer, Cli, write_job

LONG = "9" * 5000
BOMB = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
DEEP = "[" * 100_000


def refused(answer: Answer) -> None:
    assert answer.code in (1, 2), answer
    assert "Traceback" not in answer.err + answer.out
    assert "internal" not in answer.err


def sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(300 << 30)


BAD: dict[str, Callable[[Path], None]] = {
    "alias-bomb": lambda path: path.write_text(BOMB) and None,
    "digits": lambda path: path.write_text(f"gpus_per_node: {LONG}\n") and None,
    "float-digits": lambda path: path.write_text(f"gpus_per_node: {'9' * 400}\n") and None,
    "deep": lambda path: path.write_text(DEEP) and None,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
    "sparse": sparse,
    "not-utf8": lambda path: path.write_bytes(b"gpu: \xff\xfe\n") and None,
    "keys": lambda path: path.write_text("? [1, 2]\n: 3\n1: 2\n") and None,
    "surrogate": lambda path: path.write_text('{"gpu": "\\ud800"}') and None,
    "folder": lambda path: path.mkdir(),
}


@pytest.fixture(params=sorted(BAD))
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Make the bad file under a name."""

    def make(name: str) -> Path:
        path = tmp_path / name
        BAD[request.param](path)
        return path

    return make


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_cluster_and_gpu_files(here: Cli, bad: Callable[[str], Path], suffix: str) -> None:
    refused(here("plan", "albert:base-v2", "--cluster", bad(f"cluster.{suffix}"), "--seq-len", "8"))
    refused(here("plan", "albert:base-v2", "--gpu", "H100", "--gpus-file", bad(f"gpus.{suffix}")))


def test_configurations_recipes_and_plans(here: Cli, bad: Callable[[str], Path], tmp_path: Path) -> None:
    recipe, config = write_job(tmp_path)
    path = bad("given.yaml")
    for arguments in (
        ("explain", path),
        ("launch", path, "--config", config),
        ("launch", recipe, "--config", path),
        ("train", path, "--config", config, "--dry-run"),
        ("train", recipe, "--config", path, "--dry-run"),
        ("plan", "--recipe", path, "--profile", "cpu-gloo", "--gpus", "2"),
        ("plan", "--check", path),
        ("emit-config", "--plan", path),
        ("emit-config", "--preset", "single-node", "--into", path),
        ("migrate", path),
        ("detect", path),
        ("compare", path, path),
    ):
        refused(here(*arguments))
    if not path.is_dir():  # a folder is searched for configurations
        refused(here("validate", path))


def test_run_folders(here: Cli, bad: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("run.json", "recipe.json", "spec.json", "summary.json", "metrics.jsonl", "prediction.json"):
        path = bad(f"run/{name}")
        refused(here("export", tmp_path / "run"))
        refused(here("compare", tmp_path / "run", tmp_path / "run"))
        path.rmdir() if path.is_dir() else path.unlink()


ROWS = {
    "deep": '{"text": ' + "[" * 100_000 + "}",
    "digits": f'{{"text": "x", "id": {LONG}}}',
    "surrogate": '{"text": "a \\ud800 b"}',
    "no-object": "[1]",
}


@pytest.mark.parametrize("row", sorted(ROWS))
def test_rows_of_text(here: Cli, tmp_path: Path, row: str) -> None:
    data = "data: {source: jsonl, path: rows.jsonl, tokenizer: bytes}"
    recipe, config = write_job(tmp_path, RECIPE.replace("data: {source: synthetic}", data), vocabulary=262)
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n' + ROWS[row] + "\n")
    answer = here("train", recipe, "--config", config, "--no-predict", "-o", tmp_path / "run")
    refused(answer)
    assert "rows.jsonl:2" in answer.err


def test_captions(tmp_path: Path) -> None:
    from PIL import Image

    from fsdptool.errors import ConfigError
    from fsdptool.records.recipe import Data
    from fsdptool.training.data.images import Bucket, list_pictures

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe caption")
    data = Data(source="images", path=str(tmp_path))
    with pytest.raises(ConfigError, match="UTF-8"):
        list_pictures(data, (Bucket(8, 8),))
    (tmp_path / "a.txt").unlink()
    for line in ("[" * 100_000, f'{{"file_name": "a.png", "text": {LONG}}}', "[1]", '"x"'):
        (tmp_path / "metadata.jsonl").write_text(line + "\n")
        with pytest.raises(ConfigError, match=r"metadata\.jsonl"):
            list_pictures(data, (Bucket(8, 8),))
    (tmp_path / "metadata.jsonl").unlink()
    (tmp_path / "metadata.csv").write_text("file_name,text\na.png," + "x" * 200_000 + "\n")
    with pytest.raises(ConfigError, match=r"metadata\.csv"):
        list_pictures(data, (Bucket(8, 8),))


def test_what_a_shell_substitutes_is_still_read(tmp_path: Path) -> None:
    from fsdptool.files.text import read_source

    reading, writing = os.pipe()
    os.write(writing, CONFIG.encode())
    os.close(writing)
    assert read_source(f"/dev/fd/{reading}").text == CONFIG
    os.close(reading)


def test_json_that_is_fine_stays_fine() -> None:
    from fsdptool.files.values import load_json

    value = {"text": "\N{GRINNING FACE}", "large": 10**300, "deep": [[[[1.5]]]], "none": None}
    assert load_json(json.dumps(value)) == value
