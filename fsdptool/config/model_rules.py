"""The rules of the family ``model``: a file's settings against an inspected model. Torch-free by itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsdptool import spelling
from fsdptool.config.dialects.accelerate_scalars import replace_any
from fsdptool.config.draft import Draft, Fact
from fsdptool.modeling.context_parallel import MASKED_KINDS, attention_kinds
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.diagnostic import Edit


def inspect_model(reference: str, *, trust_remote_code: bool = False) -> Anatomy:
    """Resolve and inspect a model reference.

    Raises:
        ReferenceError, ModelError: It cannot be resolved or built.
    """
    from fsdptool.inspection import inspect
    from fsdptool.source import resolve

    return inspect(resolve(reference, trust_remote_code=trust_remote_code))


def judge_model(draft: Draft, anatomy: Anatomy) -> None:
    """Report what the settings do to this model, as accelerate 1.15's preparation would."""
    policy = draft.get("wrap_policy")
    if policy == "transformer":
        _classes(draft, anatomy)
    elif policy == "size":
        _containers(draft, anatomy)
    _buffers(draft, anatomy)
    _ties(draft, anatomy)
    _context(draft, anatomy)
    _ignored(draft, anatomy)


def _choice(draft: Draft, anatomy: Anatomy) -> tuple[tuple[Edit, ...] | None, dict[str, Any], str]:
    """Return the fix that writes detect's classes, what it changes, and its words."""
    classes = anatomy.wrap.classes
    text = ",".join(classes)
    fact: Fact | None = draft.facts.get("wrap_classes")
    edits: tuple[Edit, ...] | None = None
    if classes and fact is not None and fact.entry is not None:
        edits = replace_any(draft, fact.entry, text)
    elif classes and draft.dialect == "accelerate":
        holder = draft.root.get("fsdp_config")
        key = "fsdp_transformer_layer_cls_to_wrap"
        edits = draft.editor.add(holder.node if holder else None, holder, {key: text})
    return edits, {"wrap_classes": text}, f"write {text}"


def _classes(draft: Draft, anatomy: Anatomy) -> None:
    named = draft.get("wrap_classes") or ()
    present = {module.class_name for module in anatomy.modules}
    edits, changes, words = _choice(draft, anatomy)
    place = draft.at("wrap_classes")
    if not named:
        _hints(draft, anatomy, edits, changes, words)
        return
    for name in named:
        if name not in present:
            near = spelling.nearest(name, present, cutoff=0.6)
            hint = f": did you mean {near}?" if near else ""
            draft.report(
                "FSD401",
                f"{anatomy.spec.model_class} has no {name}{hint}",
                place,
                value=True,
                edits=edits,
                safe=False,
                fix=words,
                changes=changes,
            )
            continue
        if anatomy.modules and anatomy.modules[0].class_name == name:
            draft.report(
                "FSD402",
                f"{name} is the whole model",
                place,
                value=True,
                edits=edits,
                safe=False,
                fix=words,
                changes=changes,
            )
        elif _holds_embedding(anatomy, name):
            draft.report(
                "FSD403",
                f"{name} contains the input embedding",
                place,
                value=True,
                edits=edits,
                safe=False,
                fix=words,
                changes=changes,
            )
    _coverage(draft, anatomy, [name for name in named if name in present], edits, changes, words)


def _hints(draft: Draft, anatomy: Anatomy, edits: Any, changes: dict[str, Any], words: str) -> None:
    """No class is named: accelerate takes ``_no_split_modules`` of the built instance."""
    place = draft.at("wrap_policy") or draft.root.get("fsdp_config")
    absent = [entry.name for entry in anatomy.wrap.no_split_modules if entry.status == "absent"]
    if not anatomy.no_split_modules:
        draft.report(
            "FSD406",
            f"{anatomy.spec.model_class} has no _no_split_modules and the file no class: nothing is wrapped",
            place,
            edits=edits,
            safe=False,
            fix=words,
            changes=changes,
        )
    elif absent:
        draft.report(
            "FSD410",
            f"_no_split_modules of {anatomy.spec.model_class} name {', '.join(absent)}, which it lacks",
            place,
            edits=edits,
            safe=False,
            fix=words,
            changes=changes,
        )


def _holds_embedding(anatomy: Anatomy, name: str) -> bool:
    embedding = anatomy.input_embedding
    if embedding is None:
        return False
    return any(
        module.class_name == name and embedding.startswith(f"{module.path}.") for module in anatomy.modules
    )


