"""A second model that scores the agent's work: `HermesAgentBaseEnv.judge`.

It answers with JSON of a schema. If an answer does not fit, the question is asked again; a judge that cannot be
reached, or gives no valid answer, is a failure of the infrastructure. A judge that refuses a question because of its
content while it answers others is not: an agent can write refused text. Answers are stored in the run's folder, by
question.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial, reduce
from hashlib import sha256
from operator import or_
from pathlib import Path
from types import GenericAlias, NoneType
from typing import Annotated, Any, Literal, NotRequired, Required
from weakref import WeakValueDictionary

from pydantic import ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from backends.errors import SettingsError
from backends.tasks import in_own_thread
from lachesis.rewards.call_scope import current_scope, outside_scopes
from lachesis.rewards.calls import called, result_of
from lachesis.rewards.reward import JudgeRefused
from lachesis.runs.environment import Environment
from lachesis.runs.failures import NotRunning
from lachesis.runs.model_servers import start_another
from lachesis.runs.run_folder import data_folder
from lachesis.runs.silence import SilenceWatch
from lachesis.settings.server_settings import ServerConfig
from lachesis_client import InferenceError, Router
from lachesis_client.errors import ContextExhausted, ConversationRefused
from lachesis_client.failed_requests import failed_requests, note_answered, note_failed
from lachesis_messages.messages import FinishReason
from lachesis_messages.records.jsonl import JsonlWriter, read_lines

_ATTEMPTS = 3
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class JudgeFailed(InferenceError):
    """The judge gave no answer of the schema, or none in time."""


async def start_judge(env: Environment, stack: AsyncExitStack, watch: SilenceWatch, *, training: bool) -> Judge:
    """The judge of a run, at `judge_server`. `stack` ends it.

    Raises:
        ServerConfigError: the settings of its server cannot be used.
        InferenceError: it does not answer, or rejects the key.
    """
    config = env.config
    assert config.judge_server is not None
    server, server_config = await start_another(
        config.judge_server, "judge_server", settings=config, stack=stack, watch=watch
    )
    if not env.testing:
        await server.check()
    if training or env.process_mode:
        groups = Path(config.data_path_to_save_groups or data_folder(env.run_name) / "groups.jsonl")
        path = groups.with_suffix(".judge.jsonl")
    else:
        path = Path(config.data_dir_to_save_evals or data_folder(env.run_name) / "eval") / "judge.jsonl"
    judge = Judge(server, server_config, path)
    await in_own_thread(judge.load)
    return judge


def ask_of_reward(judge: Judge | None, prompt: str, schema: Any, *, env: Environment) -> Any:
    """The answer of the run's judge to a reward: to be awaited in an `async def`, at once in a plain `def`. It raises
    what `HermesAgentBaseEnv.judge` says."""
    if env.config.judge_server is None:
        raise SettingsError(
            f"{env.run_name}: judge() asks a second model server; name it with --env.judge_server "
            "'{base_url: URL, model_name: NAME}'"
        )
    if judge is None:
        raise NotRunning(f"{env.run_name}: judge() asks the server of env.judge_server, which is there in a run")
    return result_of(called("self.judge"), partial(judge.ask, prompt, schema), judge.loop, current_scope())


class Judge:
    """Asks one model server. `path` is a file of JSON lines with its answers, which a later start reads."""

    def __init__(self, server: Router, config: ServerConfig, path: Path) -> None:
        self.server = server
        self.config = config
        self.path = path
        self.loop = asyncio.get_running_loop()
        self._answers: dict[str, str] = {}
        self._asking: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def load(self) -> None:
        """Read the answers of earlier starts."""
        if self.path.exists():
            self._answers = {line["key"]: line["answer"] for line in read_lines(self.path, torn_tail=True)}

    async def ask(self, prompt: str, schema: Any) -> Any:
        """See `HermesAgentBaseEnv.judge`."""
        adapter, shape = _form(schema)
        asked = json.dumps([self.config.model_name, self.config.extra_body, prompt, shape], sort_keys=True)
        key = sha256(asked.encode(errors="surrogatepass")).hexdigest()
        try:
            with outside_scopes():
                async with self._asking.setdefault(key, asyncio.Lock()):
                    value = await self._answer(key, prompt, shape, adapter)
        except asyncio.CancelledError:
            note_failed(key, self._failed("did not answer before the reward was stopped", "lower judge_server.timeout"))
            raise
        except InferenceError as error:
            if self._answers and isinstance(error, ContextExhausted | ConversationRefused):
                raise JudgeRefused(error) from None
            note_failed(key, error)
            raise
        note_answered(lambda: key)
        return value

    async def _answer(self, key: str, prompt: str, shape: Mapping[str, Any], adapter: TypeAdapter[Any]) -> Any:
        if (known := self._answers.get(key)) is not None:
            return adapter.validate_json(known)
        request = f"{prompt}\n\nAnswer with JSON of this schema, and with nothing else:\n{json.dumps(shape)}"
        messages = [{"role": "user", "content": request}]
        extra = {
            "temperature": 0.0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": shape}},
            **(self.config.extra_body or {}),
        }
        for _ in range(_ATTEMPTS):
            with failed_requests():  # the caller tells of these
                response = await self.server.chat(messages, extra_body=extra)
            text = response.message.text
            if response.refusal or response.finish_reason is FinishReason.CONTENT_FILTER:
                raise ConversationRefused(response.server, 200, text or "content_filter")
            fenced = _FENCED.search(text)
            answer = (fenced[1] if fenced else text).strip()
            try:
                value = adapter.validate_json(answer)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                problem = f"{'.'.join(map(str, first['loc'])) or 'answer'}: {first['msg']}"
                correction = f"This is not JSON of the schema: {problem}. Answer again, with the JSON alone."
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": correction}]
                continue
            self._answers[key] = answer
            line = {"key": key, "model": self.config.model_name, "prompt": prompt, "answer": answer}
            await in_own_thread(self._keep, line)
            return value
        raise self._failed(
            f"gave {_ATTEMPTS} answers that do not fit the schema, the last one {answer[:200]!r}: {problem}",
            "take a server that has structured output (response_format), or a larger model",
        )

    def _keep(self, line: Mapping[str, Any]) -> None:
        with JsonlWriter(self.path) as file:
            file.write(line)

    def _failed(self, reason: str, next_step: str) -> JudgeFailed:
        return JudgeFailed(self.server.servers[0].base_url, f"the judge {self.config.model_name} {reason}", next_step)


def _form(schema: Any) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    """What reads an answer, and the JSON schema that the server gets."""
    if isinstance(schema, Mapping):
        return TypeAdapter(_type_of(schema, "schema")), dict(schema)
    adapter: TypeAdapter[Any] = TypeAdapter(schema)
    return adapter, adapter.json_schema()


_KINDS = {"string": StrictStr, "integer": StrictInt, "number": StrictFloat, "boolean": StrictBool, "null": NoneType}
_LIMITS = {
    "minimum": "ge",
    "maximum": "le",
    "exclusiveMinimum": "gt",
    "exclusiveMaximum": "lt",
    "pattern": "pattern",
    **dict.fromkeys(("minLength", "minItems"), "min_length"),
    **dict.fromkeys(("maxLength", "maxItems"), "max_length"),
}
_SAID = ("title", "description", "examples", "default", "$schema", "strict")
"""Keywords that check nothing."""


def _type_of(schema: Mapping[str, Any], place: str) -> Any:
    """The type of a JSON schema, as far as pydantic can check it. Raises ValueError for a keyword that it would not."""
    given = {name: value for name, value in schema.items() if name not in _SAID}
    limits = {_LIMITS[name]: given.pop(name) for name in tuple(given) if name in _LIMITS}
    kind = given.pop("type", None)
    found: Any
    if "enum" in given or "const" in given:
        found = Literal[tuple(given.pop("enum", None) or [given.pop("const")])]
    elif "anyOf" in given:
        found = reduce(or_, [_type_of(each, f"{place}.anyOf") for each in given.pop("anyOf")])
    elif isinstance(kind, list):
        found, given = reduce(or_, [_type_of({**given, "type": each}, place) for each in kind]), {}
    elif kind == "array":
        found = GenericAlias(list, _type_of(given.pop("items", {}), f"{place}.items"))
    elif kind == "object":
        needed = given.pop("required", ())
        fields = {
            name: (Required if name in needed else NotRequired)[_type_of(value, f"{place}.{name}")]
            for name, value in {**{key: {} for key in needed}, **given.pop("properties", {})}.items()
        }
        extra = given.pop("additionalProperties") if given.get("additionalProperties") in (True, False) else True
        make: Any = TypedDict
        found = make(place, fields)
        found.__pydantic_config__ = ConfigDict(extra="allow" if extra else "forbid")
    elif kind in _KINDS or kind is None:
        found = _KINDS[kind] if kind else Any
    else:
        given["type"] = kind
    if given:
        unknown = ", ".join(f"{name}: {value!r}" for name, value in given.items())
        raise ValueError(f"judge: {place} has {unknown}, which is not checked here; pass a pydantic model")
    return Annotated[found, Field(**limits)] if limits else found
