"""Structure-aware fuzzing of every kind of file that somebody else may have written.

    python benchmarks/security/fuzz.py [--cases 20000] [--seed 0] [--kinds manifests,clusters] [--output FILE]

Valid documents (recipes, configurations, cluster and GPU files, plans, model configurations, checkpoint
manifests with their shards, run folders with their metrics, events, progress files and logs) are changed
where their structure is: values of other types and sizes, names with paths and control characters in them,
keys gone, doubled or unknown, nesting, aliases, byte-order marks, digests signed again; and files that are
pipes, devices, links or cut off, and names that no file can have. Every case is one command line, run in a
process that has the libraries loaded. Each must end

- without a traceback and with a status that docs/reference/exit-codes.md documents (3 is a bug),
- within a time limit,
- with nothing written outside its own folder and the cache,
- without a control character in what it prints, and without raw markup in a page,
- with every other run of a list, whatever one folder holds,
- and, for checkpoints, refused or exported with exactly the weights that were trained.

Counts and the first failures of every kind are written as JSON. A failure is repeated by its seed:
``--only KIND:NUMBER``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from queue import Empty
from typing import Any

import yaml

MEMORY = 12 << 30
"""Address space of a process that runs cases; torch maps some GB."""

DOCUMENTED = (0, 1, 2, 4, 5, 75, 130)
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
RECIPE: dict[str, Any] = {
    "model": {"reference": "model", "weights": "random", "overrides": {"num_hidden_layers": 2}},
    "data": {"source": "synthetic", "options": {"shard_size": 8}},
    "batch": {"micro_batch": 2, "sequence_length": 16, "accumulation": 1},
    "optimizer": {"name": "adamw", "learning_rate": 0.001, "betas": [0.9, 0.95]},
    "schedule": {"name": "cosine", "warmup_steps": 1},
    "method": {"name": "lora", "lora": {"rank": 4, "targets": ["q_proj"]}},
    "sharding": {"layout": "native", "prefetch": 1},
    "checkpoints": {"every_steps": 2, "keep_last": 1},
    "steps": 4,
    "seed": 1,
}
CONFIG: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "no",
    "num_machines": 2, "num_processes": 2, "use_cpu": True, "machine_rank": 0, "main_process_ip": "10.0.0.1",
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_reshard_after_forward": True,
    },
    "parallelism_config": {"parallelism_config_dp_shard_size": 2},
}  # fmt: skip
GPU: dict[str, Any] = {
    "name": "Mine-12GB",
    "aliases": ["mine"],
    "memory_bytes": 12_000_000_000,
    "flops": {"float32": 1.0e13, "bfloat16": 2.0e13},
    "memory_bandwidth": 5.0e11,
    "link_bandwidth": 1.6e10,
    "link": "pcie",
    "source": "a ruler",
}
CLUSTER: dict[str, Any] = {
    "gpu": GPU, "gpus_per_node": 1, "nodes": 2, "inter_node_bandwidth": "400 Gbit/s", "host_memory": "2 TiB",
    "price_per_gpu_hour": 2.5, "environment": {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"}, "name": "mine",
}  # fmt: skip
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "torch_dtype": "float32",
    "tie_word_embeddings": False,
}  # fmt: skip
MARKUP = "<script>owned</script>"
WORDS = (
    *("", " ", "x" * 5000, "../../../etc/passwd", "/etc/passwd", "/dev/zero", "a/b", ".", "..", "~", "-rf"),
    *(
        "$(touch owned)",
        "`touch owned`",
        "a;touch owned",
        "'\"",
        "a\nb: c",
        "\x1b[31mred\x1b]0;t\x07",
        "a\x00b",
    ),
    *("\u202eabc", "\x9b31m", "é" * 300, "\ud800", "::error::owned", "true", "null", "1e400", "0x10"),
    *("NaN", "LlamaForCausalLM", "torch.nn.Linear", "os.system", "{}", "{0.__class__}", "%s%s%n", "<b>"),
    *("__class__", "__init__", "__proto__", "_name_or_path", "auto_map"),
    *(MARKUP, "\ufeff", "a\x85b: c", "a\u2028b: c"),
)
NUMBERS = (
    *(0, -1, 1, 2, 7, 2**31, 2**63, 2**64, -(2**63), 10**12, 10**30, 10**400, 1.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), True, False, None),
)


class _OutOfTimeError(BaseException):
    """A case did not end."""


def mutated(value: Any, rng: random.Random, changes: int) -> Any:
    """Return a document with some of its nodes changed."""
    document = json.loads(json.dumps(value))
    for _ in range(changes):
        place, key = _node(document, rng)
        if place is None:
            return _junk(rng)
        _change(place, key, rng)
    return document


def _node(document: Any, rng: random.Random) -> tuple[Any, Any]:
    """Choose a container and one of its keys, deep ones as often as shallow ones."""
    found = []
    stack = [document]
    while stack:
        value = stack.pop()
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in list(keys):
            found.append((value, key))
            stack.append(value[key])
    return rng.choice(found) if found else (None, None)


def _change(place: Any, key: Any, rng: random.Random) -> None:
    kind = rng.randrange(12)
    if kind == 0:
        del place[key]
    elif kind == 1 and isinstance(place, dict):
        place[rng.choice(WORDS)] = place.pop(key)
    elif kind == 2 and isinstance(place, dict):
        place[rng.choice([*WORDS, "trust_remote_code", "files", "dtype"])] = _junk(rng)
    elif kind == 3:
        place[key] = [place[key]] * rng.choice((0, 1, 2, 50))
    elif kind == 4:
        place[key] = {"a": place[key], rng.choice(WORDS): None}
    elif kind == 5 and isinstance(place[key], str):
        word = rng.choice(WORDS)
        place[key] = rng.choice((word + place[key], place[key] + word, place[key][: len(place[key]) // 2]))
    elif kind == 6 and type(place[key]) in (int, float):
        number = place[key]
        place[key] = rng.choice((-number, number + 1, number - 1, number * 2, number * 10**9, str(number)))
    elif kind == 7:
        for _ in range(rng.choice((3, 70))):
            place[key] = [place[key]]
    else:
        place[key] = _junk(rng)


def _junk(rng: random.Random) -> Any:
    kind = rng.randrange(5)
    if kind < 2:
        return rng.choice(WORDS)
    if kind < 4:
        return rng.choice(NUMBERS)
    return rng.choice(([], {}, [None], {"a": 1}, [[]], ["a", 1, None], {"": {}}))


def as_text(document: Any, rng: random.Random, *, json_only: bool = False) -> bytes:
    """Write a document as JSON or YAML, sometimes damaged."""
    if json_only or rng.random() < 0.4:
        data = json.dumps(document, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    else:
        data = yaml.safe_dump(document, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
    kind = rng.randrange(42)
    if kind == 0:
        return data[: rng.randrange(len(data) + 1)]
    if kind == 1:
        at = rng.randrange(len(data) + 1)
        return (
            data[:at]
            + rng.choice((b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\t", b"\r\n", b"&a *a"))
            + data[at:]
        )
    if kind == 2:
        return b"\xef\xbb\xbf" + data
    if kind == 3:
        return data + b"\n---\n" + data
    if kind == 4:
        lines = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
        return b"a0: &a0 [1,1,1,1]\n" + lines.encode() + data
    if kind == 5:
        return data + b"\nx: !!python/object/apply:os.system ['touch owned']\n"
    if kind == 6:
        return data + b"\nn: " + b"9" * rng.choice((300, 4000, 5000, 50_000)) + b"\n"
    if kind == 7:
        return rng.choice((b"[", b"{", b'{"a":')) * rng.choice((100, 50_000))
    if kind == 8:
        return b"\xef\xbb\xbf" * rng.choice((1, 2, 3)) + data
    if kind == 9:
        ending = rng.choice(("\x85", "\u2028", "\u2029", "\r", "\r\n")).encode()
        return data.replace(b"\n", ending, rng.choice((-1, 1, 3)))
    return data


def place_file(path: Path, data: bytes, rng: random.Random) -> None:
    """Write a file, or now and then something that only looks like one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = rng.randrange(100)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(rng.choice(("/dev/zero", "/dev/null", path.name, "/nonexistent", "/proc/self/mem")))
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        with path.open("wb") as stream:
            stream.truncate(300 << 30)
    else:
        path.write_bytes(data)


