"""The commands: documents against their schemas, formats, exit codes, files left alone or replaced whole."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import jsonschema
import pytest
import yaml
from sarif_subset import SCHEMA
from test_rules_against_accelerate import GOOD

from fsdptool.cli.app import run
from fsdptool.cli.rule import all_rules
from fsdptool.files.values import load_schema
from fsdptool.report.rules import rules_page

BAD = (
    GOOD.replace("mixed_precision: bf16", "mixed_precision: no  # full precision")
    + "  fsdp_use_orig_params: true\n"
)
V1 = GOOD.replace("  fsdp_version: 2\n", "").replace(
    "  fsdp_reshard_after_forward: true\n", "  fsdp_sharding_strategy: SHARD_GRAD_OP  # zero 2\n"
)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("good.yaml", GOOD), ("bad.yaml", BAD), ("v1.yaml", V1)):
        (tmp_path / name).write_text(text)
    return tmp_path


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    run([*arguments, "--format", "json"])
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(load_schema(data["schema"])).validate(data)
    return data


def test_documents_keep_to_their_schemas(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = document(capsys, "validate", "good.yaml", "bad.yaml", "v1.yaml", "absent.yaml")
    assert [item["status"] for item in data["files"]] == ["ok", "fixable", "fixable", "error"]
    assert data["consumer"]["name"] == "accelerate" and data["summary"]["errors"] == 2
    assert document(capsys, "explain", "v1.yaml")["fsdp_version"] == 1
    assert document(capsys, "migrate", "v1.yaml", "--check")["files"][0]["changed"] is True
    assert document(capsys, "rule", "FSD301")["rules"][0]["code"] == "FSD301"
    assert document(capsys, "rule", "PLN001")["rules"][0]["family"] == "plan"
    assert len(document(capsys, "rule")["rules"]) == len(all_rules())
    assert document(capsys, "emit-config", "--list-presets")["presets"]
    assert document(capsys, "emit-config", "--preset", "cpu")["settings"]["use_cpu"] is True


def test_exit_codes(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "good.yaml"]) == 0
    assert run(["validate", "v1.yaml"]) == 0
    assert run(["validate", "v1.yaml", "--strict"]) == 1
    assert run(["validate", "bad.yaml"]) == 1
    assert run(["validate", "absent.yaml"]) == 1
    assert run(["validate", "good.yaml", "--consumer", "nobody"]) == 2
    assert run(["validate", "good.yaml", "--target", "accelerate=1"]) == 2
    assert run(["validate", "good.yaml", "--dialect", "toml"]) == 2
    assert run(["rule", "FSD999"]) == 2
    assert run(["schema", "nothing"]) == 2
    assert run(["migrate", "v1.yaml", "--check"]) == 1
    assert run(["migrate", "good.yaml", "--check"]) == 0
    assert "internal error" not in capsys.readouterr().err


def test_text_shows_the_line_and_a_caret(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["validate", "bad.yaml"])
    out = capsys.readouterr().out
    assert "bad.yaml:3:18: error FSD208" in out
    line, caret = out.splitlines()[1:3]
    assert line.index("no") == caret.index("^") and caret.count("^") == 2
    assert "\x1b" not in out


def test_a_hostile_line_cannot_drive_the_terminal(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "esc.json").write_text('{"distributed_type": "FSDP", "bogus\\u001b[2J": 1}')
    run(["validate", "esc.json", "--format", "concise"])
    run(["explain", "esc.json"])
    assert "\x1b" not in capsys.readouterr().out


def test_github_annotations(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["validate", "bad.yaml", "--format", "github"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "::error title=fsdptool FSD208,file=bad.yaml,line=3,col=18,endLine=3,endColumn=20::"
    )


@pytest.mark.parametrize("format", ["github", "sarif"])
def test_a_file_without_fsdp_is_not_annotated_for_that(
    files: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    (files / "plain.yaml").write_text("base_model: m\ndatasets: []\ncontext_parallel_size: 2\n")
    run(["validate", "plain.yaml", "--format", "concise"])
    assert "FSD113" in capsys.readouterr().out
    run(["validate", "plain.yaml", "--format", format])
    out = capsys.readouterr().out
    assert "FSD305" in out
    assert "FSD113" not in out


def test_sarif(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "with space é.yaml").write_text(BAD)
    (files / "broken.yaml").write_text(": [\n")
    (files / "empty.yaml").write_text("")
    names = [
        "bad.yaml",
        "v1.yaml",
        "good.yaml",
        "with space é.yaml",
        "broken.yaml",
        "empty.yaml",
        "absent.yaml",
    ]
    run(["validate", *names, "--format", "sarif"])
    log = json.loads(capsys.readouterr().out)
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA, format_checker=jsonschema.FormatChecker()).validate(log)
    assert urlsplit(log["$schema"]).scheme == "https"
    results = log["runs"][0]["results"]
    rules = log["runs"][0]["tool"]["driver"]["rules"]
    uris = set()
    for result in results:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        place = result["locations"][0]["physicalLocation"]
        uris.add(place["artifactLocation"]["uri"])
        region = place.get("region", {"startLine": 1})
        assert region.get("endLine", region["startLine"]) >= region["startLine"]
    assert {unquote(uri) for uri in uris} == set(names) - {"good.yaml"}
    assert all(uri.isascii() and " " not in uri for uri in uris)


def test_sarif_places_are_relative_or_whole(
    files: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = tmp_path_factory.mktemp("elsewhere") / "a b.yaml"
    outside.write_text(BAD)
    run(["validate", str(files / "bad.yaml"), "./v1.yaml", str(outside), "--format", "sarif"])
    log = json.loads(capsys.readouterr().out)
    places = [item["locations"][0]["physicalLocation"] for item in log["runs"][0]["results"]]
    uris = {place["artifactLocation"]["uri"] for place in places}
    assert uris == {"bad.yaml", "v1.yaml", outside.as_uri()} and outside.as_uri().startswith("file:///")


def test_a_sarif_fix_is_the_fix(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another program that applies the replacements by their regions gets what --fix writes."""
    text = "# é𝄞 in front of nothing\n" + BAD.replace("bf16", "no")
    (files / "bad.yaml").write_text(text)
    run(["validate", "bad.yaml", "--format", "sarif"])
    log = json.loads(capsys.readouterr().out)
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    edits = []
    for result in log["runs"][0]["results"]:
        for fix in result.get("fixes", []):
            for change in fix["artifactChanges"]:
                for replacement in change["replacements"]:
                    region = replacement["deletedRegion"]
                    start = starts[region["startLine"] - 1] + region["startColumn"] - 1
                    end = starts[region["endLine"] - 1] + region["endColumn"] - 1
                    edits.append((start, end, replacement.get("insertedContent", {}).get("text", "")))
    assert edits
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    run(["validate", "bad.yaml", "--fix"])
    assert (files / "bad.yaml").read_text() == text


