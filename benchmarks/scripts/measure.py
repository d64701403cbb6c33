"""Judge the scripts of installed packages, mutated scripts and many scripts at once.

    python benchmarks/scripts/measure.py packages mutated speed

Each part writes ``results/PART.json``: what each package gave, how many mutated scripts were judged,
and the seconds
that 500 scripts took.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fsdptool.files.text import SourceText
from fsdptool.scripts import mentions_fsdp
from fsdptool.scripts.judge import judge_script
from fsdptool.scripts.rules import RULES

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("accelerate", "transformers", "trl", "peft", "diffusers", "torch/testing", "torch/distributed")
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "accelerate": "1.15.0", "peft": "0.21.2"}


def packages() -> dict[str, Any]:
    """Judge every file of some packages that mentions FSDP."""
    found: dict[str, Any] = {}
    for name in PACKAGES:
        package, _, inside = name.partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        root = Path(spec.origin).parent
        severities: Counter[str] = Counter()
        findings: list[str] = []
        files = [path for path in sorted((root / inside).rglob("*.py")) if mentions_fsdp(path)]
        for path in files:
            for item in judge_script(
                SourceText(path.read_text(encoding="utf-8"), str(path)), VERSIONS
            ).findings:
                severities[item.severity] += 1
                findings.append(f"{path.relative_to(root)}:{item.line} {item.code} {item.severity}")
        found[name] = {"files": len(files), "findings": dict(severities), "where": findings}
    return found


def mutated(count: int = 2000) -> dict[str, Any]:
    """Judge scripts whose statements were dropped, doubled and exchanged at random."""
    chance = random.Random(1)
    texts = [rule.example.fails for rule in RULES if rule.example is not None]
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        tree = ast.parse("".join(chance.choice(texts) for _ in range(3)))
        for _ in range(chance.randrange(1, 8)):
            bodies = [
                body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)
            ]
            chosen = chance.choice(bodies)
            at, other = chance.randrange(len(chosen)), copy.deepcopy(chance.choice(chance.choice(bodies)))
            chosen[at] = chance.choice((other, chosen[at], ast.Pass()))
            chance.shuffle(chosen)
        try:
            text = ast.unparse(ast.fix_missing_locations(tree))
        except RecursionError:
            outcomes["not written"] += 1
            continue
        judged = judge_script(SourceText(text), VERSIONS)
        outcomes[
            "refused" if judged.refusal else "with findings" if judged.findings else "without findings"
        ] += 1
    return {"scripts": count, **outcomes}


def speed(count: int = 500) -> dict[str, Any]:
    """Judge scripts of about a hundred lines: several examples in one."""
    chance = random.Random(2)
    texts = [rule.example.fails for rule in RULES if rule.example is not None]
    scripts = ["".join(chance.choice(texts) for _ in range(8)) for _ in range(count)]
    began = time.process_time()
    for text in scripts:
        judge_script(SourceText(text), VERSIONS)
    seconds = time.process_time() - began
    lines = sum(text.count("\n") for text in scripts)
    return {"scripts": count, "lines": lines, "seconds": round(seconds, 2)}


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    for part in sys.argv[1:]:
        result = {"packages": packages, "mutated": mutated, "speed": speed}[part]()
        (RESULTS / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(part, json.dumps(result)[:2000])
