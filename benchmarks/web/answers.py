"""Measure how long the pages of the web interface take to answer from cached data.

    python benchmarks/web/answers.py [OUTPUT]

Each page of ``screenshots.PAGES``, a folder of 300 configurations and the curves of a run of 10,000 steps are
requested inside this process until their work is done, and then 15 times more. The figure is the median of
the CPU time of this process, in milliseconds: unlike the time on a clock it does not grow with what else the
machine does. It includes the client. Then Chromium (Debian's package ``chromium``) shows the curves of that
run while the pointer moves over them, and counts its frames by ``requestAnimationFrame``. Writes
``benchmarks/results/web_answers.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from screenshots import FILES, LLAMA, PAGES, add_runs, visiting, write_files

from fsdptool.launch.queue.entries import Queue
from fsdptool.records.diagnostic import library_versions, tool_version
from fsdptool.web.jobs import Jobs
from fsdptool.web.roots import Roots
from fsdptool.web.scheduling import QueueRunner
from fsdptool.web.security import Limits, Policy, WebSession
from fsdptool.web.server import build_app

HOST = "127.0.0.1:8400"
TIMES = 15
CONFIGURATIONS = 300
"""Files of the folder that is listed, ten in each of its folders."""
EXTRA = {
    "configs-300": "/configs?folder=work/many",
    "run-curve": "/run/curve?run=work/runs/long",
}
FRAMES_SECONDS = 5
RESULTS = Path(__file__).parents[1] / "results" / "web_answers.json"

# Moves the pointer over the curves in every frame, and counts the frames.
_COUNT = """seconds => new Promise((resolve) => {
  const area = document.querySelector("#curves .u-over");
  const box = area.getBoundingClientRect();
  const begun = performance.now();
  let frames = 0, last = begun, longest = 0;
  const next = (now) => {
    frames += 1;
    longest = Math.max(longest, now - last);
    last = now;
    const x = box.left + (frames * 7) % box.width;
    const at = {clientX: x, clientY: box.top + box.height / 2, bubbles: true};
    area.dispatchEvent(new MouseEvent("mousemove", at));
    if (now - begun < seconds * 1000) requestAnimationFrame(next);
    else resolve({
      frames_per_second: Math.round(frames * 10000 / (now - begun)) / 10,
      longest_frame_ms: Math.round(longest),
    });
  };
  requestAnimationFrame(next);
})"""


def many_files() -> Iterator[tuple[str, str]]:
    """Yield the names and texts of many configurations; a third of them has a misspelt key."""
    for number in range(CONFIGURATIONS):
        text = LLAMA.replace("num_processes: 8", f"num_processes: {number + 1}")
        if number % 3 == 0:
            text = text.replace("reshard_after_forward: true", "reshard_after_forwrd: false")
        yield f"many/team-{number // 10}/run-{number}.yaml", text


def measure(client: Any, address: str) -> dict[str, Any]:
    """Return the median CPU time of one answer, once its work has ended, and its size."""
    deadline = time.monotonic() + 600
    answer = client.get(address)
    while "sse-connect=" in answer.text and "/jobs/" in answer.text and 'class="working"' in answer.text:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the work of {address} has not ended")
        time.sleep(0.5)
        answer = client.get(address)
    times = []
    for _ in range(TIMES):
        begun = time.process_time()
        answer = client.get(address)
        times.append((time.process_time() - begun) * 1000)
    if answer.status_code != 200:
        raise SystemExit(f"{address}: {answer.status_code}")
    return {"cpu_ms": round(statistics.median(times), 1), "kilobytes": round(len(answer.content) / 1000)}


def answer_times(work: Path, queue: Queue) -> list[dict[str, Any]]:
    """Return a row per page."""
    from starlette.testclient import TestClient

    session, jobs = WebSession(8400), Jobs()
    policy = Policy(session, frozenset({HOST}), Limits())
    app = build_app(policy, Roots([work]), jobs, QueueRunner(queue))
    client = TestClient(app, base_url=f"http://{HOST}", follow_redirects=False)
    client.headers["cookie"] = session.set_cookie().partition(";")[0]
    try:
        return [{"page": name, **measure(client, at)} for name, at in {**PAGES, **EXTRA}.items()]
    finally:
        jobs.close()


def count_frames() -> dict[str, Any]:
    """Return how smoothly a browser follows the pointer over the curves of 10,000 steps."""
    with visiting() as (browser, interface):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        opened = interface.new_address()
        page.goto(opened)
        page.goto(opened.partition("/open")[0] + PAGES["run"])
        page.locator("#curves .u-over").first.wait_for()
        counted: dict[str, Any] = page.evaluate(_COUNT, FRAMES_SECONDS)
    return {"steps": 10_000, "seconds": FRAMES_SECONDS, **counted}


def main(output: Path) -> None:
    """Measure everything and write the results."""
    output = output.resolve()
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        work = Path(place, "work")
        write_files(work, {**FILES, **dict(many_files())})
        rows = answer_times(work, add_runs(work, Queue(Path(place, "queue"))))
    frames = count_frames()
    document = {
        "benchmark": "web/answers",
        "hardware": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "fsdptool": tool_version(),
        "libraries": library_versions(),
        "repetitions": TIMES,
        "configurations": CONFIGURATIONS,
        "frames": frames,
        "results": rows,
    }
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['page']:14}{row['cpu_ms']:8.1f} ms{row['kilobytes']:6} kB")
    print(frames)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
