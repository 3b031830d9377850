"""`lachesis audit` names what is wrong with an environment, and nothing where nothing is."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import aiohttp
import pytest

from lachesis.cli import main
from lachesis_console import auditing
from lachesis_console.auditing.findings import NEXT_STEPS
from lachesis_console.auditing.records import AuditPlay, EnvironmentFacts
from lachesis_console.auditing.report import Audit
from lachesis_view.app import serve
from lachesis_view.index import Index

SOUND = '''
import random, time, os
from lachesis import HermesAgentBaseEnv, Message

seen = []
WORDS = ["pear", "fig", "plum", "lime"]


class Spell(HermesAgentBaseEnv):
    """The agent spells a word backwards."""

    name = "spell"
    toolsets = ()

    async def setup(self):
        self.items = iter(WORDS)

    async def get_next_item(self):
        return next(self.items, None)

    def format_prompt(self, item):
        return f"Spell {item} backwards."

    def compute_reward(self, item, result, ctx):
        said = result.final_response
        return float(said.strip() == item[::-1])

    def reference_policy(self):
        return lambda messages, tools: Message("assistant", messages[-1]["content"].split()[1][::-1])
'''
RIGHT = "return float(said.strip() == item[::-1])"
FOUR = 'WORDS = ["pear", "fig", "plum", "lime"]'
PROMPT = 'return f"Spell {item} backwards."'


def audited(tmp_path: Path, *changes: tuple[str, str], text: str = SOUND) -> tuple[int, dict[str, str]]:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = tmp_path / "spell_env.py"
    path.write_text(text)
    code = main(["audit", str(path), "--items", "4", "--json", str(tmp_path / "audit.json")])
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["schema"] == "lachesis.audit/1"
    return code, {each["code"]: each["severity"] for each in found["findings"]}


@pytest.mark.slow
def test_the_answer_of_another_question_may_be_right(tmp_path: Path) -> None:
    """Two items with one answer, which a reference policy finds in two ways."""
    reference = """        ARGUMENTS = ("{}", '{"todos": []}')

        def policy(messages, tools):
            word = messages[1]["content"].split()[1]
            if len(messages) > 2:
                return Message("assistant", word[0])
            return Message("assistant", tool_calls=(ToolCall("a", "todo", ARGUMENTS[word == "pear"]),))
        return policy
