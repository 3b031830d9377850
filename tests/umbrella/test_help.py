"""The help of the command and of its verbs: examples first, each flag once, one screen."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from pydantic import BaseModel

from lachesis.cli import SUBCOMMANDS, VERBS, main
from lachesis.cli.examples import EXAMPLES
from lachesis.cli.play_environment import DEFAULTS
from lachesis.cli.verb_parser import ENVIRONMENT
from lachesis.runs.command_line import nest_flags
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_train.sft.settings import SftSettings
from lachesis_train.trainer.settings import TrainingSettings
from lachesis_train.verbs.launch_training import make_parser, read_settings
from tests.umbrella.golden.names import printed
from tests.umbrella.test_docs import ROOT

FLAG = re.compile(r"(?<![\[\w-])--?[A-Za-z][\w-]*(?![\w.-])")


def test_the_help_of_the_command_is_one_screen_with_examples_and_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[2] == "examples:" and len(lines) <= 45 and max(map(len, lines)) <= 80
    shown = {line.split()[0] for line in lines if re.match(r"  [a-z-]+ {2,}", line)}
    assert set(VERBS) - shown == set()


@pytest.mark.parametrize("verb", [*VERBS, *(verb for verb in EXAMPLES if " " in verb and not verb.endswith("--as"))])
def test_the_help_of_a_verb_begins_with_examples_and_has_each_flag_once(verb: str) -> None:
    text = printed(verb)
    lines = text.splitlines()
    assert re.match(r"usage: lachesis [a-z -]+", lines[0]) and lines[2] == "examples:", text
    assert max(map(len, lines[: lines.index("", 3)])) <= 80
    options = text.partition("\noptions:\n")[2]
    named = Counter(flag for names in re.findall(r"^  (-.*?)(?:  .*)?$", options, re.M) for flag in FLAG.findall(names))
    assert named and [flag for flag, times in named.items() if times > 1] == []
    assert re.findall(r"  (--?[\w-]+ \w+), -", text) == []  # the value, once for each name


@pytest.mark.parametrize("verb", [*VERBS, *(verb for verb in EXAMPLES if " " in verb and not verb.endswith("--as"))])
def test_a_help_is_one_screen_in_which_a_value_has_a_readable_name(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(verb).splitlines()
    assert len(lines) <= 50 and max(map(len, lines)) <= 80
    assert [line for line in lines if re.search(r"\{\w+,|^  --?[a-z-]+ [A-Z]+_[A-Z_]+", line)] == []


@pytest.mark.parametrize(
    ("verb", "flag"),
    [("batch", "--providers-order"), ("fake-server", "--seed"), ("eval regrade", "--env.terminal-cpus")],
)
def test_flags_that_few_need_are_in_the_longer_help_and_always_accepted(
    verb: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag not in printed(verb) and "--help-all" in printed(verb)
    with pytest.raises(SystemExit) as ended:
        main([*verb.split(), "--help-all"])
    assert ended.value.code == 0 and f"  {flag} " in capsys.readouterr().out


def test_n_is_a_number_of_items_in_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("eval", "process", "batch", "check", "audit"):
        said = re.findall(r"^  -n\b.*(?:\n {8}.*)*", printed(verb), re.M)[0]
        assert "items to run" in " ".join(said.split())
    assert "-n " not in printed("serve") and "--steps N" in printed("serve")
    with pytest.raises(SystemExit):  # its older name
        main(["serve", "tool_call", "-n", "two"])
    assert "must be a whole number" in capsys.readouterr().err


def test_an_environment_that_is_not_named_is_an_error_after_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("eval", "play", "process", "serve"):
        assert main([verb]) == 2
        assert capsys.readouterr().err == "error: name an environment: `lachesis envs` lists some\n"


@pytest.mark.parametrize(("word", "verb"), SUBCOMMANDS.items())
def test_a_second_word_that_is_written_first_is_one_of_its_verb(
    word: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, word, "--help"])
    assert ended.value.code == 0 and f"lachesis {verb} {word}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [verb for verb in EXAMPLES if verb])
def test_the_examples_use_flags_that_there_are(verb: str) -> None:
    for line in EXAMPLES[verb].strip().splitlines():
        command = re.split(r" {3,}", line)[0].removeprefix("lachesis ")
        name = max((each for each in EXAMPLES if each and f"{command} ".startswith(f"{each} ")), key=len, default=verb)
        name = "export --run-dir x" if "--run-dir" in command and name == "export" else name
        name = "train --sft x" if "--sft" in command else name
        known = set(FLAG.findall(printed(name if "--as" not in name else "serve")))
        used = {flag for flag in FLAG.findall(command.removeprefix(name)) if not flag.startswith("--training")}
        assert used - known - {"--rehearse", "--as"} == set(), f"{line}: {sorted(used - known)}"


def test_the_defaults_of_short_flags_are_those_of_the_settings() -> None:
    fields = HermesAgentEnvConfig.model_fields
    assert {name: fields[name.removeprefix("env.")].default for name in DEFAULTS} == DEFAULTS
    assert "items to run, one group of rollouts each (default: 1000)" in " ".join(printed("process").split())
    assert "(default: 1000)" not in printed("serve")


def test_the_command_that_measures_a_model_has_one_name_in_helps_and_docs() -> None:
    """`evaluate` is its name in the command line of Hermes and Atropos."""
    older = {"from-atropos.md", "atropos-environments.md", "migrating.md"}
    pages = [page for page in (ROOT / "docs").glob("*.md") if page.name not in older]
    texts = {page.name: page.read_text(encoding="utf-8") for page in pages} | {verb: printed(verb) for verb in VERBS}
    assert [name for name, text in texts.items() if "`evaluate`" in text.replace("(`evaluate` for `eval`)", "")] == []


def test_the_helps_say_the_same_of_an_environment_and_have_a_default_for_each_model_and_number_at_once() -> None:
    verbs = ("eval", "process", "serve", "play", "chat", "check", "audit", "batch", "train", "train --rehearse")
    texts = {verb: printed(verb) for verb in verbs}
    assert [verb for verb, text in texts.items() if ENVIRONMENT not in " ".join(text.split())] == []
    for text in texts.values():
        for flag in re.findall(r"^  -[mc], .*(?:\n {8}.*)*", text, re.M):
            assert "(default: " in " ".join(flag.split()), flag


def test_the_examples_of_training_have_the_settings_that_a_run_needs() -> None:
    for line in EXAMPLES["train"].strip().splitlines():
        flags = re.split(r" {3,}", line)[0].split()[2:]
        if "--rehearse" not in flags and "--sft" not in flags:
            given = vars(make_parser().parse_known_args(flags)[0])
            config = given.pop("config", None)
            read_settings(ROOT / config if config else None, nest_flags(given))


def test_the_help_of_training_is_one_screen_and_says_what_lists_all_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed("train").splitlines()
    assert len(lines) <= 52 and {"--training.num_steps", "--env.group_size"} < {*" ".join(lines).split()}
    assert "`lachesis train --help-all` lists all settings" in " ".join(lines)
    assert main(["train", "--env", "gsm8k", "--help-all"]) == 0
    listed = {*re.findall(r"^  (--(?:training|env|sft|openai)\.\w+)", capsys.readouterr().out, re.M)}
    models: tuple[tuple[str, type[BaseModel]], ...]
    models = (("training", TrainingSettings), ("env", HermesAgentEnvConfig), ("sft", SftSettings))
    assert {f"--{section}.{name}" for section, model in models for name in model.model_fields} - listed == set()
