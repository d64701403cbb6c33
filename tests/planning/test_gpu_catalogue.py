"""GPUs and clusters: data with sources, forgiving names, one clear line for what is not there."""

from __future__ import annotations

import json
import math
import re
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from fsdptool.errors import ConfigError, PlanError
from fsdptool.files.values import load_schema
from fsdptool.planning import hardware as catalogue
from fsdptool.planning.clusters import describe, parse_rate, parse_size, read_cluster
from fsdptool.planning.hardware import all_entries, find_gpu, load_gpu, machine_for, read_table, write_table


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("H100-80GB-SXM", "H100-80GB-SXM"),
        ("nvidia h100 80gb hbm3", "H100-80GB-SXM"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("h100_nvl", "H100-94GB-NVL"),
        ("a100-sxm4-80gb", "A100-80GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB-SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB"),
        ("RTX4090", "RTX-4090-24GB"),
        ("L4", "L4-24GB"),
        ("l40s", "L40S-48GB"),
        ("rtx 6000 ada", "RTX-6000-Ada-48GB"),
        ("rtx pro 6000", "RTX-PRO-6000-96GB"),
        ("mi300x", "MI300X-192GB"),
        ("Tesla T4", "T4-16GB"),
        ("NVIDIA A800-SXM4-80GB", "A800-80GB-SXM"),
        ("NVIDIA A800 80GB PCIe", "A800-80GB-PCIe"),
        ("NVIDIA A800 40GB Active", "A800-40GB-PCIe"),
        ("H800", "H800-80GB-SXM"),
        ("NVIDIA H20", "H20-96GB-SXM"),
        ("NVIDIA H20-3e", "H20-141GB-SXM"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA B300 SXM6 AC", "B300-288GB-SXM"),
        ("B300", "B300-288GB-SXM"),
        ("NVIDIA GB200", "GB200-186GB"),
        ("gb300", "GB300-288GB"),
        ("NVIDIA A30", "A30-24GB"),
        ("RTX-2080Ti-11GB", "RTX-2080Ti-11GB"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080Ti-11GB"),
        ("2080ti", "RTX-2080Ti-11GB"),
        ("rtx 3080", "RTX-3080-10GB"),
        ("RTX3080-10GB", "RTX-3080-10GB"),
        ("RTX 3080 12GB", "RTX-3080-12GB"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX-3080Ti-12GB"),
        ("RTX-3080Ti", "RTX-3080Ti-12GB"),
        ("RTX-4080", "RTX-4080-16GB"),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX-4080-Super-16GB"),
        ("RTX-4070-Ti", "RTX-4070Ti-12GB"),
        ("RTX4070TiSuper", "RTX-4070Ti-Super-16GB"),
        ("NVIDIA GeForce RTX 4090 D", "RTX-4090D-24GB"),
        ("RTX-5080", "RTX-5080-16GB"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX-5070Ti-16GB"),
        ("NVIDIA RTX A5000", "RTX-A5000-24GB"),
        ("NVIDIA TITAN RTX", "Titan-RTX-24GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB-SXM"),
        ("Tesla V100S-PCIE-32GB", "V100S-32GB-PCIe"),
        ("AMD Instinct MI355X", "MI355X-288GB"),
        ("mi350x", "MI350X-288GB"),
        ("MI210", "MI210-64GB"),
    ],
)
def test_names_forgive_what_people_and_drivers_write(name: str, expected: str) -> None:
    found = find_gpu(name)
    assert found.gpu.name == expected
    assert found.diagnostic is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A800", "A800-80GB-SXM"),
        ("A800-80GB", "A800-80GB-SXM"),
        ("A800-40GB", "A800-40GB-SXM"),
        ("H800-80GB", "H800-80GB-SXM"),
        ("V100-16", "V100-16GB-SXM"),
        ("a100 80", "A100-80GB-SXM"),
    ],
)
def test_a_name_without_its_form_takes_the_first_form(name: str, expected: str) -> None:
    assert find_gpu(name).gpu.name == expected


def test_export_models_differ_in_their_links_alone() -> None:
    """An A800 is an A100 with slower NVLink, an H800 an H100."""
    for export, model in (("A800-80GB-SXM", "A100-80GB-SXM"), ("H800-80GB-SXM", "H100-80GB-SXM")):
        ours, theirs = load_gpu(export), load_gpu(model)
        assert (ours.flops, ours.memory_bytes) == (theirs.flops, theirs.memory_bytes)
        assert ours.memory_bandwidth == theirs.memory_bandwidth
        assert ours.link_bandwidth == 200e9 < theirs.link_bandwidth


def test_rates_are_dense_and_in_order() -> None:
    """Half precision is at least as fast as tf32, and fp8 twice as fast: a sparse figure would show."""
    for entry in all_entries():
        flops = entry.gpu.flops
        half = flops["float16"]
        assert flops["float32"] <= half
        if "tf32" in flops:
            assert half / flops["tf32"] == pytest.approx(2, rel=0.03), entry.gpu.name
        if "float8" in flops:
            assert flops["float8"] / half == pytest.approx(2, rel=0.03), entry.gpu.name
        assert entry.gpu.native_bf16 == ("bfloat16" in flops)
        assert entry.gpu.native_fp8 == ("float8" in flops)


def test_an_ambiguous_name_is_resolved_aloud() -> None:
    found = find_gpu("H100-80GB")
    assert found.gpu.name == "H100-80GB-SXM"
    assert found.diagnostic is not None
    assert "H100-80GB-PCIe" in (found.diagnostic.help or "")


def test_every_name_of_the_catalogue_means_itself() -> None:
    for entry in all_entries():
        assert load_gpu(entry.gpu.name) is entry.gpu


def test_the_catalogue_follows_its_schema_and_never_counts_marketing_bytes() -> None:
    raw = json.loads(catalogue._GPUS.read_text(encoding="utf-8"))
    jsonschema.validate(raw, load_schema("gpus"))
    for entry in all_entries():
        gpu = entry.gpu
        assert gpu.marketing_bytes is not None
        assert gpu.source
        assert entry.memory_source
        # What torch reports lies below the binary reading of the name, for every card.
        assert gpu.memory_bytes < gpu.marketing_bytes * 2**30 // 10**9


def test_an_unknown_gpu_names_the_nearest() -> None:
    with pytest.raises(PlanError, match="unknown GPU 'H100-81GB'") as caught:
        find_gpu("H100-81GB")
    assert "H100-80GB-SXM" in (caught.value.help or "")


def test_a_file_extends_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(
        "gpus:\n"
        "- {name: Mine-12GB, aliases: [mine], memory_bytes: 12000000000, flops: {float32: 1.0e13},\n"
        "   memory_bandwidth: 5.0e11, link_bandwidth: 1.6e10, source: a ruler}\n"
        "- {name: T4-16GB, memory_bytes: 15000000000, flops: {float32: 8.0e12, float16: 6.5e13},\n"
        "   memory_bandwidth: 3.0e11, link_bandwidth: 1.6e10, source: a measurement}\n"
    )
    assert find_gpu("mine", gpus_file=path).gpu.native_bf16 is False
    assert find_gpu("t4-16gb", gpus_file=path).gpu.memory_bytes == 15_000_000_000
    assert load_gpu("T4-16GB").memory_bytes != 15_000_000_000


def test_a_cluster_file_is_read_with_its_units(tmp_path: Path) -> None:
    path = tmp_path / "offer.yaml"
    path.write_text(
        "gpu: h100-80gb-sxm\ngpus_per_node: 8\nnodes: 2\ninter_node_bandwidth: 400 Gbit/s\n"
        "host_memory: 2 TiB\nprice_per_gpu_hour: 2.5\nenvironment: {NCCL_DEBUG: WARN, NCCL_IB_DISABLE: 0}\n"
    )
    cluster = read_cluster(path).cluster
    assert cluster.name == "offer"
    assert cluster.world_size == 16
    assert cluster.inter_node_bandwidth == 50e9
    assert cluster.host_memory_bytes == 2 * 2**40
    assert cluster.environment == {"NCCL_DEBUG": "WARN", "NCCL_IB_DISABLE": "0"}


OWN_GPU = (
    "name: Mine, memory_bytes: 8000000000, flops: {float32: 1.0e13}, memory_bandwidth: 1.0e12, source: me"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: h100\n", "gpus_per_node"),
        ("gpu: h100\ngpus_per_node: 0\n", "gpus_per_node"),
        ("gpu: h100\ngpus_per_node: 8\nprize_per_gpu_hour: 2\n", "prize_per_gpu_hour"),
        ("gpu: h100\ngpus_per_node: 8\nhost_memory: 0 GiB\n", "host memory must be positive, not 0"),
        ("gpu: h100\ngpus_per_node: 8\nprice_per_gpu_hour: .nan\n", "price_per_gpu_hour is not a finite"),
        ("gpu: h100\ngpus_per_node: 1048577\n", "1,048,577 ranks are more than is supported"),
        ('gpu: h100\ngpus_per_node: 8\nenvironment: {A: "a\\nb"}\n', "A contains control characters"),
        ("gpu: h100\ngpus_per_node: 8\nenvironment: {a b: 1}\n", "'a b' is not a variable name"),
        ("gpu: h100\ngpus_per_node: 8\nenvironment: {LD_PRELOAD: a}\n", "LD_PRELOAD decides which code"),
        (
            f"gpu: {{{OWN_GPU}, link_bandwidth: .nan}}\ngpus_per_node: 8\n",
            "gpu.link_bandwidth is not a finite",
        ),
        (f"gpu: {{{OWN_GPU}}}\ngpus_per_node: 8\n", "gpu: link_bandwidth is missing"),
        (f"gpu: {{{OWN_GPU}, link_bandwith: 1.0e9}}\ngpus_per_node: 8\n", "gpu: unknown key 'link_bandwith'"),
        ("gpu: nosuch\ngpus_per_node: 8\n", "nosuch"),
        ("gpu: [", "not valid YAML"),
        ("- 1\n", "expected an object"),
    ],
)
def test_a_bad_cluster_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "offer.yaml"
    path.write_text(text)
    with pytest.raises((PlanError, ConfigError)) as caught:
        read_cluster(path)
    mistakes = [caught.value, *getattr(caught.value, "others", ())]
    assert any(message in item.message for item in mistakes)
    assert not any("\n" in item.message for item in mistakes)


