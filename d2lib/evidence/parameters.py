"""The parameters of papermill's command line, read again strictly.

Papermill reads `-f`, `-y` and `-b` itself, by YAML 1.1 and with the last of two equal keys; `d2 run` reads its file
strictly and calls papermill from Python. Both must come to the same parameters.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from d2lib.errors import Refused
from d2lib.strict import parse_yaml, read_yaml


def read_again(parsed: Mapping[str, Any], locate: Callable[[str], Path]) -> dict[str, Any]:
    """The parameters that papermill's command line was given.

    Args:
        parsed: what papermill made of them; returned as it is when papermill was called from Python.
        locate: a path as papermill was given it → the file.

    Raises:
        Refused: a file or text is not strict YAML, or no mapping.
    """
    import click

    context = click.get_current_context(silent=True)
    if context is None or "parameters_file" not in context.params:
        return dict(parsed)
    values: dict[str, Any] = {}
    for where, value in _mappings(context.params, locate):
        if not isinstance(value, dict):
            raise Refused("parameters are not a mapping", expected="NAME: VALUE lines", found=value, where=where)
        values.update(value)
    single = {name for option in ("parameters", "parameters_raw") for name, _ in context.params[option] or ()}
    injected = {name for name in parsed if str(name).startswith("PAPERMILL_")}
    return {**{name: parsed[name] for name in injected}, **values, **{name: parsed[name] for name in single}}


def _mappings(options: Mapping[str, Any], locate: Callable[[str], Path]) -> Iterator[tuple[str, Any]]:
    """(where, value) of -b, -f and -y, in the order in which papermill takes them; an empty one is no parameters."""
    for text in options["parameters_base64"] or ():
        try:
            data = base64.b64decode(text)
        except binascii.Error as error:
            raise Refused("parameters are not base64", found=str(error), where="-b") from None
        yield "-b", parse_yaml(data, where="-b") or {}
    for name in options["parameters_file"] or ():
        path = locate(name)
        if path.exists() and not path.is_file():  # what papermill has read from a pipe cannot be read again
            raise Refused("a parameter file is not a regular file", where=name, remedy="write it to a file")
        yield name, read_yaml(path, what="a parameter file") or {}
    for text in options["parameters_yaml"] or ():
        yield "-y", parse_yaml(text, where="-y") or {}
