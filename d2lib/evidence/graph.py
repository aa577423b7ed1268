"""Which receipt read what another one made, drawn: a column of boxes in order of time, and a rail to the right of it
for each receipt that others read, with a branch into every reader. Nothing crosses a box, and it fits a phone."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from markupsafe import Markup

_WIDTH, _HEIGHT, _PITCH = 204, 48, 62
_RAIL, _FIRST, _BEND = 13, 24, 5


class Node(Protocol):
    """What a box needs to know of its receipt."""

    @property
    def name(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def page(self) -> str: ...
    @property
    def word(self) -> str: ...
    @property
    def short(self) -> str: ...


N = TypeVar("N", bound=Node)


@dataclass(frozen=True)
class Edge(Generic[N]):
    """A reader's inputs that one earlier receipt made."""

    maker: N
    reader: N
    inputs: list[tuple[str, str]]
    """(label, digest)"""


def rails(spans: Sequence[tuple[int, int]]) -> list[int]:
    """A rail for each (first row, last row), so that no two on one rail meet; short ones lie nearest to the boxes."""
    placed: dict[int, list[tuple[int, int]]] = {}
    chosen = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda index: (spans[index][1] - spans[index][0], spans[index])):
        first, last = spans[index]
        rail = next(
            rail
            for rail in range(len(spans))
            if all(last < start or end < first for start, end in placed.get(rail, []))
        )
        placed.setdefault(rail, []).append((first, last))
        chosen[index] = rail
    return chosen


def draw(nodes: Sequence[N], edges: Sequence[Edge[N]]) -> Markup:
    """The graph as an SVG; boxes are links, and the edges' inputs stand in a table beside it, not here."""
    row = {node.page: index for index, node in enumerate(nodes)}
    makers = [node for node in nodes if any(edge.maker is node for edge in edges)]
    spans = [(row[node.page], max(row[e.reader.page] for e in edges if e.maker is node)) for node in makers]
    rail = dict(zip((node.page for node in makers), rails(spans), strict=True))
    lines = []
    for node in nodes:
        incoming = sorted((edge for edge in edges if edge.reader is node), key=lambda edge: rail[edge.maker.page])
        for index, edge in enumerate(incoming):
            y0 = row[edge.maker.page] * _PITCH + _HEIGHT - 6
            y1 = row[node.page] * _PITCH + 7 + round((index + 0.5) * 28 / len(incoming))
            x = _WIDTH + _FIRST + rail[edge.maker.page] * _RAIL
            title = f"{edge.reader.name} read from {edge.maker.name}: {', '.join(label for label, _ in edge.inputs)}"
            lines.append(
                f"<g><title>{html.escape(title)}</title>"
                f'<path d="M{_WIDTH},{y0} H{x - _BEND} q{_BEND},0 {_BEND},{_BEND} V{y1 - _BEND} '
                f'q0,{_BEND} -{_BEND},{_BEND} H{_WIDTH + 6}"/>'
                f'<path class="tip" d="M{_WIDTH + 8},{y1 - 4} l-7,4 l7,4 z"/></g>'
            )
    boxes = []
    for index, node in enumerate(nodes):
        y = index * _PITCH
        name = node.name if len(node.name) <= 20 else node.name[:19] + "…"
        boxes.append(
            f'<a href="{html.escape(node.page)}" class="{html.escape(node.word)}">'
            f'<rect x="1" y="{y + 1}" width="{_WIDTH - 1}" height="{_HEIGHT - 2}" rx="5"/>'
            f'<rect class="mark" x="1" y="{y + 1}" width="6" height="{_HEIGHT - 2}" rx="2"/>'
            f'<text x="16" y="{y + 20}"><tspan class="name">{html.escape(name)}</tspan> · {node.attempt}</text>'
            f'<text x="16" y="{y + 38}">{html.escape(node.word)} · {html.escape(node.short)}</text></a>'
        )
    width = _WIDTH + _FIRST + (max(rail.values(), default=0) + 1) * _RAIL
    height = len(nodes) * _PITCH - (_PITCH - _HEIGHT)
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="group" '
        f'aria-label="The receipts in order of time"><g class="edges" aria-hidden="true">{"".join(lines)}</g>'
        f"{''.join(boxes)}</svg>"
    )