def _under(anatomy: Anatomy, classes: Sequence[str]) -> tuple[str, ...]:
    """Return the path prefixes of everything inside modules of the classes."""
    return tuple(f"{m.path}." for m in anatomy.modules if m.class_name in classes and m.path)


def _coverage(
    draft: Draft, anatomy: Anatomy, named: list[str], edits: Any, changes: dict[str, Any], words: str
) -> None:
    roots = _under(anatomy, named)
    if not roots or not anatomy.total_parameters or set(named) == set(anatomy.wrap.classes):
        return
    covered = sum(parameter.numel for parameter in anatomy.parameters if parameter.fqn.startswith(roots))
    best = _under(anatomy, anatomy.wrap.classes)
    possible = sum(
        parameter.numel for parameter in anatomy.parameters if best and parameter.fqn.startswith(best)
    )
    if covered < 0.7 * possible:
        draft.report(
            "FSD408",
            f"{','.join(named)} cover {covered:,} of {anatomy.total_parameters:,} parameters; "
            f"{','.join(anatomy.wrap.classes)} would cover {possible:,}",
            draft.at("wrap_classes"),
            value=True,
            edits=edits,
            safe=False,
            fix=words,
            changes=changes,
        )


def _containers(draft: Draft, anatomy: Anatomy) -> None:
    threshold = draft.get("min_num_params") or 0
    for module in anatomy.modules:
        if module.forwards or not module.path:
            continue
        prefix = f"{module.path}."
        size = sum(parameter.numel for parameter in anatomy.parameters if parameter.fqn.startswith(prefix))
        if size >= threshold > 0:
            draft.report(
                "FSD409",
                f"{module.path} ({module.class_name}) holds {size:,} parameters, over the {threshold:,}",
                draft.at("wrap_policy"),
                value=True,
            )
            return


def _buffers(draft: Draft, anatomy: Anatomy) -> None:
    persistent = [buffer.fqn for buffer in anatomy.buffers if buffer.persistent]
    if not draft.get("cpu_ram_efficient_loading") or not persistent or draft.consumer.name == "fsdptool":
        return
    entry = draft.at("cpu_ram_efficient_loading")
    if entry is not None:
        edits = draft.editor.replace(entry.node, False)
    else:
        holder = draft.root.get("fsdp_config")
        edits = draft.editor.add(
            holder.node if holder else None, holder, {"fsdp_cpu_ram_efficient_loading": False}
        )
    draft.report(
        "FSD404",
        f"{anatomy.spec.model_class} has {len(persistent)} persistent buffers ({persistent[0]}, ...)",
        entry,
        value=True,
        edits=edits,
        safe=False,
        fix="write fsdp_cpu_ram_efficient_loading: false",
        changes={"cpu_ram_efficient_loading": False},
    )


def _ties(draft: Draft, anatomy: Anatomy) -> None:
    if draft.consumer.name == "fsdptool":
        return
    for names in anatomy.ties:
        if len(names) > 2:
            draft.report(
                "FSD405", f"{names[0]} is shared by {len(names)} modules: {', '.join(names[1:4])}, ..."
            )


def _context(draft: Draft, anatomy: Anatomy) -> None:
    if (draft.get("cp") or 1) <= 1:
        return
    kinds = attention_kinds(anatomy.spec.config)
    if draft.consumer.name == "fsdptool":
        kinds = [kind for kind in kinds if kind not in MASKED_KINDS]
    if kinds:
        draft.report(
            "FSD407",
            f"{anatomy.spec.model_class} has attention layers of type {', '.join(kinds)}",
            draft.at("cp"),
            value=True,
        )


def _ignored(draft: Draft, anatomy: Anatomy) -> None:
    pattern = draft.get("ignored_modules")
    if not pattern:
        return
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        draft.report(
            "FSD206",
            f"fsdp_ignored_modules is no regular expression: {error}",
            draft.at("ignored_modules"),
            value=True,
        )
        return
    prefixes = tuple(f"{module.path}." for module in anatomy.modules if compiled.fullmatch(module.path))
    trainable = [p.fqn for p in anatomy.parameters if prefixes and p.fqn.startswith(prefixes) and p.trainable]
    if trainable and draft.consumer.name != "fsdptool":
        draft.report(
            "FSD411",
            f"{len(trainable)} trainable parameters are ignored ({trainable[0]}, ...)",
            draft.at("ignored_modules"),
            value=True,
        )
