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
from fsdptool.runs.events import read_lines

pytestmark = pytest.mark.slow

KILLED = """\
import json, os, signal, sys
from pathlib import Path
import fsdptool.cli.app as app

# Each attempt is a child of this process: what a command imports is imported once.
target, arguments = Path(sys.argv[1]), sys.argv[2:]
before = target.read_bytes() if target.exists() else None
if arguments[0] == "export":
    import fsdptool.training.export

def die_at(count, real):
    def call(*arguments, **options):
        count[0] -= 1
        if count[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call

attempts = []
for number in range(40):
    if before is None:
        target.unlink(missing_ok=True)
    else:
        target.write_bytes(before)
    child = os.fork()
    if not child:
        # Dies where a file is about to take its place, at the Nth time: written aside, not yet renamed.
        count = [number]
        os.fsync = die_at(count, os.fsync)
        Path.replace = die_at(count, Path.replace)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(app.run(arguments))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    attempts.append((status, target.read_text() if target.exists() else None))
    if status != -signal.SIGKILL:
        break
print(json.dumps(attempts))
"""

OLD = CONFIG.replace("fsdp_version: 2", "fsdp_version: 1").replace(
    "  fsdp_reshard_after_forward: true\n", "  fsdp_sharding_strategy: FULL_SHARD\n"
)
PLAN = ("plan", "model", "--profile", "cpu-gloo", "--gpus", "2", "--seq-len", "8", "--no-search", "-o")
WRITERS = {
    "emit-config": ("emit-config", "--preset", "single-node", "-o", "config.yaml", "--force"),
    "merge": ("emit-config", "--preset", "single-node", "--into", "config.yaml", "--force"),
    "fix": ("validate", "config.yaml", "--fix", "--unsafe-fixes"),
    "migrate": ("migrate", "config.yaml"),
    "launch": (
        "launch",
        "recipe.yaml",
        "--config",
        "config.yaml",
        "--slurm",
        "--force",
        "--script",
        "job.sh",
    ),
    "plan": (*PLAN, "plan.json", "--force"),
    "recipe": (
        "emit-config",
        "--plan",
        "plan.json",
        "-o",
        "config.yaml",
        "--recipe-output",
        "new.yaml",
        "--force",
    ),
}
TARGETS = {"plan": "plan.json", "recipe": "new.yaml", "launch": "job.sh"}


def kill_at_each_write(folder: Path, target: Path, *arguments: str) -> list[tuple[int, str | None]]:
    """Run a command that dies at its first step towards the disk, its second, ... until it survives.

    Returns the status and the target's content after each attempt; every attempt starts from the same target.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, str(target), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return [(status, content) for status, content in json.loads(done.stdout)]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, writer: str, here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    (tmp_path / "config.yaml").write_text(CONFIG if writer == "launch" else OLD)
    if writer in ("plan", "recipe"):
        # Then every attempt finds the model's trace in the cache.
        answer = here(*PLAN, "plan.json")
        assert answer.code == 0, answer
        if writer == "plan":
            Path("plan.json").write_text("mine: before\n")
    target = tmp_path / TARGETS.get(writer, "config.yaml")
    if not target.exists():
        target.write_text("mine: before\n")
    before = target.read_text()
    attempts = kill_at_each_write(tmp_path, target, *WRITERS[writer])
    *killed, (status, after) = attempts
    assert killed, "it was killed on the way at least once"
    assert {status for status, _ in killed} == {-signal.SIGKILL}
    assert status in (0, 1), "the last attempt ends by itself"
    assert after not in (None, before), "and writes"
    if writer == "plan":
        # A plan records when it was made.
        for _, content in killed:
            assert (
                content == before
                or json.loads(content or "")["verdict"] == json.loads(after or "")["verdict"]
            )
        return
    assert {content for _, content in killed} <= {before, after}
    assert killed[0][1] == before


def test_an_export_that_is_killed_leaves_the_old_one(run_copy: Path, here: Cli) -> None:
    assert here("export", run_copy).code == 0
    before = tree_of(run_copy / "export")
    (weights,) = (run_copy / "export").glob("*.safetensors")
    argv = [sys.executable, "-P", "-c", KILLED.replace("range(40)", "range(1)"), str(run_copy / "spare")]
    done = subprocess.run(
        [*argv, "export", "run", "--force"], cwd=run_copy.parent, capture_output=True, check=False
    )
    assert json.loads(done.stdout)[0][0] == -signal.SIGKILL, done.stderr
    assert tree_of(run_copy / "export") == before
    assert weights.is_file()
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


def test_two_runs_started_at_once_in_one_folder(tmp_path: Path) -> None:
    """One trains; the other is refused and changes nothing of the first."""
    recipe, config = write_job(tmp_path)
    config.write_text(CONFIG.replace("num_processes: 2", "num_processes: 1"))
    argv = [sys.executable, "-P", "-m", "fsdptool", "train", str(recipe), "--config", str(config)]
    argv += ["-o", str(tmp_path / "run"), "--no-predict"]
    runs = [subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [run.communicate(timeout=PATIENCE)[1] for run in runs]
    assert sorted(run.returncode for run in runs) == [0, 2], errors
    (refused,) = (error for run, error in zip(runs, errors, strict=True) if run.returncode)
    assert refused.startswith("error: "), refused
    assert "run" in refused.splitlines()[0]
    steps = [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4]


def test_two_exports_at_once(run_copy: Path) -> None:
    """Each replaces the folder as a whole; what remains is one of them, whole."""
    argv = [sys.executable, "-P", "-m", "fsdptool", "export", str(run_copy), "--force"]
    exports = [subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [export.communicate(timeout=PATIENCE)[1] for export in exports]
    codes = [export.returncode for export in exports]
    assert 0 in codes, errors
    assert set(codes) <= {0, 2}, errors
    assert (run_copy / "export" / "config.json").is_file()
    assert not [path.name for path in run_copy.iterdir() if path.name.startswith((".export", "export."))]


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


def test_a_read_only_folder(cli: Cli, here: Cli, tmp_path: Path) -> None:
    recipe, config = write_job(tmp_path)
    # Also for root, whom modes do not stop: a file where a folder has to be.
    (tmp_path / "closed").write_text("a file")
    closed = tmp_path / "closed"
    for arguments in (
        ("train", recipe, "--config", config, "--no-predict", "-o", closed / "run"),
        ("emit-config", "--preset", "single-node", "-o", closed / "a.yaml"),
        ("launch", recipe, "--config", config, "--slurm", "--script", closed / "job.sh"),
    ):
        answer = here(*arguments)
        assert answer.code == 2, answer
        assert answer.err.startswith("error: ")
    answer = cli("detect", "albert:base-v2", "--format", "json", FSDPTOOL_CACHE=str(closed / "cache"))
    assert answer.code == 0, answer
    assert json.loads(answer.out)["model"]["class"].startswith("Albert")
    assert closed.read_text() == "a file"
