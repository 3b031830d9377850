"""Ids that have no place in a message: what the message shows, what is refused, and what is counted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lachesis_client.errors import BadResponse
from lachesis_messages.history import MessageHistory
from lachesis_testing.fake_server import Reply, fake_tokenizer
from lachesis_tokens.engines import create_engine
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.prompts.vocabulary import Vocabulary
from lachesis_tokens.server.completion_reader import CompletionReader
from lachesis_tokens.server.token_server import TokenServer
from tests.support.exactness import Stack, assert_exact, stack
from tool_call_parsers import ParsedCompletion, get_parser
from tool_call_parsers.tokens import mark

TOKENIZER = fake_tokenizer()
END, PAD, ROLE = (TOKENIZER.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|endoftext|>", "<|im_start|>"))
ASKED = {"role": "user", "content": "What is 6 * 7?"}
TOOLS = [{"type": "function", "function": {"name": "run_cmd", "parameters": {
    "type": "object", "properties": {"cmd": {"type": "string"}}}}}]  # fmt: skip


def ids_of(*parts: str | int) -> list[int]:
    found: list[int] = []
    for part in parts:
        found += [part] if isinstance(part, int) else TOKENIZER.encode(part, add_special_tokens=False)
    return found


def larger() -> Any:
    """The tokenizer of a model with more ids than the run's tokenizer has."""
    tokenizer = fake_tokenizer()
    tokenizer.add_tokens([f"<row{number}>" for number in range(8)])
    return tokenizer


@asynccontextmanager
async def padded(rows: int | None) -> AsyncIterator[Stack]:
    """A server whose model has 8 ids beyond the run's tokenizer."""
    async with stack(larger()) as world:
        engine = create_engine("vllm", world.fake.settings())
        async with TokenServer([engine], PromptBuilder(fake_tokenizer()), "hermes", rows=rows) as tokens:
            yield Stack(world.fake, tokens, world.says)


async def test_an_id_beyond_the_model_is_an_error_of_the_server_and_never_trained() -> None:
    async with padded(None) as world:
        managed, unknown = world.tokens.for_rollout(), len(TOKENIZER)
        world.says.next = [Reply(ids_of("The answer is 4", unknown, "2.", END))]
        with pytest.raises(BadResponse, match=rf"sampled the id {unknown}.*{unknown} ids.*--openai.tokenizer_name"):
            await managed.chat([ASKED])
        assert not managed.completions() and not managed.get_state()["nodes"]


async def test_an_id_of_a_padded_vocabulary_is_trained_marked_and_counted() -> None:
    async with padded(len(TOKENIZER) + 8) as world:
        managed, history, unused = world.tokens.for_rollout(), MessageHistory([ASKED]), len(TOKENIZER) + 3
        sampled = ids_of("The answer is 4", unused, "2.", END)
        world.says.next = [Reply(sampled)]
        history.append(response := await managed.chat(history))
        assert response.message.content == f"The answer is 4{mark(unused)}2."
        assert response.tokens.ids == sampled
        history.append({"role": "user", "content": "Sure?"})
        world.says.next = ["Yes."]
        history.append(await managed.chat(history))
        assert_exact(world, history)
        assert f"4{mark(unused)}2." in managed.get_state()["nodes"][0].full_text
        assert world.tokens.wandb_metrics()["server/padding_tokens"] == 1


@pytest.mark.parametrize("tools", [TOOLS, None])
async def test_a_special_token_inside_a_message_is_a_mark_in_it(tools: Any) -> None:
    async with stack() as world:
        managed, history = world.tokens.for_rollout(), MessageHistory([ASKED])
        world.says.next = [Reply(ids_of("4", PAD, "2", ROLE, "!", END))]
        history.append(response := await managed.chat(history, tools=tools))
        assert response.message.content == f"4{mark(PAD)}2{mark(ROLE)}!"
        history.append({"role": "user", "content": "Sure?"})
        world.says.next = ["Yes."]
        history.append(await managed.chat(history, tools=tools))
        assert_exact(world, history)
        assert world.tokens.wandb_metrics()["server/stray_special_tokens"] == 2


