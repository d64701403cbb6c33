"""Run the lines that ``fsdptool launch`` prints on two hosts, and cut the connection between them.

    python benchmarks/launch/hosts.py --output benchmarks/results/launch-hosts.json

Two network namespaces joined by a pair of virtual interfaces act as two hosts. Each has its own addresses,
name and loopback interface and, as in Debian's default, resolves its own name to a loopback address. They
share this machine's file system. Requires Linux, root, and Debian's iproute2 and util-linux.

There are three runs. In the first two, node 0 is given by address and by name, and the run trains to its
end. In the third, the second host's link is taken down during training, and both hosts must end by
themselves with a line that names a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fsdptool.launch.supervise import FAILURE_GRACE_SECONDS
from fsdptool.records.diagnostic import library_versions, tool_version
from fsdptool.runs.events import read_lines

HOSTS = ("fsdptool-a", "fsdptool-b")
ADDRESSES = ("10.77.13.1", "10.77.13.2")
STEPS = 12
TIMEOUT = 30.0
"""Seconds a collective may take."""

MARGIN_SECONDS = 60.0
"""What processes may take to notice, say and end on a machine that is busy with other things."""

PATIENCE_SECONDS = 600.0
"""How long a run may take to start and to end, or to come to the step at which the cable is cut."""

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 262,
}  # fmt: skip

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = (EXAMPLES / "configs" / "two_cpu_processes.yaml").read_text(encoding="utf-8")


def recipe(steps: int) -> str:
    """Return the recipe of the runs."""
    return f"""\