"""
    _, found = audited(
        tmp_path,
        (FOUR, 'WORDS = ["pear", "plum", "fig", "lime"]'),
        (PROMPT, 'return f"Spell {item} by its first letter."'),
        ("toolsets = ()", 'toolsets = ("todo",)\n    system_prompt = "Write down what you do."'),
        (RIGHT, "return float(said.strip() == item[0])"),
        (
            '        return lambda messages, tools: Message("assistant", messages[-1]["content"].split()[1][::-1])\n',
            reference,
        ),
        ("import HermesAgentBaseEnv, Message", "import HermesAgentBaseEnv, Message, ToolCall"),
    )
    assert "wrong-answer-passes" not in found, found


def test_a_sound_environment_has_no_findings(tmp_path: Path) -> None:
    code, found = audited(tmp_path)
    assert code == 0 and not {"error", "warning"} & {*found.values()}, found


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        (RIGHT, "return 1.0", "reward-never-differs"),
        (RIGHT, "return float(bool(said))", "any-answer-passes"),
        (RIGHT, "return float(item[::-1] in said)", "lists-all-answers"),
        (RIGHT, "return random.random() * float(said == item[::-1])", "not-deterministic"),
        (RIGHT, "seen.append(said); return float(said == item[::-1] or item[::-1] in seen)", "state-leaks"),
        (RIGHT, "return 1.0 if said == item[::-1] else -100.0", "sentinel-reward"),
        (RIGHT, "return 0.5 * float(said == item[::-1])", "ceiling"),
        (RIGHT, "os._exit(3)", "ends-process"),
        (PROMPT, 'return f"Spell {item} backwards. The answer is {item[::-1]}"', "answer-in-prompt"),
        (PROMPT, 'return ""', "empty-prompt"),
        (RIGHT, "return float(said in item[::-1])", "wrong-answer-passes"),
        (RIGHT, "return float(item[::-1].startswith(said[:1]))", "wrong-answer-passes"),
        (FOUR, "WORDS = [f'word{n}' for n in range(40)]; WORDS[30] = 'a b'", "ceiling"),
        (FOUR, "WORDS = [f'word{n}' for n in range(12)] * 5 + ['x']", "duplicates"),
        (FOUR, "WORDS = ['aa'] * 6 + ['bb'] + ['aa'] * 10", "constant-answer"),
        (RIGHT, "return float(sorted(said) == sorted(item))", "wrong-answer-passes"),
        (RIGHT, "import re; return float(bool(said) and bool(re.fullmatch(said, item[::-1])))", "wrong-answer-passes"),
    ],
)
@pytest.mark.sample(4)
def test_a_planted_defect_is_an_error(before: str, after: str, code: str, tmp_path: Path) -> None:
    ended, found = audited(tmp_path, (before, after))
    assert ended == 1 and found.get(code) == "error", found


@pytest.mark.slow
def test_numbers_that_no_seed_decides_are_a_warning(tmp_path: Path) -> None:
    ended, found = audited(tmp_path, (RIGHT, f"random.random()\n        {RIGHT}"))
    assert ended == 0 and found["not-deterministic"] == "warning", found


@pytest.mark.slow
def test_nearly_full_marks_for_an_echo_are_an_error(tmp_path: Path) -> None:
    echoed = (RIGHT, "return 1.0 if said == item[::-1] else 0.95 * said.endswith(f'{item} backwards.')")
    ended, found = audited(tmp_path, echoed)
    assert ended == 1 and found["echo-passes"] == "error", found


@pytest.mark.slow
def test_an_answer_that_is_right_for_every_item_is_an_error(tmp_path: Path) -> None:
    same = ('WORDS = ["pear", "fig", "plum", "lime"]', 'WORDS = ["pear a", "pear b", "pear c", "pear d"]')
    ended, found = audited(tmp_path, same, ("item[::-1])", "item.split()[0][::-1])"))
    assert ended == 1 and found["constant-answer"] == "error", found


@pytest.mark.slow
def test_a_form_that_no_text_names_is_an_error(tmp_path: Path) -> None:
    tagged = (
        (RIGHT, 'return float(said == f"<w>{item[::-1]}</w>")'),
        ('messages[-1]["content"].split()[1][::-1])', "f\"<w>{messages[-1]['content'].split()[1][::-1]}</w>\")"),
    )
    ended, found = audited(tmp_path, *tagged)
    assert ended == 1 and found["form-not-named"] == "error", found
    named = (PROMPT, 'return f"Spell {item} backwards, as <w>WORD</w>."')
    ended, found = audited(tmp_path, *tagged, named)
    assert ended == 0 and "form-not-named" not in found, found


WORDS_IN_FILES = """
import json
from lachesis import HermesAgentBaseEnv, Message, ToolCall


class Files(HermesAgentBaseEnv):
    name = "files"
    toolsets = ("file",)

    async def setup(self):
        self.items = iter(["pear", "fig", "plum", "lime"])

    async def get_next_item(self):
        return next(self.items, None)

    def format_prompt(self, item):
        return f"Write the word {item} into {item}.txt."

    async def compute_reward(self, item, result, ctx):
        return float(await ctx.read_file(f"{item}.txt") == item)

    def reference_policy(self):
        def play(messages, tools):
            if messages[-1]["role"] == "tool":
                return Message("assistant", "Done.")
            word = messages[-1]["content"].split()[3]
            arguments = json.dumps({"path": f"{word}.txt", "content": word})
            return Message("assistant", tool_calls=(ToolCall("c", "write_file", arguments),))
        return play
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("more", "severity"), [("", "note"), (" Change nothing else.", "error")])
def test_only_the_environments_own_words_exclude_other_calls(more: str, severity: str, tmp_path: Path) -> None:
    """`search_files` can return "only the names of files"."""
    code, found = audited(tmp_path, ("{item}.txt.", f"{{item}}.txt.{more}"), text=WORDS_IN_FILES)
    assert (found["more-than-asked"], code) == (severity, int(severity == "error")), found


@pytest.mark.slow
def test_evaluation_items_that_are_training_items_are_an_error(tmp_path: Path) -> None:
    def held(words: str) -> tuple[str, str]:
        method = f"    async def get_eval_items(self):\n        return {words}\n\n    def format_prompt"
        return "    def format_prompt", method

    ended, found = audited(tmp_path, held("WORDS[:2]"))
    assert ended == 1 and found["evaluation-in-training"] == "error", found
    ended, found = audited(tmp_path, held('["kiwi", "date"]'))
    assert ended == 0 and "evaluation-in-training" not in found, found


