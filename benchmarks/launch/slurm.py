"""Stop, requeue and resume the script of ``fsdptool launch --slurm`` on a Slurm cluster of two nodes.

    python benchmarks/launch/slurm.py --output benchmarks/results/launch-slurm.json

Requires root and Debian's slurm-wlm, munge, iproute2 and util-linux. The nodes are the two network
namespaces of ``hosts.py``, each with its own slurmd; slurmctld runs on the first. There are no cgroups and
no accounting.

1. The job trains until Slurm sends SIGUSR1 ahead of its time limit. All ranks save, the script requeues the
   job, and it continues from the step at which it stopped. The recipe is then shortened, so that the second
   start ends by itself.
2. ``scancel`` ends another start, which must leave a checkpoint of the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hosts import ADDRESSES, CONFIG, HOSTS, MODEL, facts, join_hosts, launch_command, part_hosts, steps

from fsdptool.launch.slurm import SIGNAL_LEAD_SECONDS
from fsdptool.runs.events import event_path, read_lines
from fsdptool.runs.manifest import list_checkpoints, read_manifest

MINUTES = 4 + SIGNAL_LEAD_SECONDS // 60
"""Time limit of the first job: it is asked to stop three to four minutes after it began."""

CONFIGURATION = """\
ClusterName=fsdptool
SlurmctldHost={hosts[0]}({addresses[0]})
AuthInfo=socket={work}/munge.socket,cred_expire=5
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=1
KillWait=120
ReturnToService=2
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/spool-%n
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={work}/slurmd-%n.pid
SlurmctldLogFile={work}/slurmctld.log
SlurmdLogFile={work}/slurmd-%n.log
NodeName={hosts[0]} NodeAddr={addresses[0]} CPUs=2
NodeName={hosts[1]} NodeAddr={addresses[1]} CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""

RECIPE = """\
model: {reference: model, weights: random}
data: {source: text, path: text.txt, tokenizer: bytes, workers: 1}
batch: {micro_batch: 2, sequence_length: 32}
steps: STEPS
checkpoints: {every_steps: 20}
"""


