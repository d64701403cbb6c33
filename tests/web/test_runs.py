"""The pages Runs and Run without a browser: the queue, a run's folder, escapes, files outside the roots."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from run_folders import EVIL, PICTURE, make_run
from sites import Site

from fsdptool.errors import ConfigError
from fsdptool.launch.queue.entries import Queue
from fsdptool.records.queue import EntryState, Needs
from fsdptool.records.run import Start
from fsdptool.runs.folder import write_start

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO_CPU = (EXAMPLES / "configs" / "two_cpu_processes.yaml").read_text()


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: Site) -> Iterator[Queue]:
    """The queue of the application; nothing starts its entries."""
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path / "locks"))
    used = site.app.state.services.queue.queue
    used.folder = tmp_path / "queue"
    used.file.path = used.folder / "queue.sqlite"
    yield used


def post(site: Site, path: str, **form: str) -> Any:
    return site.client().post(path, data=form, headers=site.write_headers())


def test_the_page_of_a_run_shows_its_course_and_escapes_what_it_names(site: Site, queue: Queue) -> None:
    make_run(site.folder / "one")
    answer = site.client().get("/run?run=models/one")
    assert answer.status_code == 200
    text = answer.text
    assert EVIL not in text
    assert escape(EVIL) in text
    assert "stopped" in text
    assert "once upon a time" in text
    assert "Measured memory of every rank" in text
    assert "rank 1" in text
    assert " style=" not in text, "the content policy refuses inline styles"
    assert "fsdptool watch" in text
    data = site.client().get("/run/curve?run=models/one").json()
    assert data["step"] == list(range(1, 21))
    assert data["evaluations"] == [[10, 4.5]]
    assert data["unit"] == "tokens"


@pytest.mark.slow
def test_ten_thousand_steps_become_a_thousand_points_with_their_extremes(site: Site, queue: Queue) -> None:
    folder = make_run(site.folder / "long", steps=10_000)
    client = site.client()
    client.get("/run/curve?run=models/long")
    with (folder / "metrics.jsonl").open("a") as stream:
        rates = {"tokens": 256, "samples": 4, "step_seconds": 0.5, "time": time.time()}
        stream.write(json.dumps({"step": 10_001, "loss": 99.0, **rates}) + "\n")
    data = client.get("/run/curve?run=models/long").json()
    assert len(data["step"]) <= 1000
    assert data["step"][-1] == 10_001
    assert max(data["highest"]) == 99.0, "a spike is not averaged away"
    # A run that continues from a checkpoint rewrites the file.
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:50]
    aside = folder / "aside"
    aside.write_text("".join(lines))
    aside.replace(folder / "metrics.jsonl")
    assert client.get("/run/curve?run=models/long").json()["step"][-1] == 50


def test_pictures_come_from_the_run_alone(site: Site, queue: Queue, tmp_path: Path) -> None:
    folder = make_run(site.folder / "one")
    client = site.client()
    place = "/run/sample?run=models/one&step=step-00000010&file="
    assert client.get(f"{place}1.png").content == PICTURE
    # Its place is kept before it is loaded.
    assert 'loading="lazy" width="160" height="96"' in client.get("/run?run=models/one").text
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "samples" / "step-00000010" / "2.png").symlink_to(tmp_path / "secret.png")
    for file in ("0.txt", "../../../secret.png", "2.png", "9.png", quote("../1.png")):
        answer = client.get(f"{place}{file}")
        assert answer.status_code in (400, 404), file
        assert b"secret" not in answer.content.replace(b"secret.png", b"")
    assert client.get("/run?run=../secret").status_code == 400
    assert client.get("/run?run=models").status_code == 400


def test_a_failed_run_names_cause_and_change(site: Site, queue: Queue) -> None:
    message = "rank 1: CUDA out of memory. Tried to allocate 2.00 GiB"
    folder = make_run(site.folder / "failed", status="failed", message=message)
    (folder / "logs" / "rank-00001.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
        f" GPU 0 has a total capacity of 79.15 GiB {EVIL}\n"
    )
    text = site.client().get("/run?run=models/failed").text
    # The cause is said once, where it is explained.
    assert "<h2>Cause</h2>" in text and "How it ended" not in text
    assert "RUN001" in text
    assert "Change:" in text
    assert EVIL not in text


def test_the_queue_is_shown_and_changed_without_a_script(site: Site, queue: Queue) -> None:
    recipe = site.folder / "recipe.yaml"
    recipe.write_text("model: {}")
    both, one = (
        queue.add(recipe, recipe, output=site.folder / name, needs=Needs(name, frozenset(gpus)))
        for name, gpus in (("both", "01"), (f"one{EVIL}", "1"))
    )
    client = site.client()
    text = client.get("/runs").text
    assert EVIL not in text
    assert f'id="entry-{one}"' in text
    assert "GPUs 0,1" in text
    assert "starts after" in text or "in use" in text
    for action, state in (("hold", "held"), ("release", "waiting"), ("cancel", "cancelled")):
        assert post(site, f"/runs/entry/{one}", act=action).status_code == 303
        assert next(entry.state for entry in queue.report().entries if entry.id == one) == state
    assert post(site, f"/runs/entry/{one}", act="remove").headers["location"] == "/runs"
    assert [entry.id for entry in queue.report().entries] == [both]
    assert post(site, f"/runs/entry/{both}", act="format").status_code == 400
    assert client.post(f"/runs/entry/{both}", data={"act": "cancel"}).status_code == 403, "no token"
    assert queue.report().entries[0].state is EntryState.WAITING


def test_a_new_run_is_checked_and_joins_the_queue(site: Site, queue: Queue) -> None:
    for name in ("recipe.yaml", "fsdp.yaml"):
        (site.folder / name).write_text("{}")
    (site.folder / "fsdp.yaml").write_text((EXAMPLES / "configs" / "two_cpu_processes.yaml").read_text())
    form = {"recipe": "models/recipe.yaml", "config": "models/fsdp.yaml", "predict": "no"}
    assert post(site, "/runs/add", **form).headers["location"] == "/runs"
    entry = queue.report().entries[0]
    assert entry.folder == str(site.folder / "runs" / "recipe")
    assert entry.options == ("--no-predict",)
    assert entry.slots == 2
    refused = post(site, "/runs/add", **form)
    assert refused.status_code == 400
    assert f"entry {entry.id} of the queue waits for" in refused.text
    outside = post(site, "/runs/add", **{**form, "recipe": "/etc/passwd"})
    assert outside.status_code == 400
    assert "outside the folders" in outside.text
    outside = post(site, "/runs/add", **{**form, "output": "../elsewhere"})
    assert "outside the folders" in outside.text
    wrong = post(site, "/runs/add", **{**form, "output": "models/x", "max_restarts": "many"})
    assert "is not a whole number" in wrong.text
    assert len(queue.report().entries) == 1
    page = site.client().get("/runs/new")
    assert page.status_code == 200
    assert "trust" not in page.text, "code that comes with a model never runs from a page"


def test_a_stopped_run_resumes_as_an_entry_or_by_the_form(site: Site, queue: Queue) -> None:
    folder = make_run(site.folder / "one")
    (folder / "checkpoints" / "step-00000020").mkdir()
    started = post(site, "/run/resume", run="models/one")
    assert started.headers["location"].startswith("/runs/new?")
    assert "resume=yes" in started.headers["location"]
    # The queue did not start it: the form asks for its files, and its entry continues the run.
    for name, text in (("own.yaml", "{}"), ("fsdp.yaml", TWO_CPU)):
        (site.folder / name).write_text(text)
    assert site.client().get(started.headers["location"]).status_code == 200
    given = dict(parse_qsl(urlsplit(started.headers["location"]).query))
    files = {"recipe": "models/own.yaml", "config": "models/fsdp.yaml", "predict": "no"}
    assert post(site, "/runs/add", **{**given, **files}).headers["location"] == "/runs"
    entry = queue.report().entries[0]
    assert entry.folder == str(folder)
    assert "--resume auto" in " ".join(entry.options)
    queue.cancel(entry.id)
    queue.remove(entry.id)
    recipe = site.folder / "recipe.yaml"
    recipe.write_text("{}")
    added = queue.add(recipe, recipe, output=folder, options=("--force",), needs=Needs(str(folder), slots=1))
    with queue.file.write() as connection:
        connection.execute("UPDATE entries SET stage = 'ended', end_state = 'stopped' WHERE id = ?", (added,))
    assert post(site, "/run/resume-first", run="models/one").headers["location"] == "/runs"
    waiting = queue.report().entries[0]
    assert waiting.options == ("--resume", "auto")
    assert f"Entry {waiting.id} of the" in site.client().get("/run?run=models/one").text


def test_a_run_without_a_checkpoint_says_what_starting_over_loses(site: Site, queue: Queue) -> None:
    folder = make_run(site.folder / "one", status="failed", message="rank 1 was killed")
    recipe, config = site.folder / "recipe.yaml", site.folder / "fsdp.yaml"
    recipe.write_text("{}")
    config.write_text(TWO_CPU)
    said, needs = "No checkpoint exists: 20 steps are lost.", Needs(str(folder), slots=1)
    page = site.client().get("/run?run=models/one").text
    assert said in page and page.lower().count("no checkpoint exists") == 1
    assert "Start over before all others" in page
    assert ">Resume" not in page
    # Outside of the queue: the form takes the decision along.
    form = post(site, "/run/resume", run="models/one", **{"start-over": "yes"}).headers["location"]
    assert "start_over=yes" in form
    given = {"recipe": "models/recipe.yaml", "config": "models/fsdp.yaml", "output": "models/one"}
    refused = post(site, "/runs/add", **given, resume="yes")
    assert "20 steps are lost" in refused.text
    assert "start-over" in refused.text
    with pytest.raises(ConfigError, match="20 steps are lost"):
        queue.add(recipe, config, output=folder, options=("--resume", "auto"), needs=needs)
    entry = queue.add(recipe, config, output=folder, options=("--force",), needs=needs)
    with queue.file.write() as connection:
        sql = "UPDATE entries SET stage = 'ended', end_state = 'failed', started = 1.0 WHERE id = ?"
        connection.execute(sql, (entry,))
    table = site.client().get("/runs").text
    assert said in table
    assert f"entry-{entry}-start-over" in table
    assert f"entry-{entry}-resume" not in table
    # A page that was loaded before the checkpoints went.
    assert post(site, f"/runs/entry/{entry}", act="resume").status_code == 400
    assert len(queue.report().entries) == 1
    assert post(site, f"/runs/entry/{entry}", act="start-over").headers["location"] == "/runs"
    assert queue.report().entries[0].options == ("--resume", "auto", "--start-over")


def test_a_database_that_cannot_be_read_is_one_line_on_the_page(site: Site, queue: Queue) -> None:
    make_run(site.folder / "one")
    queue.folder.mkdir()
    queue.file.path.write_text("not a database" * 100)
    for path in ("/runs", "/run?run=models/one"):
        answer = site.client().get(path)
        assert answer.status_code == 200
        assert "is not a queue of fsdptool" in answer.text


def test_the_list_follows_what_changes_in_a_run_that_had_ended(site: Site, queue: Queue) -> None:
    folder = make_run(site.folder / "one")
    client = site.client()

    def state() -> str:
        row = client.get("/runs").text.partition("models/one</a>")[2]
        return row.partition("<td")[2].partition(">")[2].partition("<")[0]

    assert state() == state() == "stopped"
    # As a start that was killed leaves it: a later run.json without a summary.
    write_start(folder, Start(2, "cpu"), None)
    assert state() == "dead"


@pytest.mark.slow
def test_the_page_of_an_entry_says_how_it_stands_before_its_folder_is_written(
    site: Site, queue: Queue
) -> None:
    recipe = site.folder / "recipe.yaml"
    recipe.write_text("{}")
    needs = Needs(str(site.folder / "runs" / "one"), slots=1)
    entry = queue.add(recipe, recipe, output=site.folder / "runs" / "one", needs=needs)
    client = site.client()
    page = client.get("/run?run=models/runs/one")
    assert page.status_code == 200
    assert f"Entry {entry} of the" in page.text
    assert "waiting" in page.text
    assert client.get("/run?run=models/runs/another").status_code == 400
    make_run(site.folder / "runs" / "one")
    assert client.get("/run?run=models/runs/one", headers={"hx-request": "true"}).headers["hx-refresh"]
