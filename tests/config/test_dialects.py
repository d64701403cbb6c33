"""The dialects as plugins: ours conform, broken ones are findings, and only what is needed is loaded."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

import fsdptool.config.dialects as dialects
from fsdptool.config import read_settings
from fsdptool.config.dialects import DialectRegistry, load_registry
from fsdptool.config.dialects.accelerate import Accelerate
from fsdptool.config.dialects.protocol import Dialect, LintContext
from fsdptool.config.dialects.run_reader import RunFile
from fsdptool.config.dialects.run_writer import RunWriter
from fsdptool.config.dialects.torchtitan import Torchtitan
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Node
from fsdptool.records.described_run import DescribedRun
from fsdptool.records.diagnostic import IgnoredKey
from fsdptool.records.sharding import FsdpSettings
from fsdptool.testing.dialects import assert_conforms, check_dialect

ACCELERATE = (
    "# kept\ncompute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\n"
    "num_machines: 2\nnum_processes: 16\nfsdp_config:\n  fsdp_version: 1\n  fsdp_sharding_strategy: {}\n"
    "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
)
FSDP1 = {
    "accelerate": [ACCELERATE.format(name) for name in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD")],
    "trainer": [
        '{"output_dir": "o", "fsdp": true, "fsdp_config": {"version": 1, "use_orig_params": true}}\n'
    ],
    "axolotl": ["# kept\nbase_model: m\nfsdp_version: 1\nfsdp_config:\n  offload_params: true\n"],
    "llamafactory": ["# kept\nstage: sft\nfinetuning_type: full\nfsdp: true\nfsdp_config:\n  version: 1\n"],
    "simpletuner": ['{"model_family": "flux", "fsdp_enable": true,\n "fsdp_version": 1}\n'],
    "trl": [
        "# kept\nmodel_name_or_path: m\ndataset_name: d\npacking: true\n" + more
        for more in ("fsdp: true\nfsdp_config:\n  version: 1\n", "accelerate_config: fsdp1\n")
    ],
    "env": ["ACCELERATE_USE_FSDP=true\nFSDP_VERSION=1\nFSDP_SHARDING_STRATEGY=SHARD_GRAD_OP\n"],
    "flags": ["accelerate launch --use_fsdp --fsdp_sharding_strategy FULL_SHARD train.py\n"],
}
RUNS = {
    "torchtitan": (
        '[model]\nname = "llama3"\nflavor = "8B"\n[optimizer]\nname = "AdamW"\nlr = 3e-4\n[training]\n'
        'local_batch_size = 2\nseq_len = 4096\nsteps = 100\ndataset = "c4"\n'
        '[activation_checkpoint]\nmode = "full"\n'
    ),
    "trl": (
        "model_name_or_path: Qwen/Qwen3-8B\ndataset_name: trl-lib/Capybara\nmax_length: 2048\npacking: true\n"
        "per_device_train_batch_size: 2\nlearning_rate: 2.0e-4\n"
    ),
    "axolotl": (
        "base_model: Qwen/Qwen3-8B\ndatasets: [{path: a/b, type: alpaca}]\nsequence_len: 2048\n"
        "micro_batch_size: 2\ngradient_accumulation_steps: 4\nadapter: lora\nlora_r: 16\n"
        "learning_rate: 0.0002\n"
    ),
    "llamafactory": (
        "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 8\n"
        "dataset: alpaca\ntemplate: qwen\ncutoff_len: 2048\nper_device_train_batch_size: 1\n"
        "learning_rate: 1.0e-4\n"
    ),
}


@pytest.mark.parametrize("name", load_registry().names)
def test_each_conforms(name: str) -> None:
    runs = [RUNS[name]] if name in RUNS else []
    assert_conforms(load_registry().get(name), fsdp1=FSDP1.get(name, ()), runs=runs)


class CarelessWithRuns(Torchtitan):
    """Every way to be wrong about a whole run, switched on one at a time."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong

    def describes(self, root: Node) -> float:
        return 0.0 if self.wrong == "shy" else super().describes(root)

    def describe(self, file: RunFile) -> DescribedRun:
        if self.wrong == "raises" and "bogus" in str(file.data):
            raise KeyError("bogus")
        if self.wrong == "silent":
            file = replace(file, data={**file.data, "activation_checkpoint": {"mode": "full"}})
        run = super().describe(file)
        keys = tuple(key for key in run.keys.used if self.wrong != "quiet" or key != "training.seq_len")
        return replace(run, keys=replace(run.keys, used=keys))

    def write_run(self, to: RunWriter) -> None:
        super().write_run(to)
        if self.wrong == "forgets":
            to.text = (to.text or "").replace("seq_len = 4096", "seq_len = 99")
        if self.wrong == "slows":
            to.text = (to.text or "").replace("lr = 0.0003", "lr = 0.0001")
        if self.wrong == "refuses":
            raise ConfigError("that is not possible")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("shy", "does not recognise the file of a run"),
        ("raises", "bogus-value raised KeyError: 'bogus'"),
        ("silent", "activation_checkpoint.mode: bogus-value neither changes a fact nor is a problem"),
        ("quiet", "training.seq_len is in none of the lists of keys"),
        (
            "forgets",
            "sequence_length of a run of torchtitan is written as 99 instead of 4096, without a reason",
        ),
        ("slows", "learning.learning_rate of a run of torchtitan is written as 0.0001, without a reason"),
        ("refuses", "a run of torchtitan is refused: that is not possible"),
    ],
)
def test_a_careless_description_of_runs_is_found(wrong: str, said: str) -> None:
    problems = check_dialect(CarelessWithRuns(wrong), runs=[RUNS["torchtitan"]])
    assert any(said in problem for problem in problems), problems


