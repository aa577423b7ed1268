"""Strict reading: every way in which a file can say two things, or something else than it seems to say."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from d2lib.errors import Refused
from d2lib.strict import MAX_DEPTH, Record, differences, parse_json, parse_yaml, read_json, read_text, read_yaml

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(PLAIN)
def test_what_json_writes_is_read_back(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@given(PLAIN)
def test_json_is_yaml(value: Any) -> None:
    """YAML 1.2 contains JSON: where both readers exist they agree (PyYAML takes no escaped surrogate pairs)."""
    text = json.dumps(value, ensure_ascii=False)
    if not any(ord(letter) < 32 or not letter.isprintable() for letter in text):
        assert parse_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("+3", 3),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("On", "On"),
        ("yes", "yes"),
        ("y", "y"),
        ("012", "012"),
        ("007", "007"),
        ("1_000", "1_000"),
        ("0b1", "0b1"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("=", "="),
        ("<<", "<<"),
        ("tRue", "tRue"),
        ("'1e-3'", "1e-3"),
        ('"no"', "no"),
        ("1e", "1e"),
        ("e3", "e3"),
        ("0123456789abcdef", "0123456789abcdef"),
    ],
)
def test_yaml_scalars_are_those_of_the_core_schema(text: str, value: object) -> None:
    found = parse_yaml(f"a: {text}")["a"]
    assert found == value
    assert type(found) is type(value)


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, levels)]
    return "\n".join(lines)


DEEP = 5000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", r"a YAML key stands twice; found: a; where: f, line 1"),
        ("x:\n  {no: 1, no: 2}", r"stands twice; found: no; where: f, line 2"),
        (bomb(40), "an anchor in YAML is not allowed.*a0"),
        ("a: *b", "an alias in YAML is not allowed.*b"),
        ("a: !!str 1", "a tag in YAML is not allowed"),
        ("!!python/object/apply:os.getcwd []", "a tag in YAML is not allowed"),
        ("a: .inf", "not finite.*inf"),
        ("a: -.Inf", "not finite"),
        ("a: .NaN", "not finite"),
        ("a: 7e1234567", "not finite.*7e1234567"),
        ("a: " + "9" * 5000, "not finite"),
        ("1: x", "a YAML key is not text; expected: quote it; found: 1"),
        ("null: x", "a YAML key is not text"),
        ("? [a]\n: x", "a YAML key is not text"),
        ("a: [", "not valid YAML"),
        ("--- 1\n--- 2", "not valid YAML.*single document"),
        ("a: \x00", "not valid YAML"),
        ("[" * DEEP, "nested too deep"),
        ("[" * DEEP + "]" * DEEP, "nested too deep"),
        ("{a: " * DEEP, "nested too deep"),
        ("- " * DEEP + "x", "nested too deep"),
        ("\ufeffa: 1".encode(), "byte-order mark"),
        ("a: 1".encode("utf-16"), "byte-order mark"),
        ("a: 1".encode("utf-16-le"), "not valid YAML"),
        ("a: é".encode("latin-1"), "not UTF-8.*byte 3"),
    ],
)
def test_yaml_refusals(text: str | bytes, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        parse_yaml(text, where="f")
    assert str(refused.value).count("\n") == 0
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a":1,"b":2,"a":3}', "a JSON key stands twice; found: a; where: f"),
        ('[{"x":{"a":1,"\\u0061":3}}]', "stands twice"),
        ("NaN", "not finite"),
        ("[-Infinity]", "not finite"),
        ("1e999", "not finite"),
        ("", "not valid JSON"),
        ("1 2", "not valid JSON"),
        ("9" * 5000, "not valid JSON"),
        ('"\\ud800"', "not valid JSON.*surrogate"),
        ('"\\uDfff"', "not valid JSON.*surrogate"),
        ("[" * DEEP + "]" * DEEP, "nested too deep"),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "nested too deep"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested too deep"),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        ("{}".encode("utf-16"), "byte-order mark"),
        ("{}".encode("utf-32"), "byte-order mark"),
        ("{}".encode("utf-16-be"), "not valid JSON"),
        (b'"\xff"', "not UTF-8.*byte 1"),
    ],
)
def test_json_refusals(text: str | bytes, words: str) -> None:
    with pytest.raises(Refused, match=words):
        parse_json(text, where="f")


def test_the_depth_that_is_allowed_is_read_by_both() -> None:
    text = "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH
    assert parse_json(text) == parse_yaml(text) == json.loads(text)
    assert parse_json("[" + ",".join(["[]"] * 5000) + "]") == [[]] * 5000  # wide, not deep
    assert parse_json('"' + "[" * 5000 + '"') == "[" * 5000


@pytest.mark.parametrize("text", [r'a: "\ud800"', r'"\uDC00": 1', r'["\U0000d800"]', r'"\ud83d\ude00"'])
def test_yaml_takes_no_half_of_a_surrogate_pair(text: str) -> None:
    with pytest.raises(Refused, match=r"not valid YAML.*surrogate"):
        parse_yaml(text)
    assert parse_yaml(r'"\U0001f600"') == "\U0001f600"


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse_json('"\\ud83d\\ude00"') == "\U0001f600"


def test_depth_is_bounded_at_any_recursion_limit() -> None:
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(20_000)
        for parse in (parse_json, parse_yaml):
            with pytest.raises(Refused, match="nested too deep"):
                parse("[" * DEEP + "]" * DEEP)
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("read", [read_text, read_json, read_yaml])
def test_files_that_cannot_be_read_are_named(read: Any, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path, tmp_path / "a\x00b"):
        with pytest.raises(Refused, match="cannot be read") as refused:
            read(path, what="the policy")
        assert refused.value.where == path
        assert refused.value.message == "the policy cannot be read"
    path = tmp_path / "latin"
    path.write_bytes("'é'".encode("latin-1"))
    with pytest.raises(Refused, match="not UTF-8"):
        read(path)


def test_the_safe_loader_of_pyyaml_is_left_as_it_was() -> None:
    assert yaml.safe_load("a: no\nb: 012") == {"a": False, "b": 10}


class Inner(Record):
    rate: float
    names: tuple[str, ...] = ()
    flag: bool = False


class Outer(Record):
    inner: Inner
    count: int = 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"inner": {"rate": "1e-3"}}, "valid number; found: '1e-3'; where: f: inner.rate"),
        ({"inner": {"rate": math.nan}}, "finite number; found: nan; where: f: inner.rate"),
        ({"inner": {"rate": 1, "flag": "no"}}, "expected: true or false; found: 'no'; where: f: inner.flag"),
        ({"inner": {"rate": 1, "names": "ab"}}, "where: f: inner.names"),
        ({"inner": {"rate": 1, "other": 2}}, "not permitted; found: 2; where: f: inner.other"),
        ({"inner": {"rate": 1}, "count": 1.0}, "valid integer; found: 1.0; where: f: count"),
        ({"inner": {"rate": 1}, "count": True}, "valid integer; found: True; where: f: count"),
        ({}, "expected: Field required; where: f: inner"),
        ([], r"found: \[\]; where: f$"),
        ({"inner": {"rate": 1}, "count": {1, 2}}, "expected: plain values"),
    ],
)
def test_a_record_names_the_field_that_is_wrong(value: Any, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        Outer.parse(value, "f", message="the outer is wrong")
    assert refused.value.message == "the outer is wrong"


def test_a_record_takes_lists_for_tuples() -> None:
    assert Inner.parse({"rate": 1, "names": ["a", "b"]}) == Inner(rate=1.0, names=("a", "b"))


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}, [("a[1].b", 2, 3)]),
        ({"a": [1, 2]}, {"a": [1]}, [("a", [1, 2], [1])]),
        ({"a": 1}, {"a": True}, [("a", 1, True)]),
        ({}, {"x": None}, [("x", None, None)]),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 1}, [("a.c", 2, 3), ("d", None, 1)]),
        (1, 2, [("(all)", 1, 2)]),
        ({"a": {"b": 1}}, {"a": 1}, [("a", {"b": 1}, 1)]),
    ],
)
def test_differences_are_named_by_their_path(before: Any, now: Any, found: list[Any]) -> None:
    assert list(differences(before, now)) == found


@given(PLAIN, PLAIN)
def test_differences_are_none_exactly_when_values_are_equal(one: Any, other: Any) -> None:
    assert not list(differences(one, one))
    if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True):
        assert not list(differences(one, other))
    if one != other:
        assert list(differences(one, other))
