"""What comes from outside, read strictly: UTF-8 text, JSON, YAML, and records checked against their schema.

The same rules hold for every file that a person or another program wrote. Text is UTF-8 without a byte-order mark. A
key is given once, a number is finite, and nesting is bounded. YAML is read by the core schema of YAML 1.2 and without
anchors, aliases and tags: `1e-3` is a number, and `no`, `on`, `012` and `2026-01-01` are text as written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from d2lib.errors import Refused

MAX_DEPTH = 100
"""Lists and mappings within one another; what reads the value afterwards may recurse."""
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
"""How a digest is written in every record (see d2lib.files.Hashed)."""

_TRUNCATED = 200
_YAML11_WORDS = frozenset({"yes", "no", "on", "off", "y", "n"})


class Record(BaseModel):
    """Base of every parameter and record: immutable, strictly typed, unknown keys refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, value: Any, where: object = None, *, message: str | None = None) -> Self:
        """A plain value, as `parse_json` and `parse_yaml` return it, as a record.

        Args:
            value: mappings, lists, strings, numbers, booleans and None; lists stand for tuples, as in JSON.
            where: the file, or what else the value comes from, for the error.
            message: what the error says first, e.g. "the manifest is wrong".

        Raises:
            Refused: names the first field that is wrong, what it should be and what it is.
        """
        message = message or f"not a valid {cls.__name__}"
        try:
            return cls.model_validate_json(json.dumps(value))
        except ValidationError as error:
            raise malformed(message, error, where) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise Refused(message, expected="plain values", found=str(error), where=where) from None


def malformed(message: str, error: ValidationError, where: object = None) -> Refused:
    """A schema's first complaint as an error that names the place and the field."""
    field, expected, found = first_problem(error)
    place = ": ".join(str(part) for part in (where, field) if part not in (None, ""))
    return Refused(message, expected=expected, found=found, where=place or None)


def first_problem(error: ValidationError) -> tuple[str, str, str | None]:
    """(field, what it should be, what it is) of a schema's first complaint; no field when it is about the whole."""
    first = error.errors(include_url=False)[0]
    field, value = ".".join(map(str, first["loc"])), first["input"]
    expected = first["msg"].removeprefix("Value error, ")
    if first["type"] == "bool_type" and str(value).lower() in _YAML11_WORDS:
        expected = "true or false"
    shown = None if isinstance(value, dict | BaseModel) else repr(value)[:_TRUNCATED]
    return field, expected, shown


