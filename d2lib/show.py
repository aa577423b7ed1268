"""What a notebook page shows: figures with a text alternative and their numbers, tables, verdicts.

A figure goes out as SVG whose ids and metadata do not change from run to run, with its numbers in a table below it, so
that a reader without the picture, or without a screen, loses nothing.
"""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]


def number(value: Any) -> str:
    """A value as a person reads it: thousands separated, six significant digits, yes and no for flags."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    return str(value)


def table_html(rows: Sequence[Row], caption: str = "", label: str = "Table") -> str:
    """Rows with equal keys as an HTML table whose header cells say what they head; it scrolls in its own box.

    Args:
        label: the box's name for those who do not see it, where there is no caption.
    """
    if not rows:
        return f"<p>{html.escape(caption or label)}: none.</p>"
    head = "".join(f'<th scope="col">{html.escape(str(name))}</th>' for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(number(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="d2-table" role="region" tabindex="0" aria-label="{html.escape(caption or label)}" '
        f'style="overflow-x:auto"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def verdict_html(verdict: str | None, sentence: str) -> str:
    """The verdict as the first thing that the eye finds; the word carries it, the colour only helps."""
    word = verdict or "done"
    colour = {"PASS": "#0b6e4f", "done": "#0b6e4f", "INCONCLUSIVE": "#8a5a00"}.get(word, "#a4262c")
    return (
        f'<p class="d2-verdict" data-verdict="{html.escape(word)}"><strong style="background:{colour};color:#fff;'
        f'padding:.15em .6em;border-radius:.2em;font-size:1.3em">{html.escape(word)}</strong> '
        f"{html.escape(sentence)}</p>"
    )


def svg(figure: Figure) -> str:
    """A figure as SVG text, the same bytes each time. Its words are text, in a face as wide as DejaVu Sans."""
    import matplotlib as mpl

    stream = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "d2", "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = stream.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    return text[text.index("<svg") :]


def show_html(text: str, plain: str = "") -> None:
    """Display an HTML fragment, with a plain form for terminals."""
    from IPython.display import display

    display({"text/html": text, "text/plain": plain or "(HTML)"}, raw=True)  # type: ignore[no-untyped-call]


def show_table(rows: Sequence[Row], caption: str = "") -> None:
    """Display a table."""
    plain = "\n".join("  ".join(f"{key}={number(value)}" for key, value in row.items()) for row in rows)
    show_html(table_html(rows, caption), plain)


def show_verdict(verdict: str | None, sentence: str) -> None:
    """Display a verdict and the sentence that explains it."""
    show_html(verdict_html(verdict, sentence), f"{verdict or 'done'}: {sentence}")


def show_figure(figure: Figure, alternative: str, numbers: Sequence[Row] = ()) -> None:
    """Display a figure as SVG with its text alternative, then its numbers, folded.

    Args:
        figure: a matplotlib figure; it is closed afterwards.
        alternative: one sentence that says what the figure shows.
        numbers: the figure's values, one row a mark.
    """
    import matplotlib.pyplot as plt
    from IPython.display import display

    display(  # type: ignore[no-untyped-call]
        {"image/svg+xml": svg(figure), "text/plain": alternative},
        raw=True,
        metadata={"image/svg+xml": {"alt": alternative}},
    )
    plt.close(figure)
    if numbers:
        label = f"Numbers: {alternative}"
        body = f"<details><summary>The numbers of this figure</summary>{table_html(numbers, label=label)}</details>"
        show_html(body, f"{len(numbers)} rows of numbers")
