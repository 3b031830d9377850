"""A run compares its tool-call parser with the calls that the model's chat template writes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lachesis.settings.server_settings import ServerConfig, ServerConfigError
from lachesis_testing.fake_server import FakeServer, fake_tokenizer
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.templates.parser_match import ParserMatch, match_parser, parser_for
from tests.support.small_envs import SortWords
from tool_call_parsers import UnknownParser

HEAD = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% if loop.first and tools %}{{ tools | tojson }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
)
TAIL = "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HERMES = '<tool_call>\n{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
PAIRS = (
    "<tool_call>{{ f.name }}{% for k, v in f.arguments | items %}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v if v is string else v | tojson }}</arg_value>{% endfor %}</tool_call>"
)
UNKNOWN = "@@{{ f.name }}{{ f.arguments | tojson }}"


def matched(body: str, parser: str) -> ParserMatch:
    prompts = PromptBuilder(fake_tokenizer(), chat_template=HEAD + body + TAIL)
    return match_parser(prompts, parser_for(prompts, parser), parser)


def test_the_template_of_the_settings_counts_and_not_the_tokenizer_s() -> None:
    prompts = PromptBuilder(fake_tokenizer(), chat_template=HEAD + PAIRS + TAIL)
    assert parser_for(prompts, "auto").name == "glm47"
    assert parser_for(PromptBuilder(fake_tokenizer()), "Auto").name == "hermes"
    with pytest.raises(UnknownParser, match="no format reads the calls that the template writes"):
        parser_for(PromptBuilder(fake_tokenizer(), chat_template=HEAD + UNKNOWN + TAIL), "auto")


def test_nothing_is_said_of_a_parser_that_the_template_calls_for() -> None:
    for parser in ("auto", "glm47", "glm-5.2"):
        match = matched(PAIRS, parser)
        assert (match.lost, match.note, match.unread) == (None, None, ())


def test_a_difference_is_one_line() -> None:
    match = matched(PAIRS, "glm45")
    assert match.lost is None
    assert match.note == "tool_call_parser glm45: the chat template calls for glm47; glm45 reads its calls too"
    spoils_nested = HERMES.replace("f.arguments | tojson", "f.arguments | tojson | replace('{}', '{ , }')")
    note = matched(spoils_nested, "qwen3_json").note
    assert note is not None
    assert "\n" not in note


def test_a_parser_that_reads_no_call_of_the_template_is_named_with_the_reason() -> None:
    match = matched(PAIRS, "kimi_k2")
    assert match.lost is not None
    assert "(no call is found: '<tool_call>probe_search<arg_key>query</arg_key>" in match.lost
    assert match.detection.tool_parser == "glm47"


def test_a_template_that_writes_no_calls_rules_no_parser_out() -> None:
    match = matched("", "kimi_k2")
    assert match.lost is None
    assert match.note == (
        "tool_call_parser kimi_k2: the chat template calls for hermes "
        "(the template knows tools, and the vocabulary has <tool_call>, </tool_call>)"
    )


async def started(folder: Path, body: str, **settings: Any) -> str:
    """What a run prints at its start."""
    async with FakeServer() as server:
        server.tokenizer.save_pretrained(folder)
        (folder / "own.jinja").write_text(HEAD + body + TAIL)
        one = ServerConfig(base_url=server.base_url, model_name="fake", tokenizer_name=str(folder), server_type="vllm")
        chosen = {"enabled_toolsets": ["file"], "chat_template": str(folder / "own.jinja"), **settings}
        env = SortWords(SortWords.env_config_cls(**chosen), [one])
        env.console = Console(file=(out := io.StringIO()), width=400)
        try:
            async with env.running():
                return out.getvalue()
        finally:
            assert server.stats["completions"] == 0


@pytest.mark.parametrize("settings", [{}, {"tool_call_parser": "hermes"}])
async def test_a_run_does_not_start_where_every_call_would_be_lost(tmp_path: Path, settings: dict[str, str]) -> None:
    with pytest.raises(ServerConfigError, match=r"tool_call_parser 'hermes'.*--env.tool_call_parser glm47") as refused:
        await started(tmp_path, PAIRS, **settings)
    assert ("(the default)" in str(refused.value)) is not bool(settings)
    with pytest.raises(ServerConfigError, match=r"no known format reads them: set --env.chat_template"):
        await started(tmp_path, UNKNOWN, **settings)


async def test_a_run_starts_with_the_right_parser_or_without_tools(tmp_path: Path) -> None:
    for settings in ({"tool_call_parser": "glm47"}, {"tool_call_parser": "auto"}, {"enabled_toolsets": []}):
        assert "tool_call_parser" not in await started(tmp_path, PAIRS, **settings)
    assert "tool_call_parser" not in await started(tmp_path, HERMES)
    assert (await started(tmp_path, HERMES, tool_call_parser="granite4")).count("tool_call_parser granite4: ") == 1
