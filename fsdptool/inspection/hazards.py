"""Hazards of a model under accelerate 1.15 and torch 2.13, and the setting that avoids each. Torch-free.

Each rule was reproduced on those versions (docs/reference/plan-findings.md says how).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from fsdptool.errors import ConfigError
from fsdptool.inspection.census import Census
from fsdptool.layout import group
from fsdptool.layout.accelerate import NoForwardError
from fsdptool.records.anatomy import Anatomy, NoSplitEntry, Parameter, WrapChoice
from fsdptool.records.diagnostic import Diagnostic, Rule
from fsdptool.records.sharding import FsdpSettings

PERSISTENT_BUFFERS = "DET201"
REFUSED = "DET202"
ABSENT_NAMES = "DET203"
EMPTY_NAMES = "DET204"
NAMES_REFUSED = "DET205"
NOTHING_TO_WRAP = "DET206"
MIXED_DTYPES = "DET207"
TWO_WAY_TIE = "DET208"
OTHER_TIES = "DET209"
NESTED_CLASSES = "DET210"
SIZE_REFUSED = "DET211"
FUSED_EXPERTS = "DET212"
LIBRARY_PLAN = "DET213"
UNLISTED_BLOCKS = "DET214"
SCALARS = "DET215"
EMPTY = "DET216"
HOOKLESS = "DET217"
EXPERT_MODULES = "DET218"
TOWERS = "DET219"


BY_CHOICE = frozenset({REFUSED, EMPTY_NAMES, ABSENT_NAMES, NAMES_REFUSED, NOTHING_TO_WRAP, NESTED_CLASSES})
BY_CHOICE |= {UNLISTED_BLOCKS}
"""Codes that depend on the wrap choice."""


def model_hazards(anatomy: Anatomy) -> tuple[Diagnostic, ...]:
    """Return the hazards of a model whatever is wrapped."""
    return (
        *_buffers(anatomy),
        *_ties(anatomy),
        *_scalars(anatomy),
        *_empty(anatomy),
        *_hookless(anatomy),
        *_by_size(anatomy),
        *_dtypes(anatomy),
        *_experts(anatomy),
        *_uneven(anatomy),
        *_plan(anatomy),
    )


def choice_hazards(anatomy: Anatomy, census: Census) -> tuple[Diagnostic, ...]:
    """Return the hazards that depend on the wrap choice."""
    return (*_refused(anatomy), *_names(anatomy, census), *_classes(anatomy.wrap, census))


def _buffers(anatomy: Anatomy) -> Iterator[Diagnostic]:
    persistent = [buffer.fqn for buffer in anatomy.buffers if buffer.persistent]
    if persistent:
        yield _warn(
            PERSISTENT_BUFFERS,
            f"{_some(persistent, 'persistent buffer')}: accelerate 1.15 crashes on them when"
            " fsdp_cpu_ram_efficient_loading is on, which is the launcher's default",
            "set fsdp_cpu_ram_efficient_loading: false",
        )


def _ties(anatomy: Anatomy) -> Iterator[Diagnostic]:
    ends = {f"{path}.weight" for path in (anatomy.input_embedding, anatomy.output_embedding) if path}
    other = []
    for parameter in anatomy.parameters:
        if parameter.aliases and len(ends) == 2 and ends == set(parameter.names):
            yield _info(
                TWO_WAY_TIE,
                f"input and output embedding are one tensor of {parameter.numel:,} parameters:"
                " accelerate 1.15 keeps it gathered from forward to backward",
                "expected for tied models; `plan` accounts for this",
            )
        elif parameter.aliases:
            other.append(parameter)
    if other:
        worst = max(other, key=lambda parameter: len(parameter.names))
        listed = " = ".join(worst.names[:4]) + (" = ..." if len(worst.names) > 4 else "")
        yield _info(
            OTHER_TIES,
            f"{_some([parameter.fqn for parameter in other], 'tensor')} shared by several modules ({listed})",
            "all owners must be in one FSDP unit; fsdptool's native layout ensures this",
        )


def _scalars(anatomy: Anatomy) -> Iterator[Diagnostic]:
    scalars = [parameter.fqn for parameter in anatomy.parameters if not parameter.shape]
    if scalars:
        yield _warn(
            SCALARS,
            f"{_some(scalars, 'scalar parameter')}: fully_shard refuses parameters without dimensions, and"
            " accelerate 1.15 has no setting for it",
            f"reshape before prepare: model.{scalars[0]} = nn.Parameter(model.{scalars[0]}.data.reshape(1));"
            " fsdptool replicates scalars on every rank",
        )


def _empty(anatomy: Anatomy) -> Iterator[Diagnostic]:
    empty = [parameter.fqn for parameter in anatomy.parameters if parameter.shape and not parameter.numel]
    if empty:
        yield _warn(
            EMPTY,
            f"{_some(empty, 'empty parameter')}: torch 2.13 cannot reduce the gradients of a unit with one",
            "check the sizes in the configuration; fsdptool keeps empty parameters out of the units",
        )


def _hookless(anatomy: Anatomy) -> Iterator[Diagnostic]:
    if anatomy.hookless:
        classes = {module.path: module.class_name for module in anatomy.modules}
        names = sorted({classes[path] for path in anatomy.hookless})
        yield _warn(
            HOOKLESS,
            f"{anatomy.spec.model_class} runs {', '.join(names)} without the hooks by which FSDP2 gathers a"
            f" unit ({anatomy.hookless[0]})",
            "leave these classes out of the wrap classes; their parameters then stay in the root unit,"
            " gathered for the whole step",
        )


def _refused(anatomy: Anatomy) -> Iterator[Diagnostic]:
    """Group as accelerate 1.15 does, call by call, and report what torch refuses."""
    classes = anatomy.wrap.classes
    settings = FsdpSettings(wrap_policy="transformer" if classes else "none", wrap_classes=classes)
    try:
        group(anatomy, settings, layout="accelerate")
    except ConfigError as error:
        yield _warn(REFUSED, error.message, error.help or "train with fsdptool's native layout")


def _by_size(anatomy: Anatomy) -> Iterator[Diagnostic]:
    try:
        group(anatomy, FsdpSettings(wrap_policy="size"), layout="accelerate")
    except NoForwardError as error:
        yield _info(SIZE_REFUSED, error.message, error.help or "wrap by class instead")
    except ConfigError:
        return


def _names(anatomy: Anatomy, census: Census) -> Iterator[Diagnostic]:
    choice, names = anatomy.wrap, anatomy.no_split_modules
    explicit = (
        f"set fsdp_transformer_layer_cls_to_wrap: {','.join(choice.classes)}"
        if choice.classes
        else "set fsdp_auto_wrap_policy: NO_WRAP"
    )
    if not names:
        if choice.classes:
            yield _warn(
                EMPTY_NAMES,
                "_no_split_modules is empty: without explicit classes accelerate 1.15 silently wraps no"
                " class and gathers the whole model at once",
                explicit,
            )
        return
    if absent := [name for name in names if name not in census.by_class]:
        yield _warn(
            ABSENT_NAMES,
            f"_no_split_modules names {', '.join(absent)}, absent from the model: accelerate 1.15 stops"
            " with 'Could not find the transformer layer class' unless classes are given",
            explicit,
        )
        return
    if set(names) == set(choice.classes):
        return
    try:
        group(anatomy, FsdpSettings(wrap_classes=names), layout="accelerate")
    except ConfigError as error:
        yield _warn(NAMES_REFUSED, f"with the current _no_split_modules: {error.message}", explicit)
    if missed := [name for name in choice.classes if name not in names]:
        yield _warn(
            UNLISTED_BLOCKS,
            f"_no_split_modules leaves out {', '.join(missed)}: without explicit classes these blocks stay"
            " in the root unit",
            explicit,
        )


def _classes(choice: WrapChoice, census: Census) -> Iterator[Diagnostic]:
    if not choice.classes:
        yield _warn(
            NOTHING_TO_WRAP,
            "no class to wrap: every parameter outside the embeddings is in one unit, gathered as a whole",
            "set fsdp_auto_wrap_policy: NO_WRAP explicitly, without fsdp_activation_checkpointing",
        )
    wrapped = {path for name in choice.classes for path in census.by_class.get(name, ())}
    for path in sorted(wrapped):
        above = path
        while above:
            above = above.rpartition(".")[0]
            if above in wrapped:
                yield _info(
                    NESTED_CLASSES,
                    f"{census.modules[path].class_name} is wrapped inside"
                    f" {census.modules[above].class_name} ({path})",
                    "correct, but each level has collectives of its own; --exclude one of the classes",
                )
                return


def _dtypes(anatomy: Anatomy) -> Iterator[Diagnostic]:
    dtypes = sorted({parameter.dtype for parameter in anatomy.parameters if parameter.trainable})
    if len(dtypes) > 1:
        yield _warn(
            MIXED_DTYPES,
            f"trainable parameters have {' and '.join(dtypes)}: FSDP2 expects one dtype per unit",
            "set mixed_precision: bf16 (masters become float32), or load the model in one dtype",
        )


def fused_experts(parameters: Iterable[Parameter]) -> tuple[str, ...]:
    """Return the names of fused expert tensors: three-dimensional parameters below an ``experts`` module."""
    return tuple(
        parameter.fqn
        for parameter in parameters
        if len(parameter.shape) == 3 and "expert" in parameter.fqn.rpartition(".")[0].lower()
    )


def _experts(anatomy: Anatomy) -> Iterator[Diagnostic]:
    fused = set(fused_experts(anatomy.parameters))
    if not fused:
        return
    experts = [parameter for parameter in anatomy.parameters if parameter.fqn in fused]
    share = sum(parameter.numel for parameter in experts) / max(sum(p.numel for p in anatomy.parameters), 1)
    counts = sorted({parameter.shape[0] for parameter in experts})
    yield _info(
        FUSED_EXPERTS,
        f"{len(experts)} fused expert tensors hold {share:.1%} of the parameters; FSDP2 shards them by expert"
        f" ({', '.join(map(str, counts))}), the largest is {max(p.numel for p in experts):,}",
        "ranks beyond the number of experts hold no part of them (see --world-size); LoRA targets by module"
        " name do not match them",
    )


_EXPERT = re.compile("experts?(?![a-z])|^moe", re.IGNORECASE)
_ROUTER = re.compile(r"^(router|gate|gating|switch)(_?(net|network|layer|linear))?$|Router|TopKGate|Gating")
_TOWER = re.compile(
    r"^((vision|visual|image|video|audio|speech|sound)s?"
    r"(_?(tower|model|encoder|backbone|transformer|embed_tokens))?|vit|siglip|clip)$"
)


def expert_modules(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the paths of containers whose children are the experts of a mixture, each a module of its own.

    Children of one class and equal parameters, by the name of the container or of their class, or by the
    router beside them.
    """
    census = Census(anatomy.modules, anatomy.parameters)
    return tuple(path for path in census.modules if path and _holds_experts(census, path))


