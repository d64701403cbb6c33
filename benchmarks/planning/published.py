"""Hold plans against what other people measured on GPUs.

    python benchmarks/planning/published.py            # plan the rows that are missing, and write the table
    python benchmarks/planning/published.py --again    # plan every row afresh
    python benchmarks/planning/published.py --docs     # only write the table of published.md

``published.jsonl`` has the rows: who published what, on which hardware, and the recipe, cluster and options
that plan it. ``published_gpus.yaml`` describes GPUs that the catalogue does not have. Results go to
``benchmarks/results/planning_published.json`` after every row. Nothing here was measured by us; the rates of
compute were fitted to the throughput of these rows, so the table shows how well one set of rates describes
them all, not how well it predicts new ones.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from fsdptool.planning import Options, make_plan, read_request
from fsdptool.planning.candidate.conformal import PUBLISHED
from fsdptool.planning.candidate.memory_range import PublishedPeak, reserved_spread
from fsdptool.planning.candidate.throughput_range import (
    Division,
    PublishedError,
    generation_of,
    throughput_range,
)
from fsdptool.planning.hardware import all_entries, find_gpu
from fsdptool.records.cluster import Gpu
from fsdptool.records.diagnostic import library_versions, tool_version
from fsdptool.records.fused_loss import NamedLoss
from fsdptool.records.plan import Assumption, Candidate

HERE = Path(__file__).parent
ROWS = HERE / "published.jsonl"
GPUS = HERE / "published_gpus.yaml"
UNDECIDED = HERE / "undecided.json"
RESULTS = HERE.parent / "results" / "planning_published.json"
DOCS = HERE.parents[1] / "docs" / "explanation" / "published.md"
BLOCK = re.compile(r"(<!-- published -->\n).*?(<!-- end -->)", re.DOTALL)
GIB = 2**30
_DIVISIONS: dict[str, Division] = {"ep": "mixture", "pp": "pipeline", "tp": "tensor"}
RunT = TypeVar("RunT", PublishedError, PublishedPeak)
SPEEDS = {
    "tokens_per_second_and_gpu": "tokens/s per GPU",
    "samples_per_second_and_gpu": "samples/s per GPU",
}


def main() -> None:
    """Plan, compare and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--again", action="store_true", help="plan every row afresh")
    parser.add_argument("--docs", action="store_true", help="only write the documentation")
    parser.add_argument("ids", nargs="*", help="rows to plan; none: all")
    arguments = parser.parse_args()
    document = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    done: dict[str, Any] = {} if arguments.again else document.get("rows", {})
    for row in () if arguments.docs else read_rows():
        if row["id"] in done and row["id"] not in arguments.ids:
            continue
        if arguments.ids and row["id"] not in arguments.ids:
            continue
        done[row["id"]] = compare(row, predict(row))
        print(row["id"], json.dumps(done[row["id"]]), flush=True)
        write(done)
    write(done)
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(BLOCK.sub(lambda block: block[1] + table() + block[2], text), encoding="utf-8")


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return the published rows."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def predict(row: Mapping[str, Any]) -> Candidate:
    """Return our plan of a row: exactly its configuration, without a search."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, cluster = Path(folder) / "recipe.yaml", Path(folder) / "cluster.yaml"
        # Where a row does not say otherwise, blocks are eager and the head returns logits; ``fsdptool train``
        # would decide both.
        sharding = {"compile": False, **row["recipe"].get("sharding", {})}
        objective = {"fused": False, **row["recipe"].get("objective", {})}
        recipe.write_text(json.dumps({**row["recipe"], "sharding": sharding, "objective": objective}))
        # These programs leave torch's default where they set nothing; ``fsdptool train`` does not.
        environment = {
            "PYTORCH_ALLOC_CONF": "expandable_segments:False",
            **row["cluster"].get("environment", {}),
        }
        cluster.write_text(json.dumps({**row["cluster"], "environment": environment}))
        files = {"recipe": recipe, "clusters": (cluster,), "gpus_file": GPUS}
        options = cast("Options", {**files, **row["options"], "search": False})
        return make_plan(read_request(options)).candidates[0]


def compare(row: Mapping[str, Any], planned: Candidate) -> dict[str, Any]:
    """Return what is published beside what is planned, kind by kind."""
    result: dict[str, Any] = {}
    memory = row["published"]["memory"]
    if memory is not None:
        kinds = {memory["kind"]: memory["gib"]}
        if "active_gib" in memory:
            kinds["active"] = memory["active_gib"]
        for kind, published in kinds.items():
            size = planned.reserved_peak_bytes if kind == "reserved" else planned.allocated_peak_bytes
            assert size is not None
            result[kind] = _pair(published, size / GIB)
    throughput = row["published"]["throughput"]
    if throughput is not None:
        for field, (name, speed) in {
            "tokens_per_s_gpu": ("tokens_per_second_and_gpu", planned.tokens_per_second),
            "samples_per_s_gpu": ("samples_per_second_and_gpu", planned.samples_per_second),
        }.items():
            if field in throughput and speed is not None:
                result[name] = _pair(throughput[field], speed / row["gpus"])
        result["seconds"] = {name: round(value, 4) for name, value in planned.seconds.items()}
        result["mfu"] = round(planned.mfu or 0.0, 4)
    return result


def write(done: Mapping[str, Any]) -> None:
    """Save the rows in the order of the file, with the summary of each group."""
    ordered = {row["id"]: done[row["id"]] for row in read_rows() if row["id"] in done}
    document = {
        "benchmark": "planning/published",
        "fsdptool": tool_version(),
        "libraries": library_versions(),
        "rows": ordered,
        "summary": summary(ordered),
        "leave_one_source_out": coverage(errors(ordered)),
        "reserved_leave_one_source_out": reserved_coverage(peaks(ordered)),
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    shipped = {
        "version": 1,
        "rows": [asdict(item) for item in errors(ordered)],
        "reserved": [asdict(item) for item in peaks(ordered)],
    }
    PUBLISHED.write_text(json.dumps(shipped, indent=1) + "\n", encoding="utf-8")


def summary(done: Mapping[str, Any]) -> dict[str, Any]:
    """Return planned over published per group: median, 10th and 90th percentile, extremes."""
    groups: dict[str, list[float]] = {}
    for row in read_rows():
        for what, pair in done.get(row["id"], {}).items():
            if isinstance(pair, dict) and "ratio" in pair:
                groups.setdefault(_group(row, what), []).append(pair["ratio"])
                if what in SPEEDS and _division(row) is not None:
                    groups.setdefault("throughput, no rate fitted", []).append(pair["ratio"])
    return {name: _spread(ratios) for name, ratios in sorted(groups.items())}


def _group(row: Mapping[str, Any], what: str) -> str:
    divided = _division(row)
    if divided is not None:
        return f"{'throughput' if what in SPEEDS else f'memory, {what}'}, {divided}"
    if what not in SPEEDS:
        kind = "reserved" if what == "reserved" else "allocated"
        return f"memory, {kind}, {'alike' if row['class'] == 'clean' else 'different in known ways'}"
    compiled = "eager" if row["compile"].startswith("eager") else "compiled"
    if row.get("gpu_unknown"):
        return f"throughput, GPU not stated, {compiled}"
    product = find_gpu(row["cluster"]["gpu"], gpus_file=GPUS).gpu.name.removeprefix("RTX-").split("-")[0]
    return f"throughput, {product}, {compiled}"


def _division(row: Mapping[str, Any]) -> str | None:
    """Return how a row divides the model or rounds its products; no rate is fitted to rows that do."""
    options = row["options"]
    assumed = options.get("assume", ())
    if options.get("pp", 1) > 1:
        return "pipeline parallel"
    if options.get("tp", 1) > 1:
        return "tensor parallel" + ", float8" * ("float8" in assumed) + ", async TP" * ("async_tp" in assumed)
    if options.get("ep", 1) > 1:
        return "expert parallel"
    return "float8" if options.get("precision") == "fp8" else None


def errors(done: Mapping[str, Any]) -> list[PublishedError]:
    """Return how far every published throughput lies from our plan; runs on unnamed GPUs are left out."""
    found = []
    for row in read_rows():
        pair = speed_of(done.get(row["id"], {}))
        if pair is None or row.get("gpu_unknown"):
            continue
        gpu = find_gpu(row["cluster"]["gpu"], gpus_file=GPUS).gpu
        found.append(
            PublishedError(
                id=row["id"],
                source=row["source_group"],
                what=_what(row, gpu.name),
                gpu=gpu.name,
                generation=generation_of(gpu),
                division=_kind(row),
                ratio=round(1 / pair["ratio"], 3),
            )
        )
    return found


def peaks(done: Mapping[str, Any]) -> list[PublishedPeak]:
    """Return how far every published reserved peak lies from our plan."""
    found = []
    for row in read_rows():
        pair = done.get(row["id"], {}).get("reserved")
        if pair is None:
            continue
        gpu = find_gpu(row["cluster"]["gpu"], gpus_file=GPUS).gpu
        environment = json.dumps(row["cluster"].get("environment", {}))
        found.append(
            PublishedPeak(
                id=row["id"],
                source=row["source_group"],
                what=_what(row, gpu.name),
                expandable="expandable_segments:True" in environment,
                sharded=row["gpus"] > 1,
                division=_kind(row),
                ratio=round(1 / pair["ratio"], 3),
            )
        )
    return found


def _what(row: Mapping[str, Any], gpu: str) -> str:
    return f"{row['model'].split(' (')[0]}, {row['gpus']} x {gpu}"


def _kind(row: Mapping[str, Any]) -> Division:
    options = row["options"]
    for name, division in _DIVISIONS.items():
        if options.get(name, 1) > 1:
            return division
    return "float8" if options.get("precision") == "fp8" else "dense"


def speed_of(pairs: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the published and the planned throughput of a row, in whatever unit it has."""
    speed: dict[str, float] | None = next((pairs[name] for name in SPEEDS if name in pairs), None)
    return speed


