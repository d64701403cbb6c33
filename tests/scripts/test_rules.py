"""Every rule on training scripts finds its first example, and nothing in the second; and nothing is run."""

from __future__ import annotations

import json
import os
import random
import shlex
from pathlib import Path

import pytest

from fsdptool.cli.app import run
from fsdptool.files.text import SourceText
from fsdptool.records.diagnostic import Rule
from fsdptool.scripts.judge import judge_script
from fsdptool.scripts.rules import RULES

VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "peft": "0.21.2"}


def codes(text: str, **versions: str) -> set[str]:
    """Return the codes that are found in a script."""
    judged = judge_script(SourceText(text), VERSIONS | versions)
    assert judged.refusal is None
    return {item.code for item in judged.findings}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_example_is_what_the_rule_finds(
    rule: Rule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rule.example is not None
    found = []
    for number, text in enumerate((rule.example.fails, rule.example.passes)):
        path = tmp_path / f"train{number}.py"
        path.write_text(text, encoding="utf-8")
        run(["validate", str(path), "--isolated", "--format", "json", *shlex.split(rule.example.options)])
        (file,) = json.loads(capsys.readouterr().out)["files"]
        assert file["dialect"] == "python"
        found.append({item["code"] for item in file["findings"]})
    assert found == [{rule.code}, set()]


def test_a_name_is_followed_through_imports_functions_and_attributes() -> None:
    text = """
from torch.distributed.fsdp import *
import torch.optim as o

class Run:
    def __init__(self, net):
        self.net = net
        self.optimizer = o.AdamW(self.net.parameters())
        self._shard()

    def _shard(self):
        for layer in self.net.layers:
            fully_shard(layer)
        fully_shard(self.net)
"""
    assert codes(text) == {"FSD601"}
    assert codes(text.replace("from torch.distributed.fsdp import *", "from helpers import *")) == set()


@pytest.mark.parametrize(
    "condition", ["if args.fsdp:", "if args.fsdp and args.full:", "while args.fsdp:", "for _ in args.many:"]
)
def test_only_what_certainly_happens_is_reported(condition: str) -> None:
    """An optimizer that is made in a branch says nothing about a sharding in another one."""
    text = f"""
import torch
from torch.distributed.fsdp import fully_shard

def main(args, model):
    {condition}
        optimizer = torch.optim.AdamW(model.parameters())
    if args.shard:
        fully_shard(model.layers[0])
        fully_shard(model)
"""
    assert codes(text) == ({"FSD601"} if "if" not in condition else set())


def test_a_version_decides_what_exists() -> None:
    text = """
from torch.distributed.fsdp import fully_shard

def main(model):
    fully_shard(model.h[0], ignored_params=set())
    fully_shard(model, ignored_params=set())
"""
    assert codes(text) == set()
    assert codes(text, torch="2.6.0") == {"FSD610"}
    trainer = 'from transformers import TrainingArguments\nTrainingArguments("out", no_cuda=True)\n'
    assert codes(trainer) == {"FSD610"}
    assert codes(trainer, transformers="4.57.0") == set()


def test_a_target_judges_for_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text('from transformers import TrainingArguments\nTrainingArguments("out", no_cuda=True)\n')
    assert run(["validate", str(path), "--isolated", "--target", "torch==2.9,transformers==4.57"]) == 0
    assert run(["validate", str(path), "--isolated", "--target", "transformers==5.23"]) == 1
    assert "no_cuda" in capsys.readouterr().out


def test_comments_and_settings_silence_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    for comment, expected in (
        ("", 1),
        ("  # noqa: FSD6", 0),
        ("  # noqa", 0),
        ("  # noqa: E501, FSD610", 0),
        ("  # noqa: E501", 1),
    ):
        path.write_text(
            f"from torch.distributed.fsdp import fully_shard\nfully_shard(m, mixed_precision=1){comment}\n"
        )
        assert run(["validate", str(path), "--isolated"]) == expected, comment
    assert run(["validate", str(path), "--isolated", "--ignore", "FSD6"]) == 0
    (tmp_path / "fsdptool.toml").write_text('ignore = ["FSD610"]\n')
    assert run(["validate", str(path)]) == 0
    assert run(["validate", str(path), "--select", "FSD61"]) == 1
    capsys.readouterr()


def test_a_script_is_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "train.py").write_text(
        f"import fsdp\nopen({str(marker)!r}, 'w')\n__import__('os').mkdir({str(marker)!r})\n"
    )
    assert run(["validate", str(tmp_path / "train.py"), "--isolated"]) == 0
    assert not marker.exists()
    capsys.readouterr()


