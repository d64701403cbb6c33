"""Hazards of a model under accelerate 1.15 and torch 2.13, and the setting that avoids each. Torch-free.

Each rule was reproduced on those versions (docs/rules.md lists them).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from fsdptool.errors import ConfigError
from fsdptool.inspection.census import Census
from fsdptool.layout import group, resolve_sharding
from fsdptool.layout.accelerate import NoForwardError
from fsdptool.records.anatomy import Anatomy, NoSplitEntry, Parameter, WrapChoice
from fsdptool.records.diagnostic import Diagnostic
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
        group(anatomy, resolve_sharding(settings, layout="accelerate"))
    except ConfigError as error:
        yield _warn(REFUSED, error.message, error.help or "train with fsdptool's native layout")


def _by_size(anatomy: Anatomy) -> Iterator[Diagnostic]:
    try:
        group(anatomy, resolve_sharding(FsdpSettings(wrap_policy="size"), layout="accelerate"))
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
        group(anatomy, resolve_sharding(FsdpSettings(wrap_classes=names), layout="accelerate"))
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