def decode(data: bytes, *, where: object = None) -> str:
    """UTF-8 bytes as text; raises Refused at other encodings and at a byte-order mark."""
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise Refused(
            "a text begins with a byte-order mark", expected="UTF-8 without one", found=data[:3].hex(" "), where=where
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(
            "a text is not UTF-8", expected="UTF-8", found=f"{error.reason} at byte {error.start}", where=where
        ) from None


def read_text(path: Path, *, what: str = "a file") -> str:
    """A file's UTF-8 text; raises Refused when it cannot be read or is in another encoding."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        found = getattr(error, "strerror", None) or str(error)
        raise Refused(f"{what} cannot be read", expected="a readable file", found=found, where=path) from None
    return decode(data, where=path)


def parse_json(text: str | bytes, *, where: object = None) -> Any:
    """A JSON value; raises Refused at a duplicate key, a number that is not finite, deep nesting and trailing text."""
    if isinstance(text, bytes):
        text = decode(text, where=where)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise Refused("a JSON key stands twice", found=_duplicate(key for key, _ in pairs), where=where)
        return value

    def nonfinite(name: str) -> float:
        raise Refused("a JSON number is not finite", expected="a finite number", found=name, where=where)

    def number(digits: str) -> float:
        value = float(digits)
        return value if abs(value) != float("inf") else nonfinite(digits)

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=nonfinite, parse_float=number)
    except ValueError as error:
        raise Refused("not valid JSON", found=str(error), where=where) from None
    except RecursionError:
        raise _too_deep(where) from None
    if text.count("[") + text.count("{") > MAX_DEPTH:  # counting is quick, walking is not
        _check_depth(value, where)
    _check_unicode(text, value, "JSON", where)
    return value


def read_json(path: Path, *, what: str = "a file") -> Any:
    """The JSON value in a file, as `parse_json`."""
    return parse_json(read_text(path, what=what), where=path)


def parse_yaml(text: str | bytes, *, where: object = None) -> Any:
    """The YAML value in a text, None for an empty one.

    Raises:
        Refused: not YAML, several documents, a duplicate key or one that is not text, an anchor, an alias, a tag, a
            number that is not finite, or deep nesting.
    """
    if isinstance(text, bytes):
        text = decode(text, where=where)
    try:
        loader = _Loader(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise Refused("not valid YAML", found=" ".join(str(error).split())[:_TRUNCATED], where=where) from None
    except RecursionError:
        raise _too_deep(where) from None
    except _Rejected as error:
        line = None if error.mark is None else f"line {error.mark.line + 1}"
        place = ", ".join(str(part) for part in (where, line) if part is not None)
        raise Refused(error.message, expected=error.expected, found=error.found, where=place or None) from None
    _check_unicode(text, value, "YAML", where)
    return value


def read_yaml(path: Path, *, what: str = "a file") -> Any:
    """The YAML value in a file, as `parse_yaml`."""
    return parse_yaml(read_text(path, what=what), where=path)


def differences(before: Any, now: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two JSON values differ: (path such as `arms[1].updates`, before, now), keys in sorted order.

    An absent key is shown as None; lists of different lengths differ as a whole, and so do values without a path,
    whose place is `(all)`. 1 and 1.0 are equal, 1 and true are not.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            at = f"{place}.{key}" if place else str(key)
            if key in before and key in now:
                yield from differences(before[key], now[key], at)
            else:
                yield at, before.get(key), now.get(key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif before != now or isinstance(before, bool) != isinstance(now, bool):
        yield place or "(all)", before, now


class _Rejected(Exception):
    """YAML that is well formed and not allowed here."""

    def __init__(self, message: str, found: object, mark: yaml.Mark | None, expected: str | None = None) -> None:
        super().__init__(message)
        self.message, self.expected, self.found, self.mark = message, expected, found, mark


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2's core schema, without anchors, aliases and tags."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        if getattr(event, "anchor", None) is not None:
            what = "an alias" if isinstance(event, yaml.AliasEvent) else "an anchor"
            raise _Rejected(f"{what} in YAML is not allowed", event.anchor, mark, "the value written out")
        if getattr(event, "tag", None) is not None:
            raise _Rejected("a tag in YAML is not allowed", event.tag, mark, "a plain value")
        if self.depth >= MAX_DEPTH and isinstance(event, yaml.CollectionStartEvent):
            raise _Rejected("nested too deep", "more", mark, f"at most {MAX_DEPTH} levels")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for (key_node, _), key in zip(node.value, keys, strict=True):
            if not isinstance(key, str):
                raise _Rejected("a YAML key is not text", repr(key)[:_TRUNCATED], key_node.start_mark, "quote it")
        if len(set(keys)) != len(keys):
            raise _Rejected("a YAML key stands twice", _duplicate(keys), node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """A number of the core schema; one that is not finite is refused."""
        text = node.value.lstrip("+-")
        if node.tag.endswith("int"):
            bases = {"0x": 16, "0o": 8}
            value: int | float | None = int(text, bases.get(text[:2], 10)) if len(text) < 4000 else None
        else:
            value = None if text.lstrip(".")[:1].isalpha() else float(text)
        if value is None or value == float("inf"):
            raise _Rejected("a YAML number is not finite", node.value[:40], node.start_mark, "a finite number")
        return -value if node.value.startswith("-") else value


_CORE_SCHEMA: tuple[tuple[str, str, str, Callable[[Any, Any], Any]], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN", lambda loader, node: None),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF", lambda loader, node: node.value.lower() == "true"),
    # A leading zero is no number here: YAML 1.1 would read octal, YAML 1.2 decimal.
    ("int", r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789", _Loader.construct_number),
    (
        "float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
        _Loader.construct_number,
    ),
)
for _name, _pattern, _first, _construct in _CORE_SCHEMA:
    _tag = f"tag:yaml.org,2002:{_name}"
    _starts = [*_first, ""] if _name == "null" else list(_first)
    _Loader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _starts)
    _Loader.add_constructor(_tag, _construct)


def _duplicate(keys: Iterator[str] | list[str]) -> str:
    seen: set[str] = set()
    return next(key for key in keys if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def _too_deep(where: object) -> Refused:
    return Refused("nested too deep", expected=f"at most {MAX_DEPTH} levels", found="more", where=where)


def _check_unicode(text: str, value: Any, form: str, where: object) -> None:
    """An escape can write half a surrogate pair, which is no text and cannot be written again."""
    if "\\u" in text or "\\U" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise Refused(
                f"not valid {form}", expected="Unicode text", found="half a surrogate pair", where=where
            ) from None


def _check_depth(value: Any, where: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [item for item in level if isinstance(item, dict | list)]
        if not inner:
            return
        level = [child for item in inner for child in (item.values() if isinstance(item, dict) else item)]
    if any(isinstance(item, dict | list) for item in level):
        raise _too_deep(where)
