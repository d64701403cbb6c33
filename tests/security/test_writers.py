"""Writers that are killed, meet one another, run against the clock or find a folder closed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from attacks import CONFIG, PATIENCE, Cli, tree_of, write_job

from fsdptool.cache import Store

KILLED = """\
import os, signal, sys
from pathlib import Path
import fsdptool.cli.app as app

# Dies where a file is about to take its place, at the Nth time: written aside, not yet renamed.
count = int(sys.argv.pop(1))
real_replace, real_fsync = os.replace, os.fsync
def die(real):
    def call(*arguments, **options):
        global count
        count -= 1
        if count < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call
os.fsync = die(os.fsync)
path_replace = Path.replace
Path.replace = die(path_replace)
sys.exit(app.run(sys.argv[1:]))
"""

OLD = CONFIG.replace("fsdp_version: 2", "fsdp_version: 1").replace(
    "  fsdp_reshard_after_forward: true\n", "  fsdp_sharding_strategy: FULL_SHARD\n"
)
WRITERS = {
    "emit-config": ("emit-config", "--preset", "single-node", "-o", "config.yaml", "--force"),
    "merge": ("emit-config", "--preset", "single-node", "--into", "config.yaml", "--force"),
    "fix": ("validate", "config.yaml", "--fix", "--unsafe-fixes"),
    "migrate": ("migrate", "config.yaml"),
    "plan": ("plan", "model", "--profile", "cpu-gloo", "--gpus", "2", "--seq-len", "8", "--no-search", "-o"),
    "recipe": ("emit-config", "--plan", "plan.json", "-o", "new.yaml", "--recipe-output"),
    "export": ("export", "run", "--force"),
    "launch": ("launch", "recipe.yaml", "--config", "config.yaml", "--slurm", "--force", "--script"),
}
TARGETS = {"plan": "plan.json", "recipe": "out.yaml", "launch": "job.sh"}


def killed(folder: Path, count: int, *arguments: str) -> int:
    """Run a command that dies at its ``count``-th step towards the disk; return its status."""
    return subprocess.run(
        [sys.executable, "-P", "-c", KILLED, str(count), *arguments],
        cwd=folder,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "FSDPTOOL_CACHE": str(folder / "cache")},
    ).returncode


@pytest.mark.parametrize("writer", ["emit-config", "merge", "fix", "migrate", "launch"])
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path: Path, writer: str) -> None:
    write_job(tmp_path)
    target = tmp_path / TARGETS.get(writer, "config.yaml")
    before = OLD if writer in ("fix", "migrate", "merge", "emit-config") else "#!/bin/bash\n# mine\n"
    (tmp_path / "config.yaml").write_text(OLD if writer != "launch" else CONFIG)
    arguments = [*WRITERS[writer], *([target.name] if writer in TARGETS else [])]
    contents = set()
    died = 0
    for count in range(12):
        target.write_text(before)
        status = killed(tmp_path, count, *arguments)
        contents.add(target.read_text())
        if status != -signal.SIGKILL:
            break
        died += 1
    assert died, "it was killed on the way at least once"
    assert len(contents) <= 2
    assert before in contents


def test_an_export_that_is_killed_leaves_the_old_one(run_copy: Path, here: Cli) -> None:
    assert here("export", run_copy).code == 0
    before = tree_of(run_copy / "export")
    assert killed(run_copy.parent, 0, "export", "run", "--force") == -signal.SIGKILL
    assert tree_of(run_copy / "export") == before
    answer = here("export", run_copy, "--force")
    assert answer.code == 0, answer


WRITE = """\
import sys
from pathlib import Path
from fsdptool.cache import Store
store = Store(Path(sys.argv[1]))
for number in range(25):
    assert not store.put("kind", f"{sys.argv[2]}-{number}", {"value": number})
    assert not store.put("kind", "shared", {"value": 1, "padding": "x" * 1000})
"""


def test_many_writers_of_one_cache_lose_nothing(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-P", "-c", WRITE, str(tmp_path / "cache"), str(number)])
        for number in range(4)
    ]
    assert [writer.wait(PATIENCE) for writer in writers] == [0] * 4
    verdict = Store(tmp_path / "cache").verify()
    assert (verdict.good, verdict.bad) == (4 * 25 + 1, ())


def test_a_clock_that_goes_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    monkeypatch.setattr("time.time", lambda: 2e9)
    store.put("kind", "a", 1)
    monkeypatch.setattr("time.time", lambda: 1e9)
    store.put("kind", "b", 2)
    assert store.get("kind", "a")[0] == 1
    assert store.get("kind", "b")[0] == 2
    # The entry from the future is not old; nothing that was asked to stay goes.
    assert store.prune(older_than_days=1).removed == 0
    assert store.prune(older_than_days=0.0).failed == ()


def test_a_read_only_folder(cli: Cli, tmp_path: Path) -> None:
    recipe, config = write_job(tmp_path)
    # Also for root, whom modes do not stop: a file where a folder has to be.
    (tmp_path / "closed").write_text("a file")
    closed = tmp_path / "closed"
    for arguments in (
        ("train", recipe, "--config", config, "--no-predict", "-o", closed / "run"),
        ("emit-config", "--preset", "single-node", "-o", closed / "a.yaml"),
        ("launch", recipe, "--config", config, "--slurm", "--script", closed / "job.sh"),
    ):
        answer = cli(*arguments)
        assert answer.code == 2, answer
        assert answer.err.startswith("error: ")
    answer = cli("detect", "albert:base-v2", "--format", "json", FSDPTOOL_CACHE=str(closed / "cache"))
    assert answer.code == 0, answer
    assert json.loads(answer.out)["model"]["class"].startswith("Albert")
    assert closed.read_text() == "a file"
