"""The tree of sandboxes that a program has made, for people: as text, and as SVG in a notebook.

The tree shows what this client did. Sandboxes of other clients are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Literal

Kind = Literal["snapshot", "sandbox", "checkpoint"]
_COLOUR = {"snapshot": "#4063d8", "sandbox": "#389826", "checkpoint": "#9558b2"}
_ROW, _STEP, _LEFT = 26, 28, 14


@dataclass(eq=False, slots=True)
class Node:
    """A snapshot, sandbox or checkpoint. `gone` is whether it was deleted."""

    kind: Kind
    name: str
    note: str = ""
    gone: bool = False
    parent: Node | None = field(default=None, repr=False)
    children: list[Node] = field(default_factory=list["Node"], repr=False)

    def add(self, kind: Kind, name: str, note: str = "") -> Node:
        """Adds a child."""
        node = Node(kind, name, note, parent=self)
        self.children.append(node)
        return node

    @property
    def root(self) -> Node:
        """The uppermost node."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def rows(self, depth: int = 0) -> list[tuple[int, Node]]:
        """The node and everything below, with the depth of each."""
        found: list[tuple[int, Node]] = [(depth, self)]
        for child in self.children:
            found.extend(child.rows(depth + 1))
        return found

    def __str__(self) -> str:
        return "\n".join("  " * depth + _label(node) for depth, node in self.rows())

    def _repr_svg_(self) -> str:
        rows = self.rows()
        place = {id(node): index for index, (_, node) in enumerate(rows)}
        widest = max(_LEFT + _STEP * depth + 8 * len(_label(node)) + 30 for depth, node in rows)
        parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{widest}" height="{_ROW * len(rows) + 8}" role="img">']
        for index, (depth, node) in enumerate(rows):
            x, y = _LEFT + _STEP * depth, _ROW * index + 18
            if depth and node.parent is not None:
                above = _ROW * place[id(node.parent)] + 18
                parts.append(f'<path d="M{x - _STEP} {above + 6}V{y}H{x - 6}" fill="none" stroke="#999"/>')
            fill = "none" if node.gone else _COLOUR[node.kind]
            parts.append(f'<circle cx="{x}" cy="{y}" r="6" fill="{fill}" stroke="{_COLOUR[node.kind]}"/>')
            parts.append(f'<text x="{x + 12}" y="{y + 4}" font-family="monospace" font-size="13">{escape(_label(node))}</text>')
        return "".join(parts) + "</svg>"

    def _repr_html_(self) -> str:
        return f"<div>{self._repr_svg_()}</div>"


def _label(node: Node) -> str:
    note = f" ({node.note})" if node.note else ""
    return f"{node.kind} {node.name}{note}{', deleted' if node.gone else ''}"
