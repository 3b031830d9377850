"""`lachesis` is the public interface: a page lists it, and importing or starting it loads only what is needed."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lachesis
from lachesis.ours import is_ours

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    *("aiohttp", "atroposlib", "datasets", "jinja2", "math_verify", "openai", "tokenizers", "torch"),
    *("transformers", "wandb", "xllamacpp"),
}


def modules_after(program: str, *arguments: str) -> set[str]:
    """Every module that is loaded when `program` has ended, also by `SystemExit`."""
    wrapped = f"""
import json, sys
sys.argv = ["program", *{list(arguments)!r}]
try:
    {program}
except SystemExit as ended:
    assert not ended.code, ended.code
print("\\n" + json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", wrapped], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_every_public_name_can_be_imported_and_is_listed_once() -> None:
    assert sorted(set(lachesis.__all__)) == sorted(lachesis.__all__)
    assert [name for name in lachesis.__all__ if getattr(lachesis, name, None) is None] == []
    assert {name for name in vars(lachesis) if not name.startswith("_")} >= set(lachesis.__all__)


def test_the_page_lists_the_public_interface() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(lachesis.__all__)


@pytest.mark.parametrize(
    ("old", "new"), [("lachesis.inference", "lachesis_client"), ("lachesis.tools", "lachesis_tools")]
)
def test_two_packages_are_found_under_the_names_that_the_core_had_for_them(old: str, new: str) -> None:
    package, found = importlib.import_module(new), importlib.import_module(old)
    assert {name: getattr(found, name) for name in package.__all__} == {
        name: getattr(package, name) for name in package.__all__
    }


def test_an_unknown_name_is_named_with_a_near_one() -> None:
    with pytest.raises(AttributeError, match="did you mean 'HermesAgentBaseEnv'"):
        lachesis.HermesAgentBaseEnvironment  # noqa: B018


def test_importing_lachesis_loads_three_modules() -> None:
    before = modules_after("pass")
    added = {name for name in modules_after("import lachesis") - before if is_ours(name)}
    assert added == {"lachesis", "backends", "backends.lazy"}
    assert not {name.partition(".")[0] for name in modules_after("import lachesis") - before} & {"pydantic", "rich"}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("from lachesis_envs.terminal_test import TerminalTestEnv as Env; Env.cli()", ["process", "--help"]),
        ("from lachesis_envs.gsm8k import GSM8kAgentEnv as Env; Env.cli()", ["serve", "--help"]),
        ("from lachesis.cli import main; main()", ["doctor"]),
        ("from lachesis.cli import main; main(['--version'])", []),
        ("import environments.hermes_base_env", []),
    ],
)
def test_help_doctor_and_the_base_class_load_nothing_heavy(program: str, arguments: list[str]) -> None:
    loaded = {name.partition(".")[0] for name in modules_after(program, *arguments)}
    assert loaded & HEAVY == set()


def test_a_run_of_messages_loads_nothing_of_tokens_training_atroposlib_or_wandb(tmp_path: Path) -> None:
    program = "from lachesis_envs.terminal_test import TerminalTestEnv as Env; Env.cli()"
    arguments = ["process", "--env.total_steps=1", "--env.group_size=1", "--openai.model_name=reference"]
    output = f"--env.data_path_to_save_groups={tmp_path / 'groups.jsonl'}"
    modules = modules_after(program, *arguments, output)
    loaded = {name.partition(".")[0] for name in modules}
    assert {"lachesis_client", "pydantic"} <= loaded
    # The reference policy answers in the process: no client, no server, no reading of calls.
    assert loaded & {"aiohttp", "tool_call_parsers"} == set()
    assert modules & {"lachesis_client.balancer", "lachesis_client.http_client", "lachesis_client.chat_format"} == set()
    assert loaded & {"atroposlib", "datasets", "openai", "torch", "transformers", "wandb"} == set()
    # Phase 1: no token engine, nothing of training; the report is a page of lachesis_view.
    assert loaded & {"lachesis_compat", "lachesis_data", "lachesis_tokens", "lachesis_train"} == set()
    assert modules & {"tool_call_parsers.formats", "tool_call_parsers.parser"} == set()


@pytest.mark.slow
def test_a_run_with_tokens_loads_one_engine_and_the_parsers_of_one_family(tmp_path: Path) -> None:
    server = [sys.executable, "-m", "lachesis", "fake-server", "--port", "0", "--policy", "tools"]
    with subprocess.Popen(
        [*server, "--save-tokenizer", "tokens"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            modules = modules_after(
                "from lachesis_envs.terminal_test import TerminalTestEnv as Env; Env.cli()",
                *("process", "--env.total_steps=1", "--env.group_size=1", f"--openai.base_url={url}"),
                *("--openai.model_name=fake", "--openai.server_type=vllm"),
                f"--openai.tokenizer_name={tmp_path / 'tokens'}",
                f"--env.data_path_to_save_groups={tmp_path / 'groups.jsonl'}",
            )
        finally:
            process.terminate()
    assert '"lachesis.sample/1"' in (tmp_path / "groups.jsonl").read_text(encoding="utf-8")
    engines = {name for name in modules if name.startswith("lachesis_tokens.engines.")}
    of_http = ("base", "checks", "http_engine", "prompt_ids", "shortening", "vllm")
    assert engines == {f"lachesis_tokens.engines.{name}" for name in of_http}
    parsers = {name.partition(".")[2] for name in modules if name.startswith("tool_call_parsers.")}
    assert parsers & {"channels", "delimited", "json_blocks.named", "python_calls", "tag_blocks"} == set()
    # What this rollout meets none of: images, aborted completions, lists of dicts, texts that are not JSON.
    rare = {"prompts.prompt_images", "server.interrupts", "server.conversation_index", "samples.sample_records"}
    assert modules & {f"lachesis_tokens.{name}" for name in rare} == set()
    assert parsers & {"literals.tolerant", "schema.signature", "token_run", "model_names"} == set()
