"""A script of FSDP1 as one of FSDP2, by edits of spans: what cannot be written as FSDP2 is named by line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fsdptool.files.text import SourceText
from fsdptool.records.diagnostic import Edit, apply_edits
from fsdptool.scripts.fsdp1_calls import contexts, leaves
from fsdptool.scripts.judge import judge_script
from fsdptool.scripts.recorded import Blocked, MigrationStep, Recorded
from fsdptool.scripts.state import TooLongError
from fsdptool.scripts.wrapping import definitions, wrappings

_PASSES = 60
_FIRST = re.compile(r"FullyShardedDataParallel\b|\bfully_sharded_data_parallel\b|\bFSDP\.")


@dataclass(frozen=True, slots=True)
class MigratedScript:
    """What migrating a script gave.

    Attributes:
        text: The new script; None where it was refused.
        blocked: What cannot be migrated, with its line.
        notes: What the author should know, with its line.
        uses_fsdp1: Whether the script uses FSDP1.
    """

    text: str | None
    blocked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    uses_fsdp1: bool = True


@dataclass
class _Survey:
    """What is to be done in a script: proposals by stage, and what cannot be done."""

    stages: list[list[MigrationStep]] = field(default_factory=lambda: [[], [], [], []])
    blocked: list[tuple[int, str]] = field(default_factory=list)

    def take(self, stage: int, found: Iterable[tuple[ast.AST, MigrationStep | Blocked]]) -> None:
        """Sort what was found."""
        for node, item in found:
            if isinstance(item, MigrationStep):
                self.stages[stage].append(item)
            else:
                self.blocked.append((getattr(node, "lineno", 1), str(item)))


def migrate_script(source: SourceText, versions: Mapping[str, str]) -> MigratedScript:
    """Return a script with FSDP2 in the place of FSDP1.

    The calls inside go first, then the ``with`` statements, the wrapping, which says what is sharded, and the
    policies that it is given.
    Either everything is migrated or nothing: half of each does not run.

    Args:
        source: The script.
        versions: Versions of libraries, by distribution, for which the result is judged.
    """
    if not _FIRST.search(source.text):
        return MigratedScript(source.text, uses_fsdp1=False)
    try:
        script = Recorded(source.text)
    except (SyntaxError, ValueError) as error:
        return MigratedScript(None, (f"the script does not parse: {error}",))
    except (TooLongError, RecursionError):
        return MigratedScript(None, ("the script is too long to be followed",))
    survey = _survey(script)
    if not any(survey.stages) and not survey.blocked:
        return MigratedScript(source.text, uses_fsdp1=False)
    notes = _notes(survey)
    if survey.blocked:
        return MigratedScript(None, _lines(survey.blocked), notes)
    first, needed = script, set[tuple[str, str]]()
    for _ in range(_PASSES):
        stage = next((items for items in survey.stages if items), None)
        if stage is None:
            break
        chosen = _disjoint(stage)
        needed.update(pair for item in chosen for pair in item.imports)
        text = apply_edits(script.text, [edit for item in chosen for edit in item.edits])
        script = Recorded(text)
        survey = _survey(script)
    if survey.blocked or any(survey.stages):
        return MigratedScript(None, ("the parts of the script cannot be migrated together",), notes)
    script = _tidied(script, first)
    script = _imported(script, first, needed)
    moved = _optimizers_moved(script, versions)
    text = moved.text
    ast.parse(text)
    return MigratedScript(text, (), (*notes, *_remaining(source, text, versions)))


def _survey(script: Recorded) -> _Survey:
    survey = _Survey()
    survey.take(0, leaves(script))
    survey.take(1, contexts(script))
    survey.take(2, wrappings(script))
    survey.take(3, definitions(script))
    return survey


def _lines(found: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    return tuple(f"line {line}: {what}" for line, what in sorted(set(found)))


def _notes(survey: _Survey) -> tuple[str, ...]:
    return _lines(
        (getattr(item.node, "lineno", 1), note)
        for stage in survey.stages
        for item in stage
        for note in item.notes
    )


def _disjoint(proposals: list[MigrationStep]) -> list[MigrationStep]:
    """Return proposals that do not overlap, the innermost first; the others come in a later pass."""
    chosen: list[MigrationStep] = []
    taken: list[tuple[int, int]] = []
    for item in sorted(
        proposals,
        key=lambda item: max(edit.end for edit in item.edits) - min(edit.start for edit in item.edits),
    ):
        start, end = min(edit.start for edit in item.edits), max(edit.end for edit in item.edits)
        if all(end <= begin or start >= stop for begin, stop in taken):
            taken.append((start, end))
            chosen.append(item)
    return chosen


def _loaded(tree: ast.AST) -> set[str]:
    """Return the names that are read, those in ``__all__`` and in annotations that are texts too."""
    found = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    texts = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return found | {word for text in texts if len(text) < 60 for word in re.findall(r"\w+", text)}


def _tidied(script: Recorded, first: Recorded) -> Recorded:
    """Return a script without assignments that only FSDP1 read."""
    before = _loaded(first.tree)
    for _ in range(_PASSES):
        left = _loaded(script.tree)
        gone = [
            node
            for node in ast.walk(script.tree)
            if isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(target := node.targets[0], ast.Name)
            and target.id in before - left
            and _is_plain(script, node.value)
        ]
        edits = []
        for node in gone:
            try:
                script.indent(node)
            except Blocked:
                continue
            body = next(
                value
                for _, value in ast.iter_fields(script.parents[node])
                if isinstance(value, list) and node in value
            )
            if len(body) > 1:
                edits.append(Edit(*script.spans.line_span(node), ""))
        if not edits:
            return script
        script = Recorded(apply_edits(script.text, edits))
    return script


_MAKERS = frozenset({
    "partial", "transformer_auto_wrap_policy", "ModuleWrapPolicy", "CustomPolicy", "torch.device",
    "builtins.dict", "builtins.set", "FullStateDictConfig", "ShardedStateDictConfig",
    "FullOptimStateDictConfig", "ShardedOptimStateDictConfig", "torch.cuda.current_device",
})  # fmt: skip


def _is_plain(script: Recorded, value: ast.expr) -> bool:
    """Say whether an expression does nothing but yield its value."""
    return all(
        not isinstance(part, ast.Await | ast.NamedExpr | ast.Yield)
        and (not isinstance(part, ast.Call) or script.library(part.func) in _MAKERS)
        for part in ast.walk(value)
    )


def _imported(script: Recorded, first: Recorded, needed: set[tuple[str, str]]) -> Recorded:
    """Return a script that imports what it needs, and no longer what only FSDP1 needed."""
    before, left = _loaded(first.tree), _loaded(script.tree)
    bound = {
        (node.module or "", item.name): item.asname or item.name
        for node in ast.walk(script.tree)
        if isinstance(node, ast.ImportFrom)
        for item in node.names
    }
    plain = {
        (item.name, "")
        for node in script.tree.body
        if isinstance(node, ast.Import)
        for item in node.names
        if item.asname is None
    }
    missing = {pair for pair in needed if pair[1] in left or not pair[1]}
    missing -= {pair for pair, name in bound.items() if pair[1] == name} | plain
    edits: list[Edit] = []
    kept: list[ast.stmt] = []
    emptied: list[ast.stmt] = []
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        gone = [item for item in node.names if _name(item) in before - left]
        if len(gone) < len(node.names):
            edits += script.spans.drop(gone, node.names) if gone else ()
            kept += [node] if node in script.tree.body else []
        else:
            emptied.append(node)
    spans, newline = script.spans, script.spans.source.newline
    text = "\n".join(_statements(missing)).replace("\n", newline)
    place = next((node for node in emptied if node in script.tree.body and _is_of_fsdp(node)), None)
    for node in emptied:
        edits += [spans.replace(node, text)] if node is place and text else _without(script, node)
    if text and place is None:
        of_fsdp = [node for node in kept if _is_of_fsdp(node)]
        end = spans.end((of_fsdp or kept)[-1]) if kept else 0
        edits.append(Edit(end, end, newline + text if kept else text + newline))
    return Recorded(apply_edits(script.text, edits)) if edits else script


def _is_of_fsdp(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (
        (node.module or "").startswith("torch.distributed.fsdp")
        or (node.module == "torch.distributed" and any(item.name == "fsdp" for item in node.names))
    )


def _name(item: ast.alias) -> str:
    return item.asname or item.name.partition(".")[0]


def _without(script: Recorded, node: ast.stmt) -> list[Edit]:
    body = next(
        value
        for _, value in ast.iter_fields(script.parents[node])
        if isinstance(value, list) and node in value
    )
    try:
        script.indent(node)
    except Blocked:
        return []
    return [script.spans.replace(node, "pass") if len(body) == 1 else Edit(*script.spans.line_span(node), "")]


def _statements(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return import statements for pairs of module and name."""
    modules: dict[str, list[str]] = {}
    for module, name in sorted(pairs):
        modules.setdefault(module, []).append(name)
    lines = []
    for module, names in modules.items():
        if names == [""]:
            lines.append(f"import {module}")
            continue
        line = f"from {module} import {', '.join(names)}"
        if len(line) > 100:
            line = f"from {module} import (\n    " + ",\n    ".join(names) + ",\n)"
        lines.append(line)
    return lines


