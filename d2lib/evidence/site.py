"""Receipts as a static site: self-contained HTML that needs neither network nor script to be read.

One page per receipt (verdict first, then what the notebook shows, then parameters, inputs with hashes, environment;
code one click away), an index with a graph of which receipt read what another one made, differences between the
attempts of a phase, and a page that compares runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from d2lib.errors import Refused, one_line
from d2lib.evidence import notebook
from d2lib.evidence.graph import Edge, draw
from d2lib.evidence.layout import NOTEBOOK, OPENING, RECEIPT, WORKING_NOTEBOOK, split_attempt
from d2lib.evidence.pages import Page, render_notebook
from d2lib.evidence.receipts import Receipt, parse_receipt
from d2lib.files import sha256_bytes, write_exclusive
from d2lib.show import number, svg

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Entry:
    """One receipt on disk: the run that it lies in, its folder, what receipt.json says and that file's digest."""

    run: str
    folder: Path
    receipt: Receipt
    sha256: str

    @property
    def name(self) -> str:
        """PHASE or PHASE-JOB."""
        return self.receipt.name

    @property
    def attempt(self) -> int:
        """The attempt's number."""
        return self.receipt.attempt

    @property
    def page(self) -> str:
        """The receipt's page, relative to the site's root."""
        return f"{self.run}.{self.name}.{self.attempt}.html"

    @property
    def word(self) -> str:
        """The verdict where the phase judges, the status elsewhere."""
        return self.receipt.verdict or self.receipt.status

    @property
    def short(self) -> str:
        """The first twelve hex digits of the receipt's digest."""
        return self.sha256.removeprefix("sha256:")[:12]


@dataclass(frozen=True)
class Runs:
    """What lies in a folder of runs: receipts in the order of run and start, and attempts that have none (yet)."""

    entries: tuple[Entry, ...]
    unfinished: tuple[tuple[str, str, int], ...]
    """(run, PHASE[-JOB], attempt)"""

    def groups(self) -> dict[str, list[Entry]]:
        """The receipts by run."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.run, []).append(entry)
        return found


def read_runs(runs: Path) -> Runs:
    """Every receipt in a folder of runs, or in one run.

    Raises:
        Refused: no receipts; an empty, damaged or half-written one; a newer schema; a notebook that is too large, is
            missing, or is not the one that its receipt names.
    """
    runs = runs.resolve()
    shape = "runs/NAMESPACE/PHASE[-JOB]/attempt-N/receipt.json"
    if not runs.is_dir():
        raise Refused("no runs here", expected=f"a folder with {shape}", where=runs)
    entries, unfinished = [], []
    for folder in sorted([*runs.glob("*/attempt-*"), *runs.glob("*/*/attempt-*")]):
        place = split_attempt(folder)
        if place is None or not folder.is_dir():
            continue
        if (folder / RECEIPT).is_file():
            entries.append(_read_entry(folder))
        elif any((folder / name).exists() for name in (OPENING, WORKING_NOTEBOOK, NOTEBOOK)):
            unfinished.append((folder.parent.parent.name, *place))
    if not entries:
        begun = ", ".join(f"{run}/{name}/attempt-{attempt}" for run, name, attempt in unfinished)
        raise Refused(
            "no receipts here",
            expected=shape,
            found=f"attempts that run or were cut off: {begun}" if begun else "none",
            where=runs,
            remedy="wait for a phase to end, or run one" if begun else None,
        )
    entries.sort(key=lambda entry: (entry.run, entry.receipt.started, entry.name, entry.attempt))
    return Runs(tuple(entries), tuple(unfinished))


def _read_entry(folder: Path) -> Entry:
    data = _read(folder / RECEIPT)
    receipt = parse_receipt(data, where=folder / RECEIPT)
    if (receipt.name, receipt.attempt) != split_attempt(folder):
        raise Refused(
            "a receipt lies in another's place",
            expected=f"{receipt.name}/attempt-{receipt.attempt}",
            where=folder,
            remedy="see d2 verify",
        )
    return Entry(folder.parent.parent.name, folder, receipt, str(sha256_bytes(data)))


def _read(path: Path) -> bytes:
    """A file of a receipt; its size is looked at before anything is read."""
    try:
        size = path.stat().st_size
        if size > notebook.MAX_BYTES:
            limit = f"at most {notebook.MAX_BYTES >> 20} MiB"
            raise Refused("a file is too large to show", expected=limit, found=f"{size >> 20} MiB", where=path)
        return path.read_bytes()
    except OSError as error:
        raise Refused(
            "a receipt is only half there", expected=f"{RECEIPT} and {NOTEBOOK}", found=error.strerror, where=path
        ) from None


def _read_page(entry: Entry) -> Page:
    path = entry.folder / NOTEBOOK
    data = _read(path)
    if (found := str(sha256_bytes(data))) != entry.receipt.notebook.receipt_sha256:
        raise Refused(
            "a receipt's notebook was changed",
            expected=entry.receipt.notebook.receipt_sha256,
            found=found,
            where=path,
            remedy="see d2 verify",
        )
    try:
        return render_notebook(notebook.from_bytes(data))
    except ValueError as error:
        raise Refused("a receipt's notebook cannot be read", found=str(error), where=path) from None


def edges(entries: Sequence[Entry]) -> list[Edge[Entry]]:
    """(maker, reader) of each input that a receipt of the same run made, with the inputs' labels and digests."""
    by_hash = {entry.sha256: entry for entry in entries}
    found: dict[tuple[str, str], Edge[Entry]] = {}
    for entry in entries:
        digests = {item.label: item.sha256 for item in entry.receipt.inputs}
        for parent in entry.receipt.parents:
            maker = by_hash.get(parent.receipt_json_sha256)
            if maker is not None and maker is not entry:
                edge = found.setdefault((maker.sha256, entry.sha256), Edge(maker, entry, []))
                edge.inputs.append((parent.label, digests.get(parent.label, parent.receipt_json_sha256)))
    return list(found.values())


