"""Whether the model of a script has the classes that the script wants to be units."""

from __future__ import annotations

from collections.abc import Iterator

from fsdptool.config.rules import RULES
from fsdptool.config.rules.model import absent
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.scripts.judge import silenced
from fsdptool.scripts.runs import read_script_run
from fsdptool.scripts.settings import NamedClass, ScriptRun
from fsdptool.source.known_models import family_of_name, layer_classes, layer_classes_of

_RULE = RULES["FSD401"]
_HELP = "Name the layers of the model: `fsdptool detect MODEL` lists its classes."


def absent_classes(source: SourceText, anatomy: Anatomy | None) -> tuple[Diagnostic, ...]:
    """Return a finding for each class that a policy names and the model lacks.

    A name that accelerate or the Trainer looks for must be in the model. A policy of torch may name further
    classes: only where the model has none of them, nothing is wrapped. Defaults of arguments say nothing.

    Args:
        source: The script.
        anatomy: The model; None takes the one that the script loads by name, if the catalogue knows it.
    """
    try:
        run = read_script_run(source, defaults=False)
    except ConfigError:
        return ()
    if run is None or not run.classes:
        return ()
    found = list(_lacking(run, anatomy))
    wanted = [item for item in run.classes if item.module]
    whole = len(wanted) == sum(1 for item, _ in found if item.module)
    lines = source.text.split("\n")
    return tuple(
        Diagnostic(_RULE.code, _RULE.severity, message, _HELP, source.path, item.line, 1)
        for item, message in dict(found).items()
        if (whole or not item.module) and not silenced(_RULE.code, lines[item.line - 1 : item.line])
    )


def _lacking(run: ScriptRun, anatomy: Anatomy | None) -> Iterator[tuple[NamedClass, str]]:
    """Yield the classes that the model certainly lacks, with what is said of each."""
    if anatomy is not None:
        present = {module.class_name for module in anatomy.modules}
        for item in run.classes:
            if item.name not in present and item.module != "__main__":
                yield item, absent(anatomy.spec.model_class, item.name, present)
        return
    model = run.settings.get("model_name_or_path")
    trusted = run.settings.get("from_pretrained.trust_remote_code")
    if (
        model is None
        or not isinstance(model.value, str)
        or (trusted is not None and trusted.value is not False)
    ):
        return
    family, _ = family_of_name(model.value)
    layers = layer_classes_of(family)
    if family is None or len(layers) != 1 or _has_parts(family):
        return
    for item in run.classes:
        published = not item.module or item.module.startswith("transformers.")
        if published and item.name in layer_classes() and item.name not in layers:
            yield item, f"{model.value} has no {item.name}: its layers are {layers[0]}"


def _has_parts(family: str) -> bool:
    """Whether a model is made of several models: its other parts may have other layers."""
    from fsdptool.source import resolve

    config = resolve(family).config
    return any(isinstance(value, dict) and "model_type" in value for value in config.values())