class Bench:
    """What cases are made from: a job, a plan and a run with checkpoints; each case works on copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job = folder / "job"
        self.run = folder / "run"

    def prepare(self) -> None:
        """Write the job, make a plan and train two ranks for four steps."""
        (self.job / "model").mkdir(parents=True)
        (self.job / "model" / "config.json").write_text(json.dumps(MODEL))
        recipe = {**RECIPE, "method": {"name": "full"}, "model": {"reference": "model", "weights": "random"}}
        del recipe["schedule"], recipe["data"]["options"]
        (self.job / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (self.job / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        local = {**CONFIG, "num_machines": 1}
        (self.job / "local.yaml").write_text(yaml.safe_dump(local))
        train = ["train", "recipe.yaml", "--config", "local.yaml", "-o", str(self.run)]
        plan = ["plan", "--recipe", "recipe.yaml", "--profile", "cpu-gloo", "--gpus", "2", "--no-search"]
        for arguments in (train, [*plan, "-o", "plan.json"], ["export", str(self.run)]):
            argv = [sys.executable, "-m", "fsdptool", *arguments]
            subprocess.run(argv, cwd=self.job, check=True, capture_output=True, timeout=600)
        shutil.move(self.run / "export", self.folder / "honest")

    def honest(self) -> str:
        """Return the digest of the weights that were trained."""
        return digest(self.folder / "honest" / "model.safetensors")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sign(manifest: Any) -> Any:
    """Give a manifest the digest its reader expects."""
    if isinstance(manifest, dict):
        with contextlib.suppress(TypeError, ValueError):
            text = json.dumps({**manifest, "own_sha256": ""}, sort_keys=True, separators=(",", ":"))
            manifest["own_sha256"] = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return manifest


Arguments = list[str]


def case_recipes(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """A recipe, read by launch (which needs no model) or by train and plan."""
    place_file(place / "r.yaml", as_text(mutated(RECIPE, rng, rng.choice((1, 1, 2, 4))), rng), rng)
    shutil.copytree(bench.job / "model", place / "model")
    config = str(bench.job / "local.yaml")
    if rng.random() < 0.97:
        return ["launch", "r.yaml", "--config", config]
    return ["train", "r.yaml", "--config", config, "--dry-run"]


def case_configurations(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """An accelerate YAML, read by every command that takes one."""
    place_file(place / "c.yaml", as_text(mutated(CONFIG, rng, rng.choice((1, 1, 2, 4))), rng), rng)
    formats = ["--format", rng.choice(("text", "concise", "github", "json", "sarif"))]
    return rng.choice(
        (
            ["validate", "c.yaml", *formats],
            ["validate", "c.yaml", "--diff"],
            ["validate", "c.yaml", "--fix"],
            ["explain", "c.yaml"],
            ["migrate", "c.yaml", "--diff"],
            ["launch", str(bench.job / "recipe.yaml"), "--config", "c.yaml"],
        )
    )


def case_clusters(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """A cluster file, whose variables become shell text."""
    name = rng.choice(("c.yaml", "c.json"))
    text = as_text(mutated(CLUSTER, rng, rng.choice((1, 1, 2))), rng, json_only=name.endswith("json"))
    place_file(place / name, text, rng)
    slurm = ["--slurm"] if rng.random() < 0.5 else []
    job = [str(bench.job / "recipe.yaml"), "--config", str(bench.job / "config.yaml")]
    return ["launch", *job, "--cluster", name, *slurm]


def case_gpus(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """A GPU file; the GPU asked for is in no catalogue, so that no plan is made."""
    name = rng.choice(("g.yaml", "g.json"))
    document = mutated({"gpus": [GPU, {**GPU, "name": "Other"}]}, rng, rng.choice((1, 1, 2)))
    place_file(place / name, as_text(document, rng, json_only=name.endswith("json")), rng)
    return ["plan", str(bench.job / "model"), "--gpu", "none-such", "--gpus-file", name, "--seq-len", "8"]


def case_plans(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """A plan's document."""
    plan = json.loads((bench.job / "plan.json").read_text())
    if rng.random() < 0.3:
        # The part that decides what is resolved and built.
        plan["inputs"] = mutated(plan["inputs"], rng, rng.choice((1, 2)))
        text = json.dumps(plan).encode("utf-8", "surrogatepass")
    else:
        text = as_text(mutated(plan, rng, rng.choice((1, 2))), rng, json_only=True)
    place_file(place / "p.json", text, rng)
    shutil.copytree(bench.job / "model", place / "model")
    return rng.choice(
        (
            ["compare", "p.json", "p.json"],
            ["compare", "p.json", "p.json"],
            ["emit-config", "--plan", "p.json"],
        )
    )


