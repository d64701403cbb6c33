"""Two roles from first command to last: choosing among offers of clusters, and reporting to a colleague."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run

OFFERS = {"four-4090": ("RTX-4090-24GB", 4, 0.4), "two-a100": ("A100-80GB-SXM", 2, 1.4)}


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def ask(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    assert run(list(arguments)) == status, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.slow
def test_choosing_among_offers(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, (gpu, gpus, price) in OFFERS.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(f"name: {name}\ngpu: {gpu}\ngpus_per_node: {gpus}\nprice_per_gpu_hour: {price}\n")
        files += ["--cluster", str(path)]
    asked = [
        "plan",
        model,
        *files,
        "--seq-len",
        "128",
        "--global-batch",
        "8",
        "--steps",
        "1000",
        "--no-search",
    ]
    page, plan = tmp_path / "offers.html", tmp_path / "offers.json"
    told = ask(capsys, *asked, "--prefer", "price", "-o", str(plan))
    document: dict[str, Any] = json.loads(plan.read_text())
    offers = {offer["name"]: offer for offer in document["details"]["offers"]}
    assert list(offers) == list(OFFERS)
    cheapest = min(offers, key=lambda name: offers[name]["price_per_run"])
    rows = [re.split(" {2,}", line) for line in told.splitlines() if line.startswith(tuple(OFFERS))]
    assert [row[0] for row in rows] == [
        f"{name} (chosen)" if name == cheapest else name for name in OFFERS
    ], "one row for each offer, the cheapest one chosen"
    gpu, count, _ = OFFERS[cheapest]
    assert f"on {count} {gpu}: fits" in told.splitlines()[0]
    assert "the whole run takes" in told
    # The answer as a page, from the saved plan.
    ask(capsys, "report", str(plan), "-o", str(page))
    text = page.read_text()
    assert "<h2>Offers</h2>" in text
    assert all(name in text for name in OFFERS)


@pytest.mark.slow
def test_a_report_for_a_colleague(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, page, picture = (tmp_path / f"plan.{suffix}" for suffix in ("json", "html", "svg"))
    asked = ["plan", model, "--gpu", "RTX-4090-24GB", "--gpus", "2", "--no-search", "--seq-len", "128"]
    told = ask(capsys, *asked, "-o", str(plan))
    assert "fits" in told.splitlines()[0]
    for target in (page, picture):
        ask(capsys, "report", str(plan), "-o", str(target))
    document: dict[str, Any] = json.loads(plan.read_text())
    shown = next(item for item in document["candidates"] if item["id"] == document["chosen"])
    need = re.search(r"each rank needs ([\d.]+ \w+)", told)
    assert need is not None
    for path in (page, picture):
        text = path.read_text()
        assert need[1] in text, "the page, the picture and the terminal agree"
        assert "LlamaDecoderLayer" in text or path is picture
    assert f"{shown['id']}" in page.read_text()
    # The colleague checks it on another day, and compares it with a plan of her own.
    assert "no changes" in ask(capsys, "plan", "--check", str(plan))
    other = tmp_path / "other.json"
    ask(capsys, *asked[:-1], "256", "-o", str(other))
    assert "allocated peak" in ask(capsys, "compare", str(plan), str(other))
    # A page is not replaced by accident, and what is no plan is refused in one line.
    assert run(["report", str(plan), "-o", str(page)]) == 2
    assert run(["report", model, "-o", str(tmp_path / "new.html")]) == 2
    assert len(capsys.readouterr().err.splitlines()) <= 4
