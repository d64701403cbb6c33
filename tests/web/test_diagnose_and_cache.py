"""Pasted logs and configurations, run folders, the cache, the machine and its calibration."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from sites import PATIENCE, Site, form_fields
from test_configs import HOSTILE, MISSPELT

from fsdptool.cache import Store

LOG = f"""\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/venv/torch/autograd/__init__.py", line 364, in backward
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. {HOSTILE}
"""


def paste(site: Site, text: str) -> str:
    """Return the address to which a pasted text leads."""
    form = {"text": text.replace("\n", "\r\n"), "write_token": site.session.write_token}
    answer = site.post("/diagnose", form)
    assert answer.status_code == 303
    return str(answer.headers["location"])


def test_a_pasted_log_has_an_address_with_its_cause(site: Site) -> None:
    page = site.get(paste(site, LOG))
    assert "RUN001" in page and "in backward (rank 3)" in page and "line 3" in page
    assert "<script>" not in page and html.escape(HOSTILE) in page
    assert site.post("/diagnose", {"text": " ", "write_token": site.session.write_token}).status_code == 400
    assert site.client().get("/diagnose", params={"text": "0" * 32}).status_code == 400
    assert "No known failure" in site.get(paste(site, "all is well\n"))


def test_a_file_of_the_browser_and_a_path_are_diagnosed(site: Site, tmp_path: Path) -> None:
    answer = site.client().post(
        "/diagnose", files={"log": ("train.log", LOG.encode())}, headers=site.write_headers()
    )
    assert "RUN001" in site.get(answer.headers["location"])
    (site.folder / "train.log").write_text(LOG)
    assert "RUN001" in site.get("/diagnose", target="models/train.log")
    run = site.folder / "run"
    (run / "logs").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (tmp_path / "secret.log").write_text(LOG)
    (run / "logs" / "rank-00000.log").symlink_to(tmp_path / "secret.log")
    answer = site.client().get("/diagnose", params={"target": "models/run"})
    assert answer.status_code == 400 and "is a link to outside" in answer.text


def test_a_failed_allocation_is_explained_by_the_file_and_the_model_of_its_run(
    site: Site, tmp_path: Path
) -> None:
    address = paste(site, LOG.replace("2.00 GiB", "9.27 GiB"))
    asked = {"text": address.partition("=")[2]}
    assert "Which tensor did not fit?" in site.get(address)
    assert "Which tensor" not in site.get(paste(site, "all is well\n"))
    (site.folder / "run.yml").write_text(
        "base_model: Qwen/Qwen3-8B\nsequence_len: 8192\nmicro_batch_size: 2\noptimizer: adamw_torch\n"
        "datasets: [{path: rows.jsonl, type: completion}]\nlearning_rate: 1e-5\nnum_epochs: 1\n"
    )
    page = site.get("/diagnose", **asked, config="models/run.yml")
    assert "9.27 GiB is 2 × 8,192 tokens × 151,936 words in fp32: the logits" in page
    assert "fsdptool diagnose - --config" in page
    page = site.get("/diagnose", **asked, model="qwen3:8b")
    assert "16,384 tokens × 151,936 words in fp32: the logits" in page and "--model qwen3:8b" in page
    assert "did you mean" in site.get("/diagnose", **asked, model="qwen3:8bb")
    for outside in ({"config": str(tmp_path / "secret.yml")}, {"model": "../../etc/passwd"}):
        page = site.get("/diagnose", **asked, **outside)
        assert 'role="alert"' in page and "Request:" not in page


def test_a_pasted_configuration_shows_findings_and_its_fixed_text(site: Site) -> None:
    address = paste(site, MISSPELT.replace("LlamaDecoderLayer", f"'{HOSTILE}'"))
    page = site.get(address)
    assert "<mark>fsdp_reshard_after_forwrd" in page and "<script>" not in page
    fix = re.findall(r'href="([^"]+fix=[^"]+)"', page)[-1]
    shown = site.get(html.unescape(fix).partition("#")[0])
    assert "fsdp_reshard_after_forward: false" in shown
    link = re.search(r'href="(/diagnose/download[^"]+)"', shown)
    assert link is not None
    text = site.get(html.unescape(link[1]))
    assert "fsdp_reshard_after_forward: false   # misspelt" in text and "\r" not in text


def test_the_cache_is_measured_verified_and_pruned(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDPTOOL_CACHE", str(tmp_path / "cache"))
    store = Store()
    for name in ("one", "two"):
        store.put("inspection", store.key(name), {"value": name}, about=f"{name} {HOSTILE}")
    page = site.get("/cache")
    assert "inspection" in page and "two &lt;script&gt;" in page and "<script>" not in page
    entry = Path(store.entries()[0].path)
    entry.write_bytes(entry.read_bytes() + b" ")
    assert "1 entry is intact, 1 corrupt" in site.get("/cache", verify="yes")
    form = form_fields(page, "/cache") | {"older_than": "x"}
    refused = site.post("/cache", form)
    assert refused.status_code == 400 and "is not a number" in refused.text
    answer = site.post("/cache", form | {"older_than": "", "max_mib": "0"})
    assert "Removed 2 files" in site.get(answer.headers["location"].partition("#")[0])
    assert not store.entries()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_probe_starts_on_request_only(site: Site) -> None:
    page = examined(site)
    assert "--no-probe" in page
    button = re.search(r'href="([^"]+)">Test FSDP2 on two processes', page)
    assert button is not None and not [job for job in site.jobs._jobs.values() if job.arguments["probe"]]
    page = examined(site, **dict(parse_qsl(urlsplit(html.unescape(button[1])).query)))
    job = next(job for job in site.jobs._jobs.values() if job.arguments["probe"])
    assert job.error is None
    assert job.result["probes"], "what the two processes answered"
    assert "FSDP2 on 2 cpu processes" in page and "weights equal an unsharded loop" in page
    assert "Test FSDP2 on two processes" not in page


def examined(site: Site, **query: str) -> str:
    """Return the page once the machine was examined."""
    site.get("/cache", **query)
    for job in list(site.jobs._jobs.values()):
        assert job.wait(PATIENCE), f"{job.task} {job.arguments} has not ended"
    return site.get("/cache", **query)


def test_a_calibration_is_shown_and_then_written(site: Site) -> None:
    assert "RTX-4090" in site.get("/cache/calibrate")
    query = {"gpu": "4090", "context": "100 MiB", "output": "models/machine.json"}
    page = site.get("/cache/calibrate", **query)
    assert "--context &#39;100 MiB&#39;" in page
    assert ">100.0 MiB</td>" in page and "CUDA context and loaded kernels of one process." in page
    table = site.folder / "machine.json"
    assert not table.exists()
    form = form_fields(page, "/cache/calibrate")
    assert site.post("/cache/calibrate", form).status_code == 303
    assert json.loads(table.read_text())["machines"][0]["context_bytes"] == 100 * 2**20
    # The page was about a file that did not exist.
    assert site.post("/cache/calibrate", form).status_code == 409
    for name in ("models/.bashrc", "models/run.py", "models/../machine.json", "models"):
        answer = site.client().get("/cache/calibrate", params={**query, "output": name})
        assert answer.status_code == 400, name
