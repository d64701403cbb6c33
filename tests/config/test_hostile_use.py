"""What happens to dozens of files at once: comments, links, read-only files, writers in between, pipes."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_config_commands import BAD, V1
from test_rules_against_accelerate import GOOD

from fsdptool import migrate
from fsdptool.cli.app import run
from fsdptool.config import read_settings

ONE = GOOD.replace("num_processes: 8", "num_processes: 1")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("a.yaml", BAD), ("b.yaml", BAD), ("good.yaml", GOOD), ("v1.yaml", V1)):
        Path(name).write_text(text)
    return tmp_path


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    class Standard:
        buffer = io.BytesIO(text.encode())

    monkeypatch.setattr(sys, "stdin", Standard())


@pytest.mark.parametrize(
    ("comment", "silent", "said"),
    [
        ("ignore[FSD327]", True, False),
        ("ignore[fsd327]", True, False),
        ("ignore[FSD301, FSD327]  # a single-GPU smoke test", True, False),
        ("ignore", True, False),
        ("consumer=accelerate ignore[FSD327]", True, False),
        ("ignore[FSD327], consumer=accelerate", True, False),
        ("ignore[FSD327,]", True, False),
        ("ignore[]", False, True),
        ("ignore[FSD327", False, True),
        ("ignore FSD327", True, True),  # the bare word silences the line; the rest is said
        ("ignore[FSD3]", False, True),
        ("ignore[FSD327]x", False, True),
        ("ignored", False, True),
        ("ignor[FSD327]", False, True),
        ("noqa", False, True),
    ],
)
def test_only_a_comment_that_is_understood_silences(comment: str, silent: bool, said: bool) -> None:
    text = ONE.replace("num_processes: 1", f"num_processes: 1  # fsdptool: {comment}")
    reading = read_settings(text)
    found = {item.code for item in reading.diagnostics} | {
        item.code for item in reading.suppressed if item.code == "FSD112"
    }
    assert ("FSD327" not in found) is silent
    assert ("FSD112" in found) is said
    assert not reading.errors


def test_a_comment_on_its_own_line_is_about_the_file() -> None:
    for place in (f"# fsdptool: ignore[FSD327]\n{ONE}", f"{ONE}# fsdptool: ignore[FSD327]\n"):
        assert [item.code for item in read_settings(place).suppressed] == ["FSD327"]


def test_one_file_that_cannot_be_written_does_not_keep_the_others_from_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("a.yaml").chmod(0o444)
    assert run(["validate", "a.yaml", "absent.yaml", "b.yaml", "--fix"]) == 2
    out, err = capsys.readouterr()
    assert "a.yaml is read-only" in err and "fixed b.yaml:3" in err
    assert Path("a.yaml").read_text() == BAD and Path("b.yaml").read_text() != BAD
    # What was not written is still found, and so is what could not be read.
    assert "a.yaml:3:18: error FSD208" in out and "absent.yaml: error FSD101" in out and "b.yaml:" not in out
    Path("v1.yaml").chmod(0o444)
    shutil.copy("v1.yaml", "v2.yaml")
    Path("v2.yaml").chmod(0o644)
    assert run(["migrate", "v1.yaml", "v2.yaml"]) == 2
    assert Path("v1.yaml").read_text() == V1 and "fsdp_version: 2" in Path("v2.yaml").read_text()


def test_a_file_that_changes_in_between_is_left_to_its_writer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsdptool.config.migrate as fix

    honest = fix.repair

    def slow(reading: object, **options: object) -> object:
        result = honest(reading, **options)  # type: ignore[arg-type]
        Path("a.yaml").write_text("# somebody else's\n" + BAD)
        return result

    monkeypatch.setattr(fix, "repair", slow)
    assert run(["validate", "a.yaml", "--fix"]) == 2
    assert Path("a.yaml").read_text() == "# somebody else's\n" + BAD
    assert "a.yaml was changed by another program in the meantime" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["a.yaml", "b.yaml", "good.yaml", "v1.yaml"]


def test_links_stay_links_and_owners_stay() -> None:
    Path("link.yaml").symlink_to("a.yaml")
    if os.geteuid() == 0:
        os.chown("a.yaml", 1234, 1234)
    owner = Path("a.yaml").stat().st_uid
    assert run(["validate", "link.yaml", "--fix"]) == 0
    assert Path("link.yaml").is_symlink() and Path("a.yaml").read_text() != BAD
    assert Path("a.yaml").stat().st_uid == owner
    Path("lost.yaml").symlink_to("nowhere.yaml")
    assert run(["validate", "lost.yaml"]) == 1


def test_a_diff_says_what_it_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bogus.yaml").write_text(BAD + "parallelism_config:\n  parallelism_config_sp_size: 2\n")
    assert run(["validate", "bogus.yaml", "absent.yaml", "--diff"]) == 1
    out, err = capsys.readouterr()
    assert "+mixed_precision: 'no'" in out
    assert "bogus.yaml:14:31: error FSD312" in err and "absent.yaml: error FSD101" in err
    assert "FSD208" not in err
    assert run(["validate", "absent.yaml", "--diff"]) == 1
    assert run(["validate", "v1.yaml", "--diff"]) == 0 and "FSD301" in capsys.readouterr().err
    assert run(["validate", "v1.yaml", "--diff", "--strict"]) == 1
    assert run(["validate", "good.yaml", "--diff", "--strict"]) == 0


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("command", [["validate", "--unsafe-fixes"], ["migrate"]])
def test_a_diff_is_a_patch(
    command: list[str], last: bool, mark: bytes, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """git applies what --diff prints, to the bytes that the command itself writes."""
    text = ("mixed_precision: no\n" + V1.replace("mixed_precision: bf16\n", "")).replace("\n", ending)
    data = mark + (text if last else text.rstrip("\r\n")).encode()
    Path("v1.yaml").write_bytes(data)
    capsys.readouterr()
    assert run([*command, "v1.yaml", "--diff"]) == 1
    shown = capsys.readouterr().out
    assert Path("v1.yaml").read_bytes() == data
    subprocess.run(["git", "init", "-q", "."], check=True)
    subprocess.run(["git", "apply", "-"], input=shown.encode(), check=True)
    patched = Path("v1.yaml").read_bytes()
    Path("v1.yaml").write_bytes(data)
    assert run([*command, "v1.yaml"]) == 0
    assert Path("v1.yaml").read_bytes() == patched != data


def test_standard_input_is_read_by_all_and_never_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, BAD)
    assert run(["validate", "-", "--fix"]) == 1
    out, err = capsys.readouterr()
    assert "FSD208" in out and "standard input is not rewritten" in err
    pipe(monkeypatch, BAD)
    assert run(["explain", "-"]) == 1
    assert "accelerate file, read by accelerate" in capsys.readouterr().out
    pipe(monkeypatch, V1)
    assert run(["migrate", "-", "--diff"]) == 1
    assert capsys.readouterr().out.startswith("--- a/stdin\n+++ b/stdin\n")
    pipe(monkeypatch, V1)
    assert run(["migrate", "-"]) == 0
    assert "  fsdp_reshard_after_forward: false  # zero 2\n" in capsys.readouterr().out


def test_a_folder_is_migrated_whole(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.json").write_text('{"name": "package"}')
    assert run(["migrate", ".", "--check"]) == 1
    out, err = capsys.readouterr()
    assert "v1.yaml would change" in out and "good.yaml" not in out
    assert err.endswith("1 would change, 3 stay as they are, 1 of other programs or kinds skipped\n")
    Path("plain.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    assert run(["migrate", "plain.yaml"]) == 0
    assert "note: plain.yaml: the file does not configure FSDP" in capsys.readouterr().err
    assert run(["migrate", "."]) == 0
    said = capsys.readouterr().err
    assert "plain.yaml" not in said
    # A line is for what a person has to look at; the rest is counted.
    assert "migrated v1.yaml" not in said and all(
        line.startswith("note: ") for line in said.splitlines()[:-1]
    )
    assert said.endswith("1 migrated, 4 already up to date, 1 of other programs or kinds skipped\n")
    assert run(["migrate", ".", "--check"]) == 0
    assert run(["migrate", "other.json"]) == 1
    assert run(["migrate", "v1.yaml", "--to", "bogus"]) == 2


def test_notes_are_no_annotations_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(GOOD + "rdzv_backend: c10d\n")
    run(["validate", "a.yaml", "--format", "github"])
    assert capsys.readouterr().out.startswith("::notice ")
    run(["validate", "a.yaml", "--format", "github", "--quiet"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("", {}, "is empty"),
        (" \n\n", {}, "is empty"),
        ("# nothing\n---\n", {}, "contains comments only"),
        ("- a\n- b\n", {}, "does not contain `key: value` pairs"),
        (GOOD, {"dialect": "env"}, "does not contain `NAME=value` lines"),
        (GOOD, {"dialect": "flags"}, "does not contain a `--flag`"),
    ],
)
def test_a_file_without_settings_says_what_it_lacks(text: str, options: dict[str, str], said: str) -> None:
    Path("f.yaml").write_text(text)
    reading = read_settings(Path("f.yaml"), **options)  # type: ignore[arg-type]
    assert [(item.code, item.message) for item in reading.diagnostics] == [("FSD107", f"the file {said}")]


def test_an_environment_is_not_asked_for_what_it_cannot_say() -> None:
    text = "ACCELERATE_USE_FSDP=true\nFSDP_VERSION=2\nFSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP\n"
    assert not read_settings(text).diagnostics


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--gpus", "0"], "gpus must be at least 1, not 0"),
        (["--gpus", "-3"], "gpus must be at least 1, not -3"),
        (["--host-memory", "0"], "the host memory must be positive, not 0"),
    ],
)
def test_no_hardware_is_a_mistake_of_the_caller(
    option: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", "good.yaml", *option]) == 2
    assert said in capsys.readouterr().err


def test_anchors_go_after_what_uses_them() -> None:
    """Unread keys that lean on one another are all removed at once, so that a second run finds nothing."""
    chain = "".join(f"b{number}: &b{number} [*b{number - 1}]\n" for number in range(1, 12))
    Path("args.yaml").write_text(f"version: 2\nactivation_checkpointing: false\nb0: &b0 [1]\n{chain}")
    assert run(["validate", "args.yaml", "--dialect", "trainer", "--fix"]) == 0
    assert Path("args.yaml").read_text() == "version: 2\nactivation_checkpointing: false\n"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_an_answer_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fsdptool", "validate", str(tmp_path / "a.yaml")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "error: the answer cannot be written: No space left on device\n"


def test_migration_writes_nothing_that_is_then_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a policy RAM-efficient loading is on by default: written out, it is no new mistake."""
    text = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\nfsdp_config:\n"
    Path("plain.yaml").write_text(text + "  fsdp_sharding_strategy: FULL_SHARD\n")
    assert run(["migrate", "plain.yaml"]) == 0
    written = Path("plain.yaml").read_text()
    assert "fsdp_cpu_ram_efficient_loading: true" in written
    run(["validate", "plain.yaml"])
    said = capsys.readouterr().out
    assert "FSD315" in said and "FSD319" not in said
    Path("plain.yaml").write_text(written + "  fsdp_auto_wrap_policy: NO_WRAP\n")
    run(["validate", "plain.yaml"])
    assert "FSD319" in capsys.readouterr().out


