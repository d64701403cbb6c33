"""``fsdptool ui`` as a process: its address, what it loads, how it ends, and its refusals."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import psutil
import pytest
from sites import PATIENCE
from sockets import listening

from fsdptool.cli.app import run


@pytest.mark.slow
def test_the_server_is_opened_by_its_address_and_ended_by_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fsdptool", "ui", "--port", "0", "--no-browser", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        # Reading what it prints waits without a limit: a server that hangs is killed, and the test fails.
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        try:
            address = process.stderr.readline().split()[-1]
            with httpx2.Client(follow_redirects=True, timeout=PATIENCE) as client:
                page = client.get(address)
                assert (page.status_code, "text/html" in page.headers["content-type"]) == (200, True)
                # The address is used up; the terminal shows another one.
                assert client.get(address).status_code == 403
                assert process.stderr.readline().split()[-1] != address
                port = int(re.search(r":(\d+)/", address)[1])
                assert listening(psutil.Process(process.pid)) == {("127.0.0.1", port)}
                # torch is loaded by the child process, and only there.
                loaded = Path(f"/proc/{process.pid}/maps").read_text()
                assert "libtorch" not in loaded
                children = psutil.Process(process.pid).children()
                # An open page, which listens to the queue, keeps the terminal quiet, too.
                with client.stream("GET", f"http://127.0.0.1:{port}/runs/events") as stream:
                    assert stream.status_code == 200
                    process.send_signal(signal.SIGINT)
                    assert process.stderr.read() == "stopped\n"
                assert process.wait(120) == 0
                assert not psutil.wait_procs(children, timeout=PATIENCE)[1]
        finally:
            timer.cancel()
            process.kill()


def test_refusals_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, message in (
        (["--host", "0.0.0.0"], "stands for every address"),
        (["--host", "192.0.2.1"], "can be reached from other machines"),
        ([str(tmp_path / "none")], "is not a folder"),
    ):
        assert run(["ui", "--no-browser", *arguments]) == 2
        assert message in capsys.readouterr().err.splitlines()[0]
    monkeypatch.setattr("fsdptool.cli.ui.find_spec", lambda name: None if name == "starlette" else object())
    assert run(["ui", "--no-browser"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: the web interface needs starlette"
    assert "fsdptool[ui]" in lines[1]


def test_other_commands_do_not_load_the_interface() -> None:
    script = (
        "import sys\nfrom fsdptool.cli.app import run\nrun(['--help'])\n"
        "sys.exit(bool({'starlette', 'uvicorn', 'jinja2', 'fsdptool.web'} & set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=False, timeout=300
        ).returncode
        == 0
    )
