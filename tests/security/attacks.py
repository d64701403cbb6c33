"""What the attacks need: a job, a stranger's model, forged manifests, and what a folder holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from sockets import listening

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = (EXAMPLES / "configs" / "two_cpu_processes.yaml").read_text(encoding="utf-8")
RECIPE = """\
model: {reference: model, weights: random}
data: {source: synthetic}
batch: {micro_batch: 2, sequence_length: 16}
optimizer: {name: adamw}
steps: 4
checkpoints: {every_steps: 2}
"""
TEXT_DATA = "source: text, path: text.txt, tokenizer: bytes, workers: 1"
MODEL: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
PATIENCE = 300
"""Seconds after which something counts as hanging; nothing here is meant to take a tenth of it."""

DOCUMENTED = {0, 1, 2, 4, 5, 75, 130}
"""Exit statuses a stranger's file may lead to (docs/reference/exit-codes.md); 3 is a bug of ours."""


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def clean(self) -> bool:
        """Whether it ended as documented, without a traceback."""
        return self.code in DOCUMENTED and "Traceback" not in self.out + self.err


Cli = Callable[..., Answer]


TRAPS = (
    "torch.py",
    "accelerate.py",
    "typer.py",
    "yaml.py",
    "json.py",
    "numpy.py",
    "multiprocessing.py",
    "pickle.py",
)
"""Modules that every process of a command imports."""


def set_traps(folder: Path) -> Path:
    """Write modules that leave the mark ``pwned`` when somebody imports them; return the folder."""
    for name in TRAPS:
        text = f"open({str(folder / 'pwned')!r}, 'a').write({name!r})\nraise SystemExit('a trap')\n"
        (folder / name).write_text(text)
    return folder


@dataclass(frozen=True)
class Watched(Answer):
    """What a command said, and the addresses that it and its descendants listened on meanwhile."""

    folder: Path
    listened: frozenset[tuple[str, int]]


def installed_script(*arguments: str | Path) -> list[str]:
    """Return the command line of an installed console script: its own folder is first on Python's path."""
    script = "import sys; from fsdptool.cli.app import main; sys.argv[0] = 'fsdptool'; main()"
    return [sys.executable, "-P", "-c", script, *map(str, arguments)]


def watch(folder: Path, *arguments: str | Path, **environment: str) -> Watched:
    """Run the console script in a folder and look at its sockets until it ends."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    listened: set[tuple[str, int]] = set()
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(
            installed_script(*arguments), cwd=folder, stdout=out, stderr=err, env=variables | environment
        )
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None:
            assert time.monotonic() < deadline, "it hangs"
            listened |= listening(psutil.Process(process.pid))
            time.sleep(0.15)
    out_text, error_text = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return Watched(process.returncode, out_text, error_text, folder, frozenset(listened))


def write_job(folder: Path, recipe: str = RECIPE, vocabulary: int = 64) -> tuple[Path, Path]:
    """Write a model, a recipe and a configuration for two CPU processes; return the last two."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps({**MODEL, "vocab_size": vocabulary}))
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "accelerate.yaml").write_text(CONFIG)
    return folder / "recipe.yaml", folder / "accelerate.yaml"


def strange_model(folder: Path, mark: Path) -> Path:
    """Write a model that comes with code; whoever imports the code leaves ``mark``."""
    folder.mkdir(parents=True)
    auto = {"AutoConfig": "strange.LlamaConfig", "AutoModelForCausalLM": "strange.LlamaForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**MODEL, "auto_map": auto}))
    code = f"""\
from pathlib import Path
Path({str(mark)!r}).touch()
import transformers
class LlamaConfig(transformers.LlamaConfig):
    pass
class LlamaForCausalLM(transformers.LlamaForCausalLM):
    config_class = LlamaConfig
"""
    (folder / "strange.py").write_text(code)
    return folder


def forge_manifest(folder: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's manifest and sign it again, as anybody can."""
    from fsdptool.runs.manifest import MANIFEST, Manifest

    path = folder / MANIFEST
    raw = json.loads(path.read_text())
    raw.update(changes)
    raw["own_sha256"] = ""
    files = {name: _written(entry) for name, entry in raw["files"].items()}
    manifest = Manifest(**{**raw, "files": files})
    raw["own_sha256"] = manifest.digest()
    path.write_text(json.dumps(raw))


def _written(entry: Mapping[str, Any]) -> Any:
    from fsdptool.files.safetensors_writer import Written

    return Written(**entry)


def tree_of(folder: Path) -> dict[str, bytes | None]:
    """Return everything below a folder: names, and what files hold."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in sorted(folder.rglob("*"))
    }
