"""Receipts as a static site: self-contained HTML that needs neither network nor script to be read.

One page per receipt (verdict first, then what the notebook shows, then parameters, inputs with hashes, environment;
code one click away), an index, a graph of which receipt's outputs another one read, differences between the attempts
of a phase, and a page that compares runs.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from d2lib.errors import Refused
from d2lib.evidence import notebook
from d2lib.files import read_json, sha256_file, write_exclusive
from d2lib.show import number

SCHEMA_VERSION = 1
_SIZE = (170, 46)
_GAP = (28, 44)


@dataclass(frozen=True)
class Entry:
    """One receipt on disk: its folder and what receipt.json says."""

    folder: Path
    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        """PHASE or PHASE-JOB."""
        return self.data["phase"] if self.data.get("job") is None else f"{self.data['phase']}-{self.data['job']}"

    @property
    def key(self) -> tuple[str, str, int]:
        """(namespace, PHASE[-JOB], attempt): what makes a receipt one of its kind."""
        return (self.data["namespace"], self.name, self.data["attempt"])

    @property
    def page(self) -> str:
        """The receipt's page, relative to the site's root."""
        return f"{self.key[0]}.{self.name}.{self.key[2]}.html"

    @property
    def word(self) -> str:
        """The verdict where the phase judges, the status elsewhere."""
        return str(self.data.get("verdict") or self.data["status"])

    @cached_property
    def sha256(self) -> str:
        """Digest of receipt.json."""
        return sha256_file(self.folder / "receipt.json").digest

    @property
    def duration(self) -> str:
        """Wall time in the unit that a person would use."""
        seconds = float(self.data.get("seconds") or 0.0)
        return (
            f"{seconds:.1f} s"
            if seconds < 120
            else f"{seconds / 60:.1f} min"
            if seconds < 7200
            else (f"{seconds / 3600:.2f} h")
        )


def read_entries(runs: Path) -> list[Entry]:
    """Every receipt under a folder of runs (or one run), in the order of namespace, start and attempt.

    Raises:
        Refused: no receipts, an empty or half-written receipt, a newer schema, or a notebook too large to show.
    """
    if not runs.is_dir():
        raise Refused("no runs here", expected="a folder with runs/NAMESPACE/PHASE/attempt-N/receipt.json", where=runs)
    found = []
    for path in sorted(runs.rglob("attempt-*/receipt.json")):
        data = read_json(path)
        required = {"schema_version", "namespace", "phase", "attempt", "status", "started"}
        if not isinstance(data, dict) or required - data.keys():
            raise Refused("a receipt is incomplete", expected=f"the fields {sorted(required)}", where=path)
        if data["schema_version"] != SCHEMA_VERSION:
            raise Refused(
                "a receipt has another schema",
                expected=f"schema_version {SCHEMA_VERSION}",
                found=data["schema_version"],
                where=path,
                remedy="use the version of d2 that wrote it, or a newer one",
            )
        page = path.with_name("receipt.ipynb")
        if not page.is_file():
            raise Refused("a receipt's notebook is missing", where=page)
        if page.stat().st_size > notebook.MAX_BYTES:
            raise Refused(
                "a notebook is too large to show",
                expected=f"at most {notebook.MAX_BYTES >> 20} MiB",
                found=f"{page.stat().st_size >> 20} MiB",
                where=page,
            )
        found.append(Entry(path.parent, data))
    if not found:
        raise Refused("no receipts here", expected="runs/NAMESPACE/PHASE/attempt-N/receipt.json", where=runs)
    return sorted(found, key=lambda entry: (entry.data["namespace"], entry.data["started"], entry.key))


def _cells(entry: Entry) -> Markup:
    """The receipt notebook's cells as an HTML fragment."""
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    path = entry.folder / "receipt.ipynb"
    try:
        page = notebook.from_bytes(path.read_bytes())
    except ValueError as error:
        raise Refused("a receipt's notebook cannot be read", found=str(error), where=path) from None
    templates = str(Path(__file__).parent / "templates")
    exporter = HTMLExporter(  # type: ignore[no-untyped-call]
        template_name="d2", extra_template_basedirs=[templates], config=Config()
    )
    return Markup(exporter.from_notebook_node(page)[0])


def _parents(entry: Entry, by_hash: Mapping[str, Entry]) -> list[tuple[Entry, str]]:
    """(receipt, label) for each hash-bound input that an earlier receipt made."""
    found = []
    for parent in entry.data.get("parents") or []:
        digest = str(parent.get("receipt_json_sha256", "")).removeprefix("sha256:")
        if digest in by_hash:
            found.append((by_hash[digest], str(parent.get("label", ""))))
    return found