def coverage(found: Sequence[PublishedError]) -> dict[str, Any]:
    """Return how many runs lie in the range of throughput that the runs of all other sources give."""

    def ends(item: PublishedError, others: Sequence[PublishedError]) -> tuple[float, float]:
        judged = throughput_range(item.gpu, item.generation, item.division, others)
        return judged.slow, judged.fast

    return _judged(found, ends)


def reserved_coverage(found: Sequence[PublishedPeak]) -> dict[str, Any]:
    """Return the same for the range of reserved memory."""

    def ends(item: PublishedPeak, others: Sequence[PublishedPeak]) -> tuple[float, float]:
        judged = reserved_spread(item.expandable, item.sharded, item.division, others)
        return judged.low, judged.high

    return _judged(found, ends)


def _judged(
    found: Sequence[RunT], ends: Callable[[RunT, Sequence[RunT]], tuple[float, float]]
) -> dict[str, Any]:
    if len({item.source for item in found}) < 2:
        return {}
    inside: dict[str, list[bool]] = {}
    widths = []
    for item in found:
        low, high = ends(item, [other for other in found if other.source != item.source])
        inside.setdefault(item.source, []).append(low <= item.ratio <= high)
        widths.append(high / low)
    shares = {source: sum(hits) / len(hits) for source, hits in inside.items()}
    off = [abs(1 / item.ratio - 1) for item in found]
    return {
        "rows": len(found),
        "sources": len(inside),
        "inside": sum(map(sum, inside.values())),
        "share": round(sum(map(sum, inside.values())) / len(found), 3),
        "share_of_a_source": round(statistics.mean(shares.values()), 3),
        "median_width": round(statistics.median(widths), 3),
        "median_error": round(statistics.median(off), 3),
        "outside": {
            source: [len(hits) - sum(hits), len(hits)] for source, hits in inside.items() if not all(hits)
        },
    }


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    ordered = sorted(ratios)
    return {
        "rows": len(ordered),
        "median": round(statistics.median(ordered), 3),
        "p10": round(percentile(ordered, 0.1), 3),
        "p90": round(percentile(ordered, 0.9), 3),
        "least": ordered[0],
        "most": ordered[-1],
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values, between its neighbours in proportion."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _pair(published: float, planned: float) -> dict[str, float]:
    digits = 2 if published < 1000 else 0
    return {
        "published": round(published, digits),
        "planned": round(planned, digits),
        "ratio": round(planned / published, 3),
    }


def table() -> str:
    """Return the committed results in Markdown: the groups, then every row."""
    document = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = ["| group | rows | median | P10 | P90 | least | most |", "|---|---|---|---|---|---|---|"]
    for name, item in document["summary"].items():
        cells = " | ".join(f"{item[key]:.2f}" for key in ("median", "p10", "p90", "least", "most"))
        lines.append(f"| {name} | {item['rows']} | {cells} |")
    lines += ["", *_coverage_lines("Throughput", document["leave_one_source_out"])]
    lines += ["", *_coverage_lines("Reserved memory", document["reserved_leave_one_source_out"])]
    lines += ["", "| row | figure | published | planned | ratio |", "|---|---|---|---|---|"]
    lines += list(_lines(document["rows"]))
    lines += ["", "Rows that miss by more than 5 % in memory or 20 % in throughput:", ""]
    lines += ["| row | what is known |", "|---|---|"]
    lines += [f"| `{row['id']}` | {row['miss']} |" for row in read_rows() if "miss" in row]
    lines += ["", "What no row decides:", "", *(f"- {item}" for item in undecided())]
    return "\n".join(lines) + "\n"


def undecided() -> Iterator[str]:
    """Yield what plans assume and no published row measured."""
    rows = read_rows()
    timed = [row for row in rows if row["published"]["throughput"] is not None]
    assumed = {name for row in timed for name in row["options"].get("assume", ())}
    losses = {row["options"].get("loss") for row in rows}
    without = [f"`--assume {name}`" for name in get_args(Assumption) if name not in assumed]
    without += [f"`--loss {name}`" for name in get_args(NamedLoss) if name not in losses]
    if without:
        yield f"No row ran {' or '.join(without)}."
    gpus = [
        find_gpu(row["cluster"]["gpu"], gpus_file=GPUS).gpu for row in timed if not row.get("gpu_unknown")
    ]
    products = {gpu.name.rpartition("-")[0] or gpu.name for gpu in gpus}
    generations = {generation_of(gpu) for gpu in gpus}
    missing = [entry.gpu for entry in all_entries() if generation_of(entry.gpu) not in generations]
    yield (
        f"Throughput was published for {len(products)} products, but for no GPU of the generations"
        f" {_names(missing)}."
    )
    largest = max(row["gpus"] for row in timed)
    yield f"No row has more than {largest} GPUs: latencies of larger groups are extrapolated."
    yield from json.loads(UNDECIDED.read_text(encoding="utf-8"))["facts"]


def _names(gpus: Sequence[Gpu]) -> str:
    """Return each generation with an example."""
    examples = {generation_of(gpu): gpu.name for gpu in reversed(gpus)}
    return ", ".join(f"{name} ({example})" for name, example in sorted(examples.items()))


def _coverage_lines(name: str, judged: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{name}: the median error of {judged['rows']} runs is {judged['median_error']:.1%}. Judged by"
        f" the runs of the {judged['sources'] - 1} other sources alone, {judged['inside']} runs"
        f" ({judged['share']:.0%}) lie in the printed range of P10 to P90, whose ends differ by a factor of"
        f" {judged['median_width']:.2f} in the median."
    )
    yield "Outside it:"
    yield ""
    yield "| source | outside | runs |"
    yield "|---|---|---|"
    yield from (f"| {source} | {out} | {rows} |" for source, (out, rows) in judged["outside"].items())


def _lines(done: Mapping[str, Any]) -> Iterator[str]:
    for row in read_rows():
        for what, pair in done.get(row["id"], {}).items():
            if not isinstance(pair, dict) or "ratio" not in pair:
                continue
            figure = SPEEDS.get(what, f"{what}, GiB")
            shown = f"{pair['published']:,.4g}", f"{pair['planned']:,.4g}"
            if what == "tokens_per_second_and_gpu":
                shown = f"{pair['published']:,.0f}", f"{pair['planned']:,.0f}"
            yield (
                f"| `{row['id']}`: {row['model']}, {row['gpus']} x {row['gpu'].split(' (')[0].split(';')[0]}"
                f" | {figure} | {shown[0]} | {shown[1]} | {pair['ratio']:.2f} |"
            )


if __name__ == "__main__":
    main()
