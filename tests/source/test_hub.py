"""Hub ids against a real server on this machine: what is asked for, and what is kept."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}
FILES: dict[str, Any] = {
    "someone/llama": {"config.json": LLAMA, "model.safetensors": "0" * 1000},
    "someone/pipe": {
        "model_index.json": {
            "_class_name": "FluxPipeline",
            "transformer": ["diffusers", "FluxTransformer2DModel"],
        },
        "transformer/config.json": {"_class_name": "FluxTransformer2DModel", "num_layers": 1},
    },
    "someone/own": {
        "config.json": {
            "model_type": "tally",
            "architectures": ["TallyForCausalLM"],
            "auto_map": {
                "AutoConfig": "settings.TallyConfig",
                "AutoModelForCausalLM": ["model.TallyForCausalLM", None],
                "AutoTokenizer": "someone/llama--words.Words",
                "AutoProcessor": "../outside.Processor",
            },
        },
        "settings.py": "import transformers\n",
        "model.py": "if True:\n    from .layers import Layer\nfrom .settings import TallyConfig\n",
        "layers.py": "from .absent import Absent\n",
    },
    "someone/adapter": {
        "adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "someone/llama"}
    },
}


class Hub(BaseHTTPRequestHandler):
    """Serves files the way the Hub does: commit and etag in headers, 404 with its error codes."""

    asked: list[tuple[str, str]]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.lstrip("/").partition("?")[0]
        self.asked.append((self.command, path))
        repository, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repository == "someone/gated":
            return self.refuse(403, "GatedRepo")
        if repository not in FILES:
            return self.refuse(401, "RepoNotFound")
        if revision not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        if name not in FILES[repository]:
            return self.refuse(404, "EntryNotFound")
        value = FILES[repository][name]
        content = value.encode() if name.endswith(".py") else json.dumps(value).encode()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)
        return None

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    requests: list[tuple[str, str]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Recording", (Hub,), {"asked": requests}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", requests
    server.shutdown()
    server.server_close()


RESOLVE = """
import json, sys
from fsdptool.errors import FsdptoolError
from fsdptool.source import resolve
results = []
for reference, revision in json.loads(sys.argv[1]):
    try:
        spec = resolve(reference, revision=revision, trust_remote_code=reference == "someone/own")
        results.append([spec.reference.kind, spec.reference.revision, spec.model_class, spec.family])
    except FsdptoolError as error:
        results.append(["error", error.message])
print(json.dumps(results))
"""


def ask(
    endpoint: str, home: Path, *references: tuple[str, str | None], offline: bool = False
) -> list[list[str]]:
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower() and k != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    shown = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(references)],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    document: list[list[str]] = json.loads(shown.stdout)
    return document


@pytest.mark.slow
def test_code_that_may_run_is_fetched_with_what_it_imports(
    hub: tuple[str, list[tuple[str, str]]], tmp_path: Path
) -> None:
    endpoint, requested = hub
    assert ask(endpoint, tmp_path, ("someone/own", None)) == [["hub", COMMIT, "TallyForCausalLM", "generic"]]
    code = {path.rpartition("/")[2] for _, path in requested if path.endswith(".py")}
    assert code == {"settings.py", "model.py", "layers.py", "absent.py"}
    requested.clear()
    assert ask(endpoint, tmp_path, ("someone/own", None), offline=True)[0][0] == "hub"
    assert requested == []


@pytest.mark.slow
def test_only_json_is_downloaded_and_the_cache_answers_afterwards(
    hub: tuple[str, list[tuple[str, str]]], tmp_path: Path
) -> None:
    endpoint, requested = hub
    references = (("someone/llama", None), ("someone/pipe", None), ("someone/adapter", None))
    online = ask(endpoint, tmp_path, *references)
    assert [item[:3] for item in online] == [
        ["hub", COMMIT, "LlamaForCausalLM"],
        ["pipeline", COMMIT, "FluxTransformer2DModel"],
        ["adapter", COMMIT, "LlamaForCausalLM"],
    ]
    files = [path for _, path in requested if "/resolve/" in path]
    assert files
    assert {path.rpartition(".")[2] for path in files} == {"json"}, "no weights, no code"
    count = len(requested)
    assert ask(endpoint, tmp_path, *references) == online
    assert len(requested) == count, "the local cache comes first"
    assert ask(endpoint, tmp_path, *references, offline=True) == online


@pytest.mark.slow
def test_what_the_hub_refuses_is_one_line(hub: tuple[str, list[tuple[str, str]]], tmp_path: Path) -> None:
    endpoint, _ = hub
    answer = ask(
        endpoint, tmp_path, ("someone/none", None), ("someone/gated", None), ("someone/llama", "no-branch")
    )
    assert [item[0] for item in answer] == ["error"] * 3
    assert "no model 'someone/none' on the Hub" in answer[0][1]
    assert "someone/gated is gated" in answer[1][1]
    assert "no revision 'no-branch'" in answer[2][1]
