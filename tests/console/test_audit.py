"""`lachesis audit` names what is wrong with an environment, and nothing where nothing is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lachesis.cli import main
from lachesis_console import auditing
from lachesis_console.auditing.findings import NEXT_STEPS

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
PROMPT = 'return f"Spell {item} backwards."'


def audited(tmp_path: Path, *changes: tuple[str, str]) -> tuple[int, dict[str, str]]:
    text = SOUND
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    path = tmp_path / "spell_env.py"
    path.write_text(text)
    code = main(["audit", str(path), "--items", "4", "--json", str(tmp_path / "audit.json")])
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["schema"] == "lachesis.audit/1"
    return code, {each["code"]: each["severity"] for each in found["findings"]}


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
    ],
)
@pytest.mark.sample(4)
def test_a_planted_defect_is_an_error(before: str, after: str, code: str, tmp_path: Path) -> None:
    ended, found = audited(tmp_path, (before, after))
    assert ended == 1 and found.get(code) == "error", found


def test_an_answer_that_is_right_for_every_item_is_an_error(tmp_path: Path) -> None:
    same = ('WORDS = ["pear", "fig", "plum", "lime"]', 'WORDS = ["pear a", "pear b", "pear c", "pear d"]')
    ended, found = audited(tmp_path, same, ("item[::-1])", "item.split()[0][::-1])"))
    assert ended == 1 and found["constant-answer"] == "error", found


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


def test_the_page_has_every_finding_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs/audit.md").read_text().partition("| code |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1] for line in page.splitlines()[2:]]
    assert sorted(re.findall(r"`([a-z-]+)`", " ".join(rows))) == sorted(NEXT_STEPS)
    code = " ".join(path.read_text() for path in Path(auditing.__path__[0]).glob("*.py") if path.stem != "findings")
    assert [each for each in NEXT_STEPS if f'"{each}"' not in code] == []


def test_what_does_not_start_cannot_be_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "spell_env.py"
    path.write_text(SOUND.replace("self.items = iter(WORDS)", "open('/missing')"))
    assert main(["audit", str(path)]) == 2
    assert "could not be audited: Spell.setup: FileNotFoundError" in " ".join(capsys.readouterr().err.split())
