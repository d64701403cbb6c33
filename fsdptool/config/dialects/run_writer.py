"""Writes a run as a program's file, and notes what that program has no word for.

What a program makes of the file is not decided here: the file is read back, and every fact that comes out
otherwise is told (:mod:`fsdptool.config.translation`). A writer gives the reasons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from fsdptool.config.dialects.run_reader import Learned
from fsdptool.errors import ConfigError
from fsdptool.records.described_run import OWN_UNITS, DescribedRun
from fsdptool.records.sharding import FsdpSettings
from fsdptool.source.known_models import hub_id_of, layer_classes_of

_ADAMW = re.compile(r"(?:torch-)?adamw?(?:[-_]?(?:torch|hf|fused|xla|apex|npu))*|fusedadam")
_ADAMW_8BIT = frozenset({"adamw_bnb_8bit", "adamw8bit", "adamw_8bit", "bnb-adamw8bit"})
_PAGED = {
    "pagedadamw": "paged_adamw_32bit", "paged_adamw": "paged_adamw_32bit",
    "pagedadamw32bit": "paged_adamw_32bit", "pagedadamw8bit": "paged_adamw_8bit",
}  # fmt: skip
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_LOCAL = re.compile(r"(?:[./~]|data/).*|.*\.(?:jsonl?|parquet|csv|arrow|txt)")
PLACEHOLDER = "YOUR-DATASET"
"""Stands where a program must be told a data set and the source names none that it can read."""


def optimizer_word(name: str | None) -> str | None:
    """Return one word for the names that programs give the same optimizer; others stay as they are."""
    word = (name or "").rpartition(".")[2].lower()
    if _ADAMW.fullmatch(word):
        return "adamw"
    if word in _ADAMW_8BIT:
        return "adamw8bit"
    return _PAGED.get(word, word) or None


def dataset_id(name: object) -> str | None:
    """Return a name if it is one of a data set on the Hub."""
    text = str(name)
    return text if _HUB_ID.fullmatch(text) and not _LOCAL.fullmatch(text) else None


def word_of(value: object) -> str | None:
    """Return a value of a file, or a fact of a run, as the word that a loss shows; None if absent."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return (" " if isinstance(value, list) else ", ").join(map(str, value))
    return str(value)


