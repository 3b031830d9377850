"""The model of a run as a provider of Inspect: what a sample asks goes to the recording of its rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, BadRequestError

from lachesis_compat.guests.guest_env import GuestFailed

if TYPE_CHECKING:
    from lachesis_tokens.endpoint import Recording, RecordingEndpoint

_PARAMETERS = {
    "max_tokens": "max_tokens",
    "stop_seqs": "stop",
    "num_choices": "n",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "logprobs": "logprobs",
    "top_logprobs": "top_logprobs",
    "reasoning_effort": "reasoning_effort",
}
"""Fields of Inspect's GenerateConfig, and their names in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class _Asked:
    recording: Recording
    answers: dict[str, tuple[Any, dict[str, Any]]] = field(default_factory=dict)
    """By Inspect's id of the message: what it says, and the answer as it was received."""


_asked: ContextVar[_Asked | None] = ContextVar("asked", default=None)
"""Set where the solvers of a sample run. Scorers and cleanups run outside."""


def begin(recording_of: Callable[[Any, int], Recording | None]) -> Any:
    """A first solver, which finds the recording for all that follow."""
    from inspect_ai.solver import solver

    def lachesis_recording() -> Any:
        async def solve(state: Any, generate: Any) -> Any:
            recording = recording_of(state.sample_id, state.epoch)
            if recording is None:
                raise GuestFailed("this rollout is over")
            _asked.set(_Asked(recording))
            return state

        return solve

    return solver(lachesis_recording)()


def policy(name: str, endpoint: RecordingEndpoint, client: AsyncOpenAI) -> Any:
    """An `inspect_ai.model.Model`."""
    from inspect_ai.model import (
        ModelAPI,
        ModelOutput,
        get_model,
        messages_to_openai,
        model_output_from_openai,
        modelapi,
    )

    class Endpoint(ModelAPI):  # type: ignore[misc]
        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            asked = _asked.get()
            if asked is not None:
                return await ask(asked, input, tools, tool_choice, config)
            judge = endpoint.open(split="eval", client_sampling=True)  # not a part of the rollout
            try:
                return await ask(_Asked(judge), input, tools, tool_choice, config)
            finally:
                await judge.close()

        def should_retry(self, ex: BaseException) -> bool:
            return False

    async def ask(asked: _Asked, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
        messages: list[Any] = []
        for message, written in zip(input, await messages_to_openai(input), strict=True):
            said, received = asked.answers.get(message.id, (None, written))
            # Unchanged answers go back as they came: Inspect writes reasoning and line breaks into the text.
            messages.append(received if said == _said(message) else written)
        recording = asked.recording
        own = client.with_options(base_url=f"{recording.base_url}/v1", api_key=recording.key)
        try:
            completion = await own.chat.completions.create(
                model=name, messages=messages, **_parameters(config), **_tools(tools, tool_choice)
            )
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return ModelOutput.from_content(name, str(error), stop_reason="model_length")
        output = await model_output_from_openai(completion)
        for choice, sent in zip(output.choices, completion.choices, strict=True):
            asked.answers[choice.message.id] = (_said(choice.message), sent.message.model_dump(exclude_none=True))
        return output

    modelapi(name="lachesis")(Endpoint)
    return get_model(f"lachesis/{name}", memoize=False)


def _said(message: Any) -> Any:
    calls = getattr(message, "tool_calls", None) or []
    return message.model_dump(include={"content"}), [(call.id, call.function, call.arguments) for call in calls]


def _parameters(config: Any) -> dict[str, Any]:
    given = {theirs: getattr(config, ours) for ours, theirs in _PARAMETERS.items()}
    parameters = {name: value for name, value in given.items() if value is not None}
    if config.top_k is not None:
        parameters["extra_body"] = {"top_k": config.top_k}
    if config.response_schema is not None:
        schema = config.response_schema.model_dump(exclude_none=True)
        parameters["response_format"] = {"type": "json_schema", "json_schema": schema}
    return parameters


def _tools(tools: Sequence[Any], tool_choice: Any) -> dict[str, Any]:
    if not tools:
        return {}
    definitions = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters.model_dump(mode="json", exclude_none=True),
            },
        }
        for tool in tools
    ]
    if isinstance(tool_choice, str):
        choice: Any = "required" if tool_choice == "any" else tool_choice
    else:
        choice = {"type": "function", "function": {"name": tool_choice.name}}
    return {"tools": definitions, "tool_choice": choice}
