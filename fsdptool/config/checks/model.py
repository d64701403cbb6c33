"""The rules that need an inspected model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fsdptool import spelling
from fsdptool.config.context import LintContext
from fsdptool.config.dialects.protocol import is_before
from fsdptool.inspection.hazards import expert_modules, optional_towers
from fsdptool.modeling.context_parallel import MASKED_KINDS, attention_kinds
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.diagnostic import Edit


def check_model(lint: LintContext, anatomy: Anatomy) -> None:
    """Report what the settings do to this model, as accelerate 1.15's preparation would."""
    policy = lint.get("wrap_policy")
    if policy == "transformer":
        _classes(lint, anatomy)
    elif policy == "size":
        _containers(lint, anatomy)
    _buffers(lint, anatomy)
    _ties(lint, anatomy)
    _context(lint, anatomy)
    _ignored(lint, anatomy)
    _uneven(lint, anatomy)


def _detected_classes(lint: LintContext, anatomy: Anatomy) -> dict[str, Any]:
    """Return the fix that writes detect's classes, as arguments of ``LintContext.report``."""
    text = ",".join(anatomy.wrap.classes)
    entry = lint.at("wrap_classes")
    edits: tuple[Edit, ...] | None = None
    if text and entry is not None:
        edits = lint.editor.replace_entry(entry, text)
    elif text and lint.dialect.name == "accelerate":
        holder = lint.root.get("fsdp_config")
        key = "fsdp_transformer_layer_cls_to_wrap"
        edits = lint.editor.add(holder.node if holder else None, holder, {key: text})
    return {"edits": edits, "safe": False, "fix": f"write {text}", "changes": {"wrap_classes": text}}


def _classes(lint: LintContext, anatomy: Anatomy) -> None:
    named = lint.get("wrap_classes") or ()
    present = {module.class_name for module in anatomy.modules}
    fix = _detected_classes(lint, anatomy)
    place = lint.at("wrap_classes")
    if not named:
        _hints(lint, anatomy, fix)
        return
    for name in named:
        if name not in present:
            near = spelling.nearest(name, present, cutoff=0.6)
            hint = f": did you mean {near}?" if near else ""
            lint.report_value("FSD401", f"{anatomy.spec.model_class} has no {name}{hint}", place, **fix)
        elif anatomy.modules and anatomy.modules[0].class_name == name:
            lint.report_value("FSD402", f"{name} is the whole model", place, **fix)
        elif _holds_embedding(anatomy, name):
            _embedding(lint, anatomy, name, fix)
    _coverage(lint, anatomy, [name for name in named if name in present], fix)


def _hints(lint: LintContext, anatomy: Anatomy, fix: dict[str, Any]) -> None:
    """No class is named: accelerate takes ``_no_split_modules`` of the built instance."""
    place = lint.at("wrap_policy") or lint.root.get("fsdp_config")
    model = anatomy.spec.model_class
    absent = ", ".join(entry.name for entry in anatomy.wrap.no_split_modules if entry.status == "absent")
    if not anatomy.no_split_modules:
        lint.report("FSD406", f"{model} has no _no_split_modules; the file names no class", place, **fix)
    elif absent:
        lint.report("FSD410", f"_no_split_modules of {model} list {absent}, which it lacks", place, **fix)


def _embedding(lint: LintContext, anatomy: Anatomy, name: str, fix: dict[str, Any]) -> None:
    """A class with the input embedding: FSDP1 trains it, unless its weight is used outside the unit."""
    place = lint.at("wrap_classes")
    if lint.get("fsdp_version") != 1:
        lint.report_value("FSD403", f"{name} contains the input embedding", place, **fix)
        return
    outside = _used_outside(anatomy, name)
    if outside is None:
        message = f"{name} contains the input embedding, which fails under version 2"
        lint.report_value("FSD403", message, place, severity="info")
    else:
        message = f"{name} contains the input embedding, whose weight {outside} uses, too"
        lint.report_value("FSD403", message, place, **fix)


def _used_outside(anatomy: Anatomy, name: str) -> str | None:
    """Return a name outside of one module of a class for a parameter that this module holds, or None."""
    for prefix in _under(anatomy, [name]):
        for names in anatomy.ties:
            inside = [item for item in names if item.startswith(prefix)]
            if inside and len(inside) < len(names):
                return next(item for item in names if not item.startswith(prefix))
    return None


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


def _coverage(lint: LintContext, anatomy: Anatomy, named: list[str], fix: dict[str, Any]) -> None:
    roots = _under(anatomy, named)
    if not roots or not anatomy.total_parameters or set(named) == set(anatomy.wrap.classes):
        return
    covered = sum(parameter.numel for parameter in anatomy.parameters if parameter.fqn.startswith(roots))
    best = _under(anatomy, anatomy.wrap.classes)
    possible = sum(
        parameter.numel for parameter in anatomy.parameters if best and parameter.fqn.startswith(best)
    )
    if covered < 0.7 * possible:
        lint.report_value(
            "FSD408",
            f"{','.join(named)} cover {covered:,} of {anatomy.total_parameters:,} parameters; "
            f"{','.join(anatomy.wrap.classes)} would cover {possible:,}",
            "wrap_classes",
            **fix,
        )


