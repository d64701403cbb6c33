"""Data that cannot be used: one line that names the thing and the next step; nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fsdptool.errors import ConfigError, FsdptoolError, StorageError, WorkerError
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.codec import from_json
from fsdptool.records.recipe import Data, Recipe
from fsdptool.training.data import build_batches, build_evaluation, prepare
from fsdptool.training.data.images import Bucket, list_pictures
from fsdptool.training.data.sources import open_source

SpecOf = Callable[[str], ModelSpec]
RecipeFor = Callable[..., Recipe]


@contextmanager
def limited_memory(room: int) -> Iterator[None]:
    """Let this process take no more than ``room`` bytes besides what it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def complaint(recipe: Recipe, spec: ModelSpec, cache: Path) -> str:
    with pytest.raises(FsdptoolError) as caught:
        prepare(recipe, spec, cache=cache)
    assert "\n" not in caught.value.message
    assert caught.value.help
    assert "\n" not in caught.value.help
    leftovers = [path for path in cache.rglob("*") if path.is_dir() and "part" in path.name]
    assert not leftovers, "nothing half-written"
    return f"{caught.value.message} | {caught.value.help}"


CASES: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("missing.jsonl", "", "causal_lm", {}, "does not exist"),
    ("empty.jsonl", "", "causal_lm", {}, "has no rows"),
    ("blank.jsonl", '{"text": ""}\n{"text": ""}\n', "causal_lm", {}, "has no text: every row is empty"),
    ("wrong.jsonl", '{"body": "x"}\n', "causal_lm", {}, "wrong.jsonl:1: no column 'text'; there is body"),
    ("broken.jsonl", '{"text": "x"}\n{"text": \n', "causal_lm", {}, "broken.jsonl:2: not a JSON object"),
    ("list.jsonl", "[1]\n", "causal_lm", {}, "list.jsonl:1: expected a JSON object, got list"),
    (
        "null.jsonl",
        '{"text": "x"}\n{"text": null}\n',
        "causal_lm",
        {},
        "null.jsonl:2: column 'text' is empty",
    ),
    (
        "number.jsonl",
        '{"text": 5}\n',
        "causal_lm",
        {},
        "number.jsonl:1: column 'text' holds int, expected text",
    ),
    ("pairs.jsonl", '{"source": "x"}\n', "seq2seq", {}, "pairs.jsonl:1: no column 'target'"),
    ("labels.jsonl", '{"text": "x"}\n', "classification", {}, "labels.jsonl:1: no column 'label'"),
    (
        "four.jsonl",
        "".join(f'{{"text": "x", "label": {n}}}\n' for n in range(4)),
        "classification",
        {},
        "has 4 labels, tiny-classification predicts 3 | set model.overrides.num_labels: 4",
    ),
    (
        "chat.jsonl",
        '{"messages": "hello"}\n',
        "causal_lm",
        {"assistant_only_loss": True},
        "does not contain a list of messages",
    ),
    ("late.jsonl", '{"text": "x"}\n\n{"body": "x"}\n', "causal_lm", {}, "late.jsonl:3: no column 'text'"),
    (
        "half.jsonl",
        '{"text": "x"}\n{"text": "\\ud800"}\n',
        "causal_lm",
        {},
        "half.jsonl:2: not a JSON object: a string holds half",
    ),
    (
        "no_content.jsonl",
        '{"messages": [{"role": "user", "content": "x"}]}\n{"messages": [{"role": "user"}]}\n',
        "causal_lm",
        {},
        "no_content.jsonl:2: column 'messages': message 1 has no content",
    ),
    (
        "strings.jsonl",
        '{"messages": ["hello"]}\n',
        "causal_lm",
        {},
        "strings.jsonl:1: column 'messages': message 1 is str, not an object with role and content",
    ),
    (
        "turns.jsonl",
        '{"messages": [{"role": "user", "content": "<|im_end|>"}]}\n',
        "causal_lm",
        {
            "assistant_only_loss": True,
            "options": {"assistant_turns": ["<|im_start|>assistant\n", "<|im_end|>"]},
        },
        "turns.jsonl:1: column 'messages': message 1 contains a text of data.options.assistant_turns",
    ),
    (
        "plain.jsonl",
        '{"text": "hello"}\n',
        "causal_lm",
        {"assistant_only_loss": True},
        "needs a column of messages",
    ),
    (
        "silent.jsonl",
        '{"messages": [{"role": "user", "content": "x"}]}\n',
        "causal_lm",
        {"assistant_only_loss": True},
        "no conversation contains a message of the assistant",
    ),
]