@pytest.mark.slow
async def test_the_viewer_shows_a_file_and_a_folder_of_audits(tmp_path: Path) -> None:
    for name, change in (("sound", (RIGHT, RIGHT)), ("broken", (RIGHT, "return float('<blink>' not in said)"))):
        (tmp_path / name).mkdir()
        await asyncio.to_thread(audited, tmp_path / name, change)
    (tmp_path / "other.json").write_text('{"schema": "lachesis.audit/1", "findings": 3}')
    index = Index(tmp_path, tmp_path / "index.sqlite")
    for path, environments in ((None, ["broken", "sound"]), (tmp_path / "sound/audit.json", ["sound"])):
        runner, url = await serve(index, "127.0.0.1", 0, audits=path)
        try:
            async with aiohttp.ClientSession() as session, session.get(url + "audits") as answer:
                page = await answer.text()
        finally:
            await runner.cleanup()
        assert answer.status == 200 and "<blink>" not in page
        assert re.findall(r"<h2>.*/(\w+)/spell_env.py</h2>", page) == environments
        assert ('<th class="text">any-answer-passes</th>' in page) == (path is None)
        assert ("Nothing suspicious." in page) or path is None
    index.close()


async def test_a_row_whose_name_is_a_word_for_what_was_done_is_explained(tmp_path: Path) -> None:
    policies = ("nothing", "emptied: the files of the prompt, before the reference begins")
    plays = [AuditPlay(0, policy, "first", 1.0) for policy in policies]
    record = Audit("env", 0.0, 1.0, [], plays, EnvironmentFacts(), {}).to_record()
    assert [*record["explained"]] == ["emptied"] and "1.000 says that" in record["explained"]["emptied"]
    (tmp_path / "audit.json").write_text(json.dumps(record))
    index = Index(tmp_path, tmp_path / "index.sqlite")
    runner, url = await serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session, session.get(url + "audits") as answer:
            assert '<p class="dim">emptied: the files of the prompt lose their content' in await answer.text()
    finally:
        await runner.cleanup()
        index.close()


STEPS = '''
import json
from contextlib import asynccontextmanager
from lachesis import HermesAgentBaseEnv, Message, Tool, ToolCall, ToolResult

PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}


class Shelf(HermesAgentBaseEnv):
    """The agent puts a book on each shelf."""

    name = "shelf"
    toolsets = ()
    step_rewards = "sum"
    max_turns = 12

    async def setup(self):
        self.items = iter(["ab", "cd"])

    async def get_next_item(self):
        return next(self.items, None)

    def format_prompt(self, item):
        return f"Put a book on each of the shelves {item}."

    @asynccontextmanager
    async def session(self, item):
        yield set()

    def tools_for(self, item):
        async def put(arguments, full):
            new = arguments["place"] in item and arguments["place"] not in full
            full.add(arguments["place"])
            return ToolResult("put", reward=0.5 * new)

        async def take(arguments, full):
            there = arguments["place"] in full
            full.discard(arguments["place"])
            return ToolResult("taken", reward=-0.5 * (there and arguments["place"] in item))

        return [Tool.from_schema("put", "Put a book.", PLACE, put), Tool.from_schema("take", "Take it.", PLACE, take)]

    def reference_policy(self):
        def play(messages, tools):
            done = sum(message["role"] == "tool" for message in messages)
            if done == 2:
                return Message("assistant", "Done.")
            place = messages[-1 - 2 * done]["content"][-3:-1][done]
            return Message("assistant", tool_calls=(ToolCall(f"call_{done}", "put", json.dumps({"place": place})),))

        return play
'''


@pytest.mark.slow
def test_a_step_that_pays_again_and_again_is_an_error(tmp_path: Path) -> None:
    ended, found = audited(tmp_path, text=STEPS)
    assert ended == 0, found
    ended, found = audited(tmp_path, ("reward=-0.5 *", "reward=0.0 *"), text=STEPS)
    assert ended == 1 and found["repeatable-reward"] == "error", found