def test_a_link_out_of_a_folder_is_not_fixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder is named, not what a stranger's link in it leads to; a link within it, or a named one, is."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "mine.yaml").write_text(BAD)
    (victim / "v1.yaml").write_text(V1)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.yaml").symlink_to("../victim/mine.yaml")
    (folder / "b.json").symlink_to(victim / "v1.yaml")
    (folder / "deep").mkdir()
    (folder / "deep" / "c.yaml").symlink_to("../../victim/v1.yaml")
    (folder / "own.yaml").write_text(BAD)
    assert run(["validate", "--fix", "--unsafe-fixes", "folder"]) in (0, 1)
    assert run(["migrate", "folder"]) in (0, 1)
    migrate("folder", write=True)
    assert (victim / "mine.yaml").read_text() == BAD
    assert (victim / "v1.yaml").read_text() == V1
    assert (folder / "own.yaml").read_text() != BAD
    capsys.readouterr()
    (folder / "link.yaml").symlink_to("own.yaml")
    assert run(["validate", "folder/link.yaml", "folder", "--format", "concise"]) in (0, 1)
    assert "c.yaml" not in capsys.readouterr().out
    (folder / "link.yaml").unlink()
    (folder / "own.yaml").unlink()
    assert run(["validate", "folder"]) == 2
    assert "there is no YAML" in capsys.readouterr().err
    assert run(["validate", "--fix", "folder/a.yaml"]) in (0, 1)
    assert (victim / "mine.yaml").read_text() != BAD, "a link that was named is followed"