def flat(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    """A nested mapping as (dotted name, readable value)."""
    if isinstance(value, Mapping) and value:
        for key in sorted(value):
            yield from flat(value[key], f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, number(value) if not isinstance(value, (dict, list)) else str(value or "–")


def differences(before: Entry, after: Entry) -> list[tuple[str, str, str]]:
    """What two attempts of a phase ran with, and ended in, that differs: (field, before, after)."""

    def facts(receipt: Receipt) -> dict[str, str]:
        return dict(
            flat(
                {
                    "parameters": receipt.parameters,
                    "inputs": {item.label: item.sha256 for item in receipt.inputs},
                    "environment": receipt.environment,
                    "d2lib": receipt.d2lib_sha256,
                    "notebook": receipt.notebook.source_sha256,
                    "status": receipt.status,
                    "verdict": receipt.verdict,
                }
            )
        )

    old, new = facts(before.receipt), facts(after.receipt)
    return [
        (name, old.get(name, "–"), new.get(name, "–"))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def duration(seconds: float) -> str:
    """Wall time in the unit that a person would use."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def when(started: str) -> str:
    """A UTC time to the second, as people read it."""
    return started[:19].replace("T", " ")


def compared(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """One row per split and run from each run's last verdict, splits together."""
    last = {entry.run: entry for entry in entries if entry.receipt.phase == "finish" and entry.receipt.result}
    rows = [
        {"entry": entry, "run": entry.run, "split": split, **summary}
        for entry in last.values()
        for split, summary in ((entry.receipt.result or {}).get("splits") or {}).items()
    ]
    order = list(dict.fromkeys(row["split"] for row in rows))
    return sorted(rows, key=lambda row: (order.index(row["split"]), row["run"]))


def costs(groups: Mapping[str, Sequence[Entry]]) -> tuple[list[str], list[dict[str, Any]]]:
    """The phases in order, and per run its last receipt and the seconds of each phase over every attempt."""
    phases = list(dict.fromkeys(entry.receipt.phase for group in groups.values() for entry in group))
    rows = []
    for group in groups.values():
        seconds: dict[str, float] = {}
        for entry in group:
            seconds[entry.receipt.phase] = seconds.get(entry.receipt.phase, 0.0) + entry.receipt.seconds
        rows.append({"entry": group[-1], "receipts": len(group), "seconds": seconds, "total": sum(seconds.values())})
    return phases, rows


def _gains_figure(rows: Sequence[Mapping[str, Any]]) -> str | None:
    if not rows:
        return None
    from d2lib import plots

    return svg(plots.run_gains(rows))


def _visible(value: Any) -> Any:
    """What a template prints: markup as it is, text with what would not be seen written out."""
    return one_line(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _environment() -> Environment:
    from nbconvert.filters import text_base64
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

    environment = Environment(
        loader=PackageLoader("d2lib.evidence", "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, duration=duration, when=when, flat=flat, base64=text_base64)
    light, dark = (HtmlFormatter(style=style).get_style_defs(".highlight") for style in ("default", "github-dark"))
    style = (_TEMPLATES / "style.css").read_text(encoding="utf-8")
    environment.globals["style"] = Markup(
        f"{style}\n{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}"
    )
    return environment


def build_site(runs: Path, out: Path) -> list[Path]:
    """Write the site into a new folder and return its pages.

    Args:
        runs: a folder of runs, or one run.
        out: the site's folder, outside of the runs; it must not exist or must be empty.

    Raises:
        Refused: nothing to show, damaged receipts, or a folder that holds something already.
    """
    found = read_runs(runs)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused("the site's folder is not empty", expected="a new folder", where=out, remedy="choose another")
    if out.resolve().is_relative_to(runs.resolve()):
        raise Refused("the site would lie among the receipts", expected="a folder outside of the runs", where=out)
    environment, groups = _environment(), found.groups()
    pages: dict[str, str] = {}

    def render(name: str, template: str, **values: Any) -> None:
        pages[name] = environment.get_template(template).render(here=name, **values)

    links = {run: edges(entries) for run, entries in groups.items()}
    sentences: dict[str, str] = {}
    for run, entries in groups.items():
        latest: dict[str, Entry] = {}
        for entry in entries:
            earlier = latest.get(entry.name)
            latest[entry.name] = entry
            page = _read_page(entry)
            sentences[entry.page] = page.sentence
            render(
                entry.page,
                "receipt.html.j2",
                entry=entry,
                page=page,
                made_by=[edge for edge in links[run] if edge.reader is entry],
                read_by=[edge for edge in links[run] if edge.maker is entry],
                earlier=earlier,
                differences=differences(earlier, entry) if earlier else [],
            )
    render(
        "index.html",
        "index.html.j2",
        groups=groups,
        unfinished=found.unfinished,
        graphs={run: draw(entries, links[run]) for run, entries in groups.items()},
        links=links,
        sentences=sentences,
    )
    rows = compared(found.entries)
    phases, cost = costs(groups)
    render("compare.html", "compare.html.j2", rows=rows, figure=_gains_figure(rows), phases=phases, costs=cost)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            write_exclusive(out / name, text.encode("utf-8"), mode=0o644)
    except OSError as error:
        raise Refused("the site cannot be written", found=error.strerror, where=out) from None
    return [out / name for name in pages]
