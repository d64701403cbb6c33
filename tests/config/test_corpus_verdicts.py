"""Every file of the corpus gets its reviewed verdict, and means after a fix what explain printed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import accelerate_oracle
import axolotl_oracle
import corpus
import jsonschema
import pytest
import trainer_oracle
from sarif_subset import SCHEMA

from fsdptool.report.code_scanning import sarif_document

FILES = corpus.files()
EXPECTED = corpus.expected()
MODES = ["as-is", "fix", "unsafe", "migrate"]
STRAY = {
    "huggingface__accelerate__invalid_keys.yaml": "had unknown keys",
    "owlgebra-ai__whetstone__accelerate_fsdp2.yaml": "had unknown keys",
    "shatianming5__goodhart-cascade__accelerate_fsdp.yaml": "had unknown keys",
}
"""Unknown keys at top level: only --unsafe-fixes removes or renames them."""
UNLIKE: dict[tuple[str, str], dict[str, str]] = {
    ("accelerate", "as-is"): {
        **STRAY,
        "LiuTaowen-Tony__Retriever__fsdp_config.yaml": "'bool' object has no attribute 'lower'",
        "Lyrasilas__lerobot__accelerate_fsdp_config.yaml": "KeyError: 'NONE'",
        "amazingvince__qwen2qwen__accelerate_fsdp2.yaml": "[\"['Qwen3EncoderLayer'\"",
        "beholder91__vlm-finetune__accelerate_fsdp.yaml": "Invalid auto wrap policy: SIZE_BASED_AUTO_WRAP",
    },
    ("accelerate", "fix"): STRAY,
    ("accelerate", "unsafe"): {},
    ("accelerate", "migrate"): {
        **STRAY,
        # It says version 2, which migrate leaves alone; --fix mends it.
        "amazingvince__qwen2qwen__accelerate_fsdp2.yaml": "[\"['Qwen3EncoderLayer'\"",
    },
    ("trainer", "as-is"): {"nguyen-tuan-hiep__MoEBackdoor__fsdp_config.json": "KeyError: 'FULL'"},
    ("trainer", "fix"): {},
    ("trainer", "unsafe"): {},
    ("trainer", "migrate"): {},
}
"""Files whose consumer stops, or takes a setting otherwise than we explain it, and what it says or takes."""


def test_every_verdict_is_committed_once() -> None:
    assert len(EXPECTED) == 228
    assert {item["status"] for item in EXPECTED.values()} == {"ok", "fixable", "error"}
    for item in EXPECTED.values():
        assert (item["status"] == "error") == (item["why"] is not None), item["file"]


if corpus.folder() is not None:

    def test_the_corpus_is_the_one_that_was_reviewed() -> None:
        digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FILES}
        assert digests == {name: item["sha256"] for name, item in EXPECTED.items()}

    def test_verdicts_agree() -> None:
        for path in FILES:
            assert corpus.verdict(path) == EXPECTED[path.name]

    def test_every_finding_can_be_said_in_sarif() -> None:
        log = sarif_document([corpus.reading(path) for path in FILES])
        jsonschema.Draft7Validator(SCHEMA, format_checker=jsonschema.FormatChecker()).validate(log)
        assert len(log["runs"][0]["results"]) > len(FILES)

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("dialect", ["accelerate", "trainer"])
    def test_the_consumer_runs_what_explain_prints(dialect: str, mode: str, tmp_path: Path) -> None:
        """Every file, every setting: the real loader, launch environment and plugin agree with us.

        The files that do not run so are named, each an error of ours; nothing else may differ.
        """
        oracle = {"accelerate": accelerate_oracle, "trainer": trainer_oracle}[dialect]
        names = [path for path in FILES if EXPECTED[path.name]["dialect"] == dialect]
        unlike: dict[str, str] = {}
        for path in names:
            changed = _changed(path, mode, tmp_path)
            said = "not migrated" if changed is None else oracle.check_explained(changed)
            if said is not None:
                unlike[path.name] = said
        assert len(names) == {"accelerate": 137, "trainer": 22}[dialect]
        wanted = UNLIKE[dialect, mode]
        assert set(unlike) == set(wanted)
        assert all(wanted[name] in said for name, said in unlike.items()), unlike

    if axolotl_oracle.AVAILABLE:

        @pytest.mark.parametrize("mode", ["as-is", "fix", "unsafe", "migrate"])
        def test_axolotl_runs_what_explain_prints(mode: str, tmp_path: Path) -> None:
            for path in FILES:
                if corpus.reading(path).dialect != "axolotl":
                    continue
                changed = _changed(path, mode, tmp_path)
                if changed is not None:
                    # One example has a fraction where axolotl wants a whole number of steps.
                    changed.write_text(changed.read_text().replace("warmup_steps: 0.1", "warmup_steps: 1"))
                    axolotl_oracle.check_explained(changed)

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["fix", "unsafe", "migrate"])
    def test_a_second_run_changes_nothing(mode: str, tmp_path: Path) -> None:
        for path in FILES:
            changed = _changed(path, mode, tmp_path)
            if changed is not None:
                again = _changed(changed, mode, tmp_path / "again")
                assert again is None or again.read_bytes() == changed.read_bytes(), path.name

    @pytest.mark.slow
    def test_comments_and_line_endings_survive(tmp_path: Path) -> None:
        """Every comment on a line of its own is still there, and so are CRLF and a missing last newline."""
        for path in FILES:
            changed = _changed(path, "unsafe", tmp_path)
            if changed is None or path.suffix == ".json":
                continue
            before, after = path.read_bytes().decode(), changed.read_bytes().decode()
            kept = [line.strip() for line in before.splitlines() if line.strip().startswith("#")]
            left = [line.strip() for line in after.splitlines()]
            assert all(line in left for line in kept), path.name
            assert ("\r\n" in before) == ("\r\n" in after), path.name
            if "\r\n" in before and "\n" not in before.replace("\r\n", ""):
                assert "\n" not in after.replace("\r\n", ""), path.name
            assert before.endswith("\n") == after.endswith("\n"), path.name

    def _changed(path: Path, mode: str, folder: Path) -> Path | None:
        text, source = corpus.changed(path, mode), corpus.reading(path).source
        if text is None or source is None:
            return None
        folder.mkdir(exist_ok=True)
        target = folder / path.name
        target.write_bytes(source.encode(text))
        return target
