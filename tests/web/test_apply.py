"""The page that writes a configuration: merged, replaced, in another dialect, downloaded, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from sites import Site, form_fields
from test_configs import FSDP1, HOSTILE, MISSPELT

from fsdptool.config.reader import read_settings

PRESET = {"preset": "single-node-checkpointing"}


def shown(site: Site, **query: str) -> str:
    """Return the page once its work has ended."""
    for _ in range(2):
        page = site.get("/apply", **query)
        if 'sse-connect="/jobs/' not in page:
            return page
        job = next(iter(site.jobs._jobs.values()))
        assert job.wait(300)
    raise AssertionError(page)


@pytest.mark.slow
def test_a_preset_is_merged_into_a_file_and_comments_stay(site: Site) -> None:
    file = site.folder / "team.yaml"
    file.write_text(MISSPELT)
    page = shown(site, **PRESET, target="models/team.yaml")
    assert 'class="d-added">+  fsdp_activation_checkpointing: true' in page
    assert "fsdptool emit-config --preset single-node-checkpointing --into" in page
    assert "<mark>fsdp_reshard_after_forwrd" in page  # a finding of the result, beside its line
    before = file.read_text()
    form = form_fields(page, "/apply")
    file.write_text(before + "# added meanwhile\n")
    conflict = site.post("/apply", form)
    assert conflict.status_code == 409 and "was not overwritten" in conflict.text
    assert file.read_text() == before + "# added meanwhile\n"
    answer = site.post("/apply", form_fields(conflict.text, "/apply"))
    assert answer.status_code == 303
    text = file.read_text()
    assert "# keep this comment" in text and text.endswith("# added meanwhile\n")
    settings = read_settings(file).settings
    assert settings is not None and settings.activation_checkpointing
    assert settings.wrap_classes == ("LlamaDecoderLayer",)
    again = site.get(answer.headers["location"])
    assert "Written: models/team.yaml" in again and "already contains all of these settings" in again


@pytest.mark.slow
def test_a_new_file_is_written_once_and_a_link_is_followed_inside_only(site: Site, tmp_path: Path) -> None:
    page = shown(site, **PRESET, target="models/new.yaml")
    form = form_fields(page, "/apply")
    assert site.post("/apply", form).status_code == 303
    written = (site.folder / "new.yaml").read_text()
    # The second browser saw no file.
    assert site.post("/apply", form).status_code == 409
    assert (site.folder / "new.yaml").read_text() == written
    outside = tmp_path / "outside.yaml"
    outside.write_text("keep: me\n")
    (site.folder / "link.yaml").symlink_to(outside)
    (site.folder / "inside.yaml").symlink_to(site.folder / "new.yaml")
    for target in ("models/link.yaml", "models/../outside.yaml", "models/.profile", "models/run.py"):
        answer = site.client().get("/apply", params={**PRESET, "target": target})
        assert answer.status_code == 400, target
        assert site.post("/apply", {**form, "target": target}).status_code in (400, 409)
    assert outside.read_text() == "keep: me\n"
    query = {"preset": "single-node", "target": "models/inside.yaml"}
    form = form_fields(shown(site, **query), "/apply")
    assert site.post("/apply", form).status_code == 303
    assert (site.folder / "inside.yaml").is_symlink()
    assert "fsdp_activation_checkpointing: false" in (site.folder / "new.yaml").read_text()
    assert not list(site.folder.glob(".*"))


def test_other_dialects_replace_only_on_request(site: Site) -> None:
    page = shown(site, **PRESET, dialect="trainer", target="models/args.yaml")
    assert "fsdptool migrate accelerate.yaml --to trainer -o" in page
    assert site.post("/apply", form_fields(page, "/apply")).status_code == 303
    assert read_settings(site.folder / "args.yaml").dialect == "trainer"
    query = {**PRESET, "dialect": "trainer", "target": "models/args.yaml"}
    assert site.client().get("/apply", params=query).status_code == 400
    (site.folder / "args.yaml").write_text(FSDP1)
    page = shown(site, **query, mode="replace")
    assert 'class="d-removed">-# keep this comment' in page and "--force" in page
    answer = site.client().get("/apply/download", params={**PRESET, "dialect": "trainer"})
    assert answer.headers["content-disposition"] == 'attachment; filename="trainer.yaml"'
    assert read_settings(answer.text).dialect == "trainer"


def test_mistakes_are_shown_beside_their_fields_or_in_one_line(site: Site) -> None:
    page = site.client().get("/apply", params={"preset": "single-node", "processes": "x"})
    assert page.status_code == 400 and "is not a whole number" in page.text
    for query in ({"preset": HOSTILE}, {"plan_file": "models/none.json"}, {**PRESET, "dialect": HOSTILE}):
        assert "<script>" not in site.client().get("/apply", params=query).text
    (site.folder / "plan.json").write_text("{}")
    job_page = site.client().get("/apply", params={"plan_file": "models/plan.json"})
    if 'sse-connect="/jobs/' in job_page.text:
        assert list(site.jobs._jobs.values())[-1].wait(300)
        job_page = site.client().get("/apply", params={"plan_file": "models/plan.json"})
    assert job_page.status_code == 400 and "is not a plan" in job_page.text


@pytest.mark.parametrize("field", ["target", "plan_file"])
def test_names_are_escaped(site: Site, field: str) -> None:
    page = site.client().get("/apply", params={**PRESET, field: f"models/{HOSTILE}"}).text
    assert "<script>" not in page and "&lt;script&gt;" in page


def test_an_answer_that_comes_while_the_page_is_made_is_not_lost(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown(site, **PRESET)
    monkeypatch.setattr("fsdptool.web.pages.apply._is_ready", lambda job: False)
    assert 'sse-connect="/jobs/' in site.get("/apply", **PRESET)