FILES = '''
import json
from lachesis import HermesAgentBaseEnv, Message, ToolCall

BAD, GOOD = "one\\ntwo@\\n", "one\\n"


class Clean(HermesAgentBaseEnv):
    """The agent removes lines."""

    name = "clean"
    toolsets = ("terminal",)

    async def setup(self):
        self.items = iter([1])

    async def get_next_item(self):
        return next(self.items, None)

    def format_prompt(self, item):
        return "Remove each line with @ from notes.txt."

    async def setup_sandbox(self, item, ctx):
        await ctx.write_file("notes.txt", BAD)

    async def compute_reward(self, item, result, ctx):
        return float(await ctx.read_text("notes.txt") == GOOD)

    def reference_policy(self):
        def play(messages, tools):
            if messages[-1]["role"] == "tool":
                return Message("assistant", "Done.")
            arguments = json.dumps({"command": "sed -i /@/d notes.txt"})
            return Message("assistant", tool_calls=(ToolCall("call_0", "terminal", arguments),))

        return play
'''
COMMIT = """await ctx.write_file("notes.txt", GOOD)
        git = "git -c user.name=a -c user.email=a@b.c"
        await ctx.terminal(f"git init -q . && git add . && {git} commit -qm a && git branch fix", check=True)
        await ctx.write_file("notes.txt", BAD)
        await ctx.terminal(f"{git} commit -qm b --amend notes.txt", check=True)"""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ('ctx.read_text("notes.txt") == GOOD', 'ctx.read_text("notes.txt") != BAD', "destroying-passes"),
        ('await ctx.write_file("notes.txt", BAD)', COMMIT, "solution-in-sandbox"),
        (
            'await ctx.write_file("notes.txt", BAD)',
            "WRITE; await ctx.write_file('notes.orig', GOOD)",
            "solution-in-sandbox",
        ),
    ],
)
def test_what_the_agents_terminal_finds_or_destroys(before: str, after: str, code: str, tmp_path: Path) -> None:
    ended, found = audited(tmp_path, (before, after.replace("WRITE", before)), text=FILES)
    assert ended == 1 and found[code] == "error", found


@pytest.mark.slow
def test_a_sound_environment_with_files_has_no_errors(tmp_path: Path) -> None:
    ended, found = audited(tmp_path, text=FILES)
    assert ended == 0, found


TABLE = '''
import json, sqlite3
from contextlib import asynccontextmanager
from lachesis import HermesAgentBaseEnv, Message, Tool, ToolCall
from lachesis_tools import ToolFailure

SQL = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
LIMIT, kept = 3, []


def opened(item):
    table = sqlite3.connect(":memory:", check_same_thread=False)
    table.execute("CREATE TABLE stays (nights INTEGER)")
    table.executemany("INSERT INTO stays VALUES (?)", [(n,) for n in item])
    return table


def total(table):
    return table.execute("SELECT coalesce(sum(nights), 0) FROM stays").fetchone()[0]


class Table(HermesAgentBaseEnv):
    """The agent asks a database."""

    name = "table"
    toolsets = ()

    async def setup(self):
        self.items = iter([[3, 4, 11], [20, -65], [30, 3, 9, 1], [7, 8]])

    async def get_next_item(self):
        return next(self.items, None)

    def format_prompt(self, item):
        return f"How many nights are in the table stays (guest {sum(item) % 7})? You may send at most 3 queries."

    @asynccontextmanager
    async def session(self, item):
        state = {"table": opened(item), "sent": 0}
        yield state
        state["table"].close()

    def tools_for(self, item):
        async def query(arguments, state):
            state["sent"] += 1
            if state["sent"] > LIMIT:
                raise ToolFailure("no more queries")
            try:
                return json.dumps(state["table"].execute(arguments["query"]).fetchall())
            except sqlite3.Error as error:
                raise ToolFailure(str(error)) from None

        return [Tool.from_schema("query", "Send a statement of SQL to the table.", SQL, query)]

    def compute_reward(self, item, result, ctx):
        return float(result.final_response.strip() == f"{total(opened(item))} nights")

    def reference_policy(self):
        def play(messages, tools):
            if messages[-1]["role"] == "tool":
                return Message("assistant", f"{json.loads(messages[-1]['content'])[0][0]} nights")
            arguments = json.dumps({"query": "SELECT sum(nights) FROM stays"})
            return Message("assistant", tool_calls=(ToolCall("call_0", "query", arguments),))

        return play
'''
SAID = "result.final_response.strip()"


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("total(opened(item))", "total(ctx.session['table'])", "cheat-passes"),
        ("LIMIT, kept = 3", "LIMIT, kept = 99", "limit-not-enforced"),
        (SAID, f"{SAID}.replace('-', '')", "wrong-answer-passes"),
        (
            'yield state\n        state["table"].close()',
            "kept.append(open(__file__))\n        yield state",
            "left-open",
        ),
        (f"{SAID} == ", f"{SAID} and eval({SAID}.split()[0] or '0') == int(", "wrong-answer-passes"),
    ],
)
@pytest.mark.sample(2)
def test_what_only_tools_or_sessions_show(before: str, after: str, code: str, tmp_path: Path) -> None:
    changes = [(before, after)]
    if "eval" in after:
        changes.append(('f"{total(opened(item))} nights")', "total(opened(item))))"))
    ended, found = audited(tmp_path, *changes, text=TABLE)
    assert ended == 1 and found.get(code) == "error", found


