"""Photograph a page as people see it: on a screen, in the dark, on a telephone and on paper.

    python benchmarks/report/screenshots.py DOCUMENT.json FOLDER

The document is what ``plan``, ``detect`` or ``compare`` write with ``-o``.

Writes ``light.png``, ``dark.png``, ``narrow.png`` and ``paper.pdf`` to the folder. Needs Chromium (Debian's
package ``chromium``) on the path. Nothing is compared: the pictures are for looking at.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fsdptool.planning.plan import plan_from
from fsdptool.records.command_documents import Comparison
from fsdptool.records.detection import Detection
from fsdptool.records.diagnostic import read_answer
from fsdptool.report.page.detection import detection_page
from fsdptool.report.page.plan import comparison_page, plan_page

PAGES = {
    "plan": lambda document: plan_page(plan_from(document, where="the plan")),
    "detect": lambda document: detection_page(read_answer(Detection, document)),
    "compare": lambda document: comparison_page(read_answer(Comparison, document)),
}
WIDE, TELEPHONE = 1100, 390
NO_CUT = """<script>addEventListener("load",()=>{
const over=[...document.querySelectorAll("body *")].filter(e=>!e.closest("svg")&&!e.closest(".skip,caption")&&
e.getBoundingClientRect().right>innerWidth+1).map(e=>e.tagName+"."+e.className);
document.title=over.length?"CUT "+[...new Set(over)].join(" "):"WHOLE"})</script>"""
"""Names in the title what reaches beyond the right edge of the window."""


def chromium(*arguments: str) -> str:
    """Run headless Chromium and return its standard output."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise SystemExit("Chromium is not installed")
    with tempfile.TemporaryDirectory() as profile:
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
        command = (program, *options, f"--user-data-dir={profile}", *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def framed(page: Path, width: int) -> str:
    """Return a page that shows another one in a given width: Chromium's window is 500 pixels or wider."""
    return f'<body style="margin:0"><iframe src="{page.name}" style="border:0;width:{width}px;height:7000px">'


def main(path: Path, folder: Path) -> None:
    """Write the pictures, and say what is cut off on a telephone."""
    folder.mkdir(parents=True, exist_ok=True)
    document = json.loads(path.read_text(encoding="utf-8"))
    text = PAGES[document["schema"]](document)
    page, dark, narrow = folder / "page.html", folder / "dark.html", folder / "narrow.html"
    page.write_text(text, encoding="utf-8")
    # The dark colours without the condition; headless Chromium prefers the light ones.
    always = text.replace("@media (prefers-color-scheme:dark)", "@media all")
    dark.write_text(always.replace("color-scheme:light dark", "color-scheme:dark"), encoding="utf-8")
    narrow.write_text(framed(page, TELEPHONE), encoding="utf-8")
    for name, source, width in (
        ("light", page, WIDE),
        ("dark", dark, WIDE),
        ("narrow", narrow, TELEPHONE + 120),
    ):
        target = folder / f"{name}.png"
        chromium(f"--screenshot={target}", f"--window-size={width},5200", source.absolute().as_uri())
    paper = folder / "paper.pdf"
    chromium(f"--print-to-pdf={paper}", "--no-pdf-header-footer", page.absolute().as_uri())
    free = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", f"{NO_CUT}</body>")
    checked, holder = folder / "checked.html", folder / "holder.html"
    checked.write_text(free, encoding="utf-8")
    holder.write_text(
        framed(checked, TELEPHONE) + "</iframe><script>addEventListener('load',()=>setTimeout(()=>{"
        "document.title=document.querySelector('iframe').contentDocument.title},500))</script>",
        encoding="utf-8",
    )
    dom = chromium(
        "--allow-file-access-from-files",
        "--virtual-time-budget=3000",
        "--dump-dom",
        holder.absolute().as_uri(),
    )
    found = re.search(r"<title>([^<]*)", dom)
    print(f"{TELEPHONE} pixels: {found[1] if found else 'not checked'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
