"""Every file of the corpus gets its reviewed verdict, and means after a fix what explain printed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import accelerate_oracle
import corpus
import jsonschema
import pytest
import trainer_oracle
from sarif_subset import SCHEMA

from fsdptool.config import read_settings
from fsdptool.config.fix import repair
from fsdptool.config.migration import migrate_file
from fsdptool.report.sarif import sarif_document

FILES = corpus.files()
EXPECTED = corpus.expected()


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
            assert corpus.verdict(path, read_settings(path)) == EXPECTED[path.name]

    def test_every_finding_can_be_said_in_sarif() -> None:
        log = sarif_document([read_settings(path) for path in FILES])
        jsonschema.Draft7Validator(SCHEMA, format_checker=jsonschema.FormatChecker()).validate(log)
        assert len(log["runs"][0]["results"]) > len(FILES)

    @pytest.mark.parametrize("mode", ["as-is", "fix", "unsafe", "migrate"])
    def test_accelerate_runs_what_explain_prints(mode: str, tmp_path: Path) -> None:
        """accelerate's loader, launch environment and plugin give the settings of ``explain``."""
        same = refused = 0
        for path in FILES:
            if read_settings(path).dialect != "accelerate":
                continue
            changed = _changed(path, mode, tmp_path)
            if changed is None:
                continue
            outcome = accelerate_oracle.check_explained(changed)
            same += outcome
            refused += not outcome
        # Files that accelerate refuses carry an error of ours; after unsafe fixes only the
        # hybrid file without a process count is left.
        assert same >= {"as-is": 120, "fix": 124, "unsafe": 126, "migrate": 124}[mode]
        assert refused <= {"as-is": 10, "fix": 8, "unsafe": 3, "migrate": 6}[mode]

    @pytest.mark.parametrize("mode", ["as-is", "fix", "unsafe", "migrate"])
    def test_transformers_runs_what_explain_prints(mode: str, tmp_path: Path) -> None:
        same = 0
        for path in FILES:
            if read_settings(path).dialect != "trainer":
                continue
            changed = _changed(path, mode, tmp_path)
            if changed is not None:
                same += trainer_oracle.check_explained(changed)
        assert same >= 20

    @pytest.mark.parametrize("mode", ["fix", "unsafe", "migrate"])
    def test_a_second_run_changes_nothing(mode: str, tmp_path: Path) -> None:
        for path in FILES:
            changed = _changed(path, mode, tmp_path)
            if changed is not None:
                again = _changed(changed, mode, tmp_path / "again")
                assert again is None or again.read_bytes() == changed.read_bytes(), path.name

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
        reading = read_settings(path)
        if reading.dialect is None or reading.source is None:
            return None
        text = reading.source.text
        if mode == "migrate":
            migrated = migrate_file(path)
            if migrated.after is None:
                return None
            text = migrated.after
        elif mode != "as-is":
            text = repair(reading, unsafe=mode == "unsafe").after.text
        folder.mkdir(exist_ok=True)
        target = folder / path.name
        target.write_bytes(reading.source.encode(text))
        return target