@pytest.mark.slow
def test_a_sound_environment_with_a_database_has_no_errors(tmp_path: Path) -> None:
    ended, found = audited(tmp_path, text=TABLE)
    assert ended == 0, found


@pytest.mark.slow
def test_cheats_are_not_played_with_a_tool_of_the_environment(tmp_path: Path) -> None:
    """Nobody knows where it runs what it is given."""
    tool = f"""
    def tools_for(self, item):
        async def run(arguments, session):
            with open({str(tmp_path / "commands")!r}, "a") as file:
                file.write(arguments["command"] + "\\n")
            return ToolResult("done")
        schema = {{"type": "object", "properties": {{"command": {{"type": "string"}}}}, "required": ["command"]}}
        return [Tool.from_schema("bash", "Run a command.", schema, run)]

    def reference_policy(self):"""
    audited(
        tmp_path,
        ("import HermesAgentBaseEnv, Message", "import HermesAgentBaseEnv, Message, Tool, ToolResult"),
        ("\n    def reference_policy(self):", tool),
    )
    commands = (tmp_path / "commands").read_text()
    assert commands.strip() and "rm " not in commands and "conftest" not in commands


WEIGHED = '''
import itertools, json, random
from lachesis import HermesAgentBaseEnv, Message, ToolCall, tool
from lachesis_tools import BUILTIN_TOOLS, ToolFailure

WEIGHTS = {"red": 310, "blue": 120, "green": 540}


@tool(toolset="scale")
async def weigh(parcel: str) -> str:
    """Weigh a parcel, in grams.

    Args:
        parcel: The colour of the parcel.
    """
    if parcel not in WEIGHTS:
        raise ToolFailure(f"there is no parcel {parcel!r}")
    return str(WEIGHTS[parcel])


class Heaviest(HermesAgentBaseEnv):
    """The agent weighs parcels and names the heaviest."""

    name = "heaviest"
    tools = BUILTIN_TOOLS.extended(weigh)
    toolsets = ["scale"]

    async def setup(self):
        draw = random.Random(0)
        self.items = (draw.sample(sorted(WEIGHTS), 2) for _ in itertools.count())

    async def get_next_item(self):
        return next(self.items)

    def format_prompt(self, item):
        return f"Which parcel is heavier: {', '.join(item)}? Answer with the colour alone."

    async def compute_reward(self, item, result, ctx):
        return float(result.final_response.strip() == max(item, key=WEIGHTS.get))

    def reference_policy(self):
        def play(messages, tools):
            item = messages[0]["content"].split(": ")[1].split("?")[0].split(", ")
            said = [int(each["content"]) for each in messages if each["role"] == "tool"]
            if said:
                return Message("assistant", item[said.index(max(said))])
            calls = [ToolCall(f"call_{colour}", "weigh", json.dumps({"parcel": colour})) for colour in item]
            return Message("assistant", tool_calls=tuple(calls))
        return play
'''


@pytest.mark.slow
def test_a_tool_that_works_and_items_that_come_again_are_no_fault_of_the_tool_or_the_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = audited(tmp_path, text=WEIGHED)
    assert found["duplicates"] == "warning"
    assert not {"tool-fails", "prompts-alike"} & {*found}
    said = capsys.readouterr().out
    first = said.partition("\n")[0]
    assert re.search(r"spell_env.py: .*1 warning.* in \d+ policies, \d+ rollouts$", first), first
    assert said.index("\nwarning: ") < said.index("\npolicy "), "what was found is above the table"
    assert re.search(r"^policies without a finding: \d\d with reward 0 \(\d+ rollouts\)", said, re.MULTILINE)


def test_the_page_has_every_finding_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs/audit.md").read_text().partition("| code |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in page.splitlines()[2:]]
    assert sorted(re.findall(r"`([a-z-]+)`", " ".join(rows))) == sorted(NEXT_STEPS)
    code = " ".join(path.read_text() for path in Path(auditing.__path__[0]).glob("*.py") if path.stem != "findings")
    assert [each for each in NEXT_STEPS if f'"{each}"' not in code] == []


