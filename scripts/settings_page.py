"""Write docs/settings.md: every setting with its type, its default and the description of its field.

.venv/bin/python scripts/settings_page.py          # writes the page
.venv/bin/python scripts/settings_page.py --check  # fails when the page is not what would be written
"""

from __future__ import annotations

import argparse
import enum
import inspect
import re
import sys
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from lachesis.cli.play_environment import Verb, _parser
from lachesis.settings.flags import GROUPS, _group
from lachesis.settings.pool_settings import PoolSettings
from lachesis.settings.server_settings import ServerConfig
from lachesis.settings.setting_facts import SHORT, description_of, facts_of
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis.settings.tree_settings import TreeSettings
from lachesis_train.sft.settings import SftSettings
from lachesis_train.trainer.settings import TrainingSettings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
VERBS: tuple[Verb, ...] = ("eval", "process", "serve")

INTRODUCTION = """\
# Settings

<!-- written by `make docs` from the fields of the settings classes -->

This page lists every setting of a run. The flags that everybody needs are short; every setting also has a long flag,
`--env.NAME VALUE` or `--openai.NAME VALUE`, and a line in a YAML file that `--config FILE` names:

```yaml
env:
  group_size: 8
  max_agent_turns: 10
openai:
  model_name: my-model
  base_url: http://127.0.0.1:8000/v1
```

An environment changes a default with [a class attribute](environments.md#settings) of the same name, or a shorter one:
{short}.
A flag wins over the file, and the file over the class. A flag of a setting that is not text is read as YAML:
`--env.enabled_toolsets '[terminal, file]'`.
`lachesis process ENV --help-all` prints these tables, with the settings that ENV has of its own.

"""
NONE = """\
These are accepted, so that old settings files work, and change nothing: {ignored}. `env.batch_size`, the sequences of a
step, is read by `lachesis train` only (default: 8 groups).

These are rejected, since they would change what the model does; other settings do the same:

"""


def short_flags() -> str:
    """The table of short flags, and the setting that each of them is."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for verb in VERBS:
        parser, _ = _parser(verb)
        for action in parser._actions:
            if action.dest != "help" and action.help != argparse.SUPPRESS:
                flag = ", ".join(f"`{name}`" for name in action.option_strings)
                found[flag][verb] = f"`{action.dest}`"
    rows = []
    for flag, settings in found.items():
        cells = [settings.get(verb, "-") for verb in VERBS]
        rows.append((flag, *(cells if len(set(cells)) > 1 else (cells[0], *['"'] * 2))))
    return table(("flag", *(f"`lachesis {verb}`" for verb in VERBS)), rows)


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def type_of(annotation: Any) -> str:
    """A type as a person writes it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_of(parts[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_of(part) for part in parts))
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if annotation is type(None):
        return "null"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " or ".join(f"`{member.value}`" for member in annotation)
    if origin in (list, tuple):
        return f"list of {type_of(parts[0])}"
    names = {str: "text", bool: "true or false", int: "integer", float: "number", dict: "mapping", Any: "any"}
    return names.get(origin or annotation) or getattr(annotation, "__name__", str(annotation))


def default_of(value: Any) -> str:
    """A default as it is written in YAML."""
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None:
        return "null"
    if value in ("", [], {}):
        return "empty"
    text = yaml.safe_dump(value, default_flow_style=True, width=1000)
    return f"`{text.strip().removesuffix('...').strip()}`"


def rows(model: type[BaseModel], names: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default, description."""
    for name in names:
        field, facts = model.model_fields[name], facts_of(model, name)
        text = description_of(model, name)
        assert text, f"{model.__name__}.{name} has no description"
        if facts.choices is not None:
            text += f" Known: {', '.join(f'`{each}`' for each in facts.choices())}; or `package.module:Class`."
        default = "required" if field.is_required() else default_of(field.get_default(call_default_factory=True))
        yield f"`{name}`", type_of(field.annotation), default, text


def settings_table(model: type[BaseModel], names: Iterable[str]) -> str:
    return table(("setting", "type", "default", "meaning"), rows(model, names))


def headings() -> dict[str, str]:
    """By setting of every environment: the comment above its field and the fields before it."""
    found, heading = dict.fromkeys(PoolSettings.model_fields, "Sandboxes"), ""
    for line in inspect.getsource(HermesAgentEnvConfig).splitlines():
        if comment := re.fullmatch(r"    # ([^(]*?)(?: \(.*\))?\.", line):
            heading = comment[1]
        elif field := re.match(r"    (\w+): ", line):
            found[field[1]] = heading
    return found | dict.fromkeys(TreeSettings.model_fields, "Rollouts that branch")


def page() -> str:
    """The whole page."""
    env, of_group = HermesAgentEnvConfig, defaultdict[str, list[str]](list)
    for name in env.model_fields:
        of_group[_group("env", name, facts_of(env, name))].append(name)
    of_group["env"].sort(key=lambda name: name not in vars(env)["__annotations__"])  # inherited ones come last
    by_heading, heading_of = defaultdict[str, list[str]](list), headings()
    for name in of_group["env"]:
        by_heading[heading_of[name]].append(name)
    short = ", ".join(f"`{name}` (`{setting}`)" for name, setting in SHORT.items())
    parts = [INTRODUCTION.format(short=short), "## Short flags\n\n", short_flags()]
    parts.append(f"\n## {title_of('env')}\n")
    parts += [f"\n### {heading}\n\n{settings_table(env, names)}" for heading, names in by_heading.items()]
    parts.append(f"\n## {title_of('serve')}\n\n{settings_table(env, of_group['serve'])}")
    server = [name for name in ServerConfig.model_fields if not facts_of(ServerConfig, name).ignored]
    parts.append(f"\n## {title_of('openai')}\n\n{settings_table(ServerConfig, server)}")
    parts.append(f"\n## The trainer (`training:` in YAML)\n\n{settings_table(TrainingSettings, of(TrainingSettings))}")
    parts.append(f"\n## Fine-tuning on files (`sft:` in YAML)\n\n{settings_table(SftSettings, of(SftSettings))}")
    ignored = [name for name in of_group["none"] if facts_of(env, name).ignored and name != "batch_size"]
    ignored += [f"openai.{name}" for name in ServerConfig.model_fields if name not in server]
    parts.append(f"\n## {title_of('none')}\n\n")
    parts.append(NONE.format(ignored=", ".join(f"`{name}`" for name in sorted(ignored))))
    rejected = {name: facts_of(env, name).use_instead for name in of_group["none"]}
    parts.append(table(("setting", "use"), [(f"`{name}`", use) for name, use in rejected.items() if use]))
    parts.append("\nNext: [running an environment](running.md) explains the files, exit codes and restarts.\n")
    return "".join(parts)


def of(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)


def title_of(group: str) -> str:
    """The title of a group in the help, as a heading."""
    text = re.sub(r"(\w+:)(?= in YAML)", r"`\1`", GROUPS[group])
    return text[0].upper() + text[1:]


if __name__ == "__main__":
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        print(f"{PAGE} written")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is out of date: run scripts/settings_page.py")