class Careless(Accelerate):
    """Every way to be wrong, switched on one at a time."""

    def __init__(self, wrong: str) -> None:
        self.wrong = wrong
        if wrong == "name":
            self.name = "not a name"
        if wrong == "consumers":
            self.consumers = ("nobody",)  # type: ignore[assignment]
        if wrong == "cannot":
            self.cannot = ("offload",)
        if wrong == "understated":
            self.cannot = ("debug",)
        if wrong == "protocol":
            self.api_version = 2

    def matches(self, root: Node) -> float:
        return 1.0 if self.wrong == "greedy" else 0.0 if self.wrong == "shy" else super().matches(root)

    def read(self, lint: LintContext) -> None:
        super().read(lint)
        if self.wrong == "raises" and "bogus" in lint.source.text:
            raise KeyError("bogus")
        if self.wrong == "silent":
            lint.findings.clear()
            lint.set("state_dict_type", "sharded", entry=lint.at("state_dict_type"))
        if self.wrong == "misplaced" and "bogus" in lint.source.text:
            lint.ignored.append(IgnoredKey("key", "value", 10_000, "nobody reads it"))
        if self.wrong == "forgets":
            lint.set("cpu_offload", False)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        if self.wrong == "vague" and settings.gpu_ids:
            raise ConfigError("that is not possible")
        return super().write(settings, header)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("name", "name is not an identifier"),
        ("consumers", "consumer 'nobody' is not in programs"),
        ("cannot", "'offload', which is not a canonical setting"),
        ("understated", "debug is written, although `cannot` holds it"),
        ("protocol", "api_version is 2"),
        ("greedy", "claims a file that holds nothing it knows"),
        ("shy", "does not recognise a file that it wrote"),
        ("raises", "damaged files raised KeyError: 'bogus'"),
        ("silent", "bogus-value is read as 'sharded' without a finding"),
        ("misplaced", "key is on line 10000"),
        ("forgets", "cpu_offload is not read back as it was written"),
        ("vague", "refusing gpu_ids does not name the setting"),
    ],
)
def test_a_careless_one_does_not(wrong: str, said: str) -> None:
    problems = check_dialect(Careless(wrong))
    assert any(said in problem for problem in problems), problems
    with pytest.raises(AssertionError, match=re.escape(said)):
        assert_conforms(Careless(wrong))


@pytest.mark.slow
def test_a_migration_that_changes_the_run_is_found() -> None:
    class Hasty(Accelerate):
        def migrate(self, steps, lint, target):  # type: ignore[no-untyped-def]
            changes = super().migrate(steps, lint, target)
            steps.put("fsdp_config", "fsdp_reshard_after_forward", True)
            return {**changes, "reshard_after_forward": True}

    problems = check_dialect(Hasty(), fsdp1=FSDP1["accelerate"])
    assert problems == ["migrating changes the settings: reshard_after_forward True"]


