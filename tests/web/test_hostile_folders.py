"""Pages whose folders a stranger filled: nothing outside is shown or written, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folders import make_run
from sites import HOST, TINY, Server, Site, serving

from fsdptool.files.text import UnreadableError, confined, exists, read_bytes
from fsdptool.web.server import STRANGERS

SECRET = 987
"""A size of a model outside, which no page may show."""


@pytest.fixture(autouse=True)
def own_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("FSDPTOOL_QUEUE", str(tmp_path / "queue"))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A model outside of the folders of the pages."""
    folder = tmp_path / "outside" / "m"
    folder.mkdir(parents=True)
    write_model(folder, hidden_size=SECRET * 4)
    return folder


def write_model(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))


def settled(site: Site, path: str, **query: str) -> str:
    """Return a page after its work has ended."""
    client = site.client()
    text = client.get(path, params=query).text
    while match := re.search(r"/jobs/([0-9a-f]{32})/events", text):
        job = site.jobs.get(match[1])
        assert job is None or job.wait(300)
        text = client.get(path, params=query).text
    return text


def plant_adapter(root: Path, outside: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(outside)}
    (root / "adapter_config.json").write_text(json.dumps(adapter))


def plant_relative_adapter(root: Path, outside: Path) -> None:
    plant_adapter(root, Path("../../outside/m"))


def plant_adapter_of_an_adapter(root: Path, outside: Path) -> None:
    (root / "inner").mkdir()
    plant_adapter(root, root / "inner")
    plant_adapter(root / "inner", outside)


def plant_link(root: Path, outside: Path) -> None:
    (root / "config.json").symlink_to(outside / "config.json")


def plant_linked_folder(root: Path, outside: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "base"}
    (root / "adapter_config.json").write_text(json.dumps(adapter))
    (root / "base").symlink_to(outside)


def plant_component(root: Path, outside: Path) -> None:
    name = "../../outside/m"
    index = {"_class_name": "FluxPipeline", name: ["transformers", "LlamaForCausalLM"]}
    index |= {"transformer": ["transformers", "LlamaForCausalLM"]}
    (root / "model_index.json").write_text(json.dumps(index))
    (root / "transformer").symlink_to(outside)


REFERENCES = (
    plant_adapter,
    plant_relative_adapter,
    plant_adapter_of_an_adapter,
    plant_link,
    plant_linked_folder,
    plant_component,
)


@pytest.mark.slow
def test_models_do_not_lead_out_of_the_folders(site: Site, outside: Path) -> None:
    hardware = {"gpu": "H100-80GB-SXM", "gpus": "2", "sequence_length": "8"}
    for number, plant in enumerate(REFERENCES):
        root = site.folder / f"given-{number}"
        root.mkdir()
        plant(root, outside)
        reference = f"models/{root.name}"
        for text in (
            settled(site, "/model", reference=reference),
            settled(site, "/plan", reference=reference, **hardware),
            settled(site, "/apply", reference=reference, processes="2"),
        ):
            assert str(SECRET * 4) not in text and f"{SECRET * 4:,}" not in text
            assert "LlamaDecoderLayer" not in text
            assert "outside the folders" in text or "does not name a folder" in text or "neither a" in text
    recipe = site.folder / "recipe.yaml"
    for reference in (str(outside), "../outside/m"):
        recipe.write_text(f"model: {{reference: {reference}}}\nbatch: {{sequence_length: 8}}\nsteps: 2\n")
        text = settled(site, "/plan", recipe="models/recipe.yaml", gpu="H100-80GB-SXM", gpus="2")
        assert "LlamaDecoderLayer" not in text
        assert "outside the folders" in text
    # An adapter and a link within the folders, and a model that ships, are shown.
    base = site.folder / "base"
    base.mkdir()
    write_model(base)
    given = site.folder / "given"
    given.mkdir()
    plant_adapter(given, base)
    assert "LlamaDecoderLayer" in settled(site, "/model", reference="models/given")
    (site.folder / "linked").mkdir()
    (site.folder / "linked" / "config.json").symlink_to("../base/config.json")
    assert "LlamaDecoderLayer" in settled(site, "/model", reference="models/linked")
    assert "AlbertLayer" in settled(site, "/model", reference="albert:base-v2")


