"""Examine the pages of the web interface in a browser: accessibility, layout, requests.

    python benchmarks/web/page_checks.py [OUTPUT]

Opens each page of ``screenshots.PAGES`` in Chromium in light and dark, on a wide screen and on one of 390
pixels. Counts what axe-core finds, of any weight (the package ``axe-playwright-python`` brings it); how far
the layout shifts while the page loads (the sum of Chromium's ``layout-shift`` entries); whether the page or a
box in it scrolls sideways, with every disclosure open; requests to other hosts than this server; errors of
scripts and of the content policy. Writes ``benchmarks/results/web_page_checks.json``.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from screenshots import PAGES, VIEWS, settle, visiting

from fsdptool.records.diagnostic import library_versions, tool_version

RESULTS = Path(__file__).parents[1] / "results" / "web_page_checks.json"

_WATCH = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
}).observe({type: "layout-shift", buffered: true});
"""
_SIDEWAYS = """() => {
  for (const part of document.querySelectorAll("details")) part.open = true;
  const boxes = [document.documentElement, ...document.body.querySelectorAll("*")];
  return boxes.filter((box) => box.clientWidth > 0 && box.scrollWidth > box.clientWidth
    && (box === document.documentElement || ["auto", "scroll"].includes(getComputedStyle(box).overflowX)))
    .map((box) => `${box.tagName.toLowerCase()}.${box.className}`
      + `${box.ariaLabel ? ` "${box.ariaLabel}"` : ""}: ${box.scrollWidth - box.clientWidth} px`);
}"""


def examine(browser: Any, origin: str, opened: str, view: str) -> list[dict[str, Any]]:
    """Return a row per page of a view."""
    faults: list[str] = []
    context = browser.new_context(**VIEWS[view])
    context.add_init_script(_WATCH)

    def watch(request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
            faults.append(f"request to {request.url}")

    context.on("request", watch)
    page = context.new_page()
    page.on("pageerror", lambda error: faults.append(f"script: {error}"))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.goto(opened)
    rows = []
    for name, address in PAGES.items():
        faults.clear()
        settle(page, origin + address)
        page.evaluate(import_module("axe_playwright_python.base").AXE_SCRIPT)
        violations = page.evaluate("() => axe.run()")["violations"]
        rows.append(
            {
                "page": name,
                "view": view,
                "axe": [
                    f"{item['impact']} {item['id']}: {node['html']}"
                    for item in violations
                    for node in item["nodes"]
                ],
                "layout_shift": round(page.evaluate("window.shift"), 4),
                "sideways": page.evaluate(_SIDEWAYS),
                "faults": list(faults),
            }
        )
    context.close()
    return rows


def main(output: Path) -> None:
    """Examine all pages and write the results."""
    output = output.resolve()
    rows = []
    with visiting() as (browser, interface):
        version = browser.version
        for view in VIEWS:
            opened = interface.new_address()
            rows += examine(browser, opened.partition("/open")[0], opened, view)
    document = {
        "benchmark": "web/page_checks",
        "chromium": version,
        "fsdptool": tool_version(),
        "libraries": library_versions(),
        "results": rows,
    }
    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        for kind in ("axe", "sideways", "faults"):
            for item in row[kind]:
                print(f"{row['page']} {row['view']} {kind}: {item}")
    totals = ", ".join(
        f"{sum(len(row[kind]) for row in rows)} {kind}" for kind in ("axe", "sideways", "faults")
    )
    shift = max(row["layout_shift"] for row in rows)
    print(f"{len(PAGES)} pages in {len(VIEWS)} views: {totals}; largest layout shift {shift}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
