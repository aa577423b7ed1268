"""One gate as a row of a table: a value, what it is compared with, and whether it holds."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from d2lib.errors import Refused
from d2lib.files import Record
from d2lib.strict import DIGEST_PATTERN, malformed

Comparison = Literal[">=", ">", "<=", "<", "=="]

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
}

AnyRecord = TypeVar("AnyRecord", bound=Record)


def holds(value: float, comparison: Comparison, threshold: float) -> bool:
    """`value comparison threshold`; False as soon as one of them is NaN or infinite."""
    return math.isfinite(value) and math.isfinite(threshold) and _COMPARE[comparison](value, threshold)


class Gate(Record):
    """One comparison that must hold. `unit` is the value's, `denominator` says over what it is a mean or a count."""

    name: str
    value: float
    comparison: Comparison
    threshold: float
    holds: bool
    unit: str
    denominator: str

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.holds != holds(self.value, self.comparison, self.threshold):
            raise ValueError(f"{self.name}: holds={self.holds} contradicts its own numbers")
        return self


def judged(name: str, value: float, comparison: Comparison, threshold: float, *, unit: str, denominator: str) -> Gate:
    """The gate's row. Raises Refused when a number is not finite: there is no verdict then, not even a FAIL."""
    if not (math.isfinite(value) and math.isfinite(threshold)):
        raise Refused("a gate's number is not finite", expected=f"{comparison} {threshold}", found=value, where=name)
    return Gate(
        name=name,
        value=value,
        comparison=comparison,
        threshold=threshold,
        holds=holds(value, comparison, threshold),
        unit=unit,
        denominator=denominator,
    )


def validated(kind: type[AnyRecord], value: Any, where: object) -> AnyRecord:
    """A JSON value as a record; raises Refused that names the first field which is wrong."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise malformed("a record is malformed", error, where) from None


def digest_field() -> Any:
    """A field that holds a digest, `sha256:<64 hex digits>`."""
    return Field(pattern=DIGEST_PATTERN)