def test_a_confined_reader_resolves_links(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "own").write_text("own")
    (tmp_path / "out").write_text("out")
    (tmp_path / "in" / "link").symlink_to("../out")
    home = (tmp_path / "in").resolve()
    with confined(lambda path: Path(os.path.realpath(path)).is_relative_to(home)):
        assert read_bytes(home / "own") == b"own"
        for name in ("link", "../out"):
            with pytest.raises(UnreadableError, match="outside"):
                read_bytes(home / name)
            assert not exists(home / name)
    # Also where the link is made after the look at its path.
    looks = iter((True, False))
    with confined(lambda path: next(looks)), pytest.raises(UnreadableError, match="outside"):
        read_bytes(home / "own")
    assert read_bytes(home / "link") == b"out"


@pytest.mark.parametrize(
    "name",
    [
        *(".pre-commit-config.yaml", ".github/workflows/x.yml", "a/.b/c.yaml", ".yaml", "x.sh", "../x.yaml"),
        *("taken.yaml", "folder.yaml", "link.yaml", "x" * 300 + ".yaml", "a\0.yaml", "file/x.yaml"),
    ],
)
def test_hardware_is_saved_as_a_new_plain_file(site: Site, tmp_path: Path, name: str) -> None:
    for folder in (".github/workflows", "a/.b", "folder.yaml"):
        (site.folder / folder).mkdir(parents=True)
    (site.folder / "taken.yaml").write_text("mine")
    (site.folder / "file").touch()
    (site.folder / "link.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    before = sorted(tmp_path.rglob("*"))
    offer = {"1.gpu": "H100-80GB-SXM", "1.gpus_per_node": "8"}
    answer = site.client().post(
        "/hardware/save", data={**offer, "path": f"models/{name}"}, headers=site.write_headers()
    )
    assert answer.status_code == 400, answer.text
    assert sorted(tmp_path.rglob("*")) == before
    assert (site.folder / "taken.yaml").read_text() == "mine"
    answer = site.client().post(
        "/hardware/save", data={**offer, "path": "models/new.yaml"}, headers=site.write_headers()
    )
    assert answer.status_code == 303 and (site.folder / "new.yaml").is_file()


@pytest.mark.slow
def test_one_bad_run_leaves_the_list_and_its_page_answers(site: Site, tmp_path: Path) -> None:
    good = make_run(site.folder / "runs" / "good")
    plants: tuple[Callable[[Path], None], ...] = (
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(good.parent.parent.parent / "secret.jsonl"),
    )
    line = json.dumps({"kind": "warning", "time": time.time(), "rank": 0, "message": "a secret of mine"})
    (tmp_path / "secret.jsonl").write_text(line + "\n")
    names = ("metrics.jsonl", "events/rank-00000.jsonl", "events/rank-00000.progress", "recipe.json")
    for number, name in enumerate((*names, "run.json", "logs/rank-00000.log")):
        for kind, plant in enumerate(plants):
            folder = make_run(site.folder / "runs" / f"bad-{number}-{kind}", message="x")
            (folder / name).unlink(missing_ok=True)
            plant(folder / name)
    (folder / "run.json").write_text('{"world_size": 1180591620717411303424, "device": "cpu"}')
    client = site.client()
    text = client.get("/runs").text
    assert "runs/good" in text
    for path in sorted((site.folder / "runs").iterdir()):
        name = f"models/runs/{path.name}"
        for address in ("/run", "/run/curve"):
            answer = client.get(address, params={"run": name})
            assert answer.status_code in (200, 400), (name, answer.text)
            assert "a secret of mine" not in answer.text
    assert "a secret of mine" not in client.get("/diagnose", params={"target": "models/runs/bad-1-2"}).text


def test_a_folder_with_a_bad_configuration_is_listed(site: Site) -> None:
    folder = site.folder / "c"
    folder.mkdir()
    (folder / "marks.yaml").write_text(
        "\ufeff\ufeff" + "fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
    )
    (folder / "good.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
    os.mkfifo(folder / "pipe.yaml")
    text = site.get("/configs", folder="models/c")
    assert "good.yaml" in text and "marks.yaml" in text
    assert site.client().get("/configs/file", params={"file": "models/c/marks.yaml"}).status_code == 200


LONG = "x" * 300


@pytest.mark.parametrize(
    "address",
    [
        *("/run?run={}", "/run/curve?run={}", "/configs?folder={}", "/configs/file?file={}"),
        *("/configs/download?file={}", "/diagnose?target={}", "/model?reference={}", "/model?reference=./{}"),
        *(
            "/plan?recipe={}",
            "/plan?reference=models/{}",
            "/apply?reference=./{}",
            "/runs/new?recipe={}&config=a",
        ),
        *("/cache/calibrate?gpu=H100-80GB-SXM&runs={}", "/run/sample?run={}&step=step-00000001&file=1.png"),
    ],
)
def test_names_that_no_file_can_have(site: Site, address: str) -> None:
    for name in (f"models/{LONG}", LONG, f"{LONG}/y.yaml", "a" * 5000):
        answer = site.client().get(address.format(name))
        assert answer.status_code < 500, answer.text


@pytest.mark.parametrize("entry", ["9" * 23, "9" * 4500, "0" * 30, "-1", "1.5", "\u0661", "9" * 18])
def test_entries_that_the_queue_cannot_have(site: Site, entry: str) -> None:
    answer = site.client().post(f"/runs/entry/{entry}", data={"act": "hold"}, headers=site.write_headers())
    assert answer.status_code in (400, 404), answer.text


@pytest.mark.parametrize("text", ["1e308", "1e300", "9" * 400, "-1", "nan", "inf"])
@pytest.mark.parametrize("field", ["max_mib", "older_than"])
def test_sizes_that_no_cache_has(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, text: str
) -> None:
    monkeypatch.setenv("FSDPTOOL_CACHE", str(tmp_path / "cache"))
    answer = site.client().post("/cache", data={field: text}, headers=site.write_headers())
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("number", ["0001" + "0" * 5000, "1" * 5000, "0001", "01", "+1", "1_0", "\u0661"])
def test_offers_have_plain_numbers(site: Site, number: str) -> None:
    answer = site.client().post(
        "/hardware/save",
        data={f"{number}.gpu": "H100-80GB-SXM", "path": "models/x.yaml"},
        headers=site.write_headers(),
    )
    assert answer.status_code == 400
    short = number[:100]
    assert site.client().get("/hardware", params={f"{short}.gpu": "H100-80GB-SXM"}).status_code == 200


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as server:
        yield server


def test_strangers_leave_room_for_the_owner(running: Server) -> None:
    """Whoever opens connections without the cookie closes only the oldest of them."""
    place = ("127.0.0.1", running.interface.port)
    host = HOST.replace("8400", str(running.interface.port))
    token = running.interface.new_address().partition("token=")[2]
    with socket.create_connection(place, timeout=60) as owner:
        owner.sendall(f"GET /open?token={token} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        cookie = re.search(r"set-cookie: ([^;]+);", owner.recv(65536).decode())
        assert cookie is not None
        head = f"GET /static/style.css HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie[1]}\r\n\r\n".encode()
        owner.sendall(head)
        assert b" 200 " in owner.recv(65536)
        strangers = []
        for _ in range(5 * STRANGERS):
            stranger = socket.create_connection(place, timeout=60)
            stranger.sendall(b"GET / HTTP/1.1\r\nHo")
            strangers.append(stranger)
        with socket.create_connection(place, timeout=60) as again:
            again.sendall(head)
            assert b" 200 " in again.recv(65536)
            again.sendall(head)
            assert again.recv(65536)
        # A connection that is closed with a part of a request unread is reset.
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b"", "the oldest was closed"
        for stranger in strangers:
            stranger.close()
