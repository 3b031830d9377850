"""Settings of a file and of flags, checked: all errors at once, each with its line, the setting and the remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from backends.errors import SettingsError, cannot_read
from lachesis.settings.flags import YamlLoader, accepts, close_names
from lachesis.settings.setting_facts import facts_of

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Model = TypeVar("Model", bound=BaseModel)
Keys = tuple[str | int, ...]

_NEXT = "\n       "
"""Between the problems of one error, so that they are below each other after "error: "."""
_LINE = re.compile(r", line (\d+): ")
_KINDS = {
    "bool": "must be true or false",
    "dict": "must be a mapping, written as '{name: value}'",
    "float": "must be a number",
    "int": "must be a whole number",
    "list": "must be a list, written as '[a, b]'",
    "string": "must be text",
}
"""By the beginning of pydantic's name of an error."""
_OTHERS = {
    "extra_forbidden": "there is no setting of this name",
    "finite_number": "must be a finite number",
    "missing": "is missing",
    "model_type": "must be a mapping of settings",
}


class SettingsFile(dict[str, Any]):
    """The content of a YAML file by section; empty without a file."""

    def __init__(self, path: Path | None = None, content: Mapping[str, Any] = {}, lines: Mapping[Keys, int] = {}):
        super().__init__(content)
        self.path = path
        self._lines = lines

    def place(self, *keys: str | int) -> str:
        """The file and the line of a key, with ": " behind them; empty without a file."""
        line = self._lines.get(keys)
        return "" if self.path is None else f"{self.path}{'' if line is None else f', line {line}'}: "

    def places(self, section: Keys, names: Iterable[str], flags: Iterable[str] = ()) -> dict[str, str]:
        """`place` of each setting of a section that no flag sets, by its name: flags win."""
        return {} if self.path is None else {name: self.place(*section, name) for name in {*names} - {*flags}}

    def section(self, name: str) -> dict[str, Any]:
        """A section that is a mapping. Raises SettingsError."""
        found = self.get(name) or {}
        if not isinstance(found, dict):
            raise SettingsError(
                f"{self.place(name)}{name}: must be a mapping of settings, not a {type(found).__name__}"
            )
        return dict(found)


class Problems:
    """The problems of several checks, raised as one error in the order of the file."""

    def __init__(self) -> None:
        self._said: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """A SettingsError in the block is one of them."""
        try:
            yield
        except SettingsError as error:
            self._said += str(error).split(_NEXT)

    def raise_all(self) -> None:
        """Raises SettingsError where there are any."""
        if self._said:
            raise SettingsError(_NEXT.join(sorted(dict.fromkeys(self._said), key=_line_of)))


def _line_of(problem: str) -> int:
    found = _LINE.search(problem)
    return int(found[1]) if found else 0


def read_yaml(path: Path) -> SettingsFile:
    """The content of a settings file. Raises SettingsError where it is none."""
    try:
        loader = YamlLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise SettingsError(f"{cannot_read(path, error)}; name a YAML file of settings") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not YAML: {_yaml_problem(error)}; correct it and start again") from error
    if content is None:
        return SettingsFile(path)
    if not isinstance(content, dict):
        raise SettingsError(f"{path} must have its settings under env: and openai:, not be a {type(content).__name__}")
    return SettingsFile(path, content, dict(_lines(loader, node)))