def _holds_experts(census: Census, path: str) -> bool:
    children = [child for child in census.children[path] if census.size(child)]
    shapes = {
        tuple((name[len(child) :], census.parameters[name].shape) for name in census.below(child))
        for child in children
    }
    classes = {census.modules[child].class_name for child in children}
    if len(children) < 2 or len(classes) > 1 or len(shapes) > 1:
        return False
    own = census.modules[path]
    if any(map(_EXPERT.search, (path.rpartition(".")[2], own.class_name, *classes))):
        return all(census.modules[child].listed or not own.forwards for child in children)
    if own.forwards:
        return False
    beside = [census.modules[item] for item in census.children[path.rpartition(".")[0]] if item != path]
    return any(
        _ROUTER.search(module.path.rpartition(".")[2]) or _ROUTER.search(module.class_name)
        for module in beside
    )


def optional_towers(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the paths of encoders of pictures or sound beside a model of text, which text alone skips."""
    census = Census(anatomy.modules, anatomy.parameters)
    arguments = anatomy.modules[0].arguments if anatomy.modules else ()
    own = anatomy.spec.family == "python"
    if not own and (anatomy.output_embedding is None or "input_ids" not in arguments):
        return ()
    found: list[str] = []
    for path in census.modules:
        if _TOWER.search(path.rpartition(".")[2]) and not path.startswith(tuple(f"{top}." for top in found)):
            blocks = any(
                census.modules[item].listed for item in census.modules if item.startswith(f"{path}.")
            )
            if blocks and census.size(path) < census.total:
                found.append(path)
    return tuple(found)


def _uneven(anatomy: Anatomy) -> Iterator[Diagnostic]:
    """What only some ranks use in a step."""
    if experts := expert_modules(anatomy):
        yield _warn(
            EXPERT_MODULES,
            f"{_some(list(experts), 'list')} of experts that are modules: where a loop calls only those that"
            " a token chose, ranks have gradients of different experts, and FSDP2 averages them by position",
            "train with `fsdptool train`, which fills in zeros; elsewhere make the model call every expert,"
            " or use a class with fused experts",
        )
    if towers := optional_towers(anatomy):
        yield _warn(
            TOWERS,
            f"a batch of text alone skips {', '.join(towers)}: FSDP2's ranks then call different collectives",
            "train with `fsdptool train`, which keeps them in step; elsewhere give every rank an image or"
            " sound in each batch, or run the tower on an empty one",
        )


def _plan(anatomy: Anatomy) -> Iterator[Diagnostic]:
    if anatomy.fsdp_plan_unmatched:
        yield _info(
            LIBRARY_PLAN,
            f"transformers' own FSDP plan has rules that do not match any module: "
            f" {', '.join(anatomy.fsdp_plan_unmatched[:6])}",
            "a script that relies on DistributedConfig(fsdp_plan=...) shards fewer modules than expected",
        )


def _some(names: list[str], noun: str) -> str:
    plural = noun if len(names) == 1 else f"{noun}s"
    return f"{len(names)} {plural} ({names[0]}{', ...' if len(names) > 1 else ''})"


def _warn(code: str, message: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, severity="warning", message=message, help=help)


def _info(code: str, message: str, help: str) -> Diagnostic:
    return Diagnostic(code=code, severity="info", message=message, help=help)


def judge_no_split(names: Sequence[str], census: Census, choice: WrapChoice) -> tuple[NoSplitEntry, ...]:
    """Judge every entry of ``_no_split_modules``: right, unsuitable or absent."""
    return tuple(_judge(name, census, choice) for name in names)


def _judge(name: str, census: Census, choice: WrapChoice) -> NoSplitEntry:
    paths = census.by_class.get(name)
    if not paths:
        return NoSplitEntry(
            name, "absent", "no module of this class in the model: accelerate 1.15 raises an error"
        )
    if name in choice.classes:
        return NoSplitEntry(name, "right", f"{len(paths)} instances, chosen")
    embeddings = [path for path in paths if holds_embedding(census, path)]
    if embeddings:
        return NoSplitEntry(name, "unsuitable", f"holds an embedding ({embeddings[0]})")
    for candidate in choice.candidates:
        if candidate.name == name:
            return NoSplitEntry(name, "unsuitable", candidate.reason)
    if not any(census.size(path) for path in paths):
        return NoSplitEntry(name, "unsuitable", "has no parameters")
    return NoSplitEntry(name, "unsuitable", "a leaf: it has no inner modules with parameters")


def holds_embedding(census: Census, path: str) -> bool:
    """Whether an ``nn.Embedding`` lies below ``path`` or is the module itself."""
    if census.modules[path].embedding:
        return True
    return any(holds_embedding(census, child) for child in census.children[path])


RULES = (
    Rule("DET120", "misspelt configuration key", "warning",
         "The class does not know the key, but knows a similar one. The library silently drops the key and "
         "uses the default.",
         "Write the similar key, if that is what was meant."),
    Rule("DET121", "configuration keys that are not read", "info",
         "The class does not know these keys.",
         "No action, unless one of them is a size."),
    Rule("DET122", "class differs from the configuration", "warning",
         "`_class_name` names a class other than the one that was built.",
         "Correct the configuration."),
    Rule("DET123", "model type differs from the configuration", "warning",
         "`model_type` names a type other than the one that the class reads.",
         "Correct the configuration."),
    Rule("DET130", "module tree with a cycle", "error",
         "A module contains itself. Units need a tree, and most walks over modules do not end on a cycle.",
         "Keep the back reference in a list or a weakref, outside nn.Module's registration."),
    Rule("DET140", "model that a group of ranks does not divide", "error",
         "Tensor parallelism gives every rank the same number of heads and features, expert parallelism the "
         "same number of experts. Keys and values are not repeated over ranks.",
         "Use a group size that divides the numbers in the message."),
    Rule("DET141", "hidden states that cannot be divided along the sequence", "error",
         "Sequence parallelism needs one list of blocks that a norm follows, and blocks whose whole modules "
         "compute position by position.",
         "Leave sequence parallelism out; tensor parallelism alone divides the layers."),
    Rule("DET201", "persistent buffers", "warning",
         "accelerate 1.15 crashes on persistent buffers while `fsdp_cpu_ram_efficient_loading` is on, "
         "which is its launcher's default: `AttributeError: 'Tensor' object has no attribute "
         "'device_mesh'`.",
         "Set fsdp_cpu_ram_efficient_loading to false (FSD404 reports it in a file)."),
    Rule("DET202", "grouping that torch refuses", "warning",
         "With the selected classes, torch refuses accelerate 1.15's grouping: a tie across units, or a "
         "wrapped class that holds the input embedding.",
         "Train with fsdptool's native layout, or select other classes."),
    Rule("DET203", "`_no_split_modules` names absent classes", "warning",
         "accelerate 1.15 fails with `Could not find the transformer layer class` unless the file names "
         "classes.",
         "Write fsdp_transformer_layer_cls_to_wrap (FSD410 reports it in a file)."),
    Rule("DET204", "`_no_split_modules` is empty", "warning",
         "Without classes in the file accelerate 1.15 silently wraps no class and gathers the whole "
         "model at once.",
         "Write fsdp_transformer_layer_cls_to_wrap (FSD406 reports it in a file)."),
    Rule("DET205", "torch refuses the grouping by `_no_split_modules`", "warning",
         "With the current `_no_split_modules`, torch refuses accelerate's grouping.",
         "Write fsdp_transformer_layer_cls_to_wrap."),
    Rule("DET206", "no class to wrap", "warning",
         "No repeated block was found: every parameter outside the embeddings is in one unit, gathered as a "
         "whole.",
         "Set NO_WRAP explicitly and disable activation checkpointing; or select classes with "
         "--wrap."),
    Rule("DET207", "trainable parameters of several dtypes", "warning",
         "FSDP2 expects one dtype in each unit.",
         "Set mixed_precision to bf16, which makes masters float32, or load the model in one dtype."),
    Rule("DET208", "tied embeddings", "info",
         "Input and output embedding are one tensor. accelerate 1.15 keeps it gathered from forward to "
         "backward.",
         "No action: this is expected, and `plan` accounts for it."),
    Rule("DET209", "other shared tensors", "info",
         "Several modules share a tensor. All of its owners must be in one unit.",
         "fsdptool's native layout ensures this; accelerate handles ties of two tensors only (FSD405)."),
    Rule("DET210", "wrap class inside another", "info",
         "Correct, but each level has collectives of its own.",
         "--exclude one of the classes if the inner units are small."),
    Rule("DET211", "size-based wrapping reaches a container", "info",
         "SIZE_BASED_WRAP would wrap a ModuleList, which fully_shard refuses.",
         "Wrap by class (FSD409 reports it in a file)."),
    Rule("DET212", "fused experts", "info",
         "Experts are one three-dimensional tensor, sharded by expert. Ranks beyond their number hold "
         "no part of them, and LoRA targets by module name do not match them.",
         "`--world-size` shows each rank's share."),
    Rule("DET213", "transformers' own plan does not match", "info",
         "Rules of the model's FSDP plan in transformers refer to modules that do not exist.",
         "Do not rely on DistributedConfig(fsdp_plan=...): it shards fewer modules than expected."),
    Rule("DET214", "`_no_split_modules` leaves out blocks", "warning",
         "Without classes in the file these blocks stay in the root unit.",
         "Write fsdp_transformer_layer_cls_to_wrap."),
    Rule("DET215", "scalar parameters", "warning",
         "fully_shard refuses parameters without dimensions, and accelerate 1.15 has no setting for it.",
         "Reshape them to one element before prepare; fsdptool replicates them on every rank."),
    Rule("DET216", "empty parameters", "warning",
         "torch refuses to reduce the gradients of an FSDP unit that holds a parameter without elements: "
         "`_chunk_cat expects non-empty tensor`.",
         "Check the sizes in the configuration; fsdptool keeps empty parameters out of the units."),
    Rule("DET217", "blocks that run without FSDP2's hooks", "warning",
         "The model calls `forward` of these blocks itself, or runs them inside an autograd function of its "
         "own. FSDP2 gathers a unit in a hook of its call, and once more in a hook of its backward: as units "
         "these blocks would be used while they are sharded.",
         "Leave these classes out of the wrap classes; their parameters then stay in the root unit."),
    Rule("DET218", "experts that are modules", "warning",
         "The experts of a mixture are modules of their own. Many models call only those that a token chose; "
         "the others have no gradient. FSDP2 reduces only gradients that exist, by their position: if rank 0 "
         "used expert 0 and rank 1 expert 1, the two are averaged with each other without an error, and with "
         "unequal numbers or sizes the job stops or hangs.",
         "Train with `fsdptool train`, which gives unused experts zero gradients; elsewhere call every "
         "expert on every rank (with no rows, added as zero), or call torch 2.13's "
         "`set_reduce_scatter_unused_params(True)`."),
    Rule("DET219", "towers that some batches skip", "warning",
         "An encoder of pictures or sound runs only for batches that have them. Ranks whose batch is text "
         "alone do not gather its units nor reduce its gradients: they join other collectives, and the job "
         "hangs, stops or computes with wrong parameters.",
         "Train with `fsdptool train`, whose ranks stand in for units that they skip; elsewhere give every "
         "rank a picture in each batch, or run the tower on an empty one."),
)  # fmt: skip
