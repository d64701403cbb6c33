"""Inspects a resolved model, from the cache or by building it on the meta device."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from fsdptool.cache import Store, source_digest
from fsdptool.errors import ConfigError, ModelError
from fsdptool.families.registry import family_digest, family_of
from fsdptool.garbage import without_gc
from fsdptool.inspection.census import Census
from fsdptool.inspection.wrap_classes import choose, select
from fsdptool.records.anatomy import Anatomy, Buffer, ModelSpec, Module, Parameter, Reference
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.diagnostic import Diagnostic, library_versions, tool_version
from fsdptool.source.references import own_code_digest
from fsdptool.source.vae import pixels_per_latent

if TYPE_CHECKING:
    from torch import nn

KIND = "anatomy"


@dataclass(frozen=True, slots=True)
class Inspection:
    """An anatomy, and whether the cache had it. ``store`` holds findings about the cache itself."""

    anatomy: Anatomy
    cached: bool
    store: tuple[Diagnostic, ...] = ()


def inspect(
    spec: ModelSpec,
    *,
    wrap: Sequence[str] = (),
    exclude: Sequence[str] = (),
    use_cache: bool = True,
    refresh: bool = False,
) -> Anatomy:
    """Return the anatomy of ``spec``, from the cache if it has it (then torch stays unloaded).

    Args:
        spec: What to inspect.
        wrap: Classes to wrap instead of the detected ones.
        exclude: Classes never to wrap.
        use_cache: Whether to read and keep cached answers.
        refresh: Ignore and overwrite the cached result.

    Raises:
        ModelError: The model cannot be built, or a named class is not in it.
    """
    inspection = examine(spec, wrap=wrap, exclude=exclude, use_cache=use_cache, refresh=refresh)
    return replace(inspection.anatomy, diagnostics=inspection.anatomy.diagnostics + inspection.store)


def examine(
    spec: ModelSpec,
    *,
    wrap: Sequence[str] = (),
    exclude: Sequence[str] = (),
    use_cache: bool = True,
    refresh: bool = False,
) -> Inspection:
    """Do what :func:`inspect` does and also say whether the cache had it."""
    store = Store() if use_cache or refresh else None
    key = store.key(cache_parts(spec)) if store else ""
    findings: tuple[Diagnostic, ...] = ()
    anatomy = None
    if store is not None and not refresh:
        kept, findings = store.get(KIND, key)
        anatomy = _restored(kept, spec) if kept is not None else None
    cached = anatomy is not None
    if anatomy is None:
        from fsdptool.inspection.build import build

        with without_gc():
            model = build(spec, initialise=False)
            anatomy = describe(model, spec)
        if store is not None and not any(finding.code == "CACHE001" for finding in findings):
            findings += store.put(KIND, key, encode(anatomy), about=_about(spec))
    if wrap or exclude:
        census = Census(anatomy.modules, anatomy.parameters)
        anatomy = _reselect(anatomy, census, wrap, exclude)
    return Inspection(anatomy, cached, findings)


def describe(model: nn.Module, spec: ModelSpec) -> Anatomy:
    """Return the anatomy of a live model (on any device): the trainer uses it after LoRA injection.

    Raises:
        ModelError: The model has no parameters, or a module contains itself.
    """
    from fsdptool.inspection.census import with_concern
    from fsdptool.inspection.hazards import choice_hazards, judge_no_split, model_hazards
    from fsdptool.inspection.keys import check_keys
    from fsdptool.inspection.walk import walk

    walked = walk(model)
    if cycles := [finding for finding in walked.diagnostics if finding.severity == "error"]:
        raise ModelError(f"{spec.model_class}: {cycles[0].message}", help=cycles[0].help)
    if not walked.parameters:
        raise ModelError(f"{spec.model_class} has no parameters", help="check its configuration")
    census = Census(walked.modules, walked.parameters)
    choice = choose(census, hint=family_of(spec).wrap_hint(spec.config), hookless=walked.hookless)
    choice = replace(choice, no_split_modules=judge_no_split(walked.no_split_modules, census, choice))
    anatomy = Anatomy(
        spec=spec,
        parameters=walked.parameters,
        buffers=walked.buffers,
        modules=walked.modules,
        wrap=choice,
        input_embedding=walked.input_embedding,
        output_embedding=walked.output_embedding,
        logit_tail=walked.logit_tail,
        final_norm=walked.final_norm,
        no_split_modules=walked.no_split_modules,
        repeated_blocks=walked.repeated_blocks,
        fsdp_plan_unmatched=walked.fsdp_plan_unmatched,
        class_modules=walked.class_modules,
        weights_read=walked.weights_read,
        hookless=walked.hookless,
        tensor_plan=walked.tensor_plan,
        expert_plan=walked.expert_plan,
        family_plan=family_of(spec).tensor_plan(spec.config),
    )
    findings = (*check_keys(spec, model), *model_hazards(anatomy), *choice_hazards(anatomy, census))
    return with_concern(replace(anatomy, diagnostics=findings), census)


def _reselect(anatomy: Anatomy, census: Census, wrap: Sequence[str], exclude: Sequence[str]) -> Anatomy:
    """Apply the user's selection and repeat every check that depends on it."""
    from fsdptool.inspection.census import with_concern
    from fsdptool.inspection.hazards import BY_CHOICE, choice_hazards, judge_no_split

    choice = select(anatomy.wrap, census, wrap, exclude)
    choice = replace(
        choice, no_split_modules=judge_no_split(anatomy.no_split_modules, census, choice), concern_code=None
    )
    kept = tuple(finding for finding in anatomy.diagnostics if finding.code not in BY_CHOICE)
    chosen = replace(anatomy, wrap=choice)
    return with_concern(replace(chosen, diagnostics=kept + choice_hazards(chosen, census)), census)


