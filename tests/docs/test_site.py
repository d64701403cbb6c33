"""The pages are short, their links lead somewhere, and the site builds and fetches nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fsdptool

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SITE = runpy.run_path(str(ROOT / "benchmarks" / "readme" / "site.py"))
PROSE = runpy.run_path(str(ROOT / "benchmarks" / "readme" / "prose.py"))
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
WRITTEN = [name for name in PAGES if name not in PROSE["GENERATED"]]


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_says_whom_it_serves_and_can_be_read(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    title, opening = text.split("\n\n")[:2]
    assert title.startswith("# ")
    assert re.match(r"This (page|site) is for ", opening)
    prose = PROSE["measure"](text)
    assert prose.sentence <= PROSE["SENTENCE_WORDS"]
    assert prose.paragraph <= PROSE["PARAGRAPH_WORDS"], prose.longest
    assert prose.words <= PROSE["HOW_TO_WORDS"] or not name.startswith("how-to/")


def test_the_pages_together_are_short() -> None:
    pages = PROSE["pages"]()
    assert set(pages) == set(WRITTEN)
    assert 10_000 < sum(prose.words for prose in pages.values()) < PROSE["TOTAL_WORDS"]


def test_the_measure_counts_what_a_reader_reads() -> None:
    code, table = "```sh\nnot read\n```", "| eight | nine |\n|---|---|"
    text = f"# Title\n\nOne two three. Four five.\n\n- six seven\n\n{code}\n\n{table}\n"
    prose = PROSE["measure"](text)
    assert (prose.words, prose.paragraph) == (10, 5)
    assert prose.sentence == pytest.approx(7 / 3)
    assert PROSE["measure"]("<!-- x: begin (script) -->\n| a |\n<!-- x: end -->\n").words == 0


def test_the_readme_is_one_screen_or_two() -> None:
    assert 40 < len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert set(PAGES) <= set(re.findall(r"[\w/-]+\.md", navigation))


def test_messages_of_the_program_name_pages_that_exist() -> None:
    named = {
        match
        for folder in ("fsdptool", "plugins", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".json", ".md", ".yaml") and "results" not in path.parts
        for match in re.findall(r"(?<![\w/.-])docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


def test_every_test_that_a_page_or_a_planted_fault_names_exists() -> None:
    planted = json.loads((ROOT / "benchmarks" / "results" / "planted-cuda.json").read_text(encoding="utf-8"))
    named = {word for row in planted for word in row["test"] if word.startswith("tests/")}
    named |= {row["failed"].partition("[")[0] for row in planted}
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        named |= set(re.findall(r"(?<![\w/.-])tests/[\w/]+\.py(?:::\w+)?", path.read_text(encoding="utf-8")))
    assert len(named) > 40
    for name in sorted(named):
        file, _, test = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), name


def test_every_link_between_pages_leads_somewhere() -> None:
    generated = {DOCS / name: text for name, text in SITE["generated"]().items()}
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    texts = {path: path.read_text(encoding="utf-8") for path in pages} | generated
    assert len(texts) > 90
    broken = []
    for page, text in texts.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            file, _, anchor = target.partition("#")
            if "://" in file:
                continue
            goal = (page.parent / file).resolve() if file else page
            if not (goal in texts or goal.exists()) or (anchor and anchor not in anchors(texts[goal])):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as Markdown viewers make them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_generated_pages_name_what_the_program_has() -> None:
    pages = SITE["generated"]()
    expected = {
        "reference/commands.md": "`--micro-batch`",
        "reference/recipe-keys.md": "`data.packing`",
        "reference/gpus.md": "H100-80GB-SXM",
        "reference/failures.md": "RUN002",
        "reference/documents.md": "`next_steps`",
        "changelog.md": "## 0.1.0",
    }
    assert not [page for page, text in expected.items() if text not in pages[page]]


def test_the_reference_has_every_public_function() -> None:
    page = (DOCS / "reference" / "functions.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^::: (\S+)$", page, flags=re.M))
    assert described >= {f"{module}.{name}" for name, module in fsdptool._PUBLIC.items()}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site. mkdocs comes with the extra ``docs``."""
    if not all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("mkdocs is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    paths = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_and_viewing_it_fetches_nothing(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    assert "ProofCallback" in (site / "reference" / "functions" / "index.html").read_text(encoding="utf-8")
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(https?:)?//|<link[^>]*rel=\"?(?:stylesheet|preload|icon)"
        r"[^>]*href=\"?(https?:)?//"
    )
    assert not [page for page in pages if loaded.search(page.read_text(encoding="utf-8"))]
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles
    assert not [text for text in styles if re.search(r"url\([\"']?(?:https?:)?//|@import", text)]