def _containers(lint: LintContext, anatomy: Anatomy) -> None:
    threshold = lint.get("min_num_params") or 0
    first = lint.get("fsdp_version") == 1  # whose policy passes containers by
    for module in anatomy.modules:
        if module.forwards or not module.path:
            continue
        prefix = f"{module.path}."
        size = sum(parameter.numel for parameter in anatomy.parameters if parameter.fqn.startswith(prefix))
        if size >= threshold > 0:
            lint.report_value(
                "FSD409",
                f"{module.path} ({module.class_name}) holds {size:,} parameters, more than {threshold:,}"
                + (", which fails under version 2" if first else ""),
                "wrap_policy",
                severity="info" if first else None,
            )
            return


def _buffers(lint: LintContext, anatomy: Anatomy) -> None:
    persistent = [buffer.fqn for buffer in anatomy.buffers if buffer.persistent]
    if not lint.get("cpu_ram_efficient_loading") or not persistent or lint.consumer.name == "fsdptool":
        return
    entry = lint.at("cpu_ram_efficient_loading")
    message = f"{anatomy.spec.model_class} has {len(persistent)} persistent buffers ({persistent[0]}, ...)"
    if lint.get("fsdp_version") == 1:  # broadcasts modules, buffers included, and no state dict of DTensors
        lint.report_value("FSD404", f"{message}, which fail under version 2", entry, severity="info")
        return
    if entry is not None:
        edits = lint.editor.replace(entry.node, False)
    else:
        holder = lint.root.get("fsdp_config")
        edits = lint.editor.add(
            holder.node if holder else None, holder, {"fsdp_cpu_ram_efficient_loading": False}
        )
    lint.report_value(
        "FSD404",
        message,
        entry,
        edits=edits,
        safe=False,
        fix="write fsdp_cpu_ram_efficient_loading: false",
        changes={"cpu_ram_efficient_loading": False},
    )


def _ties(lint: LintContext, anatomy: Anatomy) -> None:
    if lint.consumer.name == "fsdptool":
        return
    first = lint.get("fsdp_version") == 1
    units = lint.get("wrap_classes") or () if lint.get("wrap_policy") == "transformer" else ()
    apart = first and any(_used_outside(anatomy, name) is not None for name in units)
    for names in anatomy.ties:
        if len(names) > 2:
            message = f"{names[0]} is shared by {len(names)} modules: {', '.join(names[1:4])}, ..."
            lint.report(
                "FSD405",
                f"{message} This fails under version 2" if first and not apart else message,
                severity="info" if first and not apart else None,
            )
        elif f"{anatomy.input_embedding}.weight" in names:
            _tied_embeddings(lint, anatomy)


def _tied_embeddings(lint: LintContext, anatomy: Anatomy) -> None:
    """Only accelerate 1.14 divides tied embeddings over two units, which torch refuses since 2.12."""
    consumer = lint.consumer
    version = consumer.version if consumer.name == "accelerate" else consumer.version_of("accelerate")
    torch = dict(consumer.beside).get("torch")
    affected = not is_before(version, 1, 14) and is_before(version, 1, 15)
    if lint.get("fsdp_version") != 2 or not affected or (torch is not None and is_before(torch, 2, 12)):
        return
    refused = not is_before(consumer.version_of("torch"), 2, 12)
    lint.report(
        "FSD412",
        f"accelerate {version} puts the tied embeddings of {anatomy.spec.model_class} into two units; torch"
        f" {torch or '2.12 and 2.13'} refuse{'s' if torch else ''} that",
        severity="error" if refused else "warning",
    )


def _context(lint: LintContext, anatomy: Anatomy) -> None:
    if (lint.get("cp") or 1) <= 1:
        return
    kinds = attention_kinds(anatomy.spec.config)
    if lint.consumer.name == "fsdptool":
        kinds = [kind for kind in kinds if kind not in MASKED_KINDS]
    if kinds:
        lint.report_value(
            "FSD407", f"{anatomy.spec.model_class} has attention layers of type {', '.join(kinds)}", "cp"
        )


def _ignored(lint: LintContext, anatomy: Anatomy) -> None:
    pattern = lint.get("ignored_modules")
    if not pattern:
        return
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        lint.report_value(
            "FSD206", f"fsdp_ignored_modules is not a valid regular expression: {error}", "ignored_modules"
        )
        return
    prefixes = tuple(f"{module.path}." for module in anatomy.modules if compiled.fullmatch(module.path))
    trainable = [p.fqn for p in anatomy.parameters if prefixes and p.fqn.startswith(prefixes) and p.trainable]
    if trainable and lint.consumer.name != "fsdptool":
        lint.report_value(
            "FSD411",
            f"{len(trainable)} trainable parameters are ignored ({trainable[0]}, ...)",
            "ignored_modules",
        )


def _uneven(lint: LintContext, anatomy: Anatomy) -> None:
    """What only some ranks use in a step; fsdptool's trainer keeps its ranks in step."""
    if lint.consumer.name == "fsdptool":
        return
    if experts := expert_modules(anatomy):
        lint.report_value(
            "FSD413", f"{len(experts)} lists of experts that are modules ({experts[0]}, ...)", "wrap_policy"
        )
    if towers := optional_towers(anatomy):
        lint.report_value("FSD414", f"a batch of text alone skips {', '.join(towers)}", "wrap_policy")
