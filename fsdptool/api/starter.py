"""What ``init`` writes: a recipe and an accelerate YAML for a model, a method and data."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, cast

from fsdptool.errors import ConfigError
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import SYNTHETIC_SAMPLES, Data, DataOptions, ModelChoice, Recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsdptool.families.protocol import Objective
    from fsdptool.planning.request.options import Options
    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.command_documents import DataKind
    from fsdptool.records.plan import Plan

_ROWS, _FILES = 64, 5000
"""Rows and files that are looked at."""
_PROMPTS = (
    *(("prompt", "completion"), ("prompt", "response"), ("instruction", "output")),
    *(("instruction", "response"), ("question", "answer"), ("query", "response"), ("input", "output")),
)
_PAIRS = (("source", "target"), ("article", "highlights"), ("document", "summary"), ("text", "summary"))
_LABELS = ("label", "labels", "class", "category", "sentiment")
_TEXTS = ("text", "content", "body", "document")
_CHARACTERS = 3
"""Characters per token, on the low side: English has about four."""
_OFTEN_ADDED = """
# Often added (docs/how-to/write-a-recipe.md):
# evaluation: {every_steps: 100, holdout: 0.02}
# tracking: {backends: [tensorboard]}
"""
_ASSISTANT_ONLY = """\
# To learn only what the assistant says, add under data: assistant_only_loss: true
# (docs/how-to/train-on-text.md)
"""


@dataclass(frozen=True, slots=True)
class DataLook:
    """What a file or folder turned out to hold.

    Attributes:
        data: The recipe's section.
        kind: How its samples are read.
        columns: Columns of its first row; empty without rows.
        longest: Characters of the longest text among the rows that were read, or None.
        samples: About how many there are, or None where that would take reading them.
        characters: About how many characters they have together, or None.
        pictures: Height and width in pixels of the pictures that were looked at; empty for text.
    """

    data: Data
    kind: DataKind
    columns: tuple[str, ...] = ()
    longest: int | None = None
    samples: int | None = None
    characters: int | None = None
    pictures: tuple[tuple[int, int], ...] = ()


def look_at(path: str, objective: Objective) -> DataLook:
    """Inspect data: its files, the columns of its first rows, and whether they are chats, texts or images.

    Args:
        path: File or folder, the Hugging Face id of a dataset, or code (``package.module:name``); the last
            two are not looked at.
        objective: What they are for.

    Raises:
        ConfigError: There is nothing, or nothing that the objective can be trained on.
    """
    from fsdptool.source.hub import looks_like_id
    from fsdptool.source.references import is_import
    from fsdptool.training.data.images import STILLS, picture_size
    from fsdptool.training.data.sources import TEXT_SUFFIXES

    place = Path(path).expanduser()
    if is_import(path) and not place.exists():
        return DataLook(Data(source="python", path=path), "code")
    if objective.samples is None:
        raise ConfigError(
            f"--data {path}: objective {objective.name} is trained on samples of your own code alone",
            help="leave --data out, or give it package.module:name (docs/how-to/name-data.md)",
        )
    tables = (".jsonl", ".json", ".ndjson", ".csv", ".tsv")
    kinds = {
        **dict.fromkeys(tables, "jsonl"),
        ".parquet": "parquet",
        **dict.fromkeys(TEXT_SUFFIXES, "text"),
        **dict.fromkeys(STILLS, "images"),
    }
    if not place.exists():
        # A dataset of the Hub may have a dot in its name, but not the ending of a file that is read here.
        if looks_like_id(path) and not path.startswith(".") and place.suffix.lower() not in kinds:
            return DataLook(Data(source="dataset", path=path), "unread")
        raise ConfigError(f"--data {path} does not exist", help="check the spelling")
    if any((place / name).is_file() for name in ("dataset_info.json", "dataset_dict.json", "state.json")):
        return DataLook(Data(source="dataset", path=path), "unread")
    below = itertools.islice(place.rglob("*"), _FILES)
    files = [place] if place.is_file() else [file for file in below if file.is_file()]
    sizes = _bytes_by_kind(files, kinds)
    if not sizes:
        raise ConfigError(
            f"--data {path} contains no file of a known kind",
            help=f"fsdptool reads {', '.join(sorted(kinds))} (docs/how-to/name-data.md)",
        )
    # The kind with the most bytes is the data; texts beside as much of another kind describe it.
    found = max(sizes, key=lambda kind: (sizes[kind], kind != "text"))
    # Pictures come with captions in text files beside them.
    source = "images" if "images" in sizes else found
    if source == "images":
        if objective.samples not in ("latents", "labelled"):
            raise ConfigError(f"--data {path} holds images, and the model is trained on text")
        stills = sorted(file for file in files if kinds.get(file.suffix.lower()) == "images")
        some = stills[:: math.ceil(len(stills) / _ROWS)]
        return DataLook(
            Data(source="images", path=path),
            "images",
            samples=len(stills),
            pictures=tuple(map(picture_size, some)),
        )
    if objective.samples == "latents":
        raise ConfigError(f"--data {path} holds text, and the model is trained on images")
    from fsdptool.training.data.sources import open_source

    data_section = Data(source=source, path=path)  # type: ignore[arg-type]
    rows = list(itertools.islice(open_source(data_section).rows(), _ROWS + 1))
    if not rows:
        raise ConfigError(f"--data {path} has no rows", help="name another file or folder")
    written = sum(len(json.dumps(row, default=str, ensure_ascii=False)) for row in rows)
    samples: int | None = None
    characters: int | None = None
    if len(rows) <= _ROWS:
        samples, characters = len(rows), written
    elif source != "parquet":
        characters = sum(file.stat().st_size for file in files if kinds.get(file.suffix.lower()) == source)
        samples = characters * len(rows) // written
    look = _rows(data_section, objective, rows[:_ROWS])
    return replace(look, samples=samples, characters=characters)


def _bytes_by_kind(files: Sequence[Path], kinds: Mapping[str, str]) -> Counter[str]:
    """Return the bytes of the files of each kind; texts about the data count as none."""
    sizes: Counter[str] = Counter()
    for file in files:
        if (kind := kinds.get(file.suffix.lower())) is not None:
            sizes[kind] += 0 if file.stem.upper() in _ABOUT else file.stat().st_size
    return sizes


def _rows(data: Data, objective: Objective, rows: Sequence[Mapping[str, Any]]) -> DataLook:
    if data.source == "text":
        return DataLook(data, "text", (), None)
    columns = tuple(str(name) for name in rows[0])
    if not columns:
        raise ConfigError(f"--data {data.path}: the first row is empty", help="write text into each row")
    if objective.samples == "documents":
        for name in columns:
            turns = rows[0][name]
            if _is_chat(turns):
                return _chat(data, name, columns, rows)
        pair = _first_pair(_PROMPTS, columns)
        if pair is not None:
            data = replace(data, text_column=pair[1], options={"prompt_column": pair[0]})
            return DataLook(data, "prompts", columns, _longest(rows, pair))
    if objective.samples == "pairs":
        pair = _first_pair((*_PAIRS, *_PROMPTS), columns)
        if pair is None:
            raise ConfigError(
                f"--data {data.path}: no pair of columns is known among {', '.join(columns)}",
                help="name the columns source and target, or set them in the recipe"
                " (docs/how-to/train-on-text.md)",
            )
        options: DataOptions = {}
        if pair != _PAIRS[0]:
            options = {"source_column": pair[0], "target_column": pair[1]}
        return DataLook(replace(data, options=options), "pairs", columns, _longest(rows, pair))
    text = _text_column(rows, columns, data)
    data = replace(data, text_column=text)
    if objective.samples != "labelled":
        return DataLook(data, "text", columns, None)
    label = next((name for name in _LABELS if name in columns), None)
    if label is None:
        raise ConfigError(
            f"--data {data.path}: no label among the columns {', '.join(columns)}",
            help="name the column label, or set data.options.label_column in the recipe",
        )
    given: DataOptions = {} if label == "label" else {"label_column": label}
    return DataLook(replace(data, options=given), "labels", columns, _longest(rows, (text,)))


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) for turn in value)


def _chat(data: Data, column: str, columns: tuple[str, ...], rows: Sequence[Mapping[str, Any]]) -> DataLook:
    chats = [row[column] for row in rows if row.get(column)]
    if not all(map(_is_chat, chats)):
        raise ConfigError(
            f"--data {data.path}: {column} is a list of turns only in some rows",
            help="write a list of {role, content} in every row",
        )
    strange = next((turn for chat in chats for turn in chat if "role" not in turn), None)
    if strange is not None:
        shown = ", ".join(sorted(map(str, strange)))
        raise ConfigError(
            f"--data {data.path}: a turn of {column} has the keys {shown}, not role and content",
            help="rename them, for example with datasets.map",
        )
    options: DataOptions = {} if column == "messages" else {"messages_column": column}
    longest = max(sum(len(str(turn.get("content") or "")) for turn in chat) for chat in chats)
    # A column of this name would take precedence over the messages.
    text_column = "text" if "text" not in columns else column
    return DataLook(replace(data, text_column=text_column, options=options), "chat", columns, longest)


def _first_pair(pairs: Sequence[tuple[str, str]], columns: Sequence[str]) -> tuple[str, str] | None:
    return next((pair for pair in pairs if set(pair) <= set(columns)), None)


def _longest(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> int:
    return max(sum(len(str(row.get(name) or "")) for name in columns) for row in rows)


def _text_column(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], data: Data) -> str:
    """Return the usual name, or the column with the most text."""
    lengths = {
        name: sum(len(row[name]) for row in rows if isinstance(row.get(name), str)) for name in columns
    }
    for name in _TEXTS:
        if lengths.get(name):
            return name
    most = max(columns, key=lambda name: lengths[name])
    if not lengths[most]:
        raise ConfigError(
            f"--data {data.path}: none of the columns {', '.join(columns)} holds text",
            help="set data.text_column in a recipe (docs/how-to/train-on-text.md)",
        )
    return most


@dataclass(frozen=True, slots=True)
class Starter:
    """A recipe and a configuration that run together.

    Attributes:
        recipe, config: The two files' texts; None where nothing fits.
        plan: What the configuration was chosen by.
        look: What the data turned out to be, or None without data.
        has_weights: Whether there are weights to start from.
        hub_id: The Hugging Face id whose weights fit a flavour, or None.
        on_cpu: Whether it was written for the CPU because there are no GPUs.
        latents: Whether its images are encoded before training (``precompute``).
    """

    recipe: str | None
    config: str | None
    plan: Plan
    look: DataLook | None
    has_weights: bool
    hub_id: str | None
    on_cpu: bool
    latents: bool


def prepare_starter(
    options: Mapping[str, Any],
    *,
    data: str | None,
    folder: Path = Path(),
    trust_remote_code: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Starter:
    """Inspect the model and the data, plan, and return the text of both files.

    Args:
        options: Options of ``plan``: reference, method, hardware and sizes; None where not given.
        data: File, folder or dataset id; None leaves generated samples.
        folder: Where the files will be: relative paths of the recipe are written for it.
        trust_remote_code: Whether the model's own code may run.
        progress: Called with a line as the search proceeds.

    Raises:
        FsdptoolError: The model or the data cannot be used; one line.
    """
    from fsdptool.api.emit_config import from_plan
    from fsdptool.config.dialects.accelerate.schema import NAME
    from fsdptool.config.recipe import dump_recipe
    from fsdptool.config.writer import schema_comment
    from fsdptool.modeling.objective import objective_for
    from fsdptool.planning.plan import chosen_candidate, make_plan
    from fsdptool.planning.request.inputs import read_request
    from fsdptool.source import check_weights, rebased, resolve

    options = {name: value for name, value in options.items() if value is not None}
    reference, given, published = _of_file(options)
    spec = resolve(reference, trust_remote_code=trust_remote_code)
    check_weights(spec, ModelChoice(reference))
    objective = objective_for(Recipe(ModelChoice(reference)), spec)
    look = look_at(data, objective) if data is not None else None
    on_cpu = _complete_hardware(given)
    _complete_sizes(given, spec, objective, look)
    if trust_remote_code:
        given["trust_remote_code"] = True
    request = read_request(cast("Options", given))
    # A plan in which the run saves before its end: the interval follows from it.
    request = replace(request, inputs=replace(request.inputs, recipe=_saving(request.inputs.recipe, 1)))
    plan = make_plan(request, progress=progress)
    has_weights = bool(spec.weights) or spec.reference.kind == "hub" or published is not None
    hub_id = _hub_id(spec)
    if plan.chosen is None:
        return Starter(None, None, plan, look, has_weights, hub_id, on_cpu, latents=False)
    emission = from_plan(plan, trust_remote_code=trust_remote_code)
    assert emission.recipe is not None
    recipe = _with_data(emission.recipe, spec, look)
    if published is not None:
        recipe = replace(recipe, model=replace(recipe.model, reference=published))
    steps = _run_steps(recipe, look, emission.settings.num_processes or 1)
    recipe = _saving(recipe, _save_interval(steps, chosen_candidate(plan).step_seconds))
    if recipe.method.name == "lora":
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, learning_rate=2e-4))
    elif has_weights:
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, learning_rate=2e-5))
    header = f"Written by fsdptool init. Check it: fsdptool train RECIPE --config CONFIG --dry-run\n{_MORE}"
    if not has_weights:
        header += f"\n{reference} has no weights: training starts at random."
        header += f" {hub_id} has them: name it as reference." if hub_id else ""
    latents = look is not None and look.kind == "images" and objective.samples == "latents"
    text = (
        schema_comment("recipe", folder) + dump_recipe(rebased(recipe, folder), header=header) + _OFTEN_ADDED
    )
    text += _ASSISTANT_ONLY if look is not None and look.kind == "chat" else ""
    config = schema_comment(NAME, folder) + emission.text()
    return Starter(text, config, plan, look, has_weights, hub_id, on_cpu, latents)


def _of_file(options: Mapping[str, Any]) -> tuple[str, dict[str, Any], str | None]:
    """Return the model, options that carry the run of a training file that is given for it, and its weights.

    fsdptool's own training loop is planned for it. The weights are those that the file names, where its model
    is planned as one of the catalogue.

    Raises:
        ConfigError: No recipe trains what the file asks for.
    """
    from fsdptool.planning.request.file_run import file_run, is_recipe, read_file_run

    reference, given = str(options["reference"]), dict(options)
    run = read_file_run(reference)
    if run is None:
        return reference, given, None
    if run.program == "fsdptool":
        raise ConfigError(f"{reference} is a recipe already", help="train it, or name its model")
    if not is_recipe(run):
        what = f"{run.method or 'full'}, {run.objective}"
        raise ConfigError(
            f"{reference} asks for what init does not write: {what}", help=f"see fsdptool explain {reference}"
        )
    gpus, nodes = options.get("gpus"), options.get("nodes")
    ranks = (gpus or 1) * (nodes or 1) if gpus or nodes else run.processes or 1
    made = file_run(run, None, reference, ranks)
    recipe, settings = made.recipe, made.settings
    if run.fsdp == "none":
        settings = replace(settings, mesh=ParallelDims(), ignored_modules=None)
    published = run.model if recipe.model.reference == run.family else None
    batch = recipe.batch
    sizes = {"sequence_length": batch.sequence_length, "height": batch.height, "width": batch.width}
    del given["reference"]
    known = {name: value for name, value in sizes.items() if value is not None}
    more = {"gpus": ranks if not nodes else gpus, "recipe": recipe, "config": settings}
    return recipe.model.reference, {**known, **more, **given}, published


def _saving(recipe: Recipe, every: int) -> Recipe:
    return replace(recipe, checkpoints=replace(recipe.checkpoints, every_steps=every))


def _run_steps(recipe: Recipe, look: DataLook | None, ranks: int) -> int | None:
    """Return about how many steps an epoch takes, or None where the size of the data is not known."""
    if look is None:
        samples: int | None = SYNTHETIC_SAMPLES
    elif recipe.data.packing and recipe.batch.sequence_length and look.kind in _PACKED:
        samples = look.characters and look.characters // (_CHARACTERS * recipe.batch.sequence_length)
    else:
        samples = look.samples
    if samples is None:
        return None
    batch = recipe.batch.global_batch or recipe.batch.micro_batch * recipe.batch.accumulation * ranks
    return max(samples // batch, 1)


def _save_interval(steps: int | None, seconds: float | None) -> int:
    """Return after how many steps to save: a tenth of a run, but at least a minute and at most half an hour.

    Args:
        steps: Steps of the run, or None if that is not known.
        seconds: Time of a step, or None.
    """
    every = steps / 10 if steps is not None else _USUAL_INTERVAL
    if seconds:
        every = min(max(every, 60.0 / seconds), 1800.0 / seconds)
    if steps is not None:
        every = min(every, steps / 2)
    every = max(every, 1.0)
    scale = int(10 ** math.floor(math.log10(every)))
    return max(digit * scale for digit in (1, 2, 5) if digit * scale <= every)


_USUAL_INTERVAL = 100
_ABOUT = ("README", "LICENSE", "LICENCE", "COPYING")
"""Names of texts about data."""
_PACKED = ("chat", "prompts", "text")
_MORE = "Every key: fsdptool schema recipe, and docs/how-to/write-a-recipe.md"


def _complete_hardware(given: dict[str, Any]) -> bool:
    """Use this machine's GPUs if none are named, else two processes on its CPU (returns True)."""
    from fsdptool.distributed.devices import count_gpus, gpu_name

    if given.get("gpu") is None and given.get("profile") is None:
        here = count_gpus()
        name = gpu_name() if here else None
        if name is None:
            given.update(profile="cpu-gloo", gpus=given.get("gpus", 2), search=False)
            return True
        given.update(gpu=name, gpus=given.get("gpus", here))
    given.setdefault("gpus", 1)
    return False