def test_whole_numbers_of_a_cluster_file_may_be_written_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "offer.yaml"
    path.write_text(f"gpu: {{{OWN_GPU}, link_bandwidth: 1.0e9}}\ngpus_per_node: 8.0\nhost_memory: 2.0e12\n")
    cluster = read_cluster(path).cluster
    assert (cluster.gpu and cluster.gpu.name, describe(cluster)) == ("Mine", "8 Mine")
    assert cluster.host_memory_bytes == 2 * 10**12


def test_all_mistakes_of_a_cluster_file_are_reported_with_the_nearest_keys(tmp_path: Path) -> None:
    path = tmp_path / "offer.yaml"
    path.write_text("gpu: L4-24GB\ngpu_per_node: 2\nprice: 3\n")
    with pytest.raises(ConfigError) as refused:
        read_cluster(path)
    mistakes = [refused.value, *refused.value.others]
    assert {item.message.removeprefix(f"{path}: ") for item in mistakes} == {
        "gpus_per_node is missing",
        "unknown key 'gpu_per_node'",
        "unknown key 'price'",
    }
    assert "did you mean gpus_per_node?" in [item.help for item in mistakes]


def test_the_cluster_schema_repeats_the_gpu_schema() -> None:
    assert load_schema("cluster")["$defs"]["GpuEntry"] == load_schema("gpus")["$defs"]["GpuEntry"]


