"""The flags of an environment's command line: one a setting, and a `--help` that is worth reading."""

from __future__ import annotations

import argparse
import difflib
import enum
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lachesis.runs.model_servers import ServerConfig
from lachesis.runs.settings import HermesAgentEnvConfig

COMMANDS = {
    "serve": "send rollouts with their exact tokens to a trainer, through Atropos' rollout API",
    "process": "play total_steps groups and write trajectories",
    "evaluate": "play eval_items problems once each and measure the model",
}

WITHOUT_EFFECT = {
    "env": frozenset(
        {
            "batch_size",
            "min_items_sent_before_logging",
            "num_rollouts_per_group_for_logging",
        }
    ),
    "openai": frozenset({"health_check", "n_kwarg_is_ignored", "rolling_buffer_length"}),
}
"""Settings of Atropos that are accepted, so that old settings files work, and that change nothing here."""

ONLY_SERVE = frozenset(
    {
        "ensure_scores_are_not_same",
        "eval_handling",
        "eval_limit_ratio",
        "grace_period",
        "include_messages",
        "inference_weight",
        "max_batches_offpolicy",
        "min_batch_allocation",
        "rollout_server_url",
        "split_rollouts",
        "spool_path",
        "steps_per_eval",
        "worker_timeout",
    }
)
"""Settings of an environment that `process` and `evaluate` do not read."""

REFUSED = {
    "thinking_mode": "--openai.extra_body",
    "reasoning_effort": "--openai.extra_body, for example '{reasoning_effort: high}'",
    "max_reasoning_tokens": "--openai.extra_body",
    "custom_thinking_prompt": "--env.ephemeral_system_prompt",
}
"""Settings of Atropos that would change what the model does, and what to use in their place."""

PARAGRAPHS = {
    "own": "settings of this environment (env: in YAML)",
    "env": "settings of every environment (env: in YAML)",
    "openai": "the model server (openai: in YAML)",
    "none": "settings of Atropos that are accepted and change nothing, and four that are refused",
}

DESCRIPTIONS = {
    "env.max_eval_workers": "Rollouts that `evaluate` plays at once.",
    "env.max_num_workers": "Groups at once in `process` and `serve`; -1 is max_num_workers_per_node for each server.",
    "env.max_num_workers_per_node": "Groups at once for each server, where max_num_workers is -1.",
    "env.tokenizer_name": "Hugging Face tokenizer: the model's, where openai.tokenizer_name names none.",
    "env.ensure_scores_are_not_same": "`serve` keeps back groups whose rewards are all equal: they teach nothing.",
    "env.eval_handling": "What `serve` does with rollouts while it evaluates: STOP_TRAIN, LIMIT_TRAIN or NONE.",
    "env.eval_limit_ratio": "Share of rollouts that go on during an evaluation, where eval_handling is LIMIT_TRAIN.",
    "env.include_messages": "`serve` sends the messages beside the tokens.",
    "env.inference_weight": "Share of the trainer's batches, against other environments of the same trainer.",
    "env.max_batches_offpolicy": "Batches that may wait at the rollout API before `serve` pauses.",
    "env.min_batch_allocation": "Least share of every batch.",
    "env.rollout_server_url": "Atropos' rollout API (run-api).",
    "env.steps_per_eval": "Steps of the trainer between two evaluations of `serve`.",
    "env.worker_timeout": "Seconds that a group of `serve` may take.",
    "env.wandb_name": "Name of the W&B run.",
    "env.num_rollouts_to_keep": "Rollouts in a table of W&B.",
    "env.data_path_to_save_groups": "Where `process` writes (PATH.jsonl); default: data/NAME/groups.jsonl.",
    "env.data_dir_to_save_evals": "Folder that `evaluate` writes into; default: data/NAME/eval.",
    "openai.timeout": "Seconds for one request.",
    "openai.num_max_requests_at_once": "Requests in flight.",
    "openai.num_requests_for_eval": "Requests in flight for evaluation.",
    "openai.model_name": "Name that the server knows; or embedded, reference, or the path of a GGUF file.",
    "openai.server_type": "Kind of server: vllm and sglang report tokens (Phase 2), openai is chat (Phase 1).",
    "openai.tokenizer_name": "Tokenizer of the model (folder or name), where model_name is none.",
    "openai.api_key": "Key; where it is empty, OPENAI_API_KEY or OPENROUTER_API_KEY for these two services.",
    "openai.base_url": "URL of the server, which usually ends in /v1.",
}
"""In place of what Atropos says, which is about its own servers."""


