"""The flags of an environment's command line, made from the settings: one flag a field, and a readable `--help`.

No library does this job. pydantic-settings adds 60 ms of CPU to a start of 300 ms, and hints for unknown names, YAML,
the list of servers, groups and notes would have to be written all the same. tyro adds 150 ms, and accepts neither
`'[file]'` for a list nor a flag for a mapping that may be null.
"""

from __future__ import annotations

import argparse
import enum
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from backends import BackendError, backend_options
from backends.errors import ExitCode
from lachesis.settings.server_settings import ServerConfig
from lachesis.settings.setting_facts import OTHER_NAMES, SHORT, Facts, description_of, facts_of
from lachesis.settings.settings import HermesAgentEnvConfig

COMMANDS = {
    "serve": "send rollouts with their exact tokens to a trainer, through Atropos' rollout API",
    "process": "run total_steps groups and write trajectories",
    "evaluate": "run eval_items problems once each and measure the model",
}

GROUPS = {
    "own": "settings of this environment (env: in YAML)",
    "env": "settings of every environment (env: in YAML)",
    "serve": "settings that only `serve` reads (env: in YAML)",
    "openai": "the model server (openai: in YAML)",
    "none": "settings of Atropos and the removed stack that have no effect, and four that are rejected",
}


SECTIONS = {"environment": "env", "environments": "env", "model": "openai", "server": "openai"}
"""Sections of a YAML file, by what they may be taken for."""


class YamlLoader(yaml.SafeLoader):
    """YAML 1.1 with the numbers of 1.2, which are those of JSON. Rejects a key that a mapping has twice: the first
    value would be lost."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:  # such as a 30th of February
            problem = f"{node.value!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        # JSON writes some characters as two halves, of which YAML makes two characters.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def construct_yaml_int(self, node: Any) -> Any:
        text = str(node.value)
        if ":" in text:  # not 90 for 1:30
            return text
        return int(text) if text.lstrip("+-").isdigit() else super().construct_yaml_int(node)

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        known = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if (key.tag, key.value) in known:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is there twice", problem_mark=key.start_mark)
            known.add((key.tag, key.value))
        return node


YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader.construct_yaml_int)
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


class Parser(argparse.ArgumentParser):
    """Names the flags that are near an unknown one."""

    lists_all = "--help"

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self.reject(rest, vars(parsed).get("parser", self))
        return parsed

    def error(self, message: str) -> NoReturn:
        """In one line: the usage of three hundred flags would help nobody."""
        from lachesis.settings.flag_errors import in_our_words

        self.exit(ExitCode.SETTINGS, f"error: {in_our_words(message, self)}\n")

    def reject(self, rest: Sequence[str], command: argparse.ArgumentParser) -> NoReturn:
        unknown = next((text.partition("=")[0] for text in rest if text.startswith("-")), rest[0])
        if not unknown.startswith("-"):
            command.error(f"{unknown!r} belongs to no setting; write it after the --NAME that it is for")
        flags = [flag for action in command._actions for flag in action.option_strings]
        section = unknown.rpartition(".")[0]
        of_section = [flag for flag in flags if section and flag.rpartition(".")[0] == section]
        near = _close_flags(unknown, of_section, cutoff=0.8) or _close_flags(unknown, flags)
        all_of_them = getattr(command, "lists_all", "--help")
        hint = f"did you mean {' or '.join(near)}?" if near else f"{all_of_them} lists all of them"
        file, _, verb = command.prog.rpartition(" ")
        if verb in COMMANDS and not unknown.startswith("--"):  # of a file that runs itself
            hint = f"short flags are those of `lachesis {verb} {file}`; {hint}"
        command.error(f"unknown setting {unknown}; {hint}")


class _HelpWithBackend(argparse._HelpAction):
    """`--help`, which lists the options of the backend that earlier flags chose."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        name = getattr(namespace, "env.terminal_backend", None)
        parser.epilog = _backend_help(name) if name else None
        super().__call__(parser, namespace, *_)


def close_names(name: str, known: Iterable[str], *, cutoff: float = 0.7) -> list[str]:
    """The known names that somebody may have meant, nearest first; also by another name that they have."""
    known = list(known)
    others = {
        other: meant for other, meant in (*SHORT.items(), *OTHER_NAMES.items(), *SECTIONS.items()) if meant in known
    }
    if name in others:
        return [others[name]]
    near = get_close_matches(name, {**others, **dict.fromkeys(known)}, n=3, cutoff=cutoff)
    return list(dict.fromkeys(others.get(each, each) for each in near))


def _close_flags(unknown: str, flags: Iterable[str], *, cutoff: float = 0.7) -> list[str]:
    by_name = {_name_of(flag): flag for flag in reversed(list(flags))}
    return [by_name[name] for name in close_names(_name_of(unknown), by_name, cutoff=cutoff)]


def _name_of(flag: str) -> str:
    return flag.rpartition(".")[2].lstrip("-").replace("-", "_")