def test_sizes_and_rates_are_read_as_written() -> None:
    assert parse_size("1.5 GiB") == 3 * 2**29
    assert parse_size("512GB") == 512 * 10**9
    assert parse_rate("100 Gbit/s") == 12.5e9
    assert parse_rate("25 GB/s") == 25e9
    for text in ("much", "1..5 GiB", "9" * 400, 10**400, math.inf, math.nan):
        with pytest.raises(PlanError):
            parse_size(text)


def test_machine_rows_go_from_special_to_general(tmp_path: Path) -> None:
    assert machine_for(load_gpu("L4")).match == "pcie"
    assert machine_for(load_gpu("H200")).match == "*"
    own = machine_for(load_gpu("H200"))
    path = tmp_path / "machine.json"
    from dataclasses import replace

    path.write_text(write_table((replace(own, match="h200-141gb-sxm", context_bytes=1),)))
    jsonschema.validate(json.loads(path.read_text()), load_schema("machine"))
    assert read_table(path)[0].context_bytes == 1
    assert machine_for(load_gpu("H200"), table=path).context_bytes == 1
    assert machine_for(load_gpu("A100"), table=path).context_bytes == own.context_bytes


def test_what_a_table_says_wins_over_the_generation(tmp_path: Path) -> None:
    """A host that launches more slowly, and blocks that compile better; the rest is the product's."""
    shipped = machine_for(load_gpu("H200"))
    path = tmp_path / "machine.json"
    needed = {
        "name": "own", "match": "*", "context_bytes": 1, "communicator_bytes": 1,
        "further_communicator_bytes": 1, "matmul_efficiency": 0.5, "memory_efficiency": 0.5,
        "link_efficiency": 0.5, "network_efficiency": 0.5, "link_latency": 1e-6, "network_latency": 1e-5,
        "kernel_latency": 2e-5,
    }  # fmt: skip
    row = {**needed, "compiled_traffic": 0.25}
    path.write_text(json.dumps({"version": 1, "machines": [row]}))
    found = machine_for(load_gpu("H200"), table=path)
    assert {name: getattr(found, name) for name in row} == row
    assert found.attention == shipped.attention
    assert found.overlap_slowdown == shipped.overlap_slowdown > 0


