"""The pages of configurations: status, findings beside the lines, fixes written as they were shown."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from sites import Site, form_fields

from fsdptool.config.migrate import repair
from fsdptool.config.reader import read_settings

MISSPELT = """\
# keep this comment
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_reshard_after_forwrd: false   # misspelt
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
  fsdp_backward_prefetch: BACKWARD_PRE
"""
FSDP1 = MISSPELT.replace("fsdp_version: 2", "fsdp_version: 1").replace(
    "fsdp_reshard_after_forwrd: false", "fsdp_sharding_strategy: FULL_SHARD"
)
HOSTILE = "<script>alert(1)</script>"


def fix_link(page: str, code: str) -> dict[str, str]:
    """Return the parameters of the link that shows the fix of a finding."""
    links = [html.unescape(link) for link in re.findall(r'href="(/configs/file\?[^"]+)"', page)]
    queries = [dict(parse_qsl(urlsplit(link).query)) for link in links]
    return next(query for query in queries if query.get("change", "").startswith(code))


def test_a_folder_lists_every_file_with_status_and_counts(site: Site) -> None:
    (site.folder / "misspelt.yaml").write_text(MISSPELT)
    (site.folder / "compose.yaml").write_text("services:\n  web: {}\n")
    (site.folder / "below").mkdir()
    (site.folder / "below" / "old.yaml").write_text(FSDP1)
    page = site.get("/configs", folder="models")
    rows = {
        re.sub(r"<[^>]+>", " ", row).split()[0]: " ".join(re.sub(r"<[^>]+>", " ", row).split())
        for row in re.findall(r"<tr><th scope=\"row\">.*?</tr>", page, re.DOTALL)
    }
    assert set(rows) == {"below/old.yaml", "compose.yaml", "misspelt.yaml"}
    assert "other program" in rows["compose.yaml"]
    assert rows["misspelt.yaml"].endswith("2") and rows["below/old.yaml"].endswith("1")
    only = site.get("/configs", folder="models", show="other")
    assert "compose.yaml" in only and "misspelt.yaml" not in only
    assert "fsdptool validate" in page


def test_what_is_wrong_comes_first_and_the_rest_is_folded(site: Site) -> None:
    folder = site.folder / "many"
    folder.mkdir()
    for number in range(60):
        (folder / f"a{number:02}.yaml").write_text("name: of another program\n")
    (folder / "z-wrong.yaml").write_text(MISSPELT.replace("fsdp_version: 2", "fsdp_version: banana"))
    (folder / "y-old.yaml").write_text(FSDP1)
    # An error is an error, whether a fix repairs it or not.
    (folder / "x-renamed.yaml").write_text(FSDP1 + "main_process_prt: 29500\n")
    text = site.get("/configs", folder="models/many")
    opened = re.findall(r'<details class="group"( open)?>\s*<summary>([^<]+)</summary>', text)
    assert opened == [
        (" open", "With errors (2)"),
        (" open", "With warnings (1)"),
        ("", "Of other programs (60)"),
    ]
    assert read_settings(folder / "x-renamed.yaml").status == "fixable"
    assert (
        max(map(text.index, ("z-wrong.yaml", "x-renamed.yaml")))
        < text.index("y-old.yaml")
        < text.index("a00.yaml")
    )
    assert "a49.yaml" in text and "a50.yaml" not in text
    assert "Show all 60" in text and "a59.yaml" in site.get("/configs", folder="models/many", show="other")


def test_findings_stand_beside_their_lines_with_settings_and_origins(site: Site) -> None:
    (site.folder / "misspelt.yaml").write_text(MISSPELT)
    page = site.get("/configs/file", file="models/misspelt.yaml")
    reading = read_settings(site.folder / "misspelt.yaml")
    finding = next(item for item in reading.diagnostics if "forwrd" in item.message)
    line = page.index(f'id="L{finding.line}"')
    after = page.index(f'id="L{finding.line + 1}"')
    assert finding.code in page[line:after] and "<mark>fsdp_reshard_after_forwrd" in page[line:after]
    assert 'href="#L4"' in page  # mixed_precision comes from line 4
    assert "fsdptool explain" in page


def test_one_fix_is_shown_and_written_alone(site: Site) -> None:
    file = site.folder / "misspelt.yaml"
    file.write_text(MISSPELT)
    before = read_settings(file)
    finding = next(item for item in before.diagnostics if "forwrd" in item.message)
    query = fix_link(site.get("/configs/file", file="models/misspelt.yaml"), finding.code)
    page = site.get("/configs/file", **query)
    added = re.findall(r'class="d-added">\+([^<]*)', page)
    assert added == ["  fsdp_reshard_after_forward: false   # misspelt"]
    assert file.read_text() == MISSPELT
    flag = "--fix" if finding.fix.safe else "--unsafe-fixes"
    place = f"{finding.code}:{finding.line}:{finding.column}"
    assert f"fsdptool validate {flag} --only {place} " in page
    answer = site.post("/configs/file", form_fields(page, "/configs/file"))
    assert answer.status_code == 303
    assert file.read_text() == MISSPELT.replace("forwrd", "forward")
    assert "Written: Fix" in site.client().get(answer.headers["location"]).text


def test_a_file_that_changed_meanwhile_is_not_overwritten(site: Site) -> None:
    file = site.folder / "misspelt.yaml"
    file.write_text(MISSPELT)
    page = site.get("/configs/file", file="models/misspelt.yaml", change="unsafe")
    form = form_fields(page, "/configs/file")
    theirs = MISSPELT.replace("bf16", "fp16")
    file.write_text(theirs)
    answer = site.post("/configs/file", form)
    assert answer.status_code == 409
    assert "was not overwritten" in answer.text and file.read_text() == theirs
    # The page shows the difference to the new content, which can be written.
    assert site.post("/configs/file", form_fields(answer.text, "/configs/file")).status_code == 303
    assert "mixed_precision: fp16" in file.read_text()
    assert not [path for path in site.folder.iterdir() if path.suffix == ".part"]


def test_a_file_is_migrated_and_shown_in_another_dialect(site: Site) -> None:
    file = site.folder / "old.yaml"
    file.write_text(FSDP1)
    assert "Migrate to FSDP2" in site.get("/configs/file", file="models/old.yaml")
    page = site.get("/configs/file", file="models/old.yaml", change="migrate")
    assert "fsdptool migrate" in page
    assert site.post("/configs/file", form_fields(page, "/configs/file")).status_code == 303
    migrated = read_settings(file)
    assert migrated.version == 2 and "# keep this comment" in file.read_text()
    page = site.get("/configs/file", file="models/old.yaml", to="trainer")
    assert "fsdp_config" in page and "--to trainer" in page
    answer = site.client().get("/configs/download", params={"file": "models/old.yaml", "to": "trainer"})
    assert answer.headers["content-disposition"] == 'attachment; filename="old-trainer.yaml"'
    assert read_settings(answer.text, dialect="trainer").dialect == "trainer"


def test_hostile_names_are_escaped(site: Site) -> None:
    name = f"{HOSTILE.replace('/', '')}.yaml"
    (site.folder / name).write_text(
        MISSPELT.replace("LlamaDecoderLayer", f"'{HOSTILE}'").replace(
            "fsdp_reshard_after_forwrd", f'"{HOSTILE}"'
        )
    )
    pages = [
        site.get("/configs", folder="models"),
        site.get("/configs/file", file=f"models/{name}"),
        site.get("/configs/file", file=f"models/{name}", change="unsafe"),
        site.get("/configs/file", file=f"models/{name}", to="trainer"),
        site.client().get("/configs", params={"folder": HOSTILE}).text,
        site.client().get("/configs/file", params={"file": f"models/{name}", "consumer": HOSTILE}).text,
        site.client().get("/configs/file", params={"file": f"models/{name}", "change": HOSTILE}).text,
    ]
    for page in pages:
        assert "<script>" not in page and "alert(1)" in page


@pytest.mark.parametrize("name", ["models/../secret.yaml", "/etc/passwd", "models/link.yaml"])
def test_files_outside_of_the_roots_are_not_read(site: Site, tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text(MISSPELT)
    (site.folder / "link.yaml").symlink_to(secret)
    (site.folder / "own.yaml").write_text(MISSPELT)
    assert site.client().get("/configs/file", params={"file": name}).status_code == 400
    listed = site.get("/configs", folder="models")
    assert "own.yaml" in listed and "link.yaml" not in listed
    form = {"file": name, "change": "unsafe", "shown": "x", "write_token": site.session.write_token}
    assert site.post("/configs/file", form).status_code == 400
    assert secret.read_text() == MISSPELT


def test_project_settings_above_a_root_do_not_count(site: Site, tmp_path: Path) -> None:
    (site.folder / "misspelt.yaml").write_text(MISSPELT)
    (tmp_path / "fsdptool.toml").write_text('exclude = ["*.yaml"]\n')
    assert "misspelt.yaml" in site.get("/configs", folder="models")
    (site.folder / "fsdptool.toml").write_text('exclude = ["*.yaml"]\nbaseline = "../baseline.json"\n')
    assert "misspelt.yaml" not in site.get("/configs", folder="models")


LINE = "accelerate launch --config_file {} --num_processes 2 train.py\n"


def test_a_command_line_is_read_with_files_below_the_roots_only(site: Site, tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text(FSDP1)
    (site.folder / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    (site.folder / "deep").mkdir()
    (site.folder / "deep" / "own.yaml").write_text(FSDP1)
    for name in ("../../secret.yaml", str(tmp_path / "secret.yaml"), "../link.yaml", "link.yaml"):
        (site.folder / "deep" / "run.sh").write_text(LINE.format(name))
        page = site.get("/configs/file", file="models/deep/run.sh")
        assert "FSD116" in page and "FSD301" not in page
    # Beside the line, or from the root; what the file says now counts.
    for name in ("own.yaml", "deep/own.yaml"):
        (site.folder / "deep" / "run.sh").write_text(LINE.format(name))
        assert "FSD301" in site.get("/configs/file", file="models/deep/run.sh")
    (site.folder / "deep" / "own.yaml").write_text(migrated(FSDP1))
    assert "FSD301" not in site.get("/configs/file", file="models/deep/run.sh")


@pytest.mark.slow
def test_a_plan_from_a_command_line_stays_below_the_roots(tmp_path: Path) -> None:
    """The child process that plans is told the roots."""
    (tmp_path / "secret.yaml").write_text(migrated(FSDP1))
    root = tmp_path / "root"
    root.mkdir()
    (root / "run.sh").write_text(LINE.format("../secret.yaml"))
    code = (
        "import sys\nfrom pathlib import Path\nfrom fsdptool.web import worker\n"
        "from fsdptool.planning import read_request\n"
        "def read(self):\n  try:\n    given = {'reference': 'llama3:8b', 'config': Path(sys.argv[2])}\n"
        "    print(read_request({**given, 'gpu': 'H100-80GB-SXM', 'gpus': 2}), file=sys.stderr)\n"
        "  except Exception as error:\n    print(error.message, file=sys.stderr)\n"
        "worker._Worker.serve = read\nworker._Worker.read = lambda *_: None\n"
        "worker.main(lambda: None, sys.argv[1:2])\n"
    )
    for roots, word in ((root, "does not configure FSDP"), (tmp_path, "FsdpSettings")):
        answer = subprocess.run(
            [sys.executable, "-c", code, str(roots), str(root / "run.sh")],
            input="", capture_output=True, text=True, cwd=root, check=False,
        )  # fmt: skip
        assert word in answer.stderr, answer.stderr


def migrated(text: str) -> str:
    """Return an FSDP1 file as FSDP2."""
    return repair(read_settings(text), unsafe=True).after.text