@pytest.mark.parametrize("name", ["hermes", "pythonic", "mistral", "qwen3_coder", "deepseek_v3", "openai"])
async def test_no_call_runs_over_a_special_token(name: str) -> None:
    parser = get_parser(name, reasoning="auto", tokenizer=TOKENIZER)
    call = {"id": "call00001", "function": {"name": "run_cmd", "arguments": {"cmd": "rm -r build"}}}
    text = parser.render(None, None, [call], TOOLS)
    async with stack(TOKENIZER, parser=parser) as world:
        for where in ("run_", "rm -r "):
            at = text.index(where) + len(where)
            world.says.next = [Reply([*ids_of(text[:at], PAD, text[at:]), END], "stop", as_is=True)]
            response = await world.tokens.for_rollout().chat([ASKED], tools=TOOLS, max_tokens=400)
            assert not response.message.tool_calls
            assert response.malformed_calls and mark(PAD) in response.message.content
        world.says.next = [Reply([*ids_of(text), END], "stop", as_is=True)]
        assert (await world.tokens.for_rollout().chat([ASKED], tools=TOOLS, max_tokens=400)).message.tool_calls


async def test_a_text_completion_marks_them_too() -> None:
    async with stack() as world:
        world.says.next = [Reply(ids_of("4", PAD, "2", END))]
        (response,) = await world.tokens.for_rollout().continue_text("6 * 7 =", 1, sampling=_sampling())
        assert response.message.content == f"4{mark(PAD)}2"


def _sampling() -> Any:
    from lachesis_client.sampling import Sampling

    return Sampling(max_tokens=16)


class Foreign:
    """A third-party parser that reads text: `name(argument)`."""

    def parse(self, text: str, tools: Any) -> ParsedCompletion:
        from tool_call_parsers import CallStatus, ParsedToolCall

        name, _, argument = text.rstrip(")").partition("(")
        call = ParsedToolCall("call_1", name, {"cmd": argument}, json.dumps({"cmd": argument}), CallStatus.OK)
        return ParsedCompletion(None, tool_calls=(call,), attempts=(call,))


def test_a_parser_of_another_package_gets_the_marks_and_its_calls_with_one_do_not_run() -> None:
    reader = CompletionReader(TOKENIZER, Foreign())  # type: ignore[arg-type]
    message, malformed = reader.read(ids_of("run_cmd(a b)"), TOOLS)
    assert [call.name for call in message.tool_calls] == ["run_cmd"] and not malformed
    for at in (4, 10):
        text, unknown = "run_cmd(a b)", len(TOKENIZER)
        message, malformed = reader.read(ids_of(text[:at], unknown, text[at:]), TOOLS)
        assert not message.tool_calls and malformed == (text[:at] + mark(unknown) + text[at:],)


@pytest.mark.parametrize("config", [{"vocab_size": 1536}, {"text_config": {"vocab_size": 1536}}])
def test_the_rows_of_a_model_are_those_of_the_config_beside_its_tokenizer(
    config: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = fake_tokenizer()
    assert Vocabulary(tokenizer, "m").rows == len(tokenizer)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer.name_or_path = str(tmp_path)
    vocabulary = Vocabulary(tokenizer, "m")
    vocabulary.check("server", [0, 1535])
    with pytest.raises(BadResponse, match=r"id 1536, and the tokenizer m has 1409 ids, and the model 1536 rows"):
        vocabulary.check("server", [0, 1536])
    for broken in ("{", "[]", '{"vocab_size": null}'):
        (tmp_path / "config.json").write_text(broken, encoding="utf-8")
        assert Vocabulary(tokenizer, "m").rows == len(tokenizer)
