"""Photograph the pages of the web interface for docs/reference/web-pages.md.

    python benchmarks/web/screenshots.py

Starts a server on a free port with a folder of example files, opens a few of ``PAGES`` in Chromium (Debian's
package ``chromium``) by Playwright, and writes the upper part of each. Other benchmarks examine all pages.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "web"))

from run_folders import make_run

from fsdptool.launch.queue.entries import Queue
from fsdptool.records.queue import Needs
from fsdptool.web.roots import Roots
from fsdptool.web.scheduling import QueueRunner
from fsdptool.web.server import Address, Interface

PLAN = (
    "reference=qwen3:0.6b&gpu=RTX-4090-24GB&gpus=2&sequence_length=1024&micro_batch=1&checkpointing=full"
    "&search=no"
)
"""A question that is traced in a few seconds."""

PAGES = {
    "start": "/",
    "model": "/model?reference=llama3:8b&world_size=6",
    "hardware": "/hardware?1.gpu=H100-80GB-SXM&1.gpus_per_node=8&1.price_per_gpu_hour=2.5&2.gpu=a100"
    "&2.gpus_per_node=8&2.nodes=2&2.inter_node_bandwidth=400+Gbit/s",
    "plan": "/plan?reference=llama3:8b&gpu=H100-80GB-SXM&gpus=8&sequence_length=4096",
    "suggestions": "/plan?reference=llama3:8b&gpu=RTX-4090-24GB&gpus=2&sequence_length=4096&search=no",
    "apply": f"/apply?{PLAN}&target=work/team/llama.yaml",
    "preset": "/apply?preset=single-node-checkpointing&target=work/team/llama.yaml",
    "configs": "/configs?folder=work",
    "config": "/configs/file?file=work/team/misspelt.yaml&change=unsafe",
    "migrate": "/configs/file?file=work/old.yaml&change=migrate",
    "runs": "/runs",
    "new-run": "/runs/new",
    "run": "/run?run=work/runs/long",
    "failed-run": "/run?run=work/runs/failed",
    "diagnose": "/diagnose?target=work/train.log",
    "cache": "/cache",
    "calibrate": "/cache/calibrate?gpu=H100-80GB-SXM&context=480+MiB&output=work/machine.json",
}
"""Name of a page to its address. Work of the server is waited for."""

VIEWS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 900}},
    "narrow": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}},
    "narrow-dark": {"color_scheme": "dark", "viewport": {"width": 390, "height": 844}},
}

LLAMA = """\
# Fine-tuning on one node; ask the platform team before changing the mesh.
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
  fsdp_reshard_after_forward: true
"""
FILES = {
    "team/llama.yaml": LLAMA,
    "team/misspelt.yaml": LLAMA.replace("reshard_after_forward: true", "reshard_after_forwrd: false")
    + "  fsdp_backward_prefetch: BACKWARD_PRE\n",
    "old.yaml": LLAMA.replace("fsdp_version: 2", "fsdp_version: 1").replace(
        "fsdp_reshard_after_forward: true", "fsdp_sharding_strategy: FULL_SHARD"
    ),
    "broken.yaml": "fsdp_config: {fsdp_version: 2\n",
    "compose.yaml": "services:\n  web: {image: nginx}\n",
    "train.log": """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "train.py", line 90, in <module>
[rank3]:     accelerator.backward(loss)
[rank3]:   File "/venv/torch/autograd/__init__.py", line 364, in backward
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total \
capacity of 79.11 GiB of which 812.00 MiB is free.
[rank0]:[E1122 06:40:00.504 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=122, OpType=_REDUCE_SCATTER_BASE, NumelIn=106343680, NumelOut=53171840, \
Timeout(ms)=600000) \
ran for 600080 milliseconds before timing out.
""",
}
"""Example files of the folder ``work``."""

DOCUMENTED = ("model", "plan", "apply", "config")
"""Pages whose pictures are in docs/reference/web-pages.md."""
DOCS = Path(__file__).resolve().parents[2] / "docs" / "images"

_WAIT_MS = 300_000
_LOAD_PICTURES = """() => Promise.all([...document.images].map((picture) => new Promise((resolve) => {
  picture.loading = "eager";
  if (picture.complete) resolve();
  picture.addEventListener("load", resolve);
  picture.addEventListener("error", resolve);
})))"""


def settle(page: Any, address: str) -> None:
    """Open a page and wait until its work is done, its curves are drawn and its pictures are loaded."""
    page.goto(address)
    page.locator(".working").first.wait_for(state="detached", timeout=_WAIT_MS)
    if page.locator("#curves").count():
        page.locator("#curves .u-over").nth(2).wait_for()
    page.evaluate(_LOAD_PICTURES)


def write_files(work: Path, files: Mapping[str, str]) -> None:
    """Write files into a folder and the folders below it."""
    for name, text in files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def add_runs(work: Path, queue: Queue) -> Queue:
    """Write a long run and one that failed, and queue three that share GPUs; they are held."""
    make_run(work / "runs" / "long", steps=10_000, model="llama3:8b")
    message = "rank 1: CUDA out of memory. Tried to allocate 2.00 GiB"
    make_run(work / "runs" / "failed", status="failed", message=message, model="llama3:8b")
    recipe = work / "team" / "recipe.yaml"
    recipe.write_text("{}", encoding="utf-8")
    for name, gpus in (("both", "01"), ("first", "0"), ("second", "1")):
        output = work / "runs" / name
        queue.add(recipe, recipe, output=output, needs=Needs(str(output), frozenset(gpus)), held=True)
    return queue


def document(browser: Any, interface: Interface) -> None:
    """Write the upper part of a few pages into the documentation."""
    page = browser.new_page(**VIEWS["light"])
    opened = interface.new_address()
    page.goto(opened)
    for name in DOCUMENTED:
        settle(page, opened.partition("/open")[0] + PAGES[name])
        page.screenshot(path=DOCS / f"ui-{name}.png")
    page.close()


@contextlib.contextmanager
def visiting() -> Iterator[tuple[Any, Interface]]:
    """Serve the example files; yield a browser and the server."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise SystemExit("Chromium is not installed")
    # Commands on the pages name files as they are from here.
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        work = Path(place, "work")
        write_files(work, FILES)
        queue = add_runs(work, Queue(Path(place, "queue")))
        address = Address(port=0)
        interface = Interface(Roots([work]), address, announce=lambda text: None, queue=QueueRunner(queue))
        server = threading.Thread(target=interface.run)
        server.start()
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=program, args=["--no-sandbox", "--disable-gpu"]
                )
                yield browser, interface
                browser.close()
        finally:
            interface.server.should_exit = True
            server.join()


if __name__ == "__main__":
    with visiting() as (browser, interface):
        document(browser, interface)
