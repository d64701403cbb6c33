"""Attacks on the web interface: foreign hosts and pages, missing secrets, long, late and crooked requests."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sites import HOST, ORIGIN, Server, Site, await_in_thread

from fsdptool.errors import ConfigError
from fsdptool.web.roots import Roots
from fsdptool.web.server import Address


def test_a_one_time_address_becomes_a_strict_cookie(site: Site) -> None:
    token = site.session.new_token()
    first = site.client(known=False).get(f"/open?token={token}")
    assert (first.status_code, first.headers["location"]) == (303, "/")
    cookie = first.headers["set-cookie"]
    assert cookie.startswith("fsdptool_ui_8400=")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    again = site.client(known=False).get(f"/open?token={token}")
    assert (again.status_code, "set-cookie" in again.headers) == (403, False)
    assert site.client(known=False).get("/open?token=").status_code == 403


def test_without_the_cookie_nothing_is_served(site: Site) -> None:
    stranger = site.client(known=False)
    for path in ("/", "/static/style.css", "/jobs/x/events", "/nowhere"):
        assert stranger.get(path).status_code == 401
    stranger.headers["cookie"] = "fsdptool_ui_8400=guessed"
    assert stranger.get("/static/style.css").status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example:8400", "127.0.0.1", "127.0.0.1:80", "localhost.evil.example:8400"]
)
def test_a_foreign_host_is_refused(site: Site, host: str) -> None:
    for path in ("/static/style.css", "/jobs/x/events", f"/open?token={site.session.new_token()}"):
        answer = site.client().get(path, headers={"host": host})
        assert answer.status_code == 421
        assert "set-cookie" not in answer.headers


def test_requests_from_other_pages_are_refused(site: Site) -> None:
    client = site.client()
    path = "/static/style.css"
    assert client.get(path, headers={"sec-fetch-site": "same-origin"}).status_code == 200
    assert client.get(path, headers={"sec-fetch-site": "none"}).status_code == 200
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "https://127.0.0.1:8400"},
        {"origin": "http://127.0.0.1:9999"},
    ):
        assert client.get(path, headers=headers).status_code == 403, headers


def test_a_write_needs_origin_and_token(site: Site) -> None:
    client, right = site.client(), site.write_headers()
    path = "/jobs/none/forget"
    assert client.post(path, headers=right).status_code == 404  # let through: there is no such work
    for left_out in right:
        headers = {key: value for key, value in right.items() if key != left_out}
        # Either of Origin and Sec-Fetch-Site proves where a write comes from; the token has no substitute.
        expected = 403 if left_out == "x-fsdptool-token" else 404
        assert client.post(path, headers=headers).status_code == expected, left_out
    assert client.post(path, headers={"x-fsdptool-token": right["x-fsdptool-token"]}).status_code == 403
    assert client.post(path, headers={**right, "x-fsdptool-token": "guessed"}).status_code == 403
    assert client.post(path, headers={**right, "origin": "http://evil.example"}).status_code == 403
    assert client.request("PUT", path, headers=right).status_code == 405


def test_a_form_without_javascript_writes_with_its_hidden_field(site: Site) -> None:
    client, path = site.client(), "/jobs/none/forget"
    given: tuple[dict[str, Any], ...] = ({}, {"files": {"upload": ("config.json", b"{}")}})
    for options in given:
        form = {"write_token": site.session.write_token}
        assert client.post(path, headers={"origin": ORIGIN}, data=form, **options).status_code == 404
        wrong = {"write_token": "guessed"}
        assert client.post(path, headers={"origin": ORIGIN}, data=wrong, **options).status_code == 403


def test_every_answer_has_the_headers(site: Site) -> None:
    answers = [
        site.client().get("/static/style.css"),
        site.client().get("/nowhere"),
        site.client(known=False).get("/"),
        site.client().get("/", headers={"host": "evil.example"}),
    ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_long_body_is_refused(site: Site) -> None:
    client, headers = site.client(), site.write_headers()
    assert client.post("/jobs/none/forget", headers=headers, content=b"x" * 70_000).status_code == 413

    def pieces() -> Iterator[bytes]:
        for _ in range(70):
            yield b"x" * 1000

    assert client.post("/jobs/none/forget", headers=headers, content=pieces()).status_code == 413
    assert client.post("/jobs/none/forget", headers=headers, content=b"x" * 1000).status_code == 404


def test_static_files_end_at_their_folder(site: Site) -> None:
    client = site.client()
    assert client.get("/static/interface.js").status_code == 200
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"):
        assert client.get(path).status_code == 404, path


def test_paths_end_at_the_roots(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "file.yaml").touch()
    (inside / "link").symlink_to(outside)
    (inside / "same").symlink_to(inside / "file.yaml")
    roots = Roots([inside])
    assert roots.resolve("inside/file.yaml") == inside / "file.yaml"
    assert roots.resolve(str(inside / "file.yaml")) == inside / "file.yaml"
    assert roots.resolve("inside/same") == inside / "file.yaml"
    assert roots.name_of(inside / "file.yaml") == "inside/file.yaml"
    for text in (
        "inside/../outside/file.yaml",
        "../outside/file.yaml",
        str(outside / "file.yaml"),
        "inside/link/file.yaml",
        "inside/link",
        "/etc/passwd",
        "",
        "inside/\0",
    ):
        with pytest.raises(ConfigError):
            roots.resolve(text)
    with pytest.raises(ConfigError, match="outside"):
        roots.resolve("inside/link/new.yaml", exists=False)
    assert roots.resolve("inside/new.yaml", exists=False) == inside / "new.yaml"
    assert roots.reference("llama3:8b") == "llama3:8b"
    with pytest.raises(ConfigError, match="outside"):
        roots.reference(str(outside))


def test_only_loopback_is_served_without_a_token() -> None:
    for address in (Address("127.0.0.1"), Address("::1"), Address("10.0.0.5", token="t" * 16)):
        address.check()
    for address, message in (
        (Address("10.0.0.5"), "can be reached from other machines"),
        (Address("0.0.0.0", token="t" * 16), "stands for every address"),
        (Address("::", token="t" * 16), "stands for every address"),
        (Address("example.org"), "is not an address"),
        (Address(token="short"), "at least 16"),
    ):
        with pytest.raises(ConfigError, match=message):
            address.check()


def read_to_end(connection: socket.socket) -> bytes:
    """Return everything until the server closes the connection."""
    connection.settimeout(60)
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: "])
def test_a_client_that_never_ends_its_request_is_dropped(impatient_server: Server, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", impatient_server.interface.port)) as connection:
        connection.sendall(sent)
        assert read_to_end(connection) == b""


def test_a_body_that_arrives_late_is_refused(impatient_site: Site) -> None:
    import asyncio

    messages = []

    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, object]) -> None:
        messages.append(message)

    headers = [(b"host", HOST.encode()), (b"content-length", b"5")]
    headers.append((b"cookie", impatient_site.client().headers["cookie"].encode()))
    headers += [(key.encode(), value.encode()) for key, value in impatient_site.write_headers().items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/jobs/none/forget",
        "raw_path": b"/jobs/none/forget",
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
        "scheme": "http",
        "server": ("127.0.0.1", 8400),
    }
    await_in_thread(impatient_site.app(scope, receive, send))
    assert messages[0]["status"] == 408