def _graph(entries: Sequence[Entry], by_hash: Mapping[str, Entry]) -> Markup:
    """The chain as an SVG: one box a receipt, one line a hash-bound input, earlier above later."""
    depth: dict[tuple[str, str, int], int] = {}
    for entry in entries:
        depth[entry.key] = 1 + max((depth.get(p.key, -1) for p, _ in _parents(entry, by_hash)), default=-1)
    columns: dict[int, list[Entry]] = {}
    for entry in entries:
        columns.setdefault(depth[entry.key], []).append(entry)
    place = {
        entry.key: (column * (_SIZE[0] + _GAP[0]) + 4, level * (_SIZE[1] + _GAP[1]) + 4)
        for level, row in columns.items()
        for column, entry in enumerate(row)
    }
    width = max(x for x, _ in place.values()) + _SIZE[0] + 4
    height = max(y for _, y in place.values()) + _SIZE[1] + 4
    lines, boxes = [], []
    for entry in entries:
        x, y = place[entry.key]
        for parent, label in _parents(entry, by_hash):
            px, py = place[parent.key]
            x0, y0, x1, y1 = px + _SIZE[0] / 2, py + _SIZE[1], x + _SIZE[0] / 2, y
            bend = (y1 - y0) / 2
            lines.append(
                f'<path d="M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + bend:.0f} {x1:.0f},{y1 - bend:.0f} {x1:.0f},{y1:.0f}">'
                f"<title>{html.escape(f'{parent.name} → {entry.name}: {label}')}</title></path>"
            )
        title = f"{entry.name} · {entry.key[2]}"
        boxes.append(
            f'<a href="{html.escape(entry.page)}"><rect x="{x}" y="{y}" width="{_SIZE[0]}" height="{_SIZE[1]}" rx="6"/>'
            f'<text x="{x + 10}" y="{y + 19}">{html.escape(title)}</text>'
            f'<text x="{x + 10}" y="{y + 36}">{html.escape(entry.word)}</text></a>'
        )
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="group" '
        f'aria-label="Which receipt read what another one made">{"".join(lines)}{"".join(boxes)}</svg>'
    )


def _flat(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from _flat(value[key], f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, number(value)


def differences(before: Entry, after: Entry) -> list[tuple[str, str, str]]:
    """What two attempts of a phase ran with that differs: (field, before, after)."""

    def facts(entry: Entry) -> dict[str, str]:
        data = entry.data
        inputs = {str(item.get("label")): item.get("sha256") for item in data.get("inputs") or []}
        return dict(
            _flat(
                {
                    "parameters": data.get("parameters") or {},
                    "inputs": inputs,
                    "environment": data.get("environment") or {},
                    "d2lib": data.get("d2lib_sha256"),
                    "notebook": (data.get("notebook") or {}).get("source_sha256"),
                    "status": data["status"],
                    "verdict": data.get("verdict"),
                }
            )
        )

    old, new = facts(before), facts(after)
    return [
        (name, old.get(name, "–"), new.get(name, "–"))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _comparison(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """One row per namespace and split from the runs' finish receipts."""
    rows = []
    for entry in entries:
        splits = (entry.data.get("result") or {}).get("splits") if entry.data["phase"] == "finish" else None
        for split, summary in (splits or {}).items():
            rows.append({"entry": entry, "split": split, **summary})
    return rows


def build_site(runs: Path, out: Path) -> list[Path]:
    """Write the site into a new folder and return its pages.

    Args:
        runs: a folder of runs, or one run.
        out: the site's folder; it must not exist or must be empty.

    Raises:
        Refused: nothing to show, damaged receipts, or a folder that holds something already.
    """
    entries = read_entries(runs)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused("the site's folder is not empty", expected="a new folder", where=out, remedy="choose another")
    by_hash = {entry.sha256: entry for entry in entries}
    environment = Environment(
        loader=PackageLoader("d2lib.evidence", "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    style = Markup((Path(__file__).parent / "templates" / "style.css").read_text(encoding="utf-8"))
    from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

    style += Markup(HtmlFormatter(style="default").get_style_defs("figure.none, .highlight"))
    pages: dict[str, str] = {}

    def render(name: str, template: str, **values: Any) -> None:
        pages[name] = environment.get_template(template).render(style=style, **values)

    latest: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        earlier = latest.get(entry.key[:2])
        latest[entry.key[:2]] = entry
        render(
            entry.page,
            "receipt.html.j2",
            entry=entry,
            cells=_cells(entry),
            parents=_parents(entry, by_hash),
            earlier=earlier,
            differences=differences(earlier, entry) if earlier else [],
            flat=lambda value: list(_flat(value)),
        )
    namespaces: dict[str, list[Entry]] = {}
    for entry in entries:
        namespaces.setdefault(entry.key[0], []).append(entry)
    graphs = {name: _graph(group, by_hash) for name, group in namespaces.items()}
    comparison = _comparison(entries)
    render(
        "index.html",
        "index.html.j2",
        namespaces=namespaces,
        graphs=graphs,
        by_hash=by_hash,
        parents=_parents,
        compared=bool(comparison),
    )
    render("compare.html", "compare.html.j2", rows=comparison)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in pages.items():
        write_exclusive(out / name, text.encode("utf-8"), mode=0o644)
        written.append(out / name)
    return written