def _yaml_problem(error: Exception) -> str:
    """The line and the problem. What is not closed is found at the end of the file; the line is where it was opened."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    at, said = error.problem_mark.line + 1, error.problem or ""
    context, begun = error.context or "", error.context_mark
    if context and not context.startswith("while"):  # a sentence of which the problem is the end
        said = f"{context}, {said}"
    elif begun is not None and re.search("quoted|flow", context) and begun.line + 1 < at:
        said, at = f"{said} in line {at}, {context}", begun.line + 1
    return f"line {at}: {said}"


def _lines(loader: YamlLoader, node: Any, above: Keys = ()) -> Iterator[tuple[Keys, int]]:
    """The lines of the keys of a mapping, of those below them, and of the items of lists there."""
    if isinstance(node, yaml.MappingNode):
        scalars = ((key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode))
        found: Iterable[tuple[Any, Any, Any]] = ((key, loader.construct_object(key), value) for key, value in scalars)
    elif isinstance(node, yaml.SequenceNode):
        found = ((item, number, item) for number, item in enumerate(node.value))
    else:
        return
    for at, key, value in found:
        yield (keys := (*above, key)), at.start_mark.line + 1
        if len(keys) < 4:
            yield from _lines(loader, value, keys)


def reject_unknown(
    prefix: str,
    given: Iterable[str],
    known: Iterable[str],
    origins: Mapping[str, str] = {},
    elsewhere: Mapping[str, Iterable[str]] = {},
) -> None:
    """Raises SettingsError for names that are not known, each with those that somebody may have meant.

    Args:
        given: keys of YAML, which may be numbers too.
        origins: see `SettingsFile.places`.
        elsewhere: by another section, the names that it has.
    """
    known, problems = list(known), []
    for key in given:
        if (name := str(key)) in known:
            continue
        file, colon, section = prefix.rpartition(": ")
        place = origins.get(key, f"{file}{colon}")
        if right := next((other for other, names in elsewhere.items() if name in names), ""):
            problems.append(f"{place}{section}{name} belongs under {right}: (write `{right}:`, and indent it below)")
            continue
        near = close_names(name, known)
        others = {each: other for other, names in elsewhere.items() for each in names}
        if not near and (meant := close_names(name, others)[:1]):
            near = [f"{each}, under {others[each]}:" if each in others else each for each in meant]
        hint = f"; did you mean {' or '.join(near)}?" if near else _known(name, known)
        problems.append(f"{place}unknown setting {section}{name}{hint}")
    if problems:
        raise SettingsError(_NEXT.join(problems))


def _known(name: str, known: Sequence[str]) -> str:
    """All names if they are few; of the hundreds that an environment has, the nearest."""
    if len(known) <= 20:
        return f"; known are {', '.join(known)}"
    near = get_close_matches(name, known, n=5, cutoff=0.5)
    return "; " + (f"near it: {', '.join(near)}; " if near else "") + "docs/settings.md lists them"


def validate_settings(
    model: type[Model],
    values: Mapping[str, Any],
    namespace: str,
    origins: Mapping[str, str] = {},
) -> Model:
    """The settings, checked. Raises SettingsError, which names each setting and its problem.

    `origins`: see `SettingsFile.places`.
    """
    problems = Problems()
    for name in (name for name, value in values.items() if isinstance(value, bool) and name in model.model_fields):
        kind = model.model_fields[name].annotation  # pydantic takes `yes` for 1
        if not accepts(kind, bool) and (accepts(kind, int) or accepts(kind, float)):
            with problems.collected():
                setting = f"{origins.get(name, '')}{namespace}.{name}"
                raise SettingsError(f"{setting}: must be a number (got {values[name]!r})")
    made: Model | None = None
    with problems.collected():
        try:
            made = model(**values)
        except ValidationError as error:
            raise settings_error(error, model, namespace, origins) from error
    problems.raise_all()
    assert made is not None
    return made


def settings_error(
    error: ValidationError, model: type[BaseModel], namespace: str, origins: Mapping[str, str] = {}
) -> SettingsError:
    """What pydantic found, in our words. `origins`: see `SettingsFile.places`."""
    lines = []
    for problem in error.errors():
        at = problem["loc"]
        setting = f"{origins.get(str(at[0]), '') if at else ''}{'.'.join(map(str, (namespace, *at)))}"
        lines.append(f"{setting}: {_message(problem)}{_got(model, problem) if at else ''}")
    return SettingsError(_NEXT.join(lines))


def _got(model: type[BaseModel], problem: ErrorDetails) -> str:
    """The rejected value, unless the setting holds secrets."""
    name = str(problem["loc"][0])
    if problem["type"] == "missing" or (name in model.model_fields and facts_of(model, name).secret):
        return ""
    return f" (got {problem['input']!r})"


def _message(problem: ErrorDetails) -> str:
    """What pydantic or a check of ours says, in the words of an error about a flag."""
    kind = problem["type"]
    if kind in _OTHERS:
        return _OTHERS[kind]
    if kind.endswith(("_type", "_parsing", "_from_float")) and (said := _KINDS.get(kind.partition("_")[0])):
        return said
    said = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return said.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
