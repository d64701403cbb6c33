"""From a model to a written configuration, and a fix in a folder's file, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sites import TINY, Server
from test_browser import serious, too_wide
from test_configs import MISSPELT

from fsdptool.config.reader import read_settings

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


def test_from_a_model_to_a_written_configuration(visit: Any, server: Server, tmp_path: Path) -> None:
    model = server.folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    team = server.folder / "team.yaml"
    team.write_text(MISSPELT)
    root = server.folder.name
    page = visit()
    page.click("nav >> text=Model")
    page.fill("#field-reference", f"{root}/tiny")
    page.keyboard.press("Enter")
    page.locator("h2", has_text="FSDP units").wait_for()
    page.locator('a[href^="/plan?"]').first.click()
    page.fill("#field-gpu", "RTX-4090-24GB")
    page.fill("#field-gpus", "2")
    page.fill("#field-sequence_length", "64")
    page.click("#question button:has-text('Plan')")
    # Answers to the fields that were filled one by one may come first.
    page.locator('a[href*="sequence_length=64"]', has_text="Apply this configuration").click()
    page.wait_for_url("**/apply?**")

    page.locator("text=The file, as").wait_for()
    assert "fsdptool emit-config --plan plan.json" in page.content()
    with page.expect_download() as download:
        page.locator("text=Download").first.click()
    saved = tmp_path / "downloaded.yaml"
    download.value.save_as(saved)
    assert read_settings(saved).require().wrap_classes == ("LlamaDecoderLayer",)

    page.fill("#field-target", f"{root}/team.yaml")
    page.click("text=Show the file")
    page.locator("text=Write this change").wait_for()
    assert serious(page) == []
    # Somebody else writes first: their words stay.
    team.write_text(MISSPELT + "# added meanwhile\n")
    page.click("text=Write this change")
    page.locator("text=was not overwritten").wait_for()
    assert team.read_text().endswith("# added meanwhile\n") and "num_processes: 8" in team.read_text()
    page.click("text=Write this change")
    page.locator("text=Written:").wait_for()
    text = team.read_text()
    assert "# keep this comment" in text and "# added meanwhile" in text and "num_processes: 2" in text

    # The misspelt key is still there: one finding, one fix.
    page.click("nav >> text=Configs")
    page.fill("#folder", root)
    page.keyboard.press("Enter")
    page.locator("a", has_text="team.yaml").click()
    assert serious(page) == []
    page.locator("text=Show this fix").first.click()
    page.click("text=Write this change")
    page.locator("text=Written: Fix").wait_for()
    assert "fsdp_reshard_after_forwrd" not in team.read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_of_files_are_accessible_on_a_narrow_screen(visit: Any, server: Server, scheme: str) -> None:
    (server.folder / "narrow.yaml").write_text(MISSPELT)
    (server.folder / "train.log").write_text("RuntimeError: CUDA error: out of memory\n" * 3)
    root = server.folder.name
    page = visit(color_scheme=scheme, viewport={"width": 390, "height": 800})
    for path in (
        f"/configs?folder={root}",
        f"/configs/file?file={root}/narrow.yaml&change=unsafe&to=trainer",
        f"/apply?preset=single-node&target={root}/narrow.yaml",
        f"/diagnose?target={root}/train.log",
        "/cache",
        "/cache/calibrate?gpu=4090&context=1GiB",
    ):
        page.goto(server.origin + path)
        page.locator(".working").first.wait_for(state="detached")
        assert serious(page) == [], path
        assert not too_wide(page), path
    page.goto(server.origin + "/cache")
    page.locator("text=processor cores").wait_for()


def test_forms_work_without_javascript(visit: Any, server: Server) -> None:
    file = server.folder / "plain.yaml"
    file.write_text(MISSPELT)
    page = visit(java_script_enabled=False)
    page.goto(f"{server.origin}/configs/file?file={server.folder.name}/plain.yaml")
    page.locator("text=Show this fix").first.click()
    page.click("text=Write this change")
    page.locator("text=Written: Fix").wait_for()
    assert "fsdp_reshard_after_forwrd" not in file.read_text()
    page.goto(f"{server.origin}/diagnose")
    page.fill("#text", MISSPELT)
    page.click("text=Diagnose the text")
    page.locator("text=did you mean fsdp_reshard_after_forward").first.wait_for()
