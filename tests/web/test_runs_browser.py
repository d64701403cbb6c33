"""Runs in a real browser: a training run of two ranks from the form to its export, and the queue."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_folders import make_run
from sites import PATIENCE, Server, end_server

from fsdptool.launch.processes import stop_run
from fsdptool.launch.queue.entries import Queue
from fsdptool.records.queue import Needs
from fsdptool.web.roots import Roots
from fsdptool.web.scheduling import QueueRunner
from fsdptool.web.server import Address, Interface

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

ROOT = Path(__file__).parents[2]
PLAY = (sys.executable, str(ROOT / "tests" / "launch" / "play_run.py"))
MILLISECONDS = PATIENCE * 1000

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 262,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}

RECIPE = """\
model: {reference: model, weights: random}
data: {source: text, path: text.txt, tokenizer: bytes, workers: 0}
batch: {micro_batch: 2, sequence_length: 32}
steps: 100000
checkpoints: {every_steps: 1000, keep_last: 2}
"""


class Desk:
    """A server of its own whose queue starts played runs, and the folder that its pages show."""

    def __init__(self, server: Server, queue: Queue) -> None:
        self.server, self.queue = server, queue

    def add(self, name: str, act: str, gpus: str) -> int:
        place = self.server.folder / name
        place.mkdir()
        (place / "recipe.yaml").write_text(act)
        needs = Needs(str(place / "run"), frozenset(gpus.split(",")))
        recipe = place / "recipe.yaml"
        return self.queue.add(recipe, recipe, output=place / "run", needs=needs, visible=gpus)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path / "locks"))
    folder, addresses = tmp_path / "site", list[str]()
    folder.mkdir()
    queue = Queue(tmp_path / "queue")
    runner = QueueRunner(queue, command=PLAY)
    interface = Interface(Roots([folder]), Address(port=0), announce=addresses.append, queue=runner)
    thread = threading.Thread(target=interface.run, kwargs={"warm": False}, daemon=True)
    thread.start()
    yield Desk(Server(interface, folder, addresses), queue)
    end_server(interface, thread)
    for row in queue.rows():
        stop_run(Path(row.folder), kill=True)


@pytest.mark.distributed
def test_a_run_from_the_form_to_its_export(visit: Any, server: Server) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    expect.set_options(timeout=MILLISECONDS)
    place = server.folder / "training"
    (place / "model").mkdir(parents=True)
    (place / "model" / "config.json").write_text(json.dumps(MODEL))
    config = (ROOT / "examples" / "configs" / "two_cpu_processes.yaml").read_text()
    (place / "fsdp.yaml").write_text(config)
    (place / "recipe.yaml").write_text(RECIPE)
    (place / "text.txt").write_text(" ".join(f"The {n}th sentence says {n * n % 97}." for n in range(400)))
    run = place / "run"

    page = visit(viewport={"width": 1280, "height": 900})
    page.goto(f"{server.origin}/runs")
    page.get_by_role("link", name="New run").click()
    name = f"{server.folder.name}/training"
    page.get_by_label("Recipe").fill(f"{name}/recipe.yaml")
    page.get_by_label("Config").fill(f"{name}/fsdp.yaml")
    page.get_by_label("Output").fill(f"{name}/run")
    page.get_by_label("Predict").select_option("no")
    page.get_by_role("button", name="Check without starting").click()
    expect(page.get_by_role("heading", name="The run can start")).to_be_visible()
    expect(page.locator(".command")).to_contain_text("fsdptool queue add")
    page.get_by_role("button", name="Add to the queue").click()
    try:
        page.get_by_role("link", name=f"{name}/run").first.click()
        expect(page.locator("h1")).to_contain_text("running")
        # Watch: the curves are drawn and grow without a reload.
        expect(page.locator("#curves .uplot").first).to_be_visible()
        drawn = page.locator("#curves").get_attribute("data-points")
        expect(page.locator("#curves")).not_to_have_attribute("data-points", drawn)
        page.get_by_role("button", name="Stop and save").click()
        expect(page.locator("h1")).to_contain_text("stopped")
        expect(page.get_by_role("heading", name="Checkpoints")).to_be_visible()
        stopped = len((run / "metrics.jsonl").read_text().splitlines())

        page.get_by_role("button", name="Resume", exact=True).click()
        page.goto(f"{server.origin}/run?run={name}/run")
        expect(page.locator("h1")).to_contain_text("running")
        expect(page.locator("#curves .uplot").nth(1)).to_be_visible()
        page.get_by_role("button", name="Stop and save").click()
        expect(page.locator("h1")).to_contain_text("stopped")
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert len(steps) >= stopped
        assert steps == list(range(1, len(steps) + 1)), "the second start continued the first"
    finally:
        stop_run(run, kill=True)
    page.get_by_role("button", name="Export the newest").click()
    expect(page.get_by_text("Exported to")).to_be_visible()
    assert (run / "export" / "config.json").exists()
    assert list((run / "export").glob("*.safetensors"))


def test_entries_that_share_a_gpu_take_turns_before_the_eyes_of_two_browsers(visit: Any, desk: Desk) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    expect.set_options(timeout=MILLISECONDS)
    both, one = desk.add("both", "finish", "0,1"), desk.add("one", "finish", "1")
    refused = desk.add("refused", "refuse", "2")
    pages = [visit(viewport={"width": width, "height": 900}) for width in (1280, 390)]
    for page in pages:
        page.goto(desk.server.interface.new_address())
        page.goto(f"{desk.server.origin}/runs")
        expect(page.locator(f"#entry-{both}")).to_contain_text("running")
        expect(page.locator(f"#entry-{one}")).to_contain_text("GPU 1 is in use")
        expect(page.locator(f"#entry-{refused}")).to_contain_text("the recipe asks for the moon")
    first, second = pages
    first.locator(f"#entry-{one}-hold").click()
    expect(second.locator(f"#entry-{one}")).to_contain_text("held")
    (desk.server.folder / "both" / "go").touch()
    expect(second.locator(f"#entry-{both}")).to_contain_text("completed")
    expect(second.locator(f"#entry-{one}")).to_contain_text("held")
    second.locator(f"#entry-{one}-release").click()
    for page in pages:
        expect(page.locator(f"#entry-{one}")).to_contain_text("running")
    first.locator(f"#entry-{one} summary").click()
    first.locator(f"#entry-{one}-kill").click()
    expect(second.locator(f"#entry-{one}")).to_contain_text("interrupted")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_failed_run_is_explained_on_an_accessible_page(visit: Any, server: Server, scheme: str) -> None:
    from test_browser import serious

    message = "rank 1: CUDA out of memory. Tried to allocate 2.00 GiB"
    make_run(server.folder / f"failed-{scheme}", status="failed", message=message)
    page = visit(color_scheme=scheme, viewport={"width": 390, "height": 800})
    page.goto(f"{server.origin}/run?run={server.folder.name}/failed-{scheme}")
    page.wait_for_selector("#curves .uplot")
    assert message in page.inner_text("main")
    assert serious(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for path in ("/runs", "/runs/new"):
        page.goto(f"{server.origin}{path}")
        assert serious(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_pages_work_without_javascript(visit: Any, desk: Desk) -> None:
    entry = desk.add("one", "finish", "0")
    page = visit(java_script_enabled=False)
    page.goto(desk.server.interface.new_address())

    def load_until(state: str) -> None:
        deadline = time.monotonic() + PATIENCE
        page.goto(f"{desk.server.origin}/runs")
        while state not in page.inner_text(f"#entry-{entry}"):
            assert time.monotonic() < deadline, page.inner_text("main")
            page.goto(f"{desk.server.origin}/runs")

    load_until("running")
    page.locator(f"#entry-{entry}-stop").click()
    load_until("stopped")
    assert page.locator(f"#entry-{entry}-resume").is_visible()