@pytest.mark.parametrize(("name", "content", "objective", "fields", "expected"), CASES)
def test_rows_that_cannot_be_used(
    name: str,
    content: str,
    objective: str,
    fields: dict[str, Any],
    expected: str,
    spec_of: SpecOf,
    recipe_for: RecipeFor,
    tmp_path: Path,
) -> None:
    path = tmp_path / name
    if name != "missing.jsonl":
        path.write_text(content, encoding="utf-8")
    recipe = recipe_for(objective, source="jsonl", path=str(path), **fields)
    assert expected in complaint(recipe, spec_of(objective), tmp_path / "cache")


def test_files_that_cannot_be_read(spec_of: SpecOf, recipe_for: RecipeFor, tmp_path: Path) -> None:
    spec = spec_of("causal_lm")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    recipe = recipe_for("causal_lm", source="text", path=str(tmp_path / "latin.txt"))
    assert "latin.txt cannot be read: 'utf-8' codec" in complaint(recipe, spec, tmp_path / "c")
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    recipe = recipe_for("causal_lm", source="parquet", path=str(tmp_path / "bad.parquet"))
    assert "bad.parquet cannot be read" in complaint(recipe, spec, tmp_path / "c")
    (tmp_path / "folder").mkdir()
    recipe = recipe_for("causal_lm", source="text", path=str(tmp_path / "folder"))
    assert "contains no file that ends in .txt" in complaint(recipe, spec, tmp_path / "c")
    (tmp_path / "folder" / "empty.txt").touch()
    assert "has no rows" in complaint(recipe, spec, tmp_path / "c")
    recipe = recipe_for("causal_lm", source="dataset", path=str(tmp_path / "folder"), split="nope")
    assert "cannot be loaded" in complaint(recipe, spec, tmp_path / "c")
    recipe = recipe_for("causal_lm", source="jsonl")
    assert "needs data.path" in complaint(recipe, spec, tmp_path / "c")


def test_a_tokenizer_that_does_not_suit(spec_of: SpecOf, recipe_for: RecipeFor, tmp_path: Path) -> None:
    import dataclasses

    spec = spec_of("causal_lm")
    small = dataclasses.replace(spec, config={**spec.config, "vocab_size": 100})
    recipe = recipe_for("causal_lm", source="text", path="pydoc")
    assert "has 262 tokens, the model tiny-causal_lm only 100" in complaint(recipe, small, tmp_path / "c")
    recipe = recipe_for("causal_lm", source="text", path="pydoc", tokenizer="auto")
    assert "has no tokenizer | set data.tokenizer: bytes" in complaint(recipe, spec, tmp_path / "c")
    recipe = recipe_for("causal_lm", source="text", path="pydoc", tokenizer=str(tmp_path))
    assert "the folder holds no tokenizer | set data.tokenizer" in complaint(recipe, spec, tmp_path / "c")


def test_sizes_that_do_not_divide(spec_of: SpecOf, recipe_for: RecipeFor, tmp_path: Path) -> None:
    recipe = recipe_for("causal_lm", batch={"micro_batch": 2, "global_batch": 6})
    with pytest.raises(ConfigError, match=r"global_batch 6 is not a multiple of 2 ranks x micro_batch 2"):
        build_batches(recipe, spec_of("causal_lm"), world=2, cache=tmp_path)