def test_a_folder_stands_for_its_scripts_that_mention_fsdp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.py").write_text("print('nothing of ours'\n")
    (tmp_path / "train.py").write_text(
        "from torch.distributed.fsdp import fully_shard\nfully_shard(m, mixed_precision=1)\n"
    )
    (tmp_path / "broken.py").write_text("import fsdp\nprint 'python 2'\n")
    assert run(["validate", str(tmp_path), "--isolated", "--format", "json"]) == 1
    files = {Path(file["path"]).name: file for file in json.loads(capsys.readouterr().out)["files"]}
    assert sorted(files) == ["broken.py", "train.py"]
    assert [item["severity"] for item in files["broken.py"]["findings"]] == ["info"]
    assert run(["validate", str(tmp_path / "broken.py"), "--isolated"]) == 1


@pytest.mark.parametrize("form", ["text", "concise", "github", "sarif", "json"])
def test_findings_have_the_forms_of_other_files(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text("from torch.distributed.fsdp import fully_shard\nfully_shard(m, mixed_precision=1)\n")
    assert run(["validate", str(path), "--isolated", "--format", form, "--strict"]) == 1
    shown = capsys.readouterr().out
    assert "FSD610" in shown
    assert "mp_policy" in shown


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.safety == "safe"], ids=lambda rule: rule.code
)
def test_a_safe_fix_removes_what_is_found(
    rule: Rule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rule.example is not None
    path = tmp_path / "train.py"
    path.write_text(rule.example.fails, encoding="utf-8")
    options = [str(path), "--isolated", *shlex.split(rule.example.options)]
    assert run(["validate", *options, "--fix"]) == 0
    fixed = path.read_text(encoding="utf-8")
    assert fixed != rule.example.fails
    assert codes(fixed) == set()
    assert run(["validate", *options, "--fix"]) == 0
    assert path.read_text(encoding="utf-8") == fixed
    capsys.readouterr()


def test_fixes_leave_the_rest_of_a_script_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Comments, columns behind characters of several bytes, line endings and other findings stay."""
    path = tmp_path / "train.py"
    text = """
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

def main(model, batch):
    policy = MixedPrecisionPolicy()
    fully_shard(
        model.layers[0],
        mixed_precision=policy,  # naïve
        use_orig_params=True,  # goes with its argument
        offload_policy=CPUOffloadPolicy(offload_params=True),
    )
    fully_shard(model, ignored_modules=[], cpu_offload=True)
    "äöü"; model.forward(batch)
""".replace("\n", "\r\n")
    path.write_bytes(text.encode())
    assert run(["validate", str(path), "--isolated", "--fix"]) == 1
    for old, new in (
        ("mixed_precision=policy", "mp_policy=policy"),
        ("        use_orig_params=True,  # goes with its argument\r\n", ""),
        ("(offload_params=True)", "()"),
        ("model.forward(batch)", "model(batch)"),
    ):
        text = text.replace(old, new)
    assert path.read_bytes().decode() == text
    capsys.readouterr()


def test_a_notebook_is_read_cell_by_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        ("markdown", "# Training"),
        ("code", "%pip install torch\nfrom torch.distributed.fsdp import fully_shard"),
        ("code", "this does not parse ("),
        ("code", "model = make()\nfully_shard(model, cpu_offload=True)"),
    ]
    document = {
        "cells": [{"cell_type": kind, "source": text.splitlines(keepends=True)} for kind, text in cells],
        "nbformat": 4,
    }
    path = tmp_path / "train.ipynb"
    path.write_text(json.dumps(document, indent=1))
    assert run(["validate", str(path), "--isolated", "--format", "json"]) == 1
    (file,) = json.loads(capsys.readouterr().out)["files"]
    (finding,) = file["findings"]
    assert finding["code"] == "FSD610"
    assert finding["message"].startswith("cell 4, line 2: ")
    assert "cpu_offload=True" in path.read_text().split("\n")[finding["line"] - 1]
    before = (
        "code",
        "model = make()\noptimizer = torch.optim.SGD(model.parameters(), lr=1)\nfully_shard(model)",
    )
    cells = [*cells[:2], ("code", "import torch"), before]
    document["cells"] = [
        {"cell_type": kind, "source": text.splitlines(keepends=True)} for kind, text in cells
    ]
    path.write_text(json.dumps(document, indent=1))
    assert run(["validate", str(path), "--isolated", "--select", "FSD601", "--format", "json"]) == 1
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert "the sharding on line 3 of cell 4, " in file["findings"][0]["message"]
    path.write_text("[1, 2]")
    assert run(["validate", str(path), "--isolated"]) == 1


def test_any_text_is_judged_without_a_crash() -> None:
    """Lines of the examples are dropped, doubled, exchanged and cut at random."""
    chance = random.Random(39)
    texts = [rule.example.fails for rule in RULES if rule.example is not None]
    for _ in range(100):
        lines = chance.choice(texts).splitlines() + chance.choice(texts).splitlines()
        for _ in range(chance.randrange(1, 6)):
            at = chance.randrange(len(lines))
            change = chance.randrange(4)
            if change == 0:
                del lines[at]
            elif change == 1:
                lines.insert(at, chance.choice(lines))
            elif change == 2:
                other = chance.randrange(len(lines))
                lines[at], lines[other] = lines[other], lines[at]
            else:
                lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
        judge_script(SourceText("\n".join(lines)), VERSIONS)


CORPUS = Path(os.environ.get("FSDPTOOL_SCRIPTS_CORPUS", "/nonexistent"))


@pytest.mark.skipif(not CORPUS.is_dir(), reason="FSDPTOOL_SCRIPTS_CORPUS names no folder")
def test_the_corpus_has_what_its_index_says_and_nothing_else() -> None:
    """The titles of rules are the names of the index, with spaces."""
    titles = {rule.code: rule.title.replace(" ", "-") for rule in RULES}
    entries = [json.loads(line) for line in (CORPUS / "index.jsonl").read_text().splitlines()]
    assert entries
    for entry in entries:
        path = CORPUS / entry["file"]
        found: dict[str, list[int | None]] = {}
        for item in judge_script(SourceText(path.read_text(), str(path)), VERSIONS).findings:
            found.setdefault(titles[item.code], []).append(item.line)
        wanted = {name: sorted(entry["lines"][name]) for name in entry["expect"]}
        assert {name: sorted(line or 0 for line in lines) for name, lines in found.items()} == wanted, entry[
            "file"
        ]