model: {{reference: model, weights: random}}
data: {{source: synthetic}}
batch: {{micro_batch: 2, sequence_length: 32}}
steps: {steps}
checkpoints: {{every_steps: 4}}
"""


def ip(*arguments: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def join_hosts() -> None:
    """Create the hosts and the link between them."""
    for host in HOSTS:
        ip("netns", "add", host)
        names = [
            f"127.0.1.1 {host}" if mine == host else f"{at} {mine}"
            for mine, at in zip(HOSTS, ADDRESSES, strict=True)
        ]
        place = Path("/etc/netns") / host
        place.mkdir(parents=True, exist_ok=True)
        (place / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
    link = ("type", "veth", "peer", "name", "fsdptool0", "netns", HOSTS[1])
    ip("link", "add", "fsdptool0", "netns", HOSTS[0], *link)
    for host, address in zip(HOSTS, ADDRESSES, strict=True):
        ip("-n", host, "address", "add", f"{address}/24", "dev", "fsdptool0")
        ip("-n", host, "link", "set", "fsdptool0", "up")
        ip("-n", host, "link", "set", "lo", "up")


def part_hosts() -> None:
    """Remove the hosts."""
    for host in HOSTS:
        subprocess.run(["ip", "netns", "delete", host], capture_output=True, check=False)
        (Path("/etc/netns") / host / "hosts").unlink(missing_ok=True)
        (Path("/etc/netns") / host).rmdir() if (Path("/etc/netns") / host).is_dir() else None


def start(host: str, line: str, log: Path) -> subprocess.Popen[str]:
    """Start a command line on a host."""
    inner = f"hostname {host}; exec {line}"
    with log.open("w") as stream:
        return subprocess.Popen(
            ["ip", "netns", "exec", host, "unshare", "--uts", "bash", "-c", inner],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            text=True,
            start_new_session=True,
        )


def launch_command(work: Path, name: str) -> list[str]:
    """Return ``fsdptool launch`` for a run below the folder."""
    inputs = [str(work / "recipe.yaml"), "--config", str(work / "two.yaml")]
    return [sys.executable, "-m", "fsdptool", "launch", *inputs, "-o", str(work / name)]


def facts(benchmark: str) -> dict[str, Any]:
    """Return the head of a result: the versions and the machine."""
    return {
        "benchmark": f"launch/{benchmark}",
        "tool_version": tool_version(),
        "libraries": library_versions(),
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform(), "processor": platform.machine()},
        "load_average": [round(value, 1) for value in os.getloadavg()],
    }


def printed_lines(work: Path, name: str, host: str) -> list[str]:
    """Return what ``fsdptool launch`` prints."""
    argv = [*launch_command(work, name), "--host", host, "--launch-id", name, "--timeout", f"{TIMEOUT:g}"]
    said = subprocess.run(argv, check=True, capture_output=True, text=True)
    return said.stdout.splitlines()


def steps(folder: Path) -> int:
    """Return the last step recorded."""
    lines = list(read_lines(folder / "metrics.jsonl"))
    return int(lines[-1]["step"]) if lines else 0


def run(work: Path, name: str, host: str, *, cut_at: int | None = None, bound: float = 0.0) -> dict[str, Any]:
    """Start the lines on both hosts, cut the link if requested, and return how both ended."""
    lines = printed_lines(work, name, host)
    logs = [work / f"{name}-{number}.log" for number in range(len(HOSTS))]
    nodes = [start(at, line, log) for at, line, log in zip(HOSTS, lines, logs, strict=True)]
    cut: float | None = None
    ended: dict[int, float] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while len(ended) < len(nodes) and time.monotonic() < deadline:
            if cut_at is not None and cut is None and steps(work / name) >= cut_at:
                ip("-n", HOSTS[1], "link", "set", "fsdptool0", "down")
                cut = time.monotonic()
                deadline = cut + bound
            for number, node in enumerate(nodes):
                if number not in ended and node.poll() is not None:
                    ended[number] = time.monotonic()
            time.sleep(0.05)
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    said = [log.read_text().splitlines() for log in logs]
    return {
        "run": name,
        "host": host,
        "lines": [
            shlex.join(word.replace(str(work), "WORK") for word in shlex.split(line)) for line in lines
        ],
        "exit_status": [
            nodes[number].returncode if number in ended else None for number in range(len(nodes))
        ],
        "steps": steps(work / name),
        "cut_at_step": cut_at,
        "seconds_from_cut_to_end": [
            round(ended[n] - cut, 1) if cut and n in ended else None for n in range(len(nodes))
        ],
        "said": [
            [line for line in text if line.startswith(("error:", "help:"))] or text[-3:] for text in said
        ],
    }


def main() -> int:
    """Run all three; return 0 only if two succeeded and the third ended within its time limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="Names of runs.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    bound = TIMEOUT + FAILURE_GRACE_SECONDS + MARGIN_SECONDS
    cases: dict[str, dict[str, Any]] = {
        "by-address": {"host": ADDRESSES[0]},
        "by-name": {"host": HOSTS[0]},
        "cut": {"host": HOSTS[0], "cut_at": 4, "bound": bound},
    }
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="fsdptool-hosts-") as folder:
        work = Path(folder)
        (work / "model").mkdir()
        (work / "model" / "config.json").write_text(json.dumps(MODEL))
        (work / "two.yaml").write_text(CONFIG.replace("num_machines: 1", "num_machines: 2"))
        part_hosts()
        try:
            join_hosts()
            for name, case in cases.items():
                if options.only and name not in options.only:
                    continue
                (work / "recipe.yaml").write_text(recipe(STEPS if name != "cut" else 10_000))
                results.append(run(work, name, **case))
                print(json.dumps(results[-1], indent=1), flush=True)
        finally:
            part_hosts()
    good = all(
        item["exit_status"] == [0, 0]
        if item["run"] != "cut"
        else item["exit_status"] == [4, 4] and _names_a_rank(item)
        for item in results
    )
    result = {
        **facts("hosts"),
        "hosts": "two network namespaces joined by a veth pair, one process on each, one file system",
        "collective_timeout_seconds": TIMEOUT,
        "bound_seconds": bound,
        "good": good,
        "runs": results,
    }
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    return 0 if good else 1


def _names_a_rank(item: dict[str, Any]) -> bool:
    return all(any(line.startswith("error: rank ") for line in said) for said in item["said"])


if __name__ == "__main__":
    sys.exit(main())
