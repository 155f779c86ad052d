"""Skeletons of prompts: a template's own text around the messages, kept by the messages' roles.

Rendering costs a chat more than its tokens do: a validation, SGLang's conversions, a program of Jinja. Many templates
write each text as it is, between marks that depend on roles and places alone. Such a template is rendered once for each
sequence of roles, with marks for texts; later chats put their own texts in.

`writes_texts_as_they_are` is the proof, from the template's syntax tree. It knows few forms, and what it does not know
is no proof. Templates with a clock, with filters on texts or with tests of them are rendered each time.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MOST = 512
"""Sequences of roles that are kept."""
_LOOP = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length"})
_CALLS = frozenset({"raise_exception", "namespace"})
_FILTERS = frozenset({"capitalize", "count", "default", "length", "lower", "string", "title", "trim", "upper"})
_METHODS = frozenset(dir(dict))
_STATEMENTS = (nodes.Template, nodes.Output, nodes.For, nodes.If, nodes.Assign, nodes.Break, nodes.Continue)
_EXPRESSIONS = (
    nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.Add,
    nodes.Sub, nodes.Mod, nodes.Concat, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.CondExpr,
    nodes.Test, nodes.Filter, nodes.Call, nodes.Keyword, nodes.Neg, nodes.List, nodes.Tuple,
)  # fmt: skip


class Skeletons:
    """Skeletons of one template. Thread-safe."""

    def __init__(self, render: Callable[[Sequence[str], Sequence[str]], str]) -> None:
        """render: renders texts by their roles, as the template does. Its errors pass."""
        self._render = render
        self._kept: OrderedDict[tuple[str, ...], tuple[str, ...] | None] = OrderedDict()
        self._lock = threading.Lock()

    def text(self, roles: Sequence[str], texts: Sequence[str]) -> str | None:
        """Return the prompt of these texts; None if the template does not write each of them once, in order."""
        key = tuple(roles)
        with self._lock:
            is_known = key in self._kept
            parts = self._kept.get(key)
            if is_known:
                self._kept.move_to_end(key)
        if not is_known:
            parts = self._learnt(key)
            with self._lock:
                self._kept[key] = parts
                while len(self._kept) > _MOST:
                    self._kept.popitem(last=False)
        if parts is None:
            return None
        written = list(parts)
        for at, text in enumerate(texts):
            written[2 * at + 1] = text
        return "".join(written)

    def _learnt(self, roles: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return the template's text before, between and behind the texts, with empty places for them."""
        marks = [f"\u2983{at}\u2984" for at in range(len(roles))]
        rest = self._render(roles, marks)
        parts: list[str] = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                return None
            parts += (before, "")
        return (*parts, rest)


def writes_texts_as_they_are(template: str) -> bool:
    """Return True if it is certain that the template looks at no text of a message, and writes each as it is."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        tree = environment.parse(template)
    except TemplateSyntaxError:
        return False
    if not all(isinstance(node, (*_STATEMENTS, *_EXPRESSIONS)) for node in _all(tree)):
        return False
    return _Proof(tree).holds


class _Proof:
    """The check of one syntax tree."""

    def __init__(self, tree: nodes.Template) -> None:
        self._lists = {"messages"}
        """Names of lists of messages."""
        self._messages: set[str] = set()
        """Names of messages."""
        for node in _all(tree):
            if isinstance(node, nodes.Assign) and self._is_list(node.node) and isinstance(node.target, nodes.Name):
                self._lists.add(node.target.name)
        for node in _all(tree):
            if isinstance(node, nodes.For) and self._is_list(node.iter) and isinstance(node.target, nodes.Name):
                self._messages.add(node.target.name)
        self.holds = self._is_clean(tree, is_written=False)

    def _is_clean(self, node: nodes.Node, *, is_written: bool) -> bool:
        """Return True if no text of a message reaches anything but the output.

        is_written: the value of `node` is written as it is.
        """
        match node:
            case nodes.Output():
                return all(self._is_clean(child, is_written=True) for child in node.nodes)
            case nodes.Add() | nodes.Concat() if is_written:
                return all(self._is_clean(child, is_written=True) for child in node.iter_child_nodes())
            case (
                nodes.Getattr(node=owner, attr=str(name)) | nodes.Getitem(node=owner, arg=nodes.Const(value=str(name)))
            ):
                return self._is_clean_field(owner, name, is_written=is_written)
            case nodes.For() if self._is_list(node.iter):
                inside = [child for child in node.iter_child_nodes() if child is not node.iter]
                return isinstance(node.target, nodes.Name) and all(
                    self._is_clean(child, is_written=False) for child in inside
                )
            case nodes.Assign() if self._is_list(node.node):
                return isinstance(node.target, nodes.Name)
            case nodes.Filter(node=nodes.Name(name=name), name="length" | "count") if name in self._lists:
                return True
            case nodes.Filter() if node.name not in _FILTERS:
                return False
            case nodes.Call():
                is_known = isinstance(node.node, nodes.Name) and node.node.name in _CALLS
                return is_known and self._are_clean(node)
            case nodes.Name():
                return node.name not in self._lists and (node.ctx == "store" or node.name not in self._messages)
        return self._are_clean(node)

    def _are_clean(self, node: nodes.Node) -> bool:
        return all(self._is_clean(child, is_written=False) for child in node.iter_child_nodes())

    def _is_clean_field(self, owner: nodes.Expr, name: str, *, is_written: bool) -> bool:
        if isinstance(owner, nodes.Name) and owner.name == "loop":
            return name in _LOOP
        if name in _METHODS or name.startswith("_"):
            return False
        if self._is_message(owner):
            return name != "content" or is_written
        return name != "content" and self._is_clean(owner, is_written=False)

    def _is_message(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Name():
                return node.name in self._messages
            case nodes.Getitem(node=owner, arg=nodes.Const(value=int()) | nodes.Neg()):
                return self._is_list(owner)
        return False

    def _is_list(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Name():
                return node.name in self._lists
            case nodes.Getitem(node=owner, arg=nodes.Slice()):
                return self._is_list(owner)
        return False


def _all(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _all(child)