class Parser(argparse.ArgumentParser):
    """Says which flags are near an unknown one."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            self.reject(rest, vars(parsed).get("flags", {}))
        return parsed

    def reject(self, rest: Sequence[str], flags: Mapping[str, argparse.ArgumentParser]) -> NoReturn:
        command = next(iter(flags.values()), self)
        known = [flag for action in command._actions for flag in action.option_strings]
        unknown = next((text.partition("=")[0] for text in rest if text.startswith("-")), rest[0])
        if not unknown.startswith("-"):
            command.error(f"{unknown!r} belongs to no setting; a value stands behind its --NAME")
        by_field = {flag.rpartition(".")[2].lstrip("-"): flag for flag in known}
        field = unknown.rpartition(".")[2].lstrip("-")
        near = [by_field[name] for name in difflib.get_close_matches(field, by_field, n=3, cutoff=0.7)]
        hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all of them"
        command.error(f"unknown setting {unknown}; {hint}")


def make_parser(
    description: str | None, config: HermesAgentEnvConfig, server: ServerConfig | BaseModel | None
) -> argparse.ArgumentParser:
    """One flag a setting; all of them text here, typed by pydantic later. The values given are shown as defaults."""
    parser = Parser(description=description, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{serve,process,evaluate}")
    for command, help_text in COMMANDS.items():
        sub = commands.add_parser(
            command,
            help=help_text,
            description=f"{help_text[0].upper()}{help_text[1:]}.",
            usage="%(prog)s [--config FILE] [--env.NAME VALUE ...] [--openai.NAME VALUE ...]",
            allow_abbrev=False,
        )
        sub.set_defaults(flags={command: sub})
        sub.add_argument("--config", metavar="FILE", help="YAML file with env: and openai: (flags win over it)")
        sub.add_argument("--slurm", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.add_argument(
            "--testing", action="store_true", default=argparse.SUPPRESS, help="skip the check of the servers"
        )
        groups = {name: sub.add_argument_group(title) for name, title in PARAGRAPHS.items()}
        for namespace, model, defaults in (("env", type(config), config), ("openai", ServerConfig, server)):
            for name, field in model.model_fields.items():
                groups[_paragraph(namespace, name)].add_argument(
                    f"--{namespace}.{name}",
                    type=_typed(field.annotation),
                    default=argparse.SUPPRESS,
                    metavar=_metavar(field.annotation),
                    help=_help(namespace, name, field, defaults).replace("%", "%%"),
                    **_optional_value(field.annotation),
                )
    return parser


def _paragraph(namespace: str, name: str) -> str:
    if name in WITHOUT_EFFECT[namespace] or (namespace == "env" and name in REFUSED):
        return "none"
    return "own" if namespace == "env" and name not in HermesAgentEnvConfig.model_fields else namespace


def _help(namespace: str, name: str, field: FieldInfo, defaults: BaseModel | None) -> str:
    if namespace == "env" and name in REFUSED:
        return f"Refused: use {REFUSED[name]}."
    if name in WITHOUT_EFFECT[namespace]:
        return ""
    text = DESCRIPTIONS.get(f"{namespace}.{name}", field.description or "").strip()
    if name == "api_key":
        return text  # what the code says may be a real one
    value = getattr(defaults, name, field.get_default(call_default_factory=True))
    value = value.value if isinstance(value, enum.Enum) else value
    return text if value in (None, "", [], {}) else f"{text} (default: {value})"


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "{" + ",".join(map(str, get_args(annotation))) + "}"
    kinds = {bool: "BOOL", str: "TEXT", float: "NUMBER", int: "N", list: "LIST", dict: "MAPPING"}
    for kind, shown in kinds.items():
        if accepts(annotation, kind):
            return shown
    return "VALUE"


def _optional_value(annotation: Any) -> dict[str, Any]:
    """A switch may be given without a value."""
    return {"nargs": "?", "const": True} if accepts(annotation, bool) else {}


def _typed(annotation: Any) -> Any:
    """How the text of a flag becomes a value: text stays text, everything else is read as YAML (so JSON works too)."""
    if accepts(annotation, str):
        return (lambda text: None if text in ("null", "None") else text) if accepts(annotation, type(None)) else str
    return _from_yaml


def _from_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not YAML: {' '.join(str(error).split())}") from error


def accepts(annotation: Any, kind: type) -> bool:
    """Whether a setting of this type may hold a `kind`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return any(accepts(part, kind) for part in get_args(annotation))
    return annotation is kind or get_origin(annotation) is kind