GOOD = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n"


def registry(monkeypatch: pytest.MonkeyPatch, **plugins: object) -> DialectRegistry:
    """Return our dialects with others beside them, each from a module of its own."""
    entries = [
        EntryPoint(dialect.name, f"{type(dialect).__module__}:{type(dialect).__name__}", dialects.GROUP)
        for dialect in load_registry().all()
    ]
    for name, plugin in plugins.items():
        module = ModuleType(f"plugin_{name}")
        module.plugin = plugin  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        entries.append(EntryPoint(name, f"plugin_{name}:plugin", dialects.GROUP))
    made = DialectRegistry(entries)
    for user in ("fsdptool.config.dialects", "fsdptool.config.reader"):
        monkeypatch.setattr(f"{user}.load_registry", lambda: made)
    return made


class Raising(Accelerate):
    name = "raising"

    def matches(self, root: Node) -> float:
        raise RuntimeError("not today")


class Newer(Accelerate):
    name = "newer"
    api_version = 2


class Twin(Accelerate):
    name = "twin"


@pytest.mark.parametrize(
    ("name", "plugin", "said"),
    [
        ("missing", "no class", "names a str, not a Dialect"),
        ("raising", Raising, "RuntimeError: not today"),
        ("newer", Newer, "it implements protocol 2"),
        ("other", Twin, "its name is 'twin'"),
    ],
)
def test_a_broken_one_is_a_finding(
    name: str, plugin: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry(monkeypatch, **{name: plugin})
    reading = read_settings(GOOD)
    assert reading.dialect == "accelerate" and not reading.errors
    finding = next(item for item in reading.diagnostics if item.code == "FSD115")
    assert said in finding.message and finding.severity == "warning"
    unread = read_settings("hello: world\nand: more\n")
    assert [item.code for item in unread.diagnostics] == ["FSD109", "FSD115"]
    if name != "raising":
        with pytest.raises(ConfigError, match=name):
            read_settings(GOOD, dialect=name)


def test_a_file_that_two_claim_equally_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    registry(monkeypatch, twin=Twin)
    finding = read_settings(GOOD).diagnostics[0]
    assert finding.code == "FSD109" and "accelerate and twin claim the file equally" in finding.message
    assert read_settings(GOOD, dialect="twin").dialect == "twin"


def test_one_name_of_two_packages_is_neithers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = registry(monkeypatch)
    twice = [EntryPoint("twin", f"{__name__}:{name}", dialects.GROUP) for name in ("Twin", "Raising")]
    contested = DialectRegistry(twice)
    assert not contested.all() and "registers the same name" in contested.problems["twin"]
    assert "twin" not in made.names


def test_a_named_dialect_loads_alone_and_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(GOOD)
    code = (
        "import sys; from fsdptool.config import read_settings;"
        f"read_settings({str(file)!r}, dialect='accelerate');"
        "names = {n.split('.')[3] for n in sys.modules if n.startswith('fsdptool.config.dialects.')};"
        "print(sorted(names - {'protocol'}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['accelerate'] False"


def test_the_protocol_says_what_must_be_written() -> None:
    assert Dialect.__abstractmethods__ == {"read", "write"}


@pytest.mark.parametrize(("mode", "cp"), [("ring", 2), ("ulysses", 1)])
def test_llama_factory_divides_sequences_by_its_own_key(mode: str, cp: int) -> None:
    """Its Ulysses attention goes past accelerate's mesh."""
    reading = read_settings(
        "model: m\nmodel_class: llm\ntrain_dataset: d.yaml\ninit_config: {name: init_on_default}\n"
        f"dist_config: {{name: fsdp2}}\ncp_size: 2\ncp_mode: {mode}\nbf16: true\n"
    )
    assert (reading.dialect, reading.require().mesh.cp) == ("llamafactory", cp)
    assert [item.key for item in reading.ignored] == (["cp_mode"] if mode == "ulysses" else [])
