"""Sampler parts are frozen dataclasses; here they become JSON-ready dictionaries and back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def to_dict(part: Any) -> dict[str, Any]:
    """`{"class": name, field: value, ...}`, nested parts included."""
    values = {field.name: getattr(part, field.name) for field in fields(part)}
    return {"class": type(part).__name__} | {
        name: to_dict(value) if is_dataclass(value) else value for name, value in values.items()
    }


def from_dict(data: dict[str, Any], base: type[T], nested: dict[str, type] | None = None) -> T:
    """Rebuild a `base` (or a subclass of it) from `to_dict`'s output.

    Args:
        nested: field name -> base class of the parts that are dictionaries themselves.

    Raises:
        ValueError: the class is missing or no `base`, or a key is unknown; with the closest known name.
    """
    values = dict(data)
    classes = {cls.__name__: cls for cls in _family(base)}
    name = values.pop("class", None)
    if name not in classes:
        raise ValueError(f"{name!r} is not a {base.__name__}{suggest(name, classes)}")
    cls = classes[name]
    reject_unknown(cls, values)
    for key, part in (nested or {}).items():
        if key in values:
            values[key] = from_dict(values[key], part)
    return cls(**values)


def reject_unknown(cls: Any, names: Iterable[str]) -> None:
    """Raise ValueError if any of `names` is no field of the dataclass `cls`."""
    known = [field.name for field in fields(cls)]
    for name in names:
        if name not in known:
            raise ValueError(f"{cls.__name__} has no parameter {name!r}{suggest(name, known)}")


def suggest(name: object, known: Iterable[str]) -> str:
    """A closing clause for an error: the closest known name, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f". Did you mean {close[0]!r}?" if close else f". Known: {', '.join(known)}."


def _family(base: type) -> list[type]:
    return [base] + [cls for child in base.__subclasses__() for cls in _family(child)]