def test_a_result_that_cannot_be_written_is_said_before_anything_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(tmp_path / "none.py"), "--json", str(tmp_path / "none" / "found.json")]) == 2
    assert "found.json: cannot be written (No such file or directory)" in capsys.readouterr().err


def test_what_does_not_start_cannot_be_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spell_env.py"
    path.write_text(SOUND.replace("self.items = iter(WORDS)", "open('/missing')"))
    assert main(["audit", str(path)]) == 2
    assert "could not be audited: Spell.setup: FileNotFoundError" in " ".join(capsys.readouterr().err.split())
    for flag, hint in (
        ("--env.group_siz", "did you mean --env.group_size?"),
        ("--n", "`lachesis process ENV --help-all`"),
    ):
        assert main(["audit", str(path), flag, "2"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"could not be audited: unknown setting {flag}; {hint}" in said


ADDING = '''
import json
from lachesis import HermesAgentBaseEnv, Message, ToolCall

TABLE = "amount\\n17\\n25\\n"
COUNTING = "total = sum(map(int, open('table.csv').read().split()[1:]))"
WRITING = "json.dump({'total': total}, open('sum.json', 'w'))"


class Adding(HermesAgentBaseEnv):
    """The agent adds numbers."""

    name = "adding"
    toolsets = ("terminal",)

    async def setup(self):
        self.items = iter([1])

    async def get_next_item(self):
        return next(self.items, None)

    def format_prompt(self, item):
        return 'Add the numbers of table.csv, and write the sum into sum.json, such as {"total": 1}.'

    def sandbox_files(self, item):
        return {"table.csv": TABLE}

    async def compute_reward(self, item, result, ctx):
        total = (await ctx.read_json("sum.json", dict[str, int])).get("total")
        table = await ctx.read_text("table.csv")
        return float(total == sum(map(int, TABLE.split()[1:])))

    def reference_policy(self):
        def play(messages, tools):
            if messages[-1]["role"] == "tool":
                return Message("assistant", "Done.")
            arguments = json.dumps({"command": f"python3 -c \\"import json; {COUNTING}; {WRITING}\\""})
            return Message("assistant", tool_calls=(ToolCall("call_0", "terminal", arguments),))

        return play
'''


@pytest.mark.slow
def test_what_is_expected_is_not_read_from_the_agents_files(tmp_path: Path) -> None:
    ended, found = audited(tmp_path, text=ADDING)
    assert ended == 0, found
    ended, found = audited(tmp_path, ("map(int, TABLE.split", "map(int, table.split"), text=ADDING)
    assert ended == 1 and found["cheat-passes"] == "error", found
    ended, found = audited(tmp_path, ("return float(total == ", "return float(total != None or 0 == "), text=ADDING)
    assert ended == 1 and "wrong-answer-passes" in found, found


SORTING = """
import itertools, json
from lachesis import HermesAgentBaseEnv, Message, ToolCall


class Sorting(HermesAgentBaseEnv):
    name = "sorting"
    toolsets = ("terminal",)

    async def setup(self):
        self.items = iter(["pear fig apple", "kiwi plum date", "olive lime grape"])

    async def get_next_item(self):
        return next(self.items, None)

    def format_prompt(self, item):
        return f"Write the words of {item!r}, sorted, one per line, into words.txt."

    async def compute_reward(self, item, result, ctx):
        written = (await ctx.read_file("words.txt")).split()
        return float(written == sorted(item.split()))

    def reference_policy(self):
        def play(messages, tools):
            if messages[-1]["role"] == "tool":
                return Message("assistant", "Done.")
            words = messages[-1]["content"].split("'")[1]
            arguments = json.dumps({"command": f"printf '%s\\n' {words} | sort > words.txt"})
            return Message("assistant", tool_calls=(ToolCall("call_0", "terminal", arguments),))

        return play
"""


@pytest.mark.slow
def test_a_reward_that_ignores_the_order_which_the_prompt_asks_for(tmp_path: Path) -> None:
    _, found = audited(tmp_path, text=SORTING)
    assert "wrong-answer-passes" not in found, found
    lax = ("written == sorted(", "sorted(written) == sorted(")
    _, found = audited(tmp_path, lax, text=SORTING)
    assert found["wrong-answer-passes"] == "warning", found
    _, found = audited(tmp_path, lax, (", sorted, one per line", ", one per line, in order to keep them"), text=SORTING)
    assert "wrong-answer-passes" not in found, found
