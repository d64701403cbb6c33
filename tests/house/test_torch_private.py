"""Every private name of torch that the package uses stands in one list, and the installed torch has them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from fsdptool import torch_private
from fsdptool.torch_private import NAMES, PrivateName, lacking

ROOT = Path(__file__).parents[2]

OTHERS = {
    "_current_frames", "_exit", "_getframe", "_value_",  # Python
    "_dtype", "_precomputed_scale", "_tensor",  # torchao
    "_from_config", "_name_or_path", "_attn_implementation", "_supports_attention_backend",  # transformers
    "_no_split_modules", "_can_use_grouped_mm", "_can_set_attn_implementation",  # transformers
    "_class_name", "_repeated_blocks", "_backends",  # diffusers
    "_fingerprint",  # datasets
    "_dynamo_marked_constant",  # an attribute that is set on a function, not read
    "_C", "_distributed_c10d", "_ops",  # modules of torch: the list has what is taken from them
}  # fmt: skip
"""Private attributes that are not torch's."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@dataclass
class Uses:
    """What the sources use by a private name.

    Attributes:
        imports: From torch, with dots.
        attributes: Of anything but ``self``.
        own: The private names that the sources define themselves.
    """

    imports: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)

    def read(self, source: str) -> None:
        for node in ast.walk(ast.parse(source)):
            match node:
                case (
                    ast.FunctionDef(name=name)
                    | ast.ClassDef(name=name)
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    self.own.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    self.own.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    pass
                case ast.Attribute(attr=name) if is_private(name):
                    self.attributes.add(name)
                case ast.Call(
                    func=ast.Name(id="getattr" | "hasattr" | "replaced"),
                    args=[_, ast.Constant(value=str(name)), *_],
                ) if is_private(name):
                    self.attributes.add(name)
                case ast.ImportFrom(module=str(module), names=names):
                    self.add_imports(f"{module}.{alias.name}" for alias in names)
                case ast.Import(names=names):
                    self.add_imports(alias.name for alias in names)

    def add_imports(self, names: Iterable[str]) -> None:
        self.imports.update(name for name in names if name.startswith("torch.") and is_private_path(name))

    def unlisted(self, own: set[str]) -> set[str]:
        full, last = {str(name) for name in NAMES}, {name.name.split(".")[-1] for name in NAMES}
        return (self.imports - full) | (self.attributes - last - own - OTHERS)


def is_private_path(name: str) -> bool:
    return any(map(is_private, name.split(".")))


@pytest.fixture(scope="module")
def uses() -> Uses:
    found = Uses()
    paths = [path for folder in ("fsdptool", "plugins") for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 300
    for path in paths:
        found.read(path.read_text(encoding="utf-8"))
    return found


def test_no_private_name_is_used_that_is_not_listed(uses: Uses) -> None:
    assert uses.unlisted(uses.own) == set()


def test_every_listed_name_is_used(uses: Uses) -> None:
    named = uses.attributes | uses.imports
    assert [str(x) for x in NAMES if not {str(x), x.name.split(".")[-1]} & named] == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._pytree import tree_any",
        "import torch._inductor.codecache",
        "group._all_reduce_state = None",
        "getattr(state, '_fsdp_param_group_of_all')",
        "torch._C._dispatch_tls_set_dispatch_key_excluded",
    ],
)
def test_a_planted_use_is_found(uses: Uses, line: str) -> None:
    planted = Uses()
    planted.read(line)
    assert len(planted.unlisted(uses.own)) == 1


def test_the_installed_torch_has_every_name() -> None:
    assert lacking(Version(metadata.version("torch")).release) == ()


def test_a_name_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (
        PrivateName(
            "torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup._none", "a test"
        ),
        PrivateName("torch._no_such_module", "name", "a test"),
        PrivateName("torch", "_C._no_such_function", "a test"),
    )
    other = PrivateName("torch", "_C._no_such_function", "a test", until=(2, 1))
    monkeypatch.setattr(torch_private, "NAMES", (*NAMES, *gone, other))
    assert lacking((2, 13)) == gone
