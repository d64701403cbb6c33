"""The pages in a real headless Chromium: keyboard, screen readers, narrow screens, no JavaScript."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sites import PATIENCE, TINY, Server, serving

from fsdptool.formatting import amount
from fsdptool.planning.plan import chosen_candidate, plan_from
from fsdptool.report.plan_words import moments
from fsdptool.web.server import Address

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


def serious(page: Any) -> list[str]:
    """Return what axe-core finds on a page that keeps people from using it."""
    axe = pytest.importorskip("axe_playwright_python.base")
    page.evaluate(axe.AXE_SCRIPT)
    found = page.evaluate("() => axe.run()")
    return [
        f"{item['id']}: {node['html']}"
        for item in found["violations"]
        if item["impact"] in ("serious", "critical")
        for node in item["nodes"]
    ]


def too_wide(page: Any) -> bool:
    """Return whether a page scrolls sideways."""
    answer: bool = page.evaluate(
        "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    )
    return answer


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_are_accessible_on_a_narrow_screen(visit: Any, server: Server, scheme: str) -> None:
    page = visit(color_scheme=scheme, viewport={"width": 390, "height": 800})
    assert page.title() == "Start · fsdptool"
    offers = "1.gpu=H100-80GB-SXM&1.gpus_per_node=8&2.gpu=nosuch&2.gpus_per_node=2"
    for path in ("/", "/hardware?" + offers, "/model"):
        page.goto(server.origin + path)
        assert serious(page) == [], path
        assert not too_wide(page), path


def test_boxes_lay_the_units_of_a_dropped_configuration(visit: Any, server: Server, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    page = visit()
    page.click("text=Model")
    page.set_input_files("#upload-file", config)
    page.click("text=Inspect this file")
    units = page.locator("h2", has_text="FSDP units")
    units.wait_for()
    assert units.text_content() == "6 FSDP units"
    assert serious(page) == []
    box = page.locator('input[name="wrap"]')
    assert [box.nth(i).get_attribute("value") for i in range(box.count()) if box.nth(i).is_checked()] == [
        "LlamaDecoderLayer"
    ]
    page.check('input[value="LlamaMLP"]')
    page.locator("h2", has_text="9 FSDP units").wait_for()
    page.fill("#field-world_size", "4")
    page.keyboard.press("Tab")
    page.locator("h2", has_text="do not divide evenly over 4 ranks").wait_for()
    # The address reproduces what is shown.
    assert "wrap=LlamaMLP" in page.url
    command = page.locator(".command code").text_content()
    assert "--wrap LlamaDecoderLayer,LlamaMLP --world-size 4" in command
    page.reload()
    page.locator("h2", has_text="9 FSDP units").wait_for()
    # Another model does not inherit the boxes.
    page.fill("#field-reference", "gpt2:small")
    page.keyboard.press("Tab")
    page.locator("h1", has_text="GPT2LMHeadModel").wait_for()


@pytest.mark.slow
def test_a_page_says_that_its_server_has_ended(browser: Any, tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api")
    with serving(tmp_path) as first:
        context = browser.new_context()
        context.set_default_timeout(PATIENCE * 1000)
        page = context.new_page()
        page.goto(first.interface.new_address())
        page.goto(f"{first.origin}/model")
        port = first.interface.port
    notice = page.locator("#disconnected")
    assert not notice.is_visible()
    page.fill("#field-reference", "nosuch:model")
    page.keyboard.press("Tab")
    api.expect(notice).to_contain_text("does not answer", timeout=PATIENCE * 1000)
    assert serious(page) == []
    # Another server on the same port does not know this browser.
    with serving(tmp_path, address=Address(port=port)) as second:
        page.fill("#field-reference", "nosuch:other")
        page.keyboard.press("Tab")
        api.expect(notice).to_contain_text("was started again", timeout=PATIENCE * 1000)
        page.goto(second.interface.new_address())
        page.goto(f"{second.origin}/model?reference=nosuch:model")
        page.locator(".problem strong").wait_for()
        assert not notice.is_visible()
        context.close()


def test_pages_work_without_javascript(visit: Any, server: Server) -> None:
    page = visit(java_script_enabled=False)
    page.goto(f"{server.origin}/model")
    page.fill("#field-reference", "gpt2:small")
    page.click("text=Inspect >> nth=0")
    page.locator("h1", has_text="GPT2LMHeadModel").wait_for()
    page.goto(f"{server.origin}/hardware?1.gpu=H100-80GB-SXM&1.gpus_per_node=8")
    page.fill("#path-1", f"{server.folder.name}/without.yaml")
    page.click("text=Save >> nth=-1")
    page.locator("text=without.yaml >> nth=0").wait_for()
    assert (server.folder / "without.yaml").exists()


PLAN = "/plan?reference={name}/planned&gpu=RTX-4090-24GB&gpus=2&sequence_length=64"


@pytest.fixture(scope="session")
def tiny(server: Server) -> str:
    """The address of the plan of a small model in a folder below the root."""
    folder = server.folder / "planned"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return server.origin + PLAN.format(name=server.folder.name)


def answered(page: Any) -> None:
    """Wait until a plan is shown completely."""
    page.locator("h2", has_text="Memory over one step").wait_for()
    page.locator(".working").wait_for(state="detached")


def download(page: Any) -> str:
    """Return the address of the document of the plan that a page shows."""
    return str(page.get_by_text("Download plan.json").get_attribute("href"))


def test_a_position_is_traced_and_points_move_the_controls(
    visit: Any, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit()
    page.goto(tiny)
    answered(page)
    assert "fits" in page.locator("h1").text_content()
    assert serious(page) == []
    # The cursor lists what is alive, by keyboard and by pointer.
    alive = page.locator(".alive")
    at_peak = alive.text_content()
    page.focus(".moment input")
    page.keyboard.press("Home")
    assert alive.text_content() != at_peak
    page.locator("svg.timeline-960 rect.hover").nth(3).hover()
    assert page.locator(".moment input").input_value() == "3"
    # Every component with its bytes, wherever the cursor is, as the plan's document has them.
    document = json.loads(
        page.evaluate("href => fetch(href).then((answer) => answer.text())", download(page))
    )
    shown = chosen_candidate(plan_from(document, where="the page"))
    for index, moment in list(enumerate(moments(shown)))[::5]:
        page.locator("svg.timeline-960 rect.hover").nth(index).hover()
        assert alive.locator("p").text_content() == f"{moment.name}: {amount(moment.allocated_bytes)}"
        largest = sorted(moment.components.items(), key=lambda item: -item[1])
        lines = [f"{name.replace('_', ' ')} {amount(size)}" for name, size in largest]
        assert alive.locator("li").all_text_contents() == lines
    # A point of the front moves the controls; the front stays.
    point = page.locator(".broad svg.scatter-960 a:has(circle.p-on)").first
    candidates = page.locator("h2", has_text="candidates").text_content()
    point.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**front=**")
    answered(page)
    assert page.input_value("#field-checkpointing") != ""
    assert page.locator("h2", has_text="candidates").text_content() == candidates
    assert page.locator(".broad circle.here").count() == 1
    assert "--no-search" in page.locator(".command code").text_content()
    # A control that was not traced says so before it answers; the address reproduces it.
    page.evaluate("document.body.dataset.same = 'page'")
    page.fill("#field-sequence_length", "96")
    # However quick the answer is, the first response comes before it.
    monkeypatch.setattr("fsdptool.web.pages.plan.QUICK_SECONDS", 0.0)
    with page.expect_response(lambda response: "sequence_length=96" in response.url) as first:
        page.keyboard.press("Tab")
    assert "Planning: " in first.value.text()
    page.wait_for_url("**sequence_length=96**")
    answered(page)
    assert "sequence_length=96" in page.url
    assert page.evaluate("document.body.dataset.same") == "page"
    address = page.url
    page.reload()
    answered(page)
    assert page.url == address


def test_the_slider_sets_its_field(visit: Any, tiny: str) -> None:
    page = visit()
    page.goto(tiny)
    answered(page)
    slider = page.locator("#field-sequence_length + input[type=range]")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert page.input_value("#field-sequence_length") == "1024"
    page.locator(".command code", has_text="--seq-len 1024").wait_for()


def test_a_suggestion_is_a_button(visit: Any, server: Server) -> None:
    page = visit()
    batch = "sequence_length=1024&micro_batch=64"
    question = f"?reference=gpt2:small&gpu=RTX-3090-24GB&gpus=1&{batch}&search=no&compile=no"
    page.goto(f"{server.origin}/plan{question}")
    answered(page)
    assert "does not fit" in page.locator("h1").text_content()
    assert page.get_by_text("cannot be applied").count() == 1
    assert page.get_by_text("Apply this configuration").count() == 0
    # The page that writes files says why it does not, and leads to what it can write.
    address = page.url
    page.goto(f"{server.origin}/apply{question}")
    page.get_by_text("No configuration of this plan fits").wait_for()
    assert "activations" in page.locator("#unfit").text_content()
    assert serious(page) == []
    page.locator("tr", has_text="full activation checkpointing").get_by_text("Apply").click()
    page.locator("text=The file, as").wait_for()
    assert "fsdp_activation_checkpointing: true" in page.locator(".source").first.text_content()
    page.goto(address)
    answered(page)
    row = page.locator("tr", has_text="full activation checkpointing")
    row.locator("text=Apply").click()
    page.wait_for_url("**checkpointing=full**")
    answered(page)
    assert page.input_value("#field-checkpointing") == "full"
    assert serious(page) == []
