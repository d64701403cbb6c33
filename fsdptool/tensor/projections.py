"""The layers of a model that tensor parallelism can divide, and what their names say of them. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from fsdptool.layout.tree import ModuleTree
from fsdptool.records.anatomy import Anatomy, Module, Parameter

QUERIES = frozenset(
    {
        "q_proj",
        "to_q",
        "query",
        "q",
        "q_lin",
        "query_proj",
        "wq",
        "q_b_proj",
        "q_attn",
        "linear_q",
        "to_query",
    }
)
KEYS = frozenset(
    {"k_proj", "v_proj", "to_k", "to_v", "key", "value", "k", "v", "k_lin", "v_lin", "key_proj", "value_proj"}
    | {"wk", "wv", "linear_k", "linear_v", "to_key", "to_value"}
)
ADDED = frozenset({"add_q_proj", "add_k_proj", "add_v_proj", "kv_b_proj", "pos_key_proj", "pos_query_proj"})
"""Further projections by heads: of a second stream (diffusers), of compressed keys and values (DeepSeek), of
relative positions (DeBERTa)."""
GATES = frozenset({"gate_proj", "g_proj", "to_gate", "to_gate_logits"})
"""Projections of an attention module that gate its heads' outputs."""
FUSED = frozenset({"c_attn", "qkv_proj", "qkv", "Wqkv", "to_qkv"})
"""Queries, keys and values one after the other."""
PARALLEL = "to_qkv_mlp_proj"
"""Queries, keys, values and feed-forward features in one projection (FLUX.2)."""
INTERLEAVED = frozenset({"query_key_value"})
"""Queries, keys and values of one head, or of one group of heads, side by side."""
ATTENTION_ROWS = (
    "o_proj",
    "out_proj",
    "to_out.0",
    "to_out",
    "c_proj",
    "dense",
    "out_lin",
    "o",
    "wo",
    "Wo",
    "proj",
    "out_layer",
)
SECOND_ROWS = ("to_add_out",)
OUTER_ROWS = ("output.dense",)
"""Rows of attention beside the module that attends (BERT), relative to their common parent."""
LATENT = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj", "q_down_proj", "kv_down_proj"})

FEED_FORWARDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("w1", "w3"), "w2"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("Wi",), "Wo"),
    (("fc1",), "fc2"),
    (("fc_in",), "fc_out"),
    (("linear_fc1",), "linear_fc2"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("lin1",), "lin2"),
    (("ffn",), "ffn_output"),
    (("linear_in",), "linear_out"),
    (("input_linear",), "output_linear"),
    (("intermediate_dense",), "output_dense"),
    (("intermediate.dense",), "output.dense"),
    (("net.0.proj",), "net.2"),
    (("gate", "up"), "down"),
    (("in_layer",), "out_layer"),
)
"""Names of the first and the second layers of feed-forward modules, relative to the module."""


WHOLE_CLASSES = {
    "BloomAttention": "its positions (alibi) are an input for all heads",
    "CodeGenAttention": "its fused projection is laid out for eight shards",
    "MochiAttention": "its rotations are an input for all heads",
    "MptAttention": "its positions (alibi) are an input for all heads",
}
"""Attention modules that cannot be divided despite their shapes (transformers 5.23, diffusers 0.42)."""
JOINED = ("proj_mlp", "proj_out")
"""Layers of a block whose last one takes attention and feed-forward features side by side (FLUX.1)."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One matrix product, or a stack of them.

    Attributes:
        path: Of its module, or the name of the parameter where its module holds several.
        inputs: Input features.
        outputs: Output features.
        transposed: Whether the weight is stored as (in, out).
    """

    path: str
    inputs: int
    outputs: int
    transposed: bool = False


class Layers:
    """The module tree of a model with its linear layers and everything that modules hold directly."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.tree = ModuleTree(anatomy)
        self.modules: dict[str, Module] = self.tree.modules
        self.children: dict[str, list[str]] = defaultdict(list)
        self.held: dict[str, list[tuple[str, Parameter]]] = defaultdict(list)
        """Parameters by the path of the module that holds them, with their names there."""
        for parameter in anatomy.parameters:
            for name in parameter.names:
                self.held[name.rpartition(".")[0]].append((name, parameter))
        for path in self.modules:
            if path:
                self.children[path.rpartition(".")[0]].append(path)
        self.linear: dict[str, Layer] = {}
        for path in self.modules:
            if layer := self._linear(path):
                self.linear[path] = layer

    def _linear(self, path: str) -> Layer | None:
        module = self.modules[path]
        held = self.held.get(path, ())
        weight = next((parameter for name, parameter in held if name == f"{path}.weight"), None)
        if weight is None or module.embedding or is_router(module):
            return None
        kinds = (module.class_name, *module.bases)
        if not any("Linear" in kind or kind == "Conv1D" or "Experts" in kind for kind in kinds):
            return None
        if {name.rpartition(".")[2] for name, _ in held} - {"weight", "bias"} or len(weight.shape) not in (
            2,
            3,
        ):
            return None
        transposed = "Conv1D" in kinds
        *_, first, second = weight.shape
        return Layer(path, first, second, True) if transposed else Layer(path, second, first)

    def within(self, path: str) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters below and including a module, with their names there."""
        yield from self.held.get(path, ())
        for child in self.children.get(path, ()):
            yield from self.within(child)

    def at(self, path: str, *names: str) -> list[Layer]:
        """Return the linear layers with these names relative to a module, in the order given."""
        found = (self.linear.get(f"{path}.{name}" if path else name) for name in names)
        return [layer for layer in found if layer is not None]


def is_router(module: Module) -> bool:
    """Whether a module scores experts."""
    last = module.path.rpartition(".")[2]
    return "Router" in module.class_name or "TopkRouter" in module.class_name or last == "router"


def is_norm(module: Module) -> bool:
    """Whether a module is a norm, by its class."""
    return any("Norm" in kind for kind in (module.class_name, *module.bases))
