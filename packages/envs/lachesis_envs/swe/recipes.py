"""Recipes of software tasks: what is corrected, where, and which tests decide."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from backends.errors import LachesisError


class BuildError(LachesisError):
    """A task cannot be built."""


def _inside(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ValueError(f"{path!r} is not a path within a tree, as 'src/shop'")
    return str(pure)


Inside = Annotated[str, AfterValidator(_inside)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RecipeTask(_Strict):
    """One of `[[tasks]]`. Paths are those of files in the trees."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    old: str
    """The tree before the fix: a folder next to the recipe, or an archive without `.tar.gz`."""
    new: str
    """The tree after it."""
    tree: list[Inside] = Field(min_length=1)
    """Files and folders that the agent gets."""
    tests: Inside
    """The folder of the tests."""
    instruction: str = Field(min_length=1)
    fix: dict[Inside, list[int]] = {}
    """By file, the lines at which the hunks begin that belong to the fix; without it, all that differs does."""
    python: list[str] = []
    """Requirements of this task; without them, those of the recipe."""
    checks: str = ""
    """Further tests, which become `test_checks.py`."""


class Recipe(_Strict):
    """A file."""

    python: list[str] = ["pytest"]
    archives: dict[str, str] = {}
    """SHA-256 by the name of an archive of the index."""
    tasks: list[RecipeTask] = Field(min_length=1)


def read_recipe(file: Path) -> Mapping[str, Any]:
    """A recipe of one's own.

    Raises:
        BuildError: it is missing, is no TOML, or has what no recipe has.
    """
    try:
        found = Recipe.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise BuildError(f"{file}: {'.'.join(map(str, first['loc']))}: {first['msg']}. Next step: correct it") from None
    except (OSError, ValueError) as error:
        raise BuildError(f"{file} cannot be read: {error}. Next step: name a recipe (docs/swe.md)") from error
    return found.model_dump()


def expected_file(own: Path, name: str) -> Path:
    """The list of the tests that must pass, one per line; those that fail before begin with `! `."""
    return own.parent / "expected" / f"{name}.txt"


def read_expected(own: Path, name: str) -> list[str]:
    """Raises `BuildError` where there is no list."""
    file = expected_file(own, name)
    try:
        if lines := file.read_text(encoding="utf-8").splitlines():
            return lines
        reason = "it is empty"
    except OSError as error:
        reason = str(error.strerror)
    raise BuildError(f"{file}: {reason}. Next step: lachesis tasks build FOLDER --recipe {own} --write-expected")


def write_expected(own: Path, name: str, expected: Iterable[str], fail_to_pass: Iterable[str]) -> Path:
    """Write the list, those that fail before first; its file."""
    before = set(fail_to_pass)
    file = expected_file(own, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = sorted(expected, key=lambda id: id not in before)
    file.write_text("".join(f"{'! ' if id in before else ''}{id}\n" for id in lines), encoding="utf-8")
    return file