def test_a_holdout_of_nothing(
    spec_of: SpecOf, recipe_for: RecipeFor, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    path = write_rows([{"text": "a"}, {"text": "b"}])
    recipe = recipe_for("causal_lm", source="jsonl", path=path, evaluation={"holdout": 0.0001})
    with pytest.raises(ConfigError, match="leaves none to evaluate on"):
        build_evaluation(recipe, spec_of("causal_lm"), cache=tmp_path)


def test_a_cache_that_is_a_file(spec_of: SpecOf, recipe_for: RecipeFor, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recipe = recipe_for("causal_lm", source="text", path="pydoc")
    with pytest.raises(StorageError, match="cannot be written"):
        prepare(recipe, spec_of("causal_lm"), cache=tmp_path / "file")


def test_the_datasets_library_and_parquet_give_the_same_samples(
    spec_of: SpecOf, recipe_for: RecipeFor, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    rows = [{"text": f"row {number} " * (number + 1)} for number in range(20)]
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table}).save_to_disk(str(tmp_path / "saved_dict"))
    folder = tmp_path / "plain"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000.parquet")
    places = [
        {"source": "jsonl", "path": write_rows(rows)},
        {"source": "parquet", "path": str(folder)},
        {"source": "dataset", "path": str(tmp_path / "saved")},
        {"source": "dataset", "path": str(tmp_path / "saved_dict")},
        {"source": "dataset", "path": str(folder)},
    ]
    found = []
    for place in places:
        loader = build_batches(recipe_for("causal_lm", **place), spec_of("causal_lm"), cache=tmp_path / "c")
        found.append(torch.cat([next(loader)[0]["input_ids"] for _ in range(8)]))
    for other in found[1:]:
        assert torch.equal(found[0], other)


def test_a_loading_process_that_dies(spec_of: SpecOf, recipe_for: RecipeFor, tmp_path: Path) -> None:
    recipe = recipe_for("causal_lm", source="text", path="pydoc", workers=2, options={"start_method": "fork"})
    loader = build_batches(recipe, spec_of("causal_lm"), cache=tmp_path)
    next(loader)
    running: Any = loader._processes
    os.kill(running.processes[0].pid, signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=r"data loading process 0 \(pid \d+\) was killed by SIGKILL"
    ) as caught:
        for _ in range(200):
            next(loader)
    assert "\n" not in caught.value.message
    assert caught.value.help
    state = loader.state_dict()
    again = build_batches(recipe, spec_of("causal_lm"), cache=tmp_path)
    again.load_state_dict(state)
    expected = build_batches(recipe_for("causal_lm", source="text", path="pydoc"), spec_of("causal_lm"))
    for _ in range(state["samples"] // 2):
        next(expected)
    assert torch.equal(next(again)[0]["input_ids"], next(expected)[0]["input_ids"])
    again.close()
    expected.close()


class _Broken:
    digest = "broken"

    def __len__(self) -> int:
        return 100

    def sample(self, index: int, epoch: int) -> dict[str, Any]:
        if index == 7:
            raise ConfigError("sample 7 cannot be read", help="take it out")
        return {"x": torch.tensor(index)}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_in_a_loading_process_stays_one_line(workers: int) -> None:
    from fsdptool.training.data.loader import Loader, RankShare, Stack
    from fsdptool.training.data.order import PlainOrder

    order = PlainOrder(100, seed=0, shuffle=False)
    loader = Loader(_Broken(), Stack(), order, RankShare(0, 1, 2, 1), workers=workers, start_method="fork")
    assert [next(loader)[0]["x"].tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ConfigError) as caught:
        next(loader)
    assert caught.value.message == "sample 7 cannot be read"
    assert caught.value.help == "take it out"


_TWO_AT_ONCE = """
import sys, time
from pathlib import Path
from fsdptool.training.data import ragged
made = []
def make(folder):
    made.append(1)
    with ragged.RaggedWriter(folder, {"x": "<i8"}) as writer:
        writer.add({"x": range(5)})
        print("writing", flush=True)
        time.sleep(float(sys.argv[2]))
        writer.close({})
ragged.made_once(Path(sys.argv[1]), make, finished="table.json")
print("made" if made else "found", ragged.Ragged(Path(sys.argv[1])).row("x", 0).tolist(), flush=True)
"""


@pytest.mark.slow
def test_a_killed_maker_leaves_nothing_and_others_wait(tmp_path: Path) -> None:
    def start(seconds: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", _TWO_AT_ONCE, str(tmp_path / "t"), seconds],
            stdout=subprocess.PIPE,
            text=True,
        )

    killed = start("60")
    assert killed.stdout is not None
    assert killed.stdout.readline() == "writing\n"
    killed.kill()
    killed.wait()
    assert not (tmp_path / "t").exists()
    first, second = start("0.5"), start("0.5")
    answers = sorted(process.communicate(timeout=60)[0].splitlines()[-1] for process in (first, second))
    assert answers == ["found [0, 1, 2, 3, 4]", "made [0, 1, 2, 3, 4]"]


@pytest.mark.slow
def test_loading_processes_end_with_their_trainer(tmp_path: Path) -> None:
    """A trainer that is killed leaves no loading process behind, though they ignore stop signals."""
    script = """
import os, time
from pathlib import Path
from fsdptool.training.data.loader import Loader, RankShare, Stack
from fsdptool.training.data.order import PlainOrder
from fsdptool.families.protocol import TensorSpec
from fsdptool.training.data.build import Synthetic
spec = [TensorSpec("x", (1, 4), "int64", "tokens", high=9)]
samples = Synthetic(spec, shared=frozenset(), count=10, seed=0)
loader = Loader(samples, Stack(), PlainOrder(10, seed=0, shuffle=False), RankShare(0, 1, 1, 1), workers=2)
next(loader)
print(*[worker.pid for worker in loader._processes.processes], flush=True)
time.sleep(60)
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    workers = [int(word) for word in trainer.stdout.readline().split()]
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    assert all(_alive(pid) for pid in workers), "a stop is the trainer's business"
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 30
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def hole(path: Path) -> None:
    """Make a file of 100 GiB that takes no room."""
    with path.open("wb") as stream:
        stream.truncate(100 << 30)


def test_a_dataset_takes_a_list_of_files_for_a_split(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    files = {"train": [str(tmp_path / f"{name}.jsonl") for name in ("a", "b")]}
    given = {"source": "dataset", "path": "json", "options": {"data_files": files}}
    assert [row["text"] for row in open_source(from_json(Data, given)).rows()] == ["a", "b"]


@pytest.mark.parametrize("unit", ["file", "line", "paragraph"])
def test_text_that_is_no_text_is_one_line(unit: Literal["file", "line", "paragraph"], tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    data = Data(source="text", path=str(path), options={"document": unit})
    path.write_bytes("naïve\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read"):
        list(open_source(data).rows())
    hole(path)
    with limited_memory(1 << 30), pytest.raises(ConfigError, match=r"a\.txt cannot be read"):
        list(open_source(data).rows())


@pytest.mark.parametrize("unit", ["file", "paragraph"])
@pytest.mark.parametrize("gap", ["", " ", "\n"])
def test_a_document_of_any_length_is_read_in_parts(
    unit: Literal["file", "paragraph"], gap: str, tmp_path: Path
) -> None:
    """Also one without lines, and one without words; joined, the parts are the document."""
    path = tmp_path / "a.txt"
    text = f"wörd{gap}" * (3 << 18)
    path.write_text(text + "\n\nnext\n", encoding="utf-8")
    rows = list(open_source(Data(source="text", path=str(path), options={"document": unit})).rows())
    assert max(len(row["text"]) for row in rows) <= 2 << 20 < len(text)
    documents = [""]
    for row in rows:
        documents[-1] += row["text"]
        if not row.get("continues"):
            documents.append("")
    whole = "".join(documents)
    assert whole.startswith(text) and whole.endswith("next\n")
    assert len(documents) - 1 == (2 if unit == "paragraph" else 1)
    if gap:
        pieces = [row["text"] for row in rows if row.get("continues")]
        assert all(piece.rstrip(gap).endswith("wörd") for piece in pieces), "cut between words"


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize("row", ['"x\n",', "x" * 80 + ",", '"', "\0"])
def test_a_csv_file_that_is_one_row(name: str, row: str, tmp_path: Path) -> None:
    path = tmp_path / name
    row = row.replace(",", "\t") if name.endswith("tsv") else row
    path.write_text("text,b\n" + row * ((16 << 20) // len(row)))
    with limited_memory(1 << 30), pytest.raises(ConfigError, match=r"cannot be read"):
        list(open_source(Data(source="jsonl", path=str(path))).rows())
    hole(path)
    with limited_memory(1 << 30), pytest.raises(ConfigError, match=r"cannot be read"):
        list(open_source(Data(source="jsonl", path=str(path))).rows())


def test_csv_files_of_people_are_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,b\r\n"two\r\nlines, quoted",1\r\n\r\nlast,2')
    located = list(open_source(Data(source="jsonl", path=str(path))).located())
    assert [dict(row) for _, row in located] == [
        {"text": "two\r\nlines, quoted", "b": "1"},
        {"text": "last", "b": "2"},
    ]
    assert [place.rpartition(":")[2] for place, _ in located] == ["3", "5"]
    # More than the limit of one row in all.
    path.write_text("text,b\n" + f"{'row ' * 2000},1\n" * 1000)
    assert sum(1 for _ in open_source(Data(source="jsonl", path=str(path))).rows()) == 1000


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_a_parquet_file_of_some_bytes_stands_for_gigabytes(nested: bool, tmp_path: Path) -> None:
    once = pa.array(["x" * (4 << 20)])
    column: pa.Array = pa.DictionaryArray.from_arrays(pa.array([0] * 1024, pa.int32()), once)
    if nested:
        column = pa.StructArray.from_arrays([column], ["content"])
        column = pa.ListArray.from_arrays(pa.array(range(1025), pa.int32()), column)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path, compression="zstd")
    assert path.stat().st_size < 2000
    with limited_memory(1 << 30):
        rows = open_source(Data(source="parquet", path=str(path))).rows()
        assert sum(1 for _ in rows) == 1024


def test_parquet_files_of_people_are_read_as_before(tmp_path: Path) -> None:
    rows = [
        {"text": f"row {n % 7}", "n": n, "messages": [{"content": str(n)}], "b": b"x", "f": None}
        for n in range(5000)
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1500)
    located = list(open_source(Data(source="parquet", path=str(path))).located())
    assert [row for _, row in located] == rows
    assert located[-1][0].endswith("a.parquet, row 5000")
    assert open_source(Data(source="parquet", path=str(path))).count() == 5000


def test_captions_in_a_csv_file_that_is_one_line(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    hole(tmp_path / "metadata.csv")
    with limited_memory(1 << 30), pytest.raises(ConfigError, match=r"metadata\.csv cannot be read"):
        list_pictures(Data(source="images", path=str(tmp_path)), (Bucket(8, 8),))