def test_every_rate_names_the_measurements_it_rests_on() -> None:
    """Each by itself: a sentence for a whole row hides which of its rates was measured."""
    folder = resources.files("fsdptool") / "planning" / "data"
    data = json.loads((folder / "architectures.json").read_text(encoding="utf-8"))
    plain = {"gpus", "architecture", "links", "sources"}
    for row in (data["every"], *data["architectures"], *data["products"]):
        rates = row.keys() - plain
        rates |= {key for link in row.get("links", {}).values() for key in link}
        assert row["sources"].keys() == rates, row.get("gpus")
        for rate, text in row["sources"].items():
            measured = re.search(r"\d|the same (rows|page|issue)|as on ", text)
            assert measured or text.startswith("assumed"), (row.get("gpus"), rate)
    kernels = json.loads((folder / "fused_kernels.json").read_text(encoding="utf-8"))["parts"]
    assert all(part["source"] for part in kernels.values())
    for machine in json.loads((folder / "machines.json").read_text(encoding="utf-8"))["machines"]:
        assert all(word in machine["source"] for word in ("link:", "network", "buffers"))


def test_a_plan_names_the_source_of_each_rate() -> None:
    told = machine_for(load_gpu("H100-80GB-SXM")).source
    assert "matmul_efficiency: 0.73 at 10,240" in told  # the product's, not its generation's
    assert "fitted to the throughput" not in told
    assert "switch_reduction: " in told
    assert "cached_speedup" not in told
