"""Catalyst's trees as JSON: `toJSON` gives a whole plan or expression in one call; here it becomes Python trees.

Catalyst writes a tree as the flat list of its nodes, each before its children.  A field of a node may hold further
trees (the expressions of an operator, the plan of a sub-query), alone or in lists and tuples.  What Catalyst leaves
out of the JSON is `null` there: maps, and classes that it does not know how to write.

Pure Python; linear in the size of the JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_PACKAGE = "org.apache.spark.sql."


@dataclass(eq=False)
class Tree:
    """A node of a plan or of an expression."""

    kind: str
    """Its class, without `org.apache.spark.sql.`."""
    fields: dict[str, Any]
    children: list[Tree] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its class without the package."""
        return self.kind.rpartition(".")[2].rstrip("$")

    def nested(self) -> Iterator[Tree]:
        """The trees in its fields; its children are not among them."""
        return trees(list(self.fields.values()))

    def walk(self) -> Iterator[Tree]:
        """This node and everything below it, what is in fields included."""
        yield self
        for below in (*self.nested(), *self.children):
            yield from below.walk()


def parse_tree(text: str) -> Tree:
    """The tree that `toJSON` has written."""
    return tree(json.loads(text))


def tree(nodes: list[dict[str, Any]]) -> Tree:
    """The tree of a flat list of nodes, each of which tells how many children follow it."""
    waiting: list[tuple[Tree, int]] = []
    root: Tree | None = None
    for node in nodes:
        made = Tree(str(node["class"]).removeprefix(_PACKAGE), node)
        if root is None:
            root = made
        else:
            parent, missing = waiting.pop()
            parent.children.append(made)
            if missing > 1:
                waiting.append((parent, missing - 1))
        if node["num-children"]:
            waiting.append((made, node["num-children"]))
    assert root is not None
    assert not waiting, "Catalyst writes all children that it counts"
    return root


def trees(value: Any) -> Iterator[Tree]:
    """All trees in a field's value."""
    if isinstance(value, list):
        if value and isinstance(value[0], dict) and "class" in value[0]:
            yield tree(value)
        else:
            for part in value:
                yield from trees(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from trees(part)
