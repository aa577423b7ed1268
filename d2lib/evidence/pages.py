"""A receipt's notebook as HTML fragments, through nbconvert: the verdict with its gates, and the cells."""

from __future__ import annotations

import functools
import html
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

_VERDICT = re.compile(r'<p class="d2-verdict"[^>]*>\s*<strong[^>]*>[^<]*</strong>\s*(?P<sentence>[^<]*)</p>')
_GATES = re.compile(r'aria-label="(Gates: )?[0-9]+ of [0-9]+ (checks )?hold"')
_NUMBERS = re.compile(r"<details><summary>The numbers of this figure</summary>")
_HEADING = re.compile(r"^(#{1,5} )", re.MULTILINE)
_ELSEWHERE = '<p class="note"><a href="#verdict">Shown at the top of this page.</a></p>'


@dataclass(frozen=True)
class Page:
    """What a notebook shows."""

    sentence: str
    """What the notebook says about its verdict, or nothing."""
    verdict: Markup
    """The gates or checks under the verdict, or nothing."""
    cells: Markup


def render_notebook(nb: Any) -> Page:
    """A notebook's page. Its verdict, where it shows one, is taken out of its place and given on its own.

    Args:
        nb: a notebook node; it is changed.
    """
    sentence, verdict = "", ""
    for cell in nb.cells:
        if cell["cell_type"] == "markdown":
            cell["source"] = _HEADING.sub(r"#\1", cell["source"])  # the page's own heading is the first
        if cell["cell_type"] == "code":
            cell["outputs"] = _with_numbers(_merge_streams(cell["outputs"]))
            figures = sum("image/svg+xml" in output.get("data", {}) for output in cell["outputs"])
            if figures:  # the style sheet sees tags as classes
                tags = cell["metadata"].get("tags", [])
                cell["metadata"]["tags"] = [*tags, "one-figure" if figures == 1 else "figures"]
            if not sentence:
                sentence, verdict = _take_verdict(cell["outputs"])
    return Page(sentence, Markup(verdict), Markup(_exporter().from_notebook_node(nb)[0]))


@functools.cache
def _exporter() -> Any:
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    return HTMLExporter(  # type: ignore[no-untyped-call]
        template_name="d2",
        extra_template_basedirs=[str(Path(__file__).parent / "templates")],
        config=Config({"HTMLExporter": {"exclude_anchor_links": True}}),
    )


def _take_verdict(outputs: list[Any]) -> tuple[str, str]:
    """The first verdict's sentence and the table that stands with it or follows it; a link takes their place."""
    shown = [output.get("data", {}).get("text/html", "") for output in outputs]
    for index, text in enumerate(shown):
        if found := _VERDICT.search(text):
            rest = text[: found.start()] + text[found.end() :]
            if not rest.strip() and index + 1 < len(shown) and _GATES.search(shown[index + 1]):
                rest = shown[index + 1]
                del outputs[index + 1]
            outputs[index]["data"]["text/html"] = _ELSEWHERE
            return html.unescape(found["sentence"]).strip(), rest
    return "", ""


def _with_numbers(outputs: list[Any]) -> list[Any]:
    """A figure and the numbers that are shown after it as one output, so that they stay together side by side."""
    kept: list[Any] = []
    for output in outputs:
        text = output.get("data", {}).get("text/html", "")
        before = kept[-1] if kept else {}
        if "image/svg+xml" in before.get("data", {}) and _NUMBERS.match(text):
            before["metadata"].setdefault("image/svg+xml", {})["numbers"] = text
        else:
            kept.append(output)
    return kept


def _merge_streams(outputs: list[Any]) -> list[Any]:
    """What a cell printed as one piece, and its log as one piece, each where it began."""
    merged: list[Any] = []
    streams: dict[str, Any] = {}
    for output in outputs:
        if output["output_type"] != "stream":
            merged.append(output)
        elif output["name"] in streams:
            streams[output["name"]]["text"] += output["text"]
        else:
            streams[output["name"]] = output
            merged.append(output)
    return merged
