"""Expressions of a script: what they stand for."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Sequence

from fsdptool.scripts.calls import Calls
from fsdptool.scripts.names import STARS
from fsdptool.scripts.state import joined
from fsdptool.scripts.values import (
    Choice,
    Condition,
    Const,
    Function,
    Items,
    Library,
    Scope,
    Table,
    Thing,
    Value,
    is_key,
)

_LARGEST = 1e30
"""Numbers beyond it are not calculated with: each product would have twice the digits."""
_HELD = frozenset({"rank", "world", "meta"})


class Expressions(Calls):
    """What evaluates expressions."""

    def value(self, node: ast.AST | None) -> Value:
        """Return what an expression stands for."""
        if node is None:
            return Const(None)
        self.count()
        evaluate: Callable[[ast.AST], Value] = getattr(self, f"_{type(node).__name__.lower()}", self._other)
        return evaluate(node)

    def _other(self, node: ast.AST) -> Value:
        sources = tuple(
            self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)
        )
        return Thing("unknown", node=node, sources=sources, tags=_tags(sources))

    def _constant(self, node: ast.Constant) -> Value:
        return Const(node.value)

    def _name(self, node: ast.Name) -> Value:
        found = self.find(node.id)
        if found is not None:
            return found
        for module in reversed(self.stars):
            if node.id in STARS.get(module, ()):
                return Library(f"{module}.{node.id}")
        if self.stars and node.id not in _BUILTINS:
            return Thing("unknown", label=node.id, node=node, outside=True)
        return Library(f"builtins.{node.id}")

    def _attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.value(node.value), node.attr, node)

    def _call(self, node: ast.Call) -> Value:
        return self.call_node(node)

    def _starred(self, node: ast.Starred) -> Value:
        return self.value(node.value)

    def _await(self, node: ast.Await) -> Value:
        return self.value(node.value)

    def _yield(self, node: ast.Yield) -> Value:
        self.value(node.value)
        return Thing("unknown", node=node)

    def _namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self.assign(node.target, value)
        return value

    def _lambda(self, node: ast.Lambda) -> Value:
        return Function(node, self.scope)

    def _items(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        values = [self.value(item) for item in node.elts]
        if any(isinstance(item, ast.Starred) for item in node.elts):
            return Thing("unknown", node=node, sources=tuple(values), tags=_tags(values))
        return Items(values, tags=_tags(values), sources=tuple(values))

    _list = _tuple = _set = _items

    def _dict(self, node: ast.Dict) -> Value:
        items: dict[object, Value] = {}
        nodes: dict[object, ast.AST] = {}
        whole = True
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item)
            name = self.value(key) if key is not None else None
            if is_key(name):
                items[name.value] = value
                nodes[name.value] = key or item
            elif key is None and isinstance(value, Table):
                items.update(value.items)
                nodes.update(value.nodes)
                whole = whole and value.whole
            else:
                whole = False
        return Table(items, nodes, whole, sources=tuple(items.values()))

    def _joinedstr(self, node: ast.JoinedStr) -> Value:
        sources = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.value(part.value)
                sources.append(value)
                if part.format_spec is not None and part.conversion == -1:
                    self.emit("format", "f-string", node, target=value)
        if not sources and all(isinstance(part, ast.Constant) for part in node.values):
            return Const("".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
        return Thing("text", node=node, sources=tuple(sources), tags=_tags(sources))

    def _binop(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(left, Const) and isinstance(right, Const):
            folded = _folded(node.op, left.value, right.value)
            if folded is not None:
                return Const(folded, sources=(*left.sources, *right.sources))
        if isinstance(node.op, ast.Mod) and isinstance(left, Const) and isinstance(left.value, str):
            return Thing("text", node=node, sources=(right,), tags=_tags((right,)))
        return Thing(
            "binary", label=type(node.op).__name__, node=node, args=(left, right), sources=(left, right),
            tags=_tags((left, right)),
        )  # fmt: skip

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        value = self.value(node.operand)
        if not isinstance(node.op, ast.Not):
            if (
                isinstance(node.op, ast.USub)
                and isinstance(value, Const)
                and isinstance(value.value, int | float)
            ):
                return Const(-value.value)
            return Thing("unary", node=node, sources=(value,), tags=_tags((value,)))
        known = self.truth(value)
        if known is not None:
            return Const(not known)
        tags = set()
        if "one" in value.tags:
            tags.add("rest")
        if "rest" in value.tags or ("rank" in value.tags and not _is_test(value)):
            tags.add("one")
        tags |= value.tags & {"initialised", "uninitialised"}
        if tags & {"initialised", "uninitialised"}:
            tags ^= {"initialised", "uninitialised"}
        return Thing("test", label="not", node=node, sources=(value,), tags=frozenset(tags))

    def _boolop(self, node: ast.BoolOp) -> Value:
        values = [self.value(item) for item in node.values]
        both = isinstance(node.op, ast.And)
        left = [value for value in values if self.truth(value) is not both]
        left = [
            value for value in left if ("initialised" if both else "uninitialised") not in value.tags
        ] or left
        if not left:
            return values[-1]
        if any(self.truth(value) is (not both) for value in left):
            return Const(not both) if both else left[0]
        if len(left) == 1:
            return left[0]
        wanted = "one" if both else "rest"
        tags = {wanted} if any(wanted in value.tags for value in left) else set[str]()
        if all("one" in value.tags for value in left):
            tags.add("one")
        return Thing(
            "test", label="and" if both else "or", node=node, args=tuple(left), sources=tuple(left),
            tags=frozenset(tags),
        )  # fmt: skip

    def _compare(self, node: ast.Compare) -> Value:
        left, right = self.value(node.left), self.value(node.comparators[0])
        for other in node.comparators[1:]:
            self.value(other)
        operator = node.ops[0]
        self.emit("compare", type(operator).__name__, node, args=(left, right))
        known = _compared(operator, left, right) if len(node.ops) == 1 else None
        if known is not None:
            return Const(known)
        tags = _rank_test(operator, left, right) if len(node.ops) == 1 else frozenset()
        return Thing(
            "test",
            label=type(operator).__name__,
            node=node,
            args=(left, right),
            sources=(left, right),
            tags=tags,
        )

    def _ifexp(self, node: ast.IfExp) -> Value:
        test = self.value(node.test)
        known = self.truth(test)
        if known is not None:
            return self.value(node.body if known else node.orelse)
        with self.under(Condition(node, True, "one" in test.tags, len(self.stack), test)):
            first = self.value(node.body)
        with self.under(Condition(node, False, "rest" in test.tags, len(self.stack), test)):
            second = self.value(node.orelse)
        return joined((first, second), bool(test.tags & {"one", "rest"}))

    def _subscript(self, node: ast.Subscript) -> Value:
        whole, index = self.value(node.value), self.value(node.slice)
        return self.item(whole, index, node)

    def _slice(self, node: ast.Slice) -> Value:
        parts = [self.value(part) for part in (node.lower, node.upper, node.step) if part is not None]
        return Thing("slice", node=node, sources=tuple(parts), tags=_tags(parts))

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        outer = self.scope
        self.scope = Scope({}, outer)
        self.loops.append(node)
        guards = len(self.guards)
        try:
            tags: frozenset[str] = frozenset()
            for generator in node.generators:
                iterable = self.value(generator.iter)
                tags |= _tags((iterable,))
                self.emit("iterate", "comprehension", node, target=iterable)
                if len(node.generators) == 1 and (made := self.items_of(node, iterable)) is not None:
                    return made
                self.assign(generator.target, self.element(iterable, node))
                for condition in generator.ifs:
                    test = self.value(condition)
                    self.guards.append(Condition(condition, True, "one" in test.tags, len(self.stack), test))
            if isinstance(node, ast.DictComp):
                self.value(node.key)
            made = self.value(node.value if isinstance(node, ast.DictComp) else node.elt)
        finally:
            self.scope = outer
            self.loops.pop()
            del self.guards[guards:]
        return Thing("comprehension", node=node, inner=made, sources=(made,), tags=tags)

    _listcomp = _setcomp = _generatorexp = _dictcomp = _comprehension

    def items_of(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, iterable: Value
    ) -> Value | None:
        """Return what a comprehension yields of each item, or None where one stands for all of them."""
        del node, iterable
        return None

    def truth(self, value: Value) -> bool | None:
        """Return whether a value is true, or None."""
        if isinstance(value, Const):
            return bool(value.value)
        if isinstance(value, Items):
            return bool(value.values)
        return None


_BUILTINS = frozenset(dir(builtins))


def _tags(values: Sequence[Value]) -> frozenset[str]:
    """Return what something depends on that was computed from values."""
    return frozenset().union(*(value.tags & _HELD for value in values)) if values else frozenset()


def _is_test(value: Value) -> bool:
    return isinstance(value, Thing) and value.kind == "test"


def _folded(operator: ast.operator, left: object, right: object) -> object:
    """Return the value of an operation on two constants; None where it is not worth the effort."""
    if isinstance(left, str) and isinstance(right, str) and isinstance(operator, ast.Add):
        return left + right if len(left) + len(right) < 10_000 else None
    if isinstance(left, bool) or isinstance(right, bool):
        return None
    if isinstance(left, int | float) and isinstance(right, int | float):
        if abs(left) > _LARGEST or abs(right) > _LARGEST:
            return None
        try:
            if isinstance(operator, ast.Add):
                return left + right
            if isinstance(operator, ast.Sub):
                return left - right
            if isinstance(operator, ast.Mult):
                return left * right
            if isinstance(operator, ast.FloorDiv):
                return left // right
            if isinstance(operator, ast.Div):
                return left / right
        except (ArithmeticError, ValueError):
            return None
    return None


def _compared(operator: ast.cmpop, left: Value, right: Value) -> bool | None:
    """Return the result of a comparison, or None. A job that is sharded has several ranks."""
    if (
        "world" in left.tags
        and not isinstance(left, Const)
        and isinstance(right, Const)
        and right.value in (0, 1)
    ):
        if isinstance(operator, ast.Gt | ast.NotEq):
            return True
        return False if isinstance(operator, ast.Eq | ast.LtE) else None
    if isinstance(left, Const) and isinstance(right, Const):
        if isinstance(operator, ast.Eq | ast.Is):
            return left.value == right.value
        if isinstance(operator, ast.NotEq | ast.IsNot):
            return left.value != right.value
        return None
    if isinstance(right, Const) and right.value is None and isinstance(operator, ast.Is | ast.IsNot):
        made = isinstance(left, Items | Table | Function) or (
            isinstance(left, Thing)
            and left.kind not in ("parameter", "attribute", "unknown", "result", "item", "outside")
        )
        return isinstance(operator, ast.IsNot) if made else None
    return None


def _rank_test(operator: ast.cmpop, left: Value, right: Value) -> frozenset[str]:
    """Return which ranks pass a comparison."""
    if "rank" in right.tags and "rank" not in left.tags:
        left, right = right, left
    if "rank" not in left.tags or "rank" in right.tags or isinstance(left, Choice):
        return frozenset()
    if isinstance(operator, ast.In | ast.NotIn):
        known = isinstance(right, Items) and all(
            isinstance(item, Const) and item.value in (0, -1) for item in right.values
        )
        return frozenset({"one" if isinstance(operator, ast.In) else "rest"} if known else ())
    if not isinstance(right, Const) or not isinstance(right.value, int):
        return frozenset()
    if isinstance(operator, ast.Eq | ast.Is) or (isinstance(operator, ast.Lt | ast.LtE) and right.value <= 1):
        one = not isinstance(operator, ast.LtE) or right.value == 0
        return frozenset({"one"}) if one else frozenset()
    if isinstance(operator, ast.NotEq | ast.IsNot):
        return frozenset({"rest"})
    if (isinstance(operator, ast.Gt) and right.value == 0) or (
        isinstance(operator, ast.GtE) and right.value == 1
    ):
        return frozenset({"rest"})
    return frozenset()
