"""What every family's configuration says, and a drafter.json read by the family that it names."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainValidator, SerializeAsAny

from d2lib.drafter.family import family_named
from d2lib.errors import Refused
from d2lib.files import Record, read_json

OLDEST_FAMILY = "deepseek"
"""The family of a drafter.json that names none: it was written when there was one."""


class DrafterConfig(Record):
    """A drafter's sizes as the rest of the library reads them; a family's own record adds what its arithmetic needs.

    `dim` and `vocab_size` are the target's.
    """

    family: str
    """Key of `family.FAMILIES`."""
    dim: int = Field(gt=0)
    vocab_size: int = Field(gt=1)
    block_size: int = Field(gt=0)
    """K: draft slots per round."""
    target_layer_ids: tuple[int, ...] = Field(min_length=1, strict=False)
    """Tapped layers, in the order of concatenation: tap n is the input residual of the target's layer n."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """RMSNorm's epsilon, fp32 inside."""

    @property
    def n_taps(self) -> int:
        """Tapped layers; raw taps have `n_taps * dim` channels."""
        return len(self.target_layer_ids)

    @abstractmethod
    def context_rows(self, anchor: int) -> int:
        """Rows before the anchor at this row that a round can see: the last so many."""

    @abstractmethod
    def padded_rows(self, rows: int) -> int:
        """To how many rows a round's context of so many is padded in reference arithmetic, with rows that are masked.

        A function of the count alone, with few values: rounds of one value go through products and sums of the same
        shapes, so that many at once can have the bits of each alone.
        """


def parse_config(value: Any, *, where: object = None) -> DrafterConfig:
    """A configuration from a JSON value; raises Refused and names the field that is wrong."""
    family = value.get("family", OLDEST_FAMILY) if isinstance(value, dict) else OLDEST_FAMILY
    return family_named(family, where=where).config.parse(value, where, message="the drafter's configuration is wrong")


def load_config(path: Path) -> DrafterConfig:
    """The configuration in a drafter.json; raises Refused when it is missing or wrong."""
    return parse_config(read_json(path), where=path)


def _of_any_family(value: Any) -> DrafterConfig:
    if isinstance(value, DrafterConfig):
        return value
    try:
        return parse_config(value, where="drafter")
    except Refused as error:
        raise ValueError(str(error)) from None


AnyDrafterConfig = Annotated[SerializeAsAny[DrafterConfig], PlainValidator(_of_any_family)]
"""A record's field that holds the configuration of a drafter of any family."""