MARK = "\ufeff"
FLAGS = "accelerate launch --use_fsdp --fsdp_sharding_strategy FULL_SHARD --num_processes 2 train.py\n"


@pytest.mark.parametrize(("name", "text"), [("v.yaml", V1), ("v.sh", FLAGS)])
def test_a_mark_stays_at_the_beginning_of_a_migrated_file(name: str, text: str) -> None:
    Path(name).write_text(MARK + text, encoding="utf-8")
    assert run(["migrate", name]) == 0
    data = Path(name).read_bytes()
    assert data.startswith(MARK.encode()) and not data[3:].startswith(MARK.encode())
    assert data != (MARK + text).encode()
    Path("plain" + name).write_text(text)
    assert run(["migrate", "plain" + name]) == 0
    assert data[3:] == Path("plain" + name).read_bytes()


@pytest.mark.parametrize("text", [V1, GOOD, BAD], ids=["v1", "good", "bad"])
@pytest.mark.parametrize("marks", [2, 3])
def test_a_file_with_several_marks_does_not_end_the_others(
    text: str, marks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path("folder/marked.yaml").write_text(MARK * marks + text)
    Path("folder/v1.yaml").write_text(V1)
    assert run(["validate", "folder", "--format", "json"]) == 1
    files = {item["path"]: item for item in json.loads(capsys.readouterr().out)["files"]}
    assert set(files) == {"folder/marked.yaml", "folder/v1.yaml"}
    assert [item["code"] for item in files["folder/marked.yaml"]["findings"]] == ["FSD104"]
    run(["migrate", "folder"])
    assert Path("folder/marked.yaml").read_text() == MARK * marks + text
    assert Path("folder/v1.yaml").read_text() != V1
    Path("folder/v1.yaml").write_text(V1)
    migrate("folder", write=True)
    assert Path("folder/v1.yaml").read_text() != V1


def test_a_failure_of_ours_is_a_finding_of_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fsdptool.config import reader

    whole = reader.check_meaning  # type: ignore[attr-defined]

    def fails(lint: Any, **rest: Any) -> None:
        if lint.source.path == "b.yaml":
            raise KeyError("a bug")
        whole(lint, **rest)

    monkeypatch.setattr(reader, "check_meaning", fails)
    assert run(["validate", "a.yaml", "b.yaml", "good.yaml", "--format", "json"]) == 1
    files = {item["path"]: item for item in json.loads(capsys.readouterr().out)["files"]}
    assert files["good.yaml"]["status"] == "ok"
    assert "internal error: KeyError" in files["b.yaml"]["findings"][0]["message"]
    assert run(["migrate", "b.yaml", "v1.yaml"]) == 1
    assert Path("v1.yaml").read_text() != V1


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("ending", ["\x85", "\u2028", "\u2029", "\r", "\r\n"])
@pytest.mark.parametrize("form", ["all", "middle", "last", "comment", "folded"])
@pytest.mark.parametrize("text", [BAD, V1, ONE], ids=["bad", "v1", "one"])
def test_lines_that_yaml_ends_are_edited_as_lines(ending: str, form: str, text: str) -> None:
    """What accelerate reads of every other key stays, and a second call changes nothing."""
    text += "main_training_function: folded # no comment\n"
    if form == "all":
        text = text.replace("\n", ending)
    elif form == "middle":
        text = text.replace("\n", ending, 3)
    elif form == "last":
        text = text.removesuffix("\n") + ending
    elif form == "comment":
        text = text.replace("distributed_type", f"# one{ending}# two{ending}distributed_type", 1)
    else:
        text = text.replace("folded # no comment", f"'folded{ending}  over lines'")
    Path("c.yaml").write_bytes(text.encode())
    before = yaml.safe_load(text)
    assert run(["validate", "--fix", "c.yaml"]) in (0, 1)
    fixed = Path("c.yaml").read_bytes().decode()
    after = yaml.safe_load(fixed)
    assert after["main_training_function"] == before["main_training_function"]
    assert set(before) - {"fsdp_config"} <= set(after) | {"downcast_bf16", "tpu_use_cluster"}
    assert len(fixed) - len(text) < 400, "each line is added once"
    run(["validate", "--fix", "c.yaml"])
    assert Path("c.yaml").read_bytes().decode() == fixed
    run(["validate", "--unsafe-fixes", "c.yaml"])
    run(["migrate", "c.yaml"])
    assert (
        yaml.safe_load(Path("c.yaml").read_bytes().decode())["main_training_function"]
        == before["main_training_function"]
    )
