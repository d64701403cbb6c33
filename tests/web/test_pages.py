"""Pages without a browser: what they answer, what they refuse, what they escape."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest
import yaml
from run_folders import make_run
from sites import TINY, Site
from starlette.testclient import TestClient

from fsdptool.planning.clusters import read_cluster
from fsdptool.records.advice import Suggestion, SuggestionKind
from fsdptool.records.plan import SearchPoint
from fsdptool.records.queue import RunRequest
from fsdptool.web.plans import changed_values, point_values

SCRIPT = "<script>alert(1)</script>"


def settled(client: TestClient, site: Site, path: str) -> str:
    """Return a page after its work has ended."""
    text = client.get(path).text
    while match := re.search(r"/jobs/([0-9a-f]{32})/events", text):
        job = site.jobs.get(match[1])
        assert job is None or job.wait(300)
        text = client.get(path).text
    return text


def test_every_option_of_a_new_run_is_in_a_group(site: Site) -> None:
    text = site.get("/runs/new")
    named = set(re.findall(r' name="([^"]+)"', text.partition("<form")[2].partition("</form>")[0]))
    assert named == {item.name for item in fields(RunRequest)}


def test_the_first_page_asks_one_question_and_lists_recent_runs(site: Site) -> None:
    for number in range(7):
        make_run(site.folder / f"run-{number}")
    text = site.get("/")
    (form,) = re.findall(r'<form[^>]*action="/plan"[^>]*>.*?</form>', text, re.DOTALL)
    names = re.findall(r'<(?:input|select)[^>]* name="([^"]+)"', form)
    assert names == ["reference", "gpu", "gpus", "sequence_length"]
    assert text.count('href="/run?run=') == 5
    assert '<a href="/runs">All runs</a>' in text


def test_a_script_in_a_class_name_stays_text(site: Site) -> None:
    client, headers = site.client(), site.write_headers()
    config = json.dumps({**TINY, "architectures": [SCRIPT], "model_type": f"x{SCRIPT}"})
    answer = client.post("/model/upload", headers=headers, files={"file": ("config.json", config)})
    assert answer.status_code == 303
    for path in (
        answer.headers["location"],
        f"/model?reference={SCRIPT}",
        f"/hardware?1.gpu={SCRIPT}&2.name={SCRIPT}",
    ):
        text = settled(client, site, path)
        assert "alert(1)" in text
        assert SCRIPT not in text


def test_models_outside_the_roots_are_refused(site: Site) -> None:
    client = site.client()
    for reference in ("/etc", "../../etc/passwd", "~/.ssh"):
        answer = client.get("/model", params={"reference": reference})
        assert answer.status_code == 400
        assert "outside the folders" in answer.text
    # A page cannot allow a model's own code to run.
    query = "reference=json.decoder:JSONDecoder&trust_remote_code=true&allow-import=1"
    assert "imported only with --allow-import" in settled(client, site, f"/model?{query}")


def test_a_wrong_upload_is_one_line(site: Site) -> None:
    client, headers = site.client(), site.write_headers()
    for data, message in ((b"", "is empty"), (b"{", "is not JSON"), (b"[1]", "is not a JSON object")):
        answer = client.post("/model/upload", headers=headers, files={"file": ("config.json", data)})
        assert answer.status_code == 400
        assert message in answer.text
    assert client.get("/model?reference=upload:0123456789abcdef").status_code == 400


def test_offers_are_compared_and_saved_as_cluster_files(site: Site) -> None:
    client, headers = site.client(), site.write_headers()
    query = "1.gpu=h100&1.gpus_per_node=8&1.price_per_gpu_hour=2.5"
    query += "&2.gpu=A100-80GB-SXM&2.gpus_per_node=8&2.nodes=2"
    text = client.get(f"/hardware?{query}").text
    assert "GPU &#39;h100&#39; is taken as H100-80GB-SXM" in text
    assert ">20.00</td>" in text
    assert "1.24 TiB" in text
    form = {"2.gpu": "A100-80GB-SXM", "2.gpus_per_node": "8", "2.nodes": "2", "path": "models/a100.yaml"}
    saved = client.post("/hardware/save", headers=headers, data={**form, "back": "/hardware?x=1"})
    assert (saved.status_code, saved.headers["location"]) == (303, "/hardware?x=1&saved=models%2Fa100.yaml")
    cluster = read_cluster(site.folder / "a100.yaml").cluster
    assert (cluster.gpu.name, cluster.world_size) == ("A100-80GB-SXM", 16)
    before = (site.folder / "a100.yaml").read_bytes()
    for change, message in (
        ({"2.nodes": "4"}, "exists"),
        ({"path": "../a.yaml"}, "outside the folders"),
        ({"path": "models/none/a.yaml"}, "does not exist"),
        ({"path": "models/a.txt"}, "not a YAML file"),
        ({"path": "models/b.yaml", "2.gpu": "nosuch"}, "unknown GPU"),
        ({"path": "models/b.yaml", "2.nodes": "x"}, "is not a whole number"),
    ):
        answer = client.post("/hardware/save", headers=headers, data={**form, **change})
        assert (answer.status_code, message in answer.text) == (400, True), message
    assert [path.name for path in site.folder.iterdir()] == ["a100.yaml"]
    assert (site.folder / "a100.yaml").read_bytes() == before
    file = client.get("/hardware/cluster.yaml?1.gpu=H100-80GB-SXM&1.gpus_per_node=8")
    assert yaml.safe_load(file.text) == {"gpus_per_node": 8, "gpu": "H100-80GB-SXM", "nodes": 1}


def test_a_form_leads_back_to_this_server_only(site: Site) -> None:
    client, headers = site.client(), site.write_headers()
    job = site.jobs.submit("none:none", {})
    assert job.wait(120)
    for target in ("https://evil.example/", "//evil.example/", "/\\evil.example", "evil"):
        answer = client.post(f"/jobs/{job.id}/forget", headers=headers, data={"back": target})
        assert answer.headers["location"] == "/"
        job = site.jobs.submit("none:none", {})
        assert job.wait(120)


def test_an_unknown_page_is_an_error_page(site: Site) -> None:
    answer = site.client().get("/nowhere")
    assert (answer.status_code, "use the menu" in answer.text) == (404, True)


def test_a_question_to_plan_is_checked_before_it_is_asked(site: Site) -> None:
    client = site.client()
    ask = {"reference": "llama3:8b", "gpu": "H100-80GB-SXM"}
    for wrong, message in (
        ({"micro_batch": "x"}, "&#39;x&#39; is not a whole number"),
        ({"sequence_length": "0"}, "must be at least 1"),
        ({"method": "none"}, "choose one of: full, lora, qlora, distillation"),
        ({"recipe": "/etc/passwd"}, "outside the folders"),
        ({"clusters": "models/none.yaml"}, "does not exist"),
        ({"teacher": "../../etc"}, "outside the folders"),
        ({"model": "/etc/passwd"}, "outside the folders"),
    ):
        answer = client.get("/plan", params={**ask, **wrong})
        assert (answer.status_code, message in answer.text) == (400, True), wrong
    assert 'name="trust_remote_code"' not in client.get("/plan").text
    # What only the planner knows is wrong stands beside its field, too.
    text = settled(client, site, "/plan?reference=llama3:8b&gpu=nosuch&hsdp=3x4")
    assert 'role="alert"' in text
    assert re.search(r'class="field wrong">\s*<label for="field-(hsdp|gpu)"', text)


@pytest.mark.slow
def test_offers_saved_as_files_are_planned_side_by_side(site: Site) -> None:
    (site.folder / "tiny").mkdir()
    (site.folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    for name, gpu in (("a", "H100-80GB-SXM"), ("b", "RTX-4090-24GB")):
        text = f"name: {name}<b>\ngpu: {gpu}\ngpus_per_node: 2\nprice_per_gpu_hour: 1.5\n"
        (site.folder / f"{name}.yaml").write_text(text)
    query = "reference=models/tiny&sequence_length=64&search=no&clusters=models/a.yaml,models/b.yaml"
    client = site.client()
    text = settled(client, site, f"/plan?{query}")
    assert "a&lt;b&gt;" in text
    assert "<b>" not in re.sub(r'<b class="\w+">|<b>(error|warning|info|unknown|confidence)', "", text)
    assert f"--cluster {site.folder}/a.yaml --cluster {site.folder}/b.yaml" in text
    document = client.get(f"/plan/plan.json?{query}").json()
    assert [offer["name"] for offer in document["details"]["offers"]] == ["a<b>", "b<b>"]
    # A file that changes is another question.
    (site.folder / "a.yaml").write_text("gpu: H200-141GB-SXM\ngpus_per_node: 4\n")
    assert "4 H200-141GB-SXM" in settled(client, site, f"/plan?{query}")


@pytest.mark.slow
def test_a_training_file_is_planned_where_a_model_is_asked_for(site: Site) -> None:
    (site.folder / "tiny").mkdir(exist_ok=True)
    (site.folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    (site.folder / "train.yaml").write_text(
        "base_model: org/model\nadapter: lora\nlora_r: 4\nlora_target_linear: true\nsequence_len: 64\n"
        "micro_batch_size: 2\ngradient_accumulation_steps: 4\noptimizer: adamw_torch_fused\nbf16: true\n"
        "learning_rate: 0.0002\ndatasets: [{path: org/data, type: alpaca}]\n"
    )
    query = "reference=models/train.yaml&model=models/tiny&gpu=H100-80GB-SXM&gpus=2"
    client = site.client()
    settled(client, site, f"/plan?{query}")
    inputs = client.get(f"/plan/plan.json?{query}").json()["inputs"]
    assert (inputs["run"]["program"], inputs["recipe"]["method"]["lora"]["rank"]) == ("axolotl", 4)


def test_suggestions_and_points_are_addresses() -> None:
    point = SearchPoint(
        cluster=0,
        layout="native",
        wrap_policy="transformer",
        wrap_classes=("Block",),
        micro_batch=4,
        accumulation=2,
        checkpointing="full",
        reshard_after_forward=True,
        dp_replicate=2,
        dp_shard=4,
        cp=1,
        cpu_offload=False,
        optimizer_implementation="auto",
        prefetch=1,
        reduce_dtype=None,
        gradients="sharded",
    )
    values = point_values(point)
    assert {
        "hsdp": "2x4",
        "offload": "no",
        "wrap": "Block",
        "reduce_dtype": "param",
    }.items() <= values.items()

    def suggestion(settings: dict[str, object], **more: object) -> Suggestion:
        return Suggestion("", settings, None, None, "", SuggestionKind.COMBINED, **more)

    changed = changed_values(point, suggestion({"cpu_offload": True, "micro_batch": 1}))
    assert (changed["offload"], changed["micro_batch"], changed["checkpointing"]) == ("yes", "1", "full")
    more = changed_values(point, suggestion({"dp_shard": 8}, hardware={"gpu": "X", "gpus": 8, "nodes": 2}))
    assert (more["hsdp"], more["nodes"]) == ("2x8", "2")
    assert changed_values(point, suggestion({"lora_base": "int8"}))["lora_base"] == "int8"
    # A variable of the workers is not an option.
    assert changed_values(point, suggestion({}, environment={"PYTORCH_ALLOC_CONF": "x"})) is None


def test_a_page_whose_work_was_dropped_is_told_to_load_again(site: Site) -> None:
    assert "event: ended" in site.get("/jobs/none/events")
