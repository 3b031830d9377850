"""What an author's mistake looks like: one block with the thing, the place in the file, the reason, the next step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lachesis.cli import main

OURS = ("/lachesis/", "/lachesis_tools/", "/lachesis_console/", "asyncio/", "functools.py", "pydantic")
TEXT = '''
import abc
from contextlib import asynccontextmanager
from lachesis import BUILTIN_TOOLS, HermesAgentBaseEnv, Message, ToolCall, reward, tool


@tool(toolset="ops")
async def look(place: str) -> str:
    """Look somewhere.

    Args:
        place: Where.
    """
    return "nothing"


class Mine(HermesAgentBaseEnv):
    """It asks for a letter."""

    name = "mine"
    tools = BUILTIN_TOOLS.extended(look)
    toolsets = ["ops"]

    async def get_next_item(self):
        return {"letter": "a"}

    def format_prompt(self, item):
        return "Say " + item["letter"]

    async def compute_reward(self, item, result, ctx):
        return float(result.final_response == item["letter"])

    def reference_policy(self):
        return lambda messages, tools: Message("assistant", messages[-1]["content"][-1])
'''
SESSION = "    @asynccontextmanager\n    async def session(self, item):\n        yield\n"


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(name: str, text: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    Path(name).write_text(text)
    assert main(["check", name, "-n", "1", *flags]) in (0, 1, 2)
    done = capsys.readouterr()
    return done.err + done.out


@pytest.mark.parametrize(
    ("number", "old", "new", "said"),
    [
        (
            0,
            '    """Look somewhere.\n\n    Args:\n        place: Where.\n    """\n',
            "",
            "tool 'look' needs a docstring",
        ),
        (1, "place: str", "place", "parameter 'place' needs a type annotation"),
        (2, "place: str", "place: 'Nowhere'", "must be importable names (name 'Nowhere' is not defined)"),
        (3, "place: str", "place: asyncio.Lock", "no JSON schema for its parameters"),
        (4, "async def look", "def look", "must be an `async def`"),
        (5, '@tool(toolset="ops")', "@tool", "it is written @tool(toolset='...')"),
        (6, '@tool(toolset="ops")\n', "", "'look' is not a tool: decorate it with @tool"),
        (7, '(toolset="ops")', '(toolset="ops", name="a b")', "use letters, digits"),
        (
            8,
            "    async def compute_reward",
            "    @reward(0.5)\n    async def it",
            "a weight is written @reward(weight=0.5)",
        ),
    ],
)
def test_a_file_that_is_refused_shows_its_own_line_and_the_reason_once(
    number: int, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"refused_{number}.py"
    found = checked(name, "import asyncio\n" + TEXT.replace(old, new), capsys)
    first, *rest = found.splitlines()
    assert first.startswith(f"error: {name}: ") and found.count(said) == 1 and said in first, found
    assert re.search(rf'^  File ".*/{name}", line \d+, in ', found, re.MULTILINE)
    assert rest[-1] == "correct it and start again" and not any(each in found for each in OURS), found


@pytest.mark.parametrize(
    ("number", "old", "new", "said"),
    [
        (
            0,
            'return "Say " + item["letter"]',
            "return 3",
            r"Mine.format_prompt \(FILE, line \d+\) returned 3; return text",
        ),
        (
            1,
            "def format_prompt",
            "async def format_prompt",
            r"Mine.format_prompt \(FILE, line \d+\) returned a coroutine",
        ),
        (
            2,
            "    def reference",
            SESSION.replace("yield", "return") + "    def reference",
            r"FILE, line \d+\) has no `yield`",
        ),
        (
            3,
            "    def reference",
            SESSION.partition("\n")[2] + "    def reference",
            r"decorate it with @asynccontextmanager",
        ),
        (
            4,
            "return float(result.final_response == ",
            "return str(",
            r"compute_reward returned 'a'; it must be a number, .* \(FILE, line \d+\)",
        ),
        (
            5,
            "item, result, ctx",
            "item, result",
            r"called as compute_reward\(self, item, result, ctx\) \(FILE, line \d+\)",
        ),
        (
            6,
            'float(result.final_response == item["letter"])',
            'item["x"]',
            r"item has the fields letter \(FILE, line \d+\)",
        ),
        (7, "lambda messages, tools", "lambda messages", r"the policy is called as policy\(messages, tools\)"),
        (
            8,
            'Message("assistant", messages[-1]["content"][-1])',
            '"a"',
            r"it returned 'a', not a Message; correct reference_pol",
        ),
        (
            9,
            "    def reference",
            SESSION.replace("yield", "item[1]\n        yield") + "    def reference",
            r"KeyError: 1; item",
        ),
    ],
)
def test_what_a_method_returns_or_raises_is_one_finding_with_its_place(
    number: int, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    name = f"returns_{number}.py"
    found = checked(name, TEXT.replace(old, new).replace("Mine", f"Mine{number}"), capsys)
    findings = [line for line in found.splitlines() if line.startswith("suspicious: ")]
    assert len(findings) == 1 and re.search(said.replace("FILE", name).replace("Mine", f"Mine{number}"), findings[0]), (
        found
    )
    assert "RequestRejected" not in found and "0x" not in found and "Traceback" not in found
    assert not any(each in found for each in OURS), found
    assert not [each for each in recwarn if "never awaited" in str(each.message)]


@pytest.mark.parametrize(
    ("number", "old", "new", "said"),
    [
        (0, "compute_reward", "score", "Mine has score, and needs compute_reward(self, item, result, ctx): rename it"),
        (
            1,
            "    async def get_next_item",
            "    @abc.abstractmethod\n    def rows(self): ...\n    async def get_next_item",
            "Mine is abstract: it lacks rows, which a base class asks for (class_1.py, line",
        ),
    ],
)
def test_a_class_that_lacks_a_method_says_which(
    number: int, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = checked(f"class_{number}.py", TEXT.replace(old, new), capsys)
    assert f"error: {said}" in found and "Traceback" not in found


def test_check_names_a_parameter_that_no_docstring_describes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not describe" not in checked("described.py", TEXT, capsys)
    found = checked("undescribed.py", TEXT.replace("        place: Where.\n", "").replace("    Args:\n", ""), capsys)
    assert "note: the tool 'look' (undescribed.py, line 7) does not describe place: " in found
    assert "nothing suspicious" in found, "a note is no mistake"