def _optimizers_moved(script: Recorded, versions: Mapping[str, str]) -> Recorded:
    """Return a script whose optimizers are made after sharding, where the statement can be moved there.

    With ``use_orig_params=True`` FSDP1 lets a script make it first; with FSDP2 it would train nothing.
    """
    found = [
        item for item in judge_script(SourceText(script.text), versions).findings if item.code == "FSD601"
    ]
    for item in reversed(found):
        statement = next(
            (
                node
                for node in ast.walk(script.tree)
                if isinstance(node, ast.Assign) and node.lineno <= (item.line or 0) <= (node.end_lineno or 0)
            ),
            None,
        )
        if statement is None or not isinstance(statement.targets[0], ast.Name):
            continue
        body = next(
            value
            for _, value in ast.iter_fields(script.parents[statement])
            if isinstance(value, list) and statement in value
        )
        rest = body[body.index(statement) + 1 :]
        last = next((node for node in reversed(rest) if _shards(node)), None)
        if last is None:
            continue
        between = rest[: rest.index(last) + 1]
        name = statement.targets[0].id
        if any(isinstance(part, ast.Name) and part.id == name for node in between for part in ast.walk(node)):
            continue
        start, end = script.spans.line_span(statement)
        at = script.spans.line_span(last)[1]
        script = Recorded(
            apply_edits(script.text, [Edit(start, end, ""), Edit(at, at, script.text[start:end])])
        )
    return script


def _shards(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("fully_shard", "set_model_state_dict")
        for node in ast.walk(statement)
    )


def _remaining(source: SourceText, text: str, versions: Mapping[str, str]) -> tuple[str, ...]:
    """Return the errors that the new script has and the old one did not have."""
    before = {item.code for item in judge_script(source, versions).findings}
    after = judge_script(source.with_text(text), versions)
    return tuple(
        f"{item.code} on line {item.line} of the result: {item.message}"
        for item in after.findings
        if item.severity == "error" and item.code not in before
    )