def resized(anatomy: Anatomy) -> Anatomy:
    """Return an anatomy whose classes have the sizes that a changed model gives them; the choice stays."""
    census = Census(anatomy.modules, anatomy.parameters)
    candidates = []
    for item in anatomy.wrap.candidates:
        paths = census.by_class.get(item.name, ())
        sizes, total = [census.size(path) for path in paths], census.union(paths)
        candidates.append(
            replace(
                item,
                parameters_each=(min(sizes), max(sizes)) if sizes else item.parameters_each,
                parameters_total=total,
                share=(share := total / max(census.total, 1)),
                reason=item.reason.replace(f"{item.share:.1%}", f"{share:.1%}"),
            )
        )
    return replace(anatomy, wrap=replace(anatomy.wrap, candidates=tuple(candidates)))


def cache_parts(spec: ModelSpec) -> dict[str, Any]:
    """Return everything an inspection depends on, as JSON values for the cache key."""
    return {
        "config": to_json(spec.config),
        # A key that the model does not read is refused as an override, and a finding in a file.
        "overrides": to_json(spec.overrides),
        "model_class": spec.model_class,
        "library": spec.library,
        "family": spec.family,
        "revision": spec.reference.revision,
        "component": spec.component,
        "trust_remote_code": spec.trust_remote_code,
        "code": own_code_digest(spec),
        "vae": pixels_per_latent(spec),
        "plugin": family_digest(spec.family),
        "libraries": library_versions(),
        "tool": f"{tool_version()}:{source_digest(__name__)}",
        "python": sys.version_info[:2],
    }


def _restored(data: Any, spec: ModelSpec) -> Anatomy | None:
    try:
        return decode(data, spec)
    except (ConfigError, KeyError, TypeError, ValueError):
        # Valid JSON of another shape: a record changed without its digest.
        return None


def _about(spec: ModelSpec) -> str:
    return f"{spec.model_class} of {spec.reference.id}"


_TABLES = ("spec", "parameters", "buffers", "modules")
_NOBODY = ModelSpec(Reference("config", ""), "", None, "", "", {})


# Anatomies in the cache are tables, not thousands of objects: a hit has to answer in well under half a
# second, and the general codec spends 0.1 s on a 126-layer model.
def encode(anatomy: Anatomy) -> dict[str, Any]:
    """Return the anatomy as JSON data, without its spec: :func:`decode` is given it."""
    kinds: dict[tuple[Any, ...], int] = {}
    modules = []
    for module in anatomy.modules:
        flags = (module.listed, module.embedding, module.forwards)
        kind = (module.class_name, module.bases, *flags, module.sizes, module.arguments)
        modules.append([module.path, kinds.setdefault(kind, len(kinds)), list(module.aliases)])
    rest = {f.name: to_json(getattr(anatomy, f.name)) for f in fields(Anatomy) if f.name not in _TABLES}
    return {
        "kinds": [to_json(kind) for kind in kinds],
        "modules": modules,
        "parameters": [
            [p.fqn, list(p.shape), p.dtype, p.trainable, list(p.aliases)] for p in anatomy.parameters
        ],
        "buffers": [[b.fqn, list(b.shape), b.dtype, b.persistent] for b in anatomy.buffers],
        "rest": rest,
    }


def decode(data: Mapping[str, Any], spec: ModelSpec) -> Anatomy:
    """Return the anatomy that :func:`encode` was given, with ``spec``.

    Raises:
        ConfigError, KeyError, TypeError, ValueError: ``data`` has another shape.
    """
    kinds: list[Any] = [
        (name, tuple(bases), *flags, tuple((what, count) for what, count in sizes), tuple(arguments))
        for name, bases, *flags, sizes, arguments in data["kinds"]
    ]
    empty: dict[str, list[Any]] = {name: [] for name in _TABLES[1:]}
    anatomy = from_json(Anatomy, {**data["rest"], **empty, "spec": to_json(_NOBODY)})
    return replace(
        anatomy,
        spec=spec,
        modules=tuple(_module(path, kinds[kind], aliases) for path, kind, aliases in data["modules"]),
        parameters=tuple(
            Parameter(fqn, tuple(shape), dtype, trainable, tuple(aliases))
            for fqn, shape, dtype, trainable, aliases in data["parameters"]
        ),
        buffers=tuple(
            Buffer(fqn, tuple(shape), dtype, persistent) for fqn, shape, dtype, persistent in data["buffers"]
        ),
    )


def _module(path: str, kind: tuple[Any, ...], aliases: list[str]) -> Module:
    name, bases, listed, embedding, forwards, sizes, arguments = kind
    return Module(path, name, bases, listed, embedding, forwards, tuple(aliases), sizes, arguments)