def case_models(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """A model's configuration; sizes stay small enough to build."""
    document = mutated(MODEL, rng, rng.choice((1, 1, 2)))
    place_file(place / "m" / "config.json", as_text(document, rng, json_only=True), rng)
    return ["detect", "m", "--format", rng.choice(("text", "json"))]


def case_manifests(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """A checkpoint whose manifest was changed and signed again, or whose files do not bear it out."""
    run = place / "run"
    shutil.copytree(bench.run, run)
    folders = sorted((run / "checkpoints").glob("step-*"))
    for older in folders[:-1]:
        shutil.rmtree(older)
    folder = folders[-1]
    manifest = json.loads((folder / "manifest.json").read_text())
    kind = rng.randrange(8)
    shards = sorted(folder.glob("*.safetensors"))
    if kind < 4:
        manifest = mutated(manifest, rng, rng.choice((1, 1, 2)))
    elif kind == 4:
        dropped = rng.choice(shards)
        dropped.unlink()
        manifest["files"].pop(dropped.name)
        manifest["world_size"] = rng.choice((2, 1, 0, -1, 10**12))
    elif kind == 5:
        shutil.copy(
            rng.choice(shards),
            folder / rng.choice(("z.safetensors", "a.safetensors", "shard-00002.safetensors")),
        )
    elif kind == 6:
        _change_shard(rng.choice(shards), rng)
        for shard in shards:
            manifest["files"][shard.name] = {"bytes": shard.stat().st_size, "sha256": digest(shard)}
    else:
        shard = rng.choice(shards)
        shard.unlink()
        choice = rng.randrange(4)
        if choice == 0:
            os.mkfifo(shard)
        elif choice == 1:
            shard.symlink_to(rng.choice(("/dev/zero", "/etc/hostname", shard.name)))
        elif choice == 2:
            shard.mkdir()
        else:
            manifest["files"][shard.name]["bytes"] = 0
            shard.touch()
            manifest["files"][shard.name]["sha256"] = hashlib.sha256(b"").hexdigest()
    text = json.dumps(sign(manifest)).encode("utf-8", "surrogatepass")
    (folder / "manifest.json").unlink()
    place_file(folder / "manifest.json", text, rng)
    named = ["--checkpoint", str(folder)] if rng.random() < 0.3 else []
    return ["export", "run", *named]


def _change_shard(path: Path, rng: random.Random) -> None:
    """Change what a shard's header says, and leave its tensors' bytes alone."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    table, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    places = json.loads(table["__metadata__"]["DCP_SHARDING_INFO"])
    if rng.random() < 0.5:
        places = mutated(places, rng, rng.choice((1, 3)))
        table["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(places)
    else:
        table = mutated(table, rng, 1)
    text = json.dumps(table).encode("utf-8", "surrogatepass")
    length = rng.choice((len(text), len(text), len(text), 2**62, 0))
    path.write_bytes(length.to_bytes(8, "little") + text + body)


def case_runs(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """A run folder with one of its documents changed."""
    run = place / "run"
    shutil.copytree(bench.run, run)
    name = rng.choice(
        (
            "run.json",
            "recipe.json",
            "settings.json",
            "spec.json",
            "units.json",
            "prediction.json",
            "summary.json",
        )
    )
    path = run / name
    document = json.loads(path.read_text()) if path.exists() else None
    path.unlink(missing_ok=True)
    place_file(path, as_text(mutated(document, rng, rng.choice((1, 1, 2))), rng, json_only=True), rng)
    if rng.random() < 0.2:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        lines.insert(rng.randrange(len(lines)), json.dumps(mutated(json.loads(lines[0]), rng, 2)))
        (run / "metrics.jsonl").write_text("\n".join(lines), errors="surrogatepass")
    plan = str(bench.job / "plan.json")
    calibrate = ["calibrate", "run", "--gpu", "H100-80GB-SXM"]
    return rng.choice((["compare", plan, "run"], ["compare", "run", "run"], calibrate, ["export", "run"]))


DOCUMENTS = (
    *("run.json", "recipe.json", "prediction.json", "summary.json", "logs/out-of-memory.json"),
    "events/rank-00000.progress",
)
LINES = ("metrics.jsonl", "events/rank-00000.jsonl", "events/rank-00001.jsonl")
ACCOUNT: dict[str, Any] = {
    "rank": 0,
    "seen": {"moment": "backward", "requested_bytes": 5, "live": [{"name": "gradients", "bytes": 7}]},
    "planned_moment": "backward",
    "planned_bytes": 5,
    "peak_moment": "backward",
    "peak_bytes": 5,
    "next_steps": [{"change": "checkpointing", "cost": "time", "device_total_bytes": 5}],
}


def case_looks(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """Two run folders, one of which was changed, and the commands that look at runs."""
    leave = shutil.ignore_patterns("step-*")
    for name in ("good", "bad"):
        shutil.copytree(bench.run, place / "runs" / name, ignore=leave)
    run = place / "runs" / "bad"
    (run / "logs" / "out-of-memory.json").write_text(json.dumps(ACCOUNT))
    if rng.random() < 0.6:  # a run that failed or died is looked at more closely
        (run / "summary.json").unlink()
        event = {"kind": "failure", "time": time.time(), "rank": 0, "message": "m", "traceback": ["t"]}
        with (run / LINES[1]).open("a") as stream:
            stream.write(json.dumps(event) + "\n")
    for _ in range(rng.choice((1, 1, 2))):
        _change_run(run, rng)
    bad = rng.choice((["--format", "json"], []))
    return rng.choice(
        (
            ["runs", "runs", "--format", rng.choice(("text", "json", "csv", "tsv"))],
            ["watch", "runs/bad", *bad],
            ["watch", "runs/bad", "--once"],
            ["report", "runs/bad", "-o", "page.html"],
            ["diagnose", "runs/bad", *bad],
        )
    )


def _change_run(run: Path, rng: random.Random) -> None:
    """Change one file of a run folder."""
    kind = rng.randrange(10)
    if kind == 0:
        name = rng.choice((".lock", "logs/rank-00000.log", "logs/launcher.log", "events", "logs", *LINES))
        path = run / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        place_file(path, rng.randbytes(200), random.Random(rng.randrange(4)))
        return
    path = run / rng.choice(DOCUMENTS if kind < 4 else LINES)
    # A change before this one may have left something else there.
    plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20
    text = path.read_text(encoding="utf-8", errors="replace") if plain else "{}"
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    if kind < 4:
        try:
            document = mutated(json.loads(text), rng, rng.choice((1, 1, 2)))
        except ValueError:
            document = _junk(rng)
        place_file(path, as_text(document, rng, json_only=True), rng)
        return
    lines = [line.encode() for line in text.splitlines()] or [b"{}"]
    for _ in range(rng.choice((1, 2, 5))):
        try:
            line = json.loads(rng.choice(lines[:3]).decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            line = {"kind": "memory", "time": 1.0, "moments": {"backward": 5}}
        changed = as_text(mutated(line, rng, rng.choice((1, 1, 2))), rng, json_only=True)
        lines.insert(rng.randrange(3, len(lines) + 3), changed)
    place_file(path, b"\n".join(lines) + rng.choice((b"\n", b"", b'\n{"step": 3', b"\n\0\0\0")), rng)


def case_logs(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """A log with the words of known failures, cut, doubled and mixed with other numbers and words."""
    from fsdptool.rules import signatures

    sizes = (
        "Tried to allocate 1.50 GiB. 2.00 GiB is reserved by PyTorch but unallocated",
        "torch.OutOfMemoryError",
    )
    known = [text for item in signatures() for text in item.texts]
    lines = []
    for _ in range(rng.choice((1, 5, 60))):
        line = " ".join(
            rng.choice((*known, *sizes, *map(str, WORDS), "[rank3]: ", "Error: ")) for _ in range(4)
        )
        junk = rng.choice(("1.2.3", "..", "9" * 400, "-1", "", "1e400", "NaN"))
        pieces = re.split(r"(\d+)", line)
        lines.append("".join(rng.choice((piece, junk)) if piece.isdigit() else piece for piece in pieces))
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    place_file(place / "log", data + rng.choice((b"", b"\xff\xfe", b"\0" * 5000, b"\r\r\n")), rng)
    return ["diagnose", "log", "--format", rng.choice(("text", "json"))]


def case_names(bench: Bench, place: Path, rng: random.Random) -> Arguments:
    """A name that no file can have, where a command takes one."""
    name = rng.choice(("x" * 256, "y" * 300 + "/a.yaml", "a/" * 3000, "\x1b[31m" * 80, "é" * 200, "loop"))
    (place / "loop").symlink_to("loop")
    recipe, config = str(bench.job / "recipe.yaml"), str(bench.job / "local.yaml")
    shutil.copy(config, place / "c.yaml")
    return rng.choice(
        (
            *(
                [command, name]
                for command in ("validate", "migrate", "explain", "diagnose", "runs", "export")
            ),
            *(["watch", name, "--once"], ["report", name, "-o", "page.html"], ["compare", name, name]),
            *(["calibrate", name, "--gpu", "H100-80GB-SXM"], ["detect", name], ["plan", "--recipe", name]),
            *(["validate", name, "c.yaml"], ["validate", "c.yaml", "--baseline", name]),
            *(["launch", name, "--config", config], ["launch", recipe, "--config", name]),
            ["launch", recipe, "--config", config, "--cluster", name],
            ["train", recipe, "--config", config, "-o", name, "--dry-run"],
            *(["emit-config", "--plan", name], ["emit-config", "--preset", "single-node", "-o", name]),
            *(["plan", "--check", name], ["report", str(bench.job / "plan.json"), "-o", name + ".html"]),
            ["migrate", "c.yaml", "-o", name],
        )
    )


KINDS: dict[str, tuple[Callable[[Bench, Path, random.Random], Arguments], float]] = {
    "recipes": (case_recipes, 0.3), "configurations": (case_configurations, 0.34),
    "clusters": (case_clusters, 0.15), "gpus": (case_gpus, 0.07), "plans": (case_plans, 0.05),
    "models": (case_models, 0.01), "manifests": (case_manifests, 0.05), "runs": (case_runs, 0.03),
    "looks": (case_looks, 0.2), "logs": (case_logs, 0.05), "names": (case_names, 0.05),
}  # fmt: skip
"""How cases of a kind are made, and their share."""


def outside(bench: Bench, place: Path) -> set[tuple[str, int, int]]:
    """Return names, sizes and times of everything that a case must leave alone."""
    found = set()
    for folder in (bench.folder, bench.job, bench.job / "model", bench.run, bench.folder / "home"):
        for entry in os.scandir(folder):
            if folder == bench.folder and (entry.name == "cache" or entry.name.startswith("cases-")):
                continue
            state = entry.stat(follow_symlinks=False)
            size = 0 if entry.is_dir() else state.st_size
            found.add((entry.path, size, 0 if entry.is_dir() else state.st_mtime_ns))
    return found | {(entry.path, 0, 0) for entry in os.scandir(place.parent)}


def _wrong_answer(code: int | None, said: str) -> list[str]:
    """Return what is wrong with a status and what a command printed."""
    wrong = []
    if code == 3 or "internal error" in said:
        wrong.append("internal error")
    elif code is not None and code not in DOCUMENTED:
        wrong.append(f"status {code}")
    if "Traceback (most recent call last)" in said:
        wrong.append("traceback")
    if CONTROL.search(said):
        wrong.append("control character")
    return wrong


def _wrong_result(
    bench: Bench, kind: str, place: Path, arguments: Arguments, code: int | None, said: str
) -> list[str]:
    """Return what is wrong with what a command left in its folder, or left out of a list."""
    wrong = []
    if (place / "owned").exists():
        wrong.append("ran a command")
    if kind == "looks" and arguments[0] == "runs" and code == 0 and "good" not in said:
        wrong.append("a run is not listed")
    page = place / "page.html"
    if page.is_file() and MARKUP in page.read_text(encoding="utf-8", errors="replace"):
        wrong.append("raw markup")
    if kind == "manifests" and code == 0:
        weights = place / "run" / "export" / "model.safetensors"
        if not weights.exists() or digest(weights) != bench.honest():
            wrong.append("exported other weights")
    return wrong


def run_case(bench: Bench, kind: str, number: int, seed: int, limit: int, work: Path) -> dict[str, Any]:
    """Run one case; returns its status and what is wrong with it."""
    from fsdptool.cli.app import run

    rng = random.Random(f"{seed}:{kind}:{number}")
    place = work / f"{kind}-{number}"
    place.mkdir()
    try:
        arguments = KINDS[kind][0](bench, place, rng)
    except RecursionError:  # deeper than PyYAML writes
        arguments = ["--version"]
    before = outside(bench, place)
    out, err = io.StringIO(), io.StringIO()
    code: int | None = None
    wrong: list[str] = []
    began = time.monotonic()
    os.chdir(place)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(arguments)
    except _OutOfTimeError:
        wrong.append("hang")
    except BaseException as error:
        wrong.append(f"raised {type(error).__name__}: {error}"[:200])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.monotonic() - began
    os.chdir(bench.folder)
    said = out.getvalue() + err.getvalue()
    wrong += _wrong_answer(code, said)
    if outside(bench, place) != before:
        wrong.append("wrote outside its folder")
    wrong += _wrong_result(bench, kind, place, arguments, code, said)
    lines = [line for line in err.getvalue().splitlines() if line.startswith(("internal", "error"))]
    shutil.rmtree(place, ignore_errors=True)
    return {
        "kind": kind,
        "number": number,
        "code": code,
        "wrong": wrong,
        "seconds": seconds,
        "said": (lines[0] if lines else "")[:300],
        "arguments": arguments,
    }


def work_through(bench: Bench, cases: Any, seed: int, limit: int, deadline: float, results: Any) -> None:
    """Run cases as they come; one process, with the libraries loaded once."""

    def give_up(number: int, frame: object) -> None:
        raise _OutOfTimeError

    signal.signal(signal.SIGALRM, give_up)
    # Reading without bounds ends in a MemoryError, not in the machine's last byte.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    # What a library writes below Python is nobody's answer here.
    sys.stdout.flush()
    # Before the first case: an import that a time limit interrupts leaves half a module.
    import_module("transformers.models.llama.modeling_llama")
    import_module("fsdptool.training.export.api")
    work = Path(tempfile.mkdtemp(dir=bench.folder, prefix="cases-"))
    while (case := cases.get()) is not None and time.monotonic() < deadline:
        results.put((os.getpid(), case))
        results.put(run_case(bench, case[0], case[1], seed, limit, work))
    shutil.rmtree(work, ignore_errors=True)
    results.put((os.getpid(), None))


def main() -> int:
    """Fuzz and write the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--limit", type=int, default=120, help="seconds a case may take")
    parser.add_argument("--minutes", type=float, default=60, help="no case begins later")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", help="KIND:NUMBER, to repeat one case and see what it says")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    with tempfile.TemporaryDirectory(prefix="fsdptool-fuzz-") as name:
        folder = Path(name).resolve()
        (folder / "home").mkdir()
        environment = {"HOME": str(folder / "home"), "FSDPTOOL_CACHE": str(folder / "cache")}
        os.environ.update(environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"})
        os.environ.update(
            {"TRANSFORMERS_VERBOSITY": "error", "FSDPTOOL_DATA_CACHE": str(folder / "cache" / "data")}
        )
        bench = Bench(folder)
        bench.prepare()
        if options.only:
            kind, number = options.only.split(":")
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            found = run_case(bench, kind, int(number), options.seed, options.limit, folder)
            print(json.dumps(found, indent=1))
            return int(bool(found["wrong"]))
        document = fuzz(bench, kinds, options)
    text = json.dumps(document, indent=1, ensure_ascii=True) + "\n"
    if options.output is not None:
        options.output.write_text(text)
    print(text)
    return int(document["wrong"] > 0)


def fuzz(bench: Bench, kinds: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run all cases in processes of their own; returns the counts."""
    whole = sum(KINDS[kind][1] for kind in kinds)
    cases = [(kind, n) for kind in kinds for n in range(round(options.cases * KINDS[kind][1] / whole))]
    random.Random(options.seed).shuffle(cases)
    context = multiprocessing.get_context("fork")
    queue, results = context.Queue(), context.Queue()
    for case in (*cases, *[None] * options.processes):
        queue.put(case)
    began = time.monotonic()
    deadline = began + 60 * options.minutes
    counts: dict[str, dict[str, Any]] = {
        kind: {"cases": 0, "statuses": Counter[str](), "wrong": Counter[str]()} for kind in kinds
    }
    failures: list[dict[str, Any]] = []
    slowest = 0.0
    workers: dict[int, Any] = {}
    busy: dict[int, tuple[float, Any]] = {}

    def start() -> None:
        arguments = (bench, queue, options.seed, options.limit, deadline, results)
        worker = context.Process(target=work_through, args=arguments)
        worker.start()
        workers[worker.pid or 0] = worker

    def count(result: dict[str, Any]) -> None:
        row = counts[result["kind"]]
        row["cases"] += 1
        row["statuses"][str(result["code"])] += 1
        for what in result["wrong"]:
            row["wrong"][what] += 1
        if result["wrong"]:
            failures.append(result)

    for _ in range(options.processes):
        start()
    while workers:
        with contextlib.suppress(Empty):
            result = results.get(timeout=1)
            if isinstance(result, dict):
                slowest = max(slowest, result["seconds"])
                count(result)
            elif result[1] is None:
                workers.pop(result[0]).join()
                busy.pop(result[0], None)
            else:
                busy[result[0]] = (time.monotonic(), result[1])
        for pid, (since, (kind, number)) in list(busy.items()):
            # A loop in C does not see the signal that ends a case.
            if pid in workers and time.monotonic() - since > 2 * options.limit + 5:
                workers.pop(pid).kill()
                busy.pop(pid)
                silent = {"kind": kind, "number": number, "code": None, "wrong": ["hang"], "seconds": 0.0}
                count({**silent, "said": "", "arguments": []})
                start()
    return {
        "seed": options.seed,
        "cases": sum(row["cases"] for row in counts.values()),
        "wrong": len(failures),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "slowest_seconds": round(slowest, 1),
        "kinds": {
            kind: {
                "cases": row["cases"],
                "statuses": dict(sorted(row["statuses"].items())),
                "wrong": dict(row["wrong"]),
            }
            for kind, row in counts.items()
        },
        "failures": sorted(failures, key=lambda item: (item["kind"], item["number"]))[:40],
    }


if __name__ == "__main__":
    sys.exit(main())