class RunWriter:
    """The keys of the file that is written for a run.

    Args:
        run: The run.
        program: Name of the program that the file is for.

    Attributes:
        data: Keys with their values; sections are mappings.
        cannot: Facts of the run that the program has no word for, or decides itself, with the reason.
        asked: What the program needs and no run says: what is written for it, and why.
        beside: Texts of files that belong beside the file, by what follows the stem of its name.
        text: The whole text, where it is not ``data`` in YAML.
    """

    def __init__(self, run: DescribedRun, program: str) -> None:
        self.run = run
        self.program = program
        self.data: dict[str, Any] = {}
        self.cannot: dict[str, str] = {}
        self.asked: dict[str, tuple[str, str]] = {}
        self.beside: dict[str, str] = {}
        self.text: str | None = None

    def put(self, key: str, value: Any) -> None:
        """Set a key, with dots between sections; None sets nothing."""
        if value is None:
            return
        *sections, last = key.split(".")
        data = self.data
        for section in sections:
            data = data.setdefault(section, {})
        data[last] = list(value) if isinstance(value, tuple) else value

    def lose(self, why: str, *facts: str) -> None:
        """Note why the program does not have a fact of the run as it is."""
        for fact in facts:
            self.cannot.setdefault(fact, why)

    def ask(self, key: str, placeholder: Any, why: str) -> None:
        """Set a key that the program needs and no run says, and note that it is to be filled in."""
        self.put(key, placeholder)
        self.asked[key] = (str(placeholder[0] if isinstance(placeholder, list) else placeholder), why)

    def need_objective(self, *known: str) -> None:
        """Refuse an objective that the program does not train.

        Raises:
            ConfigError: It is none of ``known``.
        """
        objective = self.run.objective or "sft"
        if objective not in known:
            raise ConfigError(
                f"{self.program} has no counterpart of a run with the objective {objective}",
                help=f"{self.program} is written for: {', '.join(known)}",
            )

    def model(self) -> str | None:
        """Return the model as the Hub names it: torchtitan and torchtune have names of their own."""
        run = self.run
        if run.program not in ("torchtitan", "torchtune") and run.model != run.family:
            if "$" in (run.model or ""):
                self.lose("the source gives a variable, which is not resolved", "model")
            return run.model
        known = hub_id_of(run.family) if run.family is not None else None
        if known is not None:
            self.lose(f"{self.program} takes the model by its name on the Hub", "model", "family")
        return known or run.model

    def optimizer(self, names: Mapping[str, str], plain: Collection[str] = ()) -> str | None:
        """Return the program's name of the optimizer.

        Args:
            names: The program's names by :func:`optimizer_word`.
            plain: Names that the program takes as they are.
        """
        name = self.run.optimizer
        if name is None or name in plain:
            return name
        known = names.get(optimizer_word(name) or "")
        if known is None:
            self.lose(f"{self.program} has no optimizer {name}", "optimizer", "optimizer_state_bits")
        return known

    def choice(self, fact: str, words: Mapping[Any, Any]) -> Any:
        """Return the program's word for a fact; None, and a reason, where it has none."""
        value = getattr(self.run, fact)
        if value is None:
            return None
        if value not in words:
            self.lose(f"{self.program} has no word for {value}", fact)
        return words.get(value)

    def targets(self) -> tuple[str, ...] | str | None:
        """Return the adapted modules as peft names them: by the ends of their paths, or as one expression."""
        named = self.run.lora_targets
        if named is None or named == "all-linear":
            return named
        names = [name.removeprefix("*.") for name in ((named,) if isinstance(named, str) else named)]
        if isinstance(named, tuple) and any(" " in name for name in names):
            self.lose("the source says it in words", "lora_targets")
            return "all-linear"
        if isinstance(named, str) and named.startswith("*") is False:
            return named
        self.lose("peft names modules by the ends of their paths", "lora_targets")
        if not any("*" in name for name in names):
            return tuple(names)
        patterns = (re.escape(name).replace(r"\*", ".*") for name in names)
        return rf"(?:.*\.)?(?:{'|'.join(patterns)})"

    def classes(self) -> tuple[str, ...]:
        """Return the classes of layers to wrap, as transformers names them; empty: those of the model."""
        run = self.run
        named = tuple(name for name in run.wrap_classes or () if name.isidentifier() and name[0].isupper())
        if run.program in OWN_UNITS or (run.wrap_classes and not named):
            named = layer_classes_of(run.family)
        if named != run.wrap_classes:
            self.lose(f"{self.program} wraps the layers of the model", "wrap_classes")
        return named

    def settings(self) -> FsdpSettings:
        """Return how the run is sharded, on the mesh of data-parallel ranks alone."""
        run = self.run
        if run.fsdp == 1:
            why = "FSDP1 becomes FSDP2 (docs/how-to/leave-fsdp1.md)"
            self.lose(why, "fsdp", "stored_dtype", "optimizer_state_bits", "reduce_dtype", "base_dtype")
        if run.reshard is not None and not isinstance(run.reshard, bool):
            self.lose("only true and false can be said", "reshard")
        return FsdpSettings(
            wrap_classes=self.classes(),
            reshard_after_forward=run.reshard is not False,
            cpu_offload=bool(run.cpu_offload),
            mixed_precision="fp16" if run.compute_dtype == "fp16" else "bf16",
        )

    def put_learning(self, known: Mapping[str, Learned], *without: str) -> None:
        """Set what decides the learning, as far as the program has keys for it.

        Args:
            known: The program's keys.
            without: Names that the writer sets itself.
        """
        for name, value in self.run.learning.items():
            item = known.get(name)
            if name in without:
                continue
            if name == "warmup_ratio" and item is None and "warmup_steps" in known:
                steps = round(float(value) * (self.run.steps or 0))
                self.put(known["warmup_steps"].key, steps)
                self.lose(f"{self.program} counts steps: {steps} is written", f"learning.{name}")
            elif item is None or item.key == "":
                self.lose(f"{self.program} has no key for it", f"learning.{name}")
            elif item.words and value not in item.words:
                self.lose(f"{self.program} has no word for {value}", f"learning.{name}")
            else:
                self.put(item.key, item.words.get(value, value) if item.words else value)

    def put_clipping(self, key: str) -> None:
        """Set the norm to which gradients are clipped; 0 switches clipping off elsewhere, and is lost."""
        norm = self.run.learning.get("max_grad_norm")
        if norm is not None and float(norm) <= 0:
            self.lose("no clipping is written as a norm that nothing reaches", "learning.max_grad_norm")
            norm = 1e9
        self.put(key, norm)

    def dataset(self) -> str:
        """Return the data set's name on the Hub, or a placeholder that says so."""
        given = self.run.learning.get("dataset")
        name = str(given) if given and self.run.program == self.program else dataset_id(given)
        if name is None:
            self.lose(f"the data is not named as {self.program} names it: put it there", "learning.dataset")
        return name or PLACEHOLDER

    def total_batch(self) -> int | None:
        """Return the samples of a step on all ranks; where their number is open, those of one rank."""
        run, mesh = self.run, self.run.mesh
        if run.global_batch is not None or run.micro_batch is None:
            return run.global_batch
        shard, replicas = mesh.dp_shard or -1, mesh.dp_replicate or 1
        if shard > 0 and replicas > 0 and run.fsdp != "none":
            return run.micro_batch * (run.accumulation or 1) * shard * replicas
        if run.processes is None:
            why = f"{self.program} counts the samples of all ranks, whose number is open: multiply by it"
            self.lose(why, "global_batch", "accumulation")
        ranks = (run.processes or 1) // ((mesh.cp or 1) * (mesh.tp or 1) * (mesh.pp or 1))
        return run.micro_batch * (run.accumulation or 1) * max(ranks, 1)

    def launched(self) -> None:
        """Note that the number of ranks is given at the launch."""
        self.lose("given at the launch (--num_processes, --nproc_per_node)", "processes", "global_batch")

    def rendered(self, header: tuple[str, ...]) -> str:
        """Return the text of the file, with comment lines at its head."""
        if self.text is None:
            import yaml

            self.text = yaml.safe_dump(self.data, sort_keys=False, allow_unicode=True, width=100)
        return "".join(f"# {line}\n" if line else "#\n" for line in header) + self.text


def toml_text(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return sections of plain values as TOML."""
    parts = []
    for name, values in sections.items():
        lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
        parts.append("\n".join((f"[{name}]", *lines)) + "\n")
    return "\n".join(parts)
