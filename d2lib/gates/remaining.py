"""What a verdict of G2 does not establish, and what has to follow it: the last words of finish's page."""

from __future__ import annotations

import html

from d2lib.gates.g2 import Word

NOT_ESTABLISHED = (
    "Accepted lengths on other traffic: dev and both held-out splits are development data, measured in full.",
    "Accepted lengths in serving: rounds sit on the committed-K2 trajectory, a proxy, and the bonus token is excluded.",
    "Throughput, latency, or that an engine serves the adapter with this arithmetic.",
    "Readiness for production: no checkpoint, package or service is promoted by this page.",
)
"""What a PASS leaves open."""

AFTER_PASS = (
    "a test on fresh, reserved public TEST families",
    "qualification on an isolated real worker",
    "the floating native adapter package and its profile",
    "V1",
    "the coordinator's G3 and depth work on GB10",
)
"""What is still required before the production's drafter may be replaced."""

AFTER_FAIL = (
    "keep this receipt and everything that it names, and report it",
    "do not retune on the held-out splits",
    "do not draw the pilot's sample again",
)
"""What follows a FAIL."""


def remaining_html(verdict: Word) -> str:
    """The lists that belong to a verdict, as an HTML fragment."""
    after = ("Still required, for the production's drafter", AFTER_PASS) if verdict == "PASS" else ("Now", AFTER_FAIL)
    return "".join(
        f"<p><strong>{html.escape(title)}</strong></p><ul>{_items(items)}</ul>"
        for title, items in (("What a PASS does not establish", NOT_ESTABLISHED), after)
    )


def remaining_text(verdict: Word) -> str:
    """The same for a terminal."""
    return "\n".join(
        ("A PASS does not establish:", *NOT_ESTABLISHED, "Next:", *(AFTER_PASS if verdict == "PASS" else AFTER_FAIL))
    )


def _items(items: tuple[str, ...]) -> str:
    return "".join(f"<li>{html.escape(item)}</li>" for item in items)
