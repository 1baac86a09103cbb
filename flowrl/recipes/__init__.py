"""The shipped recipes, and how a recipe's file is found and read. Loads neither torch nor diffusers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

FOLDER = Path(__file__).parent
SUFFIXES = (".yaml", ".yml")


class RecipeError(ValueError):
    """A recipe that cannot be used; the message names the key or the file and the remedy."""


def shipped() -> dict[str, Path]:
    """The recipes of this folder by name, sorted."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def is_recipe(name_or_path: str) -> bool:
    """Whether this names a recipe rather than a model: a shipped one, or a YAML file's path."""
    return name_or_path in shipped() or Path(name_or_path).suffix in SUFFIXES


def find(name_or_path: str) -> Path:
    """The file of a recipe, given its name or its path.

    Raises:
        RecipeError: there is none; with the nearest name.
    """
    if name_or_path in shipped():
        return shipped()[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.suffix in SUFFIXES:
        raise RecipeError(f"no recipe file {path}{nearest(path.stem, shipped())}")
    raise RecipeError(f"no recipe {name_or_path!r}{nearest(name_or_path, shipped())}")


def read(path: Path) -> dict[str, Any]:
    """The mapping in a recipe's file.

    Raises:
        RecipeError: not YAML (with file and line), a key given twice, or no mapping.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise RecipeError(f"{path}{where}: {error.problem or 'not YAML'}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} is not YAML text: {error}") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"{path} holds no mapping of keys to values")
    return tree


def read_value(text: str) -> Any:
    """The value of a `key=value` on the command line, read as YAML.

    Raises:
        RecipeError: not YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{text!r} is not a YAML value: {getattr(error, 'problem', error)}") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """How an error about an unknown name ends: with the nearest known one, or with all."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


class _Loader(yaml.SafeLoader):
    """YAML with version 1.2's plain scalars: `no` is a word, 1e-4 a number. A key given twice is an error."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in pairs if tag.rpartition(":")[2] in ("null", "int", "merge")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*\.\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|nan))$"),
    list("-+.0123456789"),
)