def make_parser(
    description: str | None, config: HermesAgentEnvConfig, server: ServerConfig | None, prog: str | None = None
) -> argparse.ArgumentParser:
    """One flag per setting. The values of `config` and `server` are shown as defaults; pydantic checks the given
    values.

    `prog` is how the command was written; default: the program and the name of the command.
    """
    parser = Parser(description=description, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{serve,process,evaluate}")
    for command, help_text in COMMANDS.items():
        sub = commands.add_parser(
            command,
            prog=prog,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}.",
            usage="%(prog)s [--config FILE] [--env.NAME VALUE ...] [--openai.NAME VALUE ...]",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        # A chat, an audit, a batch and a script have no such help: they are not `lachesis VERB ENV`.
        sub.lists_all = "--help-all" if len((prog or "").split()) > 2 else "`lachesis process ENV --help-all`"
        sub.set_defaults(parser=sub)
        add = sub.add_argument
        add("-h", "--help", action=_HelpWithBackend, help="show this help message and exit")
        add("--config", metavar="FILE", help="YAML file with env: and openai: (flags win over it)")
        for name, help_text in (("slurm", argparse.SUPPRESS), ("testing", "skip the check of the servers")):
            given: dict[str, Any] = {"nargs": "?", "const": True, "type": truth, "default": argparse.SUPPRESS}
            add(f"--{name}", metavar="BOOL", help=help_text, **given)
        add(
            *("--save-trajectories", "--save_trajectories"),
            dest="env.save_trajectories",
            metavar="BOOL",
            help="the same as --env.save_trajectories",
            **given,
        )
        groups = {name: sub.add_argument_group(title) for name, title in GROUPS.items()}
        for namespace, model, defaults in (("env", type(config), config), ("openai", ServerConfig, server)):
            add_flags(groups, namespace, model, defaults)
    return parser


def add_flags(
    groups: Mapping[str, argparse._ArgumentGroup] | argparse._ArgumentGroup,
    namespace: str,
    model: type[BaseModel],
    defaults: BaseModel | None = None,
    *,
    names: Collection[str] | None = None,
) -> None:
    """A flag `--namespace.field` for each field of `model`, or for `names`, in one group or in that of `GROUPS` where
    it belongs."""
    inherited = {*HermesAgentEnvConfig.model_fields} - {*vars(HermesAgentEnvConfig)["__annotations__"]}
    for name in names or sorted(model.model_fields, key=inherited.__contains__):  # of pools and trees: few need them
        field, facts = model.model_fields[name], facts_of(model, name)
        group = groups[_group(namespace, name, facts)] if isinstance(groups, Mapping) else groups
        switch: dict[str, Any] = {"nargs": "?", "const": True} if accepts(field.annotation, bool) else {}
        group.add_argument(
            f"--{namespace}.{name}",
            type=_reader(field.annotation),
            default=argparse.SUPPRESS,
            metavar=_metavar(field.annotation, facts),
            help=_help(model, name, facts, field, defaults).replace("%", "%%"),
            **switch,
        )


def _group(namespace: str, name: str, facts: Facts) -> str:
    if facts.ignored or facts.use_instead:
        return "none"
    if namespace == "env" and name not in HermesAgentEnvConfig.model_fields:
        return "own"
    return "serve" if facts.only_serve else namespace


def _help(model: type[BaseModel], name: str, facts: Facts, field: FieldInfo, defaults: BaseModel | None) -> str:
    if facts.use_instead:
        return f"Rejected: use {facts.use_instead}."
    if facts.ignored:
        return ""
    text = description_of(model, name)
    if facts.choices is not None:
        text += f" Known: {', '.join(facts.choices())}; or package.module:Class."
    if facts.secret:
        return text
    value = getattr(defaults, name, field.get_default(call_default_factory=True))
    value = value.value if isinstance(value, enum.Enum) else value
    return text if value in (None, "", [], {}) else f"{text} (default: {value})"


def _backend_help(name: str) -> str:
    try:
        options = backend_options(name)
    except (BackendError, ValueError) as error:
        return str(error)
    lines = [f"options of the backend {name!r}, set as --env.terminal_options '{{NAME: VALUE}}':"]
    return "\n".join([*lines, *(f"  {option.name:<22}{option.help}" for option in options)])


def _metavar(annotation: Any, facts: Facts) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return "{" + ",".join(member.value for member in annotation) + "}"
    if facts.choices is not None:
        return "NAME"
    kinds = {bool: "BOOL", str: "TEXT", float: "NUMBER", int: "N", list: "LIST", dict: "MAPPING"}
    return next((shown for kind, shown in kinds.items() if accepts(annotation, kind)), "VALUE")


def _reader(annotation: Any) -> Callable[[str], Any]:
    """How the text of a flag becomes a value: text stays text, everything else is read as YAML (so JSON works too)."""
    if not accepts(annotation, str):
        return _from_yaml
    return (lambda text: None if text in ("null", "None") else text) if accepts(annotation, type(None)) else str


def truth(text: str) -> bool:
    """The value of a flag that is true or false."""
    value = _from_yaml(text)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if value not in (True, False):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return bool(value)


def _from_yaml(text: str) -> Any:
    try:
        return yaml.load(text, YamlLoader)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not YAML: {' '.join(str(error).split())}") from error


def accepts(annotation: Any, kind: type) -> bool:
    """Whether a setting of this type may hold a `kind`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return any(accepts(part, kind) for part in get_args(annotation))
    return annotation is kind or get_origin(annotation) is kind