def test_fix_and_diff(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (files / "bad.yaml").read_text()
    assert run(["validate", "bad.yaml", "--diff", "--fix"]) == 1
    assert (files / "bad.yaml").read_text() == before
    assert "+mixed_precision: 'no'  # full precision" in capsys.readouterr().out
    (files / "bad.yaml").chmod(0o640)
    assert run(["validate", "bad.yaml", "--fix"]) == 0
    fixed = (files / "bad.yaml").read_text()
    assert fixed == before.replace(": no  #", ": 'no'  #").replace("  fsdp_use_orig_params: true\n", "")
    assert stat.S_IMODE((files / "bad.yaml").stat().st_mode) == 0o640
    assert run(["validate", "bad.yaml", "--fix"]) == 0 and (files / "bad.yaml").read_text() == fixed
    assert sorted(path.name for path in files.iterdir()) == ["bad.yaml", "good.yaml", "v1.yaml"]


def test_only_fixes_what_it_names(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two misspelt keys of one rule, and a safe fix of another: each is fixed alone, where it stands."""
    text = BAD + "  fsdp_ofload_params: true\n  fsdp_actvation_checkpointing: true\n"
    file = files / "bad.yaml"
    file.write_text(text)
    data = document(capsys, "validate", "bad.yaml")
    first, second = (item for item in data["files"][0]["findings"] if item["code"] == "FSD202")
    place = f"FSD202:{second['line']}:{second['column']}"
    assert run(["validate", "bad.yaml", "--unsafe-fixes", "--diff", "--only", place]) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if line[0] in "+-"][2:] == [
        "-  fsdp_actvation_checkpointing: true",
        "+  fsdp_activation_checkpointing: true",
    ]
    run(["validate", "bad.yaml", "--unsafe-fixes", "--only", f"FSD202:{second['line']}"])
    text = text.replace("actvation", "activation")
    assert file.read_text() == text
    # A line that a fix removes moves those below it, but not what was chosen: both are found.
    run(["validate", "bad.yaml", "--unsafe-fixes", "--only", f"FSD202:{first['line']},FSD302"])
    text = text.replace("ofload", "offload").replace("  fsdp_use_orig_params: true\n", "")
    assert file.read_text() == text
    capsys.readouterr()
    for options, reason in (
        (["--only", "FSD208"], "chooses what is fixed"),
        (["--fix", "--only", "FSD208@3"], "does not name a finding"),
        (["--fix", "--only", f"FSD202:{first['line']}"], "no finding has this code and place"),
        (["--fix", "--only", "FSD208:3", "good.yaml"], "needs one file"),
    ):
        assert run(["validate", "bad.yaml", *options]) == 2
        assert reason in capsys.readouterr().err
    assert file.read_text() == text


def test_a_file_that_cannot_be_written_is_left_alone(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (files / "bad.yaml").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert run(["validate", "bad.yaml", "--fix"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert (files / "bad.yaml").read_bytes() == before
    assert sorted(path.name for path in files.iterdir()) == ["bad.yaml", "good.yaml", "v1.yaml"]


def test_crlf_bom_and_missing_newline_survive(files: Path) -> None:
    data = b"\xef\xbb\xbf" + BAD.rstrip("\n").replace("\n", "\r\n").encode()
    (files / "bad.yaml").write_bytes(data)
    run(["validate", "bad.yaml", "--fix", "--quiet"])
    after = (files / "bad.yaml").read_bytes()
    assert after.startswith(b"\xef\xbb\xbf") and b"'no'  # full" in after and not after.endswith(b"\n")
    assert after.count(b"\n") == after.count(b"\r\n") and b"orig_params" not in after


def test_migrate_in_place_and_across(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["migrate", "v1.yaml"]) == 0
    text = (files / "v1.yaml").read_text()
    assert "  fsdp_reshard_after_forward: false  # zero 2\n" in text and "fsdp_version: 2" in text
    assert run(["migrate", "v1.yaml"]) == 0 and (files / "v1.yaml").read_text() == text
    capsys.readouterr()
    for dialect in ("trainer", "axolotl", "flags", "env", "simpletuner", "llamafactory", "trl"):
        assert run(["migrate", "v1.yaml", "--to", dialect]) == 0
        assert capsys.readouterr().out
    (files / "none.yaml").write_text(V1.replace("SHARD_GRAD_OP", "NO_SHARD"))
    assert run(["migrate", "none.yaml"]) == 1
    assert "MULTI_GPU" in capsys.readouterr().err


def test_migrate_leaves_what_says_version_2(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``validate --fix`` would drop the setting of FSDP1 and write the precision out."""
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_sync_module_states: true\n"
    (files / "two.yaml").write_text(text)
    assert run(["migrate", "--check", "two.yaml"]) == 0
    assert run(["migrate", "two.yaml"]) == 0
    assert (files / "two.yaml").read_text() == text
    (files / "one.yaml").write_text(text.replace("fsdp_version: 2", "fsdp_version: 1"))
    (files / "args.yaml").write_text("output_dir: o\nfsdp: full_shard\n")  # FSDP2, since transformers 5.10
    assert run(["migrate", "--check", "args.yaml"]) == 0
    assert run(["migrate", "--check", "one.yaml", "two.yaml"]) == 1
    assert capsys.readouterr().out == "one.yaml would change\n"


def test_hybrid_becomes_a_mesh(files: Path) -> None:
    (files / "h.yaml").write_text(
        V1.replace("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2").replace("num_machines: 1", "num_machines: 2")
    )
    assert run(["migrate", "h.yaml"]) == 0
    data = yaml.safe_load((files / "h.yaml").read_text())
    assert data["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
    }
    assert data["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert (files / "h.yaml").read_text().startswith(V1[:30])


def test_standard_input(files: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdptool", "validate", "-", "--format", "concise"],
        input=BAD,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1 and "<text>:3:18: error FSD208 [*]" in done.stdout


def test_merge_shows_a_diff_and_asks(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (files / "good.yaml").read_text()
    assert run(["emit-config", "--preset", "two-nodes-hybrid", "--into", "good.yaml"]) == 1
    assert (files / "good.yaml").read_text() == before
    assert "+  parallelism_config_dp_replicate_size: 2" in capsys.readouterr().out
    assert run(["emit-config", "--preset", "two-nodes-hybrid", "--into", "good.yaml", "--force"]) == 0
    merged = yaml.safe_load((files / "good.yaml").read_text())
    assert merged["num_processes"] == 16 and merged["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"]


def test_a_file_merged_for_cpu_says_who_reads_it(files: Path) -> None:
    for _ in range(2):
        assert run(["emit-config", "--preset", "cpu", "--into", "good.yaml", "--force"]) == 0
        assert (files / "good.yaml").read_text().count("consumer=fsdptool") == 1
    assert run(["validate", "good.yaml"]) == 0


def test_the_rules_page_is_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "rules.md"
    assert page.read_text(encoding="utf-8") == rules_page(all_rules().values())


@pytest.mark.slow
def test_pre_commit_runs_the_hooks(tmp_path: Path) -> None:
    """The real pre-commit builds an environment without torch from this checkout, and runs the hooks."""
    root = Path(__file__).parents[2]
    hooks, work = tmp_path / "hooks", tmp_path / "work"
    git = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_SYSTEM": "/dev/null",
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **git, "PRE_COMMIT_HOME": str(tmp_path / "home"), "PATH": path}

    def call(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=folder, env=environment, text=True, capture_output=True, check=False
        )

    for folder in (hooks, work):
        folder.mkdir()
        call(folder, "git", "init", "-q")
    for name in (".pre-commit-hooks.yaml", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(root / name, hooks / name)
    for name in ("fsdptool", "plugins", "schemas"):
        shutil.copytree(root / name, hooks / name, ignore=shutil.ignore_patterns("__pycache__"))
    call(hooks, "git", "add", ".")
    call(hooks, "git", "commit", "-qm", "hooks")
    revision = call(hooks, "git", "rev-parse", "HEAD").stdout.strip()
    config = {
        "repos": [
            {
                "repo": str(hooks),
                "rev": revision,
                "hooks": [{"id": "fsdptool-validate-by-content"}, {"id": "fsdptool-migrate"}],
            }
        ]
    }
    (work / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))
    (work / "fsdp.yaml").write_text(GOOD)
    (work / "unrelated.yaml").write_text("a: 1\n")
    (work / "accelerate-chart.yaml").write_text("apiVersion: v1\nkind: Pod\n---\nkind: Service\n")
    (work / "accelerate-values.json").write_text('{"replicas": {{ .Values.replicas }}}\n')
    call(work, "git", "add", ".")
    good = call(work, "pre-commit", "run", "--all-files")
    assert good.returncode == 0, good.stdout + good.stderr
    (work / "accelerate_v1.yaml").write_text(V1)
    (work / "fsdp.yaml").write_text(BAD)
    (work / "27b-fft.yaml").write_text(
        "base_model: m\nmicro_batch_size: 1\nfsdp_version: 3\nfsdp_config: {a: 1}\n"
    )
    call(work, "git", "add", ".")
    bad = call(work, "pre-commit", "run", "--all-files")
    assert bad.returncode == 1
    assert "fsdp.yaml:3:18: error FSD208" in bad.stdout and "accelerate_v1.yaml would change" in bad.stdout
    assert "27b-fft.yaml:3:15: error FSD206" in bad.stdout
    packages = {path.name for path in (tmp_path / "home").glob("repo*/py_env*/lib/*/site-packages/*")}
    assert "fsdptool" in packages and "typer" in packages and not packages & {"torch", "transformers"}


@pytest.mark.slow
def test_the_schema_alone_serves_a_generic_checker(files: Path) -> None:
    """check-jsonschema accepts the good file and refuses what a schema can refuse."""
    schema = Path(__file__).parents[2] / "schemas" / "accelerate-fsdp2.schema.json"
    checker = str(Path(sys.executable).with_name("check-jsonschema"))
    wrong = {
        "typo": GOOD.replace("fsdp_version", "fsdp_versoin"),
        "prefix": GOOD + "parallelism_config:\n  dp_shard_size: 8\n",
        "list": GOOD.replace("LlamaDecoderLayer", "[A, B]"),
        "top": GOOD + "bogus: 1\n",
        "precision": GOOD.replace("bf16", "fp32"),
        "deepspeed": GOOD + "deepspeed_config:\n  zero_stage: 3\n",
        "v1": V1,
        "offload": GOOD + "  fsdp_activation_checkpointing_offload: true\n",
    }
    for name, text in wrong.items():
        (files / f"wrong_{name}.yaml").write_text(text)
    command = [checker, "--schemafile", str(schema), "--output-format", "json"]
    good = subprocess.run([*command, "good.yaml"], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout
    bad = subprocess.run(
        [*command, *(f"wrong_{name}.yaml" for name in wrong)], capture_output=True, text=True, check=False
    )
    named = {item["filename"] for item in json.loads(bad.stdout)["errors"]}
    assert named == {f"wrong_{name}.yaml" for name in wrong}


def test_the_schema_knows_every_key() -> None:
    from fsdptool.config.dialects.accelerate import keys

    schema = load_schema("accelerate-fsdp2")["properties"]
    assert set(schema) == keys.TOP_LEVEL | {"fp16", "dynamo_backend"}
    legacy = {
        "sharding_strategy",
        "backward_prefetch",
        "forward_prefetch",
        "use_orig_params",
        "sync_module_states",
    }
    modern = {key for key, name in keys.FSDP_KEYS.items() if name not in legacy}
    assert set(schema["fsdp_config"]["properties"]) == modern
    assert set(keys.PARALLELISM_KEYS) <= set(schema["parallelism_config"]["properties"])
