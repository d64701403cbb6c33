"""What tests of the web interface share: the application in this process, and a real server."""

from __future__ import annotations

import asyncio
import html
import re
import shutil
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from fsdptool.web.jobs import Jobs
from fsdptool.web.roots import Roots
from fsdptool.web.security import WebSession
from fsdptool.web.server import Address, Interface

HOST = "127.0.0.1:8400"
ORIGIN = f"http://{HOST}"
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 250,
}
"""A Llama whose embedding does not divide evenly over four ranks."""


PATIENCE = 300.0
"""Seconds that a busy machine may take for something that takes one."""


def await_in_thread(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread of its own: Playwright leaves a running event loop in the main thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, asyncio.wait_for(work, PATIENCE)).result()


def end_server(interface: Interface, thread: threading.Thread) -> None:
    """End a server that runs in a thread.

    Raises:
        TimeoutError: It did not end.
    """
    interface.server.should_exit = True
    thread.join(PATIENCE)
    if thread.is_alive():
        raise TimeoutError(f"the server did not end within {PATIENCE:.0f} s of being told to")


@dataclass(slots=True)
class Site:
    """The application without a network, and the secrets of a browser that was let in."""

    app: Any
    session: WebSession
    folder: Path
    jobs: Jobs

    def client(self, *, known: bool = True, **options: Any) -> TestClient:
        """Return a client; one that is known has the session cookie."""
        client = TestClient(self.app, base_url=ORIGIN, follow_redirects=False, **options)
        if known:
            client.headers["cookie"] = self.session.set_cookie().partition(";")[0]
        return client

    def get(self, path: str, **query: str) -> str:
        """Return a page that must exist."""
        answer = self.client().get(path, params=query or None)
        assert answer.status_code == 200, answer.text
        return str(answer.text)

    def post(self, path: str, form: dict[str, str]) -> Any:
        """Send a form as a browser without JavaScript does."""
        return self.client().post(path, data=form, headers={"origin": ORIGIN})

    def write_headers(self) -> dict[str, str]:
        """Return what a page of this server sends with a write."""
        return {
            "origin": ORIGIN,
            "sec-fetch-site": "same-origin",
            "x-fsdptool-token": self.session.write_token,
        }


@dataclass(slots=True)
class Server:
    """A server on a free port of loopback."""

    interface: Interface
    folder: Path
    addresses: list[str] = field(default_factory=list)

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"http://127.0.0.1:{self.interface.port}"


@contextmanager
def serving(folder: Path, *, address: Address | None = None, **options: Any) -> Iterator[Server]:
    """Run a real server in a thread; its child process traces the models."""
    addresses: list[str] = []
    interface = Interface(Roots([folder]), address or Address(port=0), announce=addresses.append, **options)
    thread = threading.Thread(target=interface.run, kwargs={"warm": False}, daemon=True)
    thread.start()
    try:
        yield Server(interface, folder, addresses)
    finally:
        end_server(interface, thread)


def form_fields(page: str, action: str) -> dict[str, str]:
    """Return the hidden fields of the form that a page sends to an address."""
    form = re.search(rf'<form method="post" action="{action}".*?</form>', page, re.DOTALL)
    assert form is not None, page
    pairs = re.findall(r'type="hidden" name="([^"]+)" value="([^"]*)"', form[0])
    return {name: html.unescape(value) for name, value in pairs}


def chromium() -> str | None:
    """Return the system's Chromium, or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)