def _complete_sizes(
    given: dict[str, Any], spec: ModelSpec, objective: Objective, look: DataLook | None
) -> None:
    if objective.samples == "latents":
        if "height" not in given and "width" not in given:
            given["height"], given["width"] = starting_pixels(spec, look)
        given.setdefault("height", given.get("width"))
        given.setdefault("width", given["height"])
    elif "sequence_length" not in given and objective.samples is not None and "image_size" not in spec.config:
        tokens = 2048
        if look is not None and look.longest is not None:
            tokens = min(max(1 << (look.longest // _CHARACTERS).bit_length(), 256), 4096)
        if given.get("profile") is not None:
            tokens = min(tokens, 256)
        limits = (_size(spec, name) for name in ("max_position_embeddings", "n_positions"))
        given["sequence_length"] = min([tokens, *(limit for limit in limits if limit)])


def starting_pixels(spec: ModelSpec, look: DataLook | None) -> tuple[int, int]:
    """Return the height and width that the model was trained at, or a smaller size of this shape.

    At least half of the pictures cover it without being enlarged, unless they are smaller than one step.
    """
    from fsdptool.families.registry import family_of

    family: Any = family_of(spec)
    if not hasattr(family, "native_size"):
        return 1024, 1024
    (height, width), step = family.native_size(spec.config), family.pixel_step(spec.config)
    covered = [min(tall / height, wide / width) for tall, wide in (look.pictures if look else ())]
    scale = min(1.0, median_low(covered)) if covered else 1.0
    # The small addition keeps 384 / 512 * 512 from falling below 384.
    sides = (max(int(side * scale / step + 1e-9), 1) * step for side in (height, width))
    return next(sides), next(sides)


def _size(spec: ModelSpec, name: str) -> int | None:
    inner = spec.config.get("text_config")
    config = inner if isinstance(inner, Mapping) else spec.config
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None


def _with_data(recipe: Recipe, spec: ModelSpec, look: DataLook | None) -> Recipe:
    if look is None:
        return recipe
    data = look.data
    if look.kind not in ("images", "code") and not _has_tokenizer(spec):
        data = replace(data, tokenizer=_hub_id(spec) or "bytes")
    return replace(recipe, data=data)


def _has_tokenizer(spec: ModelSpec) -> bool:
    from fsdptool.training.data.tokenizer import holds_tokenizer

    if spec.folder is None:
        return spec.reference.kind == "hub"
    return holds_tokenizer(Path(spec.folder))


def _hub_id(spec: ModelSpec) -> str | None:
    """Return the Hugging Face id of a flavour's weights and tokenizer, or None."""
    from fsdptool.families.registry import family_of

    return family_of(spec).flavours()[spec.flavour].hub_id if spec.flavour is not None else None