class Cluster:
    """The daemons and commands of a Slurm cluster."""

    def __init__(self, work: Path) -> None:
        self.work = work
        text = CONFIGURATION.format(hosts=HOSTS, addresses=ADDRESSES, work=work)
        (work / "slurm.conf").write_text(text)
        (work / "state").mkdir()
        key = work / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        socket = f"--socket={work}/munge.socket"
        files = [f"--{name}-file={work}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        # Its own folder is trusted by nobody but us.
        self.munge = ["/usr/sbin/munged", "--foreground", "--force", socket, *files]
        self.daemons: list[subprocess.Popen[bytes]] = []

    def environment(self) -> dict[str, str]:
        """Return the variables of every command; jobs find fsdptool as after an installation."""
        variables = {**os.environ, "SLURM_CONF": str(self.work / "slurm.conf")}
        variables["PATH"] = f"{Path(sys.executable).parent}:/usr/sbin:{os.environ['PATH']}"
        return variables

    def on(self, host: str, *argv: str) -> list[str]:
        """Return what runs a command on a host; not ``ip netns exec``, which hides the control groups."""
        there = f'mount --bind /etc/netns/{host}/hosts /etc/hosts; hostname {host}; exec "$@"'
        entered = ["nsenter", f"--net=/run/netns/{host}", "unshare", "--uts", "--mount"]
        return [*entered, "sh", "-c", there, "-", *argv]

    def begin(self) -> None:
        """Start every daemon and wait for the nodes."""
        commands = [
            self.munge,
            self.on(HOSTS[0], "slurmctld", "-D"),
            *(self.on(host, "slurmd", "-D", "-N", host) for host in HOSTS),
        ]
        for number, command in enumerate(commands):
            with (self.work / f"daemon-{number}.out").open("wb") as log:
                daemon = subprocess.Popen(command, env=self.environment(), stdout=log, stderr=log)
            self.daemons.append(daemon)
            time.sleep(1.0)
        wait_until(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"], 60.0, "no idle nodes")

    def end(self) -> None:
        """Stop every daemon."""
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *argv: str) -> str:
        """Run a Slurm command on the first node and return its output."""
        done = subprocess.run(
            self.on(HOSTS[0], *argv),
            env=self.environment(),
            cwd=self.work,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{argv}: {done.stderr}")
        return done.stdout

    def submit(self, script: Path) -> str:
        """Submit a script; returns the job's number."""
        return self.ask("sbatch", "--parsable", str(script)).strip()

    def job(self, number: str) -> dict[str, str]:
        """Return Slurm's record of a job."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.ask("scontrol", "show", "job", number)))

    def over(self, number: str) -> bool:
        """Return whether a job has ended and is not in the queue."""
        return self.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def wait_until(met: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait; raises ``TimeoutError`` with ``what``."""
    deadline = time.monotonic() + seconds
    while not met():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.2)


@contextmanager
def running_cluster(work: Path) -> Iterator[Cluster]:
    """Run Slurm on two hosts, and remove both afterwards."""
    part_hosts()
    cluster = Cluster(work)
    try:
        join_hosts()
        cluster.begin()
        yield cluster
    finally:
        cluster.end()
        part_hosts()


def write_script(work: Path, name: str, minutes: int) -> Path:
    """Let ``fsdptool launch --slurm`` write the job."""
    argv = launch_command(work, name)
    argv += ["--slurm", "--script", str(work / f"{name}.sh"), "--time", f"00:{minutes:02d}:00"]
    argv += ["--cpus-per-task", "2", "--setup", f"cd {work}"]
    subprocess.run(argv, check=True, capture_output=True)
    return work / f"{name}.sh"


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind of all ranks."""
    return [e for rank in (0, 1) for e in read_lines(event_path(folder, rank)) if e["kind"] == kind]


def ended(folder: Path) -> dict[str, Any]:
    """Return how the last start ended."""
    summary = json.loads((folder / "summary.json").read_text())
    return {name: summary[name] for name in ("status", "exit_code", "resumable", "steps", "last_good_step")}


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint."""
    checkpoints = list_checkpoints(folder / "checkpoints")
    return read_manifest(checkpoints[0]).step if checkpoints else None


def stop_and_resume(cluster: Cluster, work: Path) -> dict[str, Any]:
    """Let Slurm stop a job ahead of its time limit, and check that it continues."""
    folder = work / "limited"
    (work / "recipe.yaml").write_text(RECIPE.replace("STEPS", "1000000"))
    script = write_script(work, "limited", MINUTES)
    number = cluster.submit(script)
    began = time.time()
    wait_until(
        lambda: int(cluster.job(number)["Restarts"]) > 0, 60.0 * MINUTES + 300.0, "the job is not requeued"
    )
    stopped_at, first = steps(folder), ended(folder)
    recorded = events(folder, "finished")
    (work / "recipe.yaml").write_text(RECIPE.replace("STEPS", str(stopped_at + 20)))
    cluster.ask("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    wait_until(lambda: cluster.over(number), 600.0, "the job does not end")
    return {
        "script": script.read_text().replace(str(work), "WORK").splitlines(),
        "time_limit_minutes": MINUTES,
        "seconds_from_submission_to_stop": round(max(e["time"] for e in recorded) - began, 1),
        "signals_seen_by_ranks": sorted(e["signal"] for e in recorded),
        "first_start": first,
        "stopped_at_step": stopped_at,
        "nodes_of_ranks": sorted({event["node"] for event in events(folder, "started")}),
        "restarts": int(cluster.job(number)["Restarts"]),
        "resumed_from_step": [event["step"] for event in events(folder, "resumed")],
        "state": cluster.job(number)["JobState"],
        "second_start": ended(folder),
    }


def cancel(cluster: Cluster, work: Path) -> dict[str, Any]:
    """Cancel a job while it trains."""
    folder = work / "cancelled"
    (work / "recipe.yaml").write_text(RECIPE.replace("STEPS", "1000000"))
    number = cluster.submit(write_script(work, "cancelled", 60))
    wait_until(lambda: steps(folder) >= 25, 300.0, "the job does not train")
    cluster.ask("scancel", number)
    began = time.monotonic()
    wait_until(lambda: cluster.over(number), 300.0, "the job does not end")
    wait_until(lambda: not cluster.ask("squeue", "-h"), 300.0, "the job does not leave")
    return {
        "state": cluster.job(number)["JobState"],
        "seconds": round(time.monotonic() - began, 1),
        "signals_seen_by_ranks": sorted(e["signal"] for e in events(folder, "finished")),
        "steps": steps(folder),
        "newest_checkpoint": newest_step(folder),
        "summary": ended(folder) if (folder / "summary.json").exists() else None,
    }


def main() -> int:
    """Run both parts; return 0 only if no step was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=("limit", "cancel"))
    parser.add_argument("--keep", action="store_true", help="Keep the folder for inspection.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    wanted = options.only or ["limit", "cancel"]
    work = Path(tempfile.mkdtemp(prefix="fsdptool-slurm-"))
    (work / "model").mkdir()
    (work / "model" / "config.json").write_text(json.dumps(MODEL))
    (work / "text.txt").write_text(" ".join(f"The {n}th sentence says {n * n % 97}." for n in range(4000)))
    (work / "two.yaml").write_text(CONFIG.replace("num_machines: 1", "num_machines: 2"))
    result: dict[str, Any] = {
        **facts("slurm"),
        "nodes": "two slurmd in network namespaces joined by a veth pair, one rank on each, one file system",
    }
    with running_cluster(work) as cluster:
        result["slurm"] = cluster.ask("sinfo", "--version").strip()
        if "limit" in wanted:
            result["stopped_before_the_limit"] = stop_and_resume(cluster, work)
            print(json.dumps(result["stopped_before_the_limit"], indent=1), flush=True)
        if "cancel" in wanted:
            result["cancelled"] = cancel(cluster, work)
            print(json.dumps(result["cancelled"], indent=1), flush=True)
    if not options.keep:
        subprocess.run(["rm", "-r", str(work)], check=False)
    limited, cancelled = result.get("stopped_before_the_limit"), result.get("cancelled")
    result["good"] = (
        limited is not None
        and limited["first_start"]["exit_code"] == 75
        and limited["resumed_from_step"] == [limited["stopped_at_step"]]
        and limited["state"] == "COMPLETED"
        and cancelled is not None
        and cancelled["newest_checkpoint"] == cancelled["steps"]
    )
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    return 0 if result["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
