"""A client inside the process for attacks and answers, and a real server with a real browser for pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("starlette")
pytest.importorskip("python_multipart")

from sites import HOST, PATIENCE, Server, Site, chromium, serving

from fsdptool.web.jobs import Jobs
from fsdptool.web.roots import Roots
from fsdptool.web.security import Limits, Policy, WebSession
from fsdptool.web.server import build_app


@pytest.fixture(scope="session")
def answering() -> Iterator[Jobs]:
    """The process that answers the questions of all sites: to load its libraries takes seconds."""
    jobs = Jobs()
    jobs.warm()
    yield jobs
    jobs.close()


@pytest.fixture
def site(tmp_path: Path, answering: Jobs) -> Iterator[Site]:
    """An application whose only root is an empty folder; a body of more than 64 KiB is too large."""
    folder = tmp_path / "models"
    folder.mkdir()
    session = WebSession(8400)
    policy = Policy(session, frozenset({HOST}), Limits(body_bytes=1 << 16))
    yield Site(build_app(policy, Roots([folder]), answering), session, folder, answering)
    asked = list(answering._jobs.values())
    for job in asked:
        answering.cancel(job)
    for job in asked:
        assert job.wait(PATIENCE)
        answering.forget(job)


@pytest.fixture
def impatient_site(tmp_path: Path) -> Iterator[Site]:
    """An application that waits a moment only for the body of a request."""
    session, jobs = WebSession(8400), Jobs()
    policy = Policy(session, frozenset({HOST}), Limits(body_seconds=0.05))
    yield Site(build_app(policy, Roots([tmp_path]), jobs), session, tmp_path, jobs)
    jobs.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of all browser tests."""
    with serving(tmp_path_factory.mktemp("site")) as running:
        yield running


@pytest.fixture
def impatient_server(tmp_path: Path) -> Iterator[Server]:
    """A server that waits a moment only for the head of a request."""
    with serving(tmp_path, header_seconds=0.3) as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium; tests that need it are skipped only where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium is installed")
    arguments = ["--disable-background-networking", "--disable-gpu", "--disable-dev-shm-usage"]
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=path, args=arguments, chromium_sandbox=os.geteuid() != 0
        )
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any, server: Server) -> Iterator[Any]:
    """A function that opens a new browser session and returns its page, logged in.

    Every request that leaves loopback, every violation of the content policy and every error of a script
    fails the test.
    """
    contexts, faults = [], []

    def watch(request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
            faults.append(f"request to {request.url}")

    def open_page(**options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE * 1000)
        contexts.append(context)
        context.on("request", watch)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(f"script error: {error}"))
        page.on(
            "console",
            lambda message: faults.append(message.text) if "Content Security" in message.text else None,
        )
        page.goto(server.interface.new_address())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults
