"""Hostile and odd texts: never a traceback, never a hang, and PyYAML's own idea of every value."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import corpus
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rules_against_accelerate import GOOD

from fsdptool.config import read_settings
from fsdptool.config.result import Verdict
from fsdptool.files.text import SIZE_LIMIT, UnreadableError, decode
from fsdptool.files.tree import ParseError, parse_json, to_python
from fsdptool.files.yaml_tree import parse_yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "config"))
import fuzz  # type: ignore[import-not-found]

OWN = [
    ("good.yaml", GOOD.encode()),
    ("v1.yaml", GOOD.replace("  fsdp_version: 2\n", "  fsdp_sharding_strategy: 4\n").encode()),
    (
        "trainer.json",
        b'{"fsdp": "full_shard auto_wrap",\n "fsdp_config": {"transformer_layer_cls_to_wrap": ["B"]}}',
    ),
    (
        "axolotl.yml",
        b"base_model: x\nsequence_len: 1\nfsdp:\n  - full_shard\nfsdp_config:\n  fsdp_offload_params: true\n",
    ),
    (
        "st.json",
        b'{"model_family": "flux", "model_type": "full", "--fsdp_enable": true, "context_parallel_size": 2}',
    ),
    ("a.env", b"export ACCELERATE_USE_FSDP=true\nexport FSDP_VERSION=2\n"),
    ("line.txt", b"--use_fsdp --fsdp_version=2 \\\n --fsdp_offload_params yes\n"),
]


@pytest.mark.slow
def test_mutations_of_our_own_files() -> None:
    """A bounded share of benchmarks/config/fuzz.py; the committed result has the full count."""
    report = fuzz.fuzz(OWN, 250, seed=7)
    assert not report.failures, report.failures[0]
    assert report.readings > 100 and report.fixed > 7


if corpus.folder() is not None:

    @pytest.mark.slow
    def test_mutations_of_the_corpus() -> None:
        files = [(path.name, path.read_bytes()) for path in corpus.files()]
        report = fuzz.fuzz(files, 150, seed=11)
        assert not report.failures, report.failures[0]

    @pytest.mark.slow
    def test_values_are_pyyamls_own() -> None:
        for path in corpus.files():
            text = path.read_bytes().decode()
            try:
                wanted = yaml.safe_load(text)
            except yaml.YAMLError:
                with pytest.raises(ParseError):
                    parse_yaml(text)
                continue
            root = parse_yaml(text).root
            assert root is not None and to_python(root) == wanted, path.name


SCALARS = [
    "yes",
    "no",
    "On",
    "~",
    "",
    "null",
    "1_000",
    "0o17",
    "017",
    "0x1F",
    "0b11",
    "1:30",
    "-1:30",
    "1.5",
    "1e8",
    "1.0e8",
    "1.0e+8",
    ".5",
    ".inf",
    "-.INF",
    ".nan",
    "2026-01-02",
    "2026-01-02 03:04:05",
    "=",
    "<",
    "'it''s'",
    '"a\\tb"',
    "a: b",
    "[1, {a: no}]",
    "{a: 1}",
    "!!str 5",
    "!!int '5'",
    "|\n  x\n",
    ">-\n  a\n  b\n",
    "y",
    "n",
]


@pytest.mark.parametrize("scalar", SCALARS)
def test_scalars_are_pyyamls_own(scalar: str) -> None:
    text = f"key: {scalar}"
    try:
        wanted = yaml.safe_load(text)
    except yaml.YAMLError:
        return
    root = parse_yaml(text).root
    assert root is not None
    got = to_python(root)
    assert repr(got) == repr(wanted)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_any_text_reads_as_pyyaml_reads_it(text: str) -> None:
    try:
        wanted = yaml.safe_load(f"a: {text}")
    except (yaml.YAMLError, ValueError, UnicodeEncodeError, RecursionError):
        return
    try:
        root = parse_yaml(f"a: {text}").root
    except ParseError:
        return  # the C parser and ours are a little stricter; refusing is never wrong
    assert root is not None and repr(to_python(root)) == repr(wanted)


BOMBS = {
    "depth": "a: " + "[" * 20000,
    "maps": "{a: " * 3000,
    "aliases": "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"b{n}: &b{n} [{', '.join(['*' + ('a' if n == 0 else f'b{n - 1}')] * 9)}]\n" for n in range(9)),
    "itself": "a: &a [*a]",
    "merge": "a: &a {x: 1}\n" + "b:\n" + "  <<: *a\n" * 30000,
    "json": '{"a": ' * 5000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name: str) -> None:
    path = "f.json" if name == "json" else "f.yaml"
    reading = read_settings(decode(BOMBS[name].encode(), path))
    assert reading.errors and reading.settings is None


@pytest.mark.parametrize(
    "text",
    [
        f"distributed_type: FSDP\nnum_processes: 0x{'f' * 3900}\n",
        "ACCELERATE_USE_FSDP=1\nACCELERATE_USE_PARALLELISM_CONFIG=1\nPARALLELISM_CONFIG_TP_SIZE=\u00b2\n",
        "base_model: a\ndatasets: []\nfsdp_version: 2\nfsdp_config:\n  min_num_params: '\u00b2'\n",
        "ACCELERATE_USE_FSDP=1\nACCELERATE_USE_PARALLELISM_CONFIG=1\nPARALLELISM_CONFIG_TP_SIZE="
        + "9" * 5000,
    ],
    ids=["too many digits to print", "a digit that is no number", "another such digit", "too many to read"],
)
def test_numbers_that_python_cannot_make_are_findings(text: str) -> None:
    found = Verdict((read_settings(text),)).document()["files"][0]["findings"]
    assert {item["code"] for item in found} & {"FSD205", "FSD206", "FSD111"}


@pytest.mark.parametrize("name", ["a.json", "a.yaml"])
def test_a_byte_order_mark_stops_json_and_not_yaml(name: str, tmp_path: Path) -> None:
    """As Python's own readers, which accelerate and transformers use."""
    path = tmp_path / name
    path.write_bytes(b'\xef\xbb\xbf{"output_dir": "o", "fsdp": true, "fsdp_config": {"version": 2}}')
    codes = {item.code for item in read_settings(path).errors}
    if name == "a.json":
        with pytest.raises(json.JSONDecodeError), path.open(encoding="utf-8") as stream:
            json.load(stream)
        assert codes == {"FSD104"}
    else:
        with path.open(encoding="utf-8") as stream:
            assert yaml.safe_load(stream)["fsdp"] is True
        assert not codes


def test_a_block_that_is_no_mapping_is_said_once() -> None:
    text = "fsdp_config: [1]\nnum_processes: 2\nnum_machines: 1\ncompute_environment: LOCAL_MACHINE\n"
    assert [item.code for item in read_settings(text).errors] == ["FSD212", "FSD205"]


def test_large_files_are_refused_unparsed(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    path.write_bytes(b"[" * (SIZE_LIMIT + 1))
    assert [item.code for item in read_settings(path).errors] == ["FSD102"]
    with pytest.raises(UnreadableError):
        decode(b" " * (SIZE_LIMIT + 1))


def test_unreadable_files_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("# caf\xe9\na: 1\n".encode("latin-1"))
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    (tmp_path / "other.yaml").write_text("hello: world\n")
    found = {
        name: [item.code for item in read_settings(tmp_path / name).errors]
        for name in ("latin.yaml", "empty.yaml", "list.yaml", "other.yaml", "absent.yaml", ".")
    }
    assert found == {
        "latin.yaml": ["FSD103"],
        "empty.yaml": ["FSD107"],
        "list.yaml": ["FSD107"],
        "other.yaml": ["FSD109"],
        "absent.yaml": ["FSD101"],
        ".": ["FSD101"],
    }


FOREIGN = {
    "xla": "fsdp_config:\n  xla: true\nfsdp: full_shard\noutput_dir: o\n",
    "oumi": "model:\n  model_name: x\ntraining:\n  trainer_type: TRL_SFT\nfsdp_x: 1\n",
    "components": "model:\n  _component_: mytune.models.llama3\n",
    "nested": "accelerate_config:\n  distributed_type: FSDP\n  fsdp_config: {}\n",
    "deepspeed": "zero_optimization:\n  stage: 3\n",
}


def test_oumis_own_files_are_called_oumis() -> None:
    """They have a section ``fsdp``, too, which alone would look like another program's."""
    text = "model:\n  model_name: x\ntraining:\n  trainer_type: TRL_SFT\nfsdp:\n  enable_fsdp: true\n"
    assert [item.message for item in read_settings(text).errors] == ["an oumi training configuration"]
    own = "model:\n  hidden_size: 8\ntraining:\n  batch_size: 4\nfsdp:\n  sharding_strategy: full_shard\n"
    told = "a training description of another program (sections model and training)"
    assert [item.message for item in read_settings(own).errors] == [told]


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_formats_are_named(name: str) -> None:
    reading = read_settings(FOREIGN[name])
    assert [item.code for item in reading.errors] == ["FSD110"] and reading.dialect is None


def test_json_is_pythons_own() -> None:
    text = '{"a": [1, 2.5e3, -0, true, null, "\\u00e9\\ud83d\\ude00"], "a": {"b": NaN}}'
    root = parse_json(text).root
    assert root is not None and repr(to_python(root)) == "{'a': {'b': nan}}"
    for bad in ("{", "[1,]", '{"a" 1}', "{'a': 1}", '{"a": 01}', '"a', "tru", "{} {}", '"\x01"'):
        with pytest.raises(ParseError):
            parse_json(bad)
