"""GSM8K with tools: the reference policy earns everything, a wrong one nothing, on each kind of dataset."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.settings.server_settings import ServerConfig
from lachesis_envs.gsm8k import GSM8kAgentEnv, GSM8kEnvConfig
from lachesis_envs.gsm8k.environment import final_answer, worked_solution
from lachesis_envs.gsm8k.symbolic import gsm_symbolic
from lachesis_envs.gsm8k.word_problems import WordProblems
from lachesis_envs.gsm8k.worked_solutions import evaluate
from tests.support.scripted_server import ScriptedServer, say
from tests.support.small_envs import ROOT, lines, make, rollouts

REAL = ROOT.parent / "shared" / "data" / "gsm8k"
ROWS = [
    {
        "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
        "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nThat is 48+24 = <<48+24=72>>72.\n#### 72",
    },
    {
        "question": "A car costs $1,000 and a bike a fifth of that. What do both cost?",
        "answer": "The bike costs 1000/5 = <<1000/5=200>>200.\nBoth cost <<1000+200=1200>>1200.\n#### 1,200",
    },
]


def reference(folder: Path, **settings: Any) -> GSM8kAgentEnv:
    config = GSM8kEnvConfig(
        data_path_to_save_groups=str(folder / "groups.jsonl"),
        data_dir_to_save_evals=str(folder / "eval"),
        **{"group_size": 2, "total_steps": 4, **settings},
    )
    return GSM8kAgentEnv(config, [ServerConfig(model_name="reference")])


def fixture(folder: Path) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize("dataset", ["gsm_symbolic", "word_problems"])
async def test_the_reference_policy_earns_everything_on_made_up_problems(tmp_path: Path, dataset: str) -> None:
    result = await reference(tmp_path, dataset_name=dataset).process_manager()
    assert (result.summary.reward.mean, result.summary.scored) == (1.0, 8)
    assert result.summary.tool_use_rate == 1.0
    assert result.summary.metrics == {"boxed_answer_rate": 1.0, "percent_correct": 1.0, "plain_answer_rate": 1.0}


async def test_the_reference_policy_earns_everything_on_a_file(tmp_path: Path) -> None:
    result = await reference(tmp_path, dataset_name=str(fixture(tmp_path)), total_steps=2).process_manager()
    assert (result.summary.reward.mean, result.summary.items) == (1.0, 2)
    (first, _) = sorted(lines(result.files.groups), key=lambda group: group["item"]["answer"], reverse=True)
    assert first["item"]["answer"] == "72"
    results = [message["content"] for message in first["messages"][0] if message["role"] == "tool"]
    assert "24" in results[0], "the tool really ran"
    assert "72" in results[1]


async def test_the_reference_policy_earns_everything_on_the_real_problems(tmp_path: Path) -> None:
    if not REAL.is_dir():
        pytest.skip(f"the real GSM8K is not at {REAL}")
    env = reference(tmp_path, dataset_name=str(REAL), eval_items=25)
    result = await env._run_evaluate()
    assert (result.summary.reward.mean, result.summary.items) == (1.0, 25)
    first = json.loads((REAL / "test.jsonl").read_text().splitlines()[0])["question"]
    asked = {sample["item"]["question"] for sample in lines(tmp_path / "eval" / "samples.jsonl")}
    assert first in asked, "evaluation is about the test split"


async def test_a_wrong_answer_earns_nothing_and_no_answer_neither(tmp_path: Path) -> None:
    def wrong(request: Mapping[str, Any]) -> Any:
        return say(r"\boxed{71}" if len(server.requests) % 2 else "I give up.")

    async with ScriptedServer(wrong) as server:
        env = make(
            GSM8kAgentEnv,
            server,
            tmp_path,
            dataset_name=str(fixture(tmp_path)),
            enabled_toolsets=["python"],
        )
        result = await env.process_manager()
    assert [rollout["reward"] for rollout in rollouts(result.files.groups)] == [0.0] * 4
    assert result.summary.metrics["boxed_answer_rate"] == 0.5
    assert all(request["tools"][0]["function"]["name"] == "python" for request in server.requests)


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (r"\boxed{1200}", 1.0),
        (r"\boxed{\$1,200}", 1.0),
        (r"\boxed{\frac{2400}{2}}", 1.0),
        (r"not \boxed{5} but \boxed{1200.00}", 1.0),
        ("Both cost $1,200.", 0.0),
        (r"The box is \boxed{}, and both cost 1200.", 0.0),
        (r"\boxed{120}", 0.0),
        ("9" * 6000, 0.0),
        ("", None),
    ],
)
async def test_what_an_answer_earns(tmp_path: Path, said: str, reward: float | None) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(ROWS[1]))
    async with ScriptedServer([say(said)]) as server:
        settings = {"dataset_name": str(tmp_path / "one.jsonl"), "total_steps": 1, "group_size": 1, "max_resamples": 0}
        result = await make(GSM8kAgentEnv, server, tmp_path, **settings).process_manager()
    (rollout,) = rollouts(result.files.groups)
    assert rollout["traceback"] is None
    if reward is None:
        assert (rollout["outcome"], rollout["reward"]) == ("model_error", 0.0), "silence is the model's own doing"
    else:
        assert (rollout["outcome"], rollout["reward"]) == ("completed", reward)


def test_the_same_seed_makes_the_same_problems_and_leaves_no_module_behind() -> None:
    before = set(sys.modules)
    first, second, other = gsm_symbolic(30, seed=1), gsm_symbolic(30, seed=1), gsm_symbolic(30, seed=2)
    questions = [first[place]["question"] for place in range(30)]
    assert questions == [second[place]["question"] for place in range(30)]
    assert questions != [other[place]["question"] for place in range(30)]
    assert not [name for name in set(sys.modules) - before if name.split(".")[0] == "reasoning_gym"]


@given(seed=st.integers(), place=st.integers(0, 999))
def test_a_word_problem_states_its_numbers_and_its_solution_gives_its_answer(seed: int, place: int) -> None:
    problems = WordProblems(1000, seed)
    row = problems[place]
    assert row == WordProblems(1000, seed)[place] == problems[place : place + 1][0]
    steps = re.findall(r"<<(.*?)=(\d+)>>", row["answer"])
    assert [str(evaluate(step)) for step, _ in steps] == [value for _, value in steps]
    assert row["answer"].endswith(f"#### {steps[-1][1]}")
    assert "{" not in row["question"]
    earlier = [value for _, value in steps[:-1]]
    numbers = [number for step, _ in steps for number in re.findall(r"\d+", step)]
    stated = re.findall(r"\d+", row["question"])
    assert set(numbers) <= {*earlier, *stated}


@pytest.mark.parametrize("dataset", ["gsm_symbolic", "word_problems"])
async def test_evaluation_asks_other_problems_than_training(tmp_path: Path, dataset: str) -> None:
    env = reference(tmp_path, eval_items=20, dataset_name=dataset)
    await env.setup()
    try:
        trained = {(await env.get_next_item())["question"] for _ in range(20)}  # type: ignore[index]
        asked = {item["question"] for item in await env.get_eval_items()}
    finally:
        await env.teardown()
    assert len(asked) > 10
    assert not trained & asked


def test_the_servers_of_the_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BASE_URL", "MODEL", "API_KEY"):
        monkeypatch.delenv(f"ATROPOS_SERVER_{name}", raising=False)
    _, (embedded,) = GSM8kAgentEnv.config_init()
    assert embedded.model_name == "embedded"
    monkeypatch.setenv("ATROPOS_SERVER_BASE_URL", "http://10.0.0.1:9/v1")
    monkeypatch.setenv("ATROPOS_SERVER_MODEL", "qwen")
    monkeypatch.setenv("ATROPOS_SERVER_API_KEY", "key")
    monkeypatch.setenv("ATROPOS_TOKENIZER_NAME", "tok")
    config, (server,) = GSM8kAgentEnv.config_init()
    assert (server.base_url, server.model_name, server.api_key) == ("http://10.0.0.1:9/v1", "qwen", "key")
    assert config.tokenizer_name == "tok"


def test_a_file_in_the_folder_names_a_server_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("BASE_URL", "MODEL", "API_KEY"):
        monkeypatch.delenv(f"ATROPOS_SERVER_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTHER", "of the process")
    (tmp_path / ".env").write_text(
        "ATROPOS_SERVER_BASE_URL=http://10.0.0.1:9/v1\nATROPOS_SERVER_MODEL=${OTHER}\nPATH=/nowhere\nHF_TOKEN=x\n"
        "ATROPOS_TOKENIZER_NAME=tok\n"
    )
    before = dict(os.environ)
    for _ in range(2):
        config, (server,) = GSM8kAgentEnv.config_init()
        assert (server.base_url, server.model_name, server.api_key) == ("http://10.0.0.1:9/v1", "${OTHER}", "")
    assert dict(os.environ) == before
    assert config.tokenizer_name != "tok"
    said = capsys.readouterr().err
    assert said.count("note: ATROPOS_SERVER_BASE_URL, ATROPOS_SERVER_MODEL of ") == 1
    monkeypatch.setenv("ATROPOS_SERVER_API_KEY", "of the process")
    assert GSM8kAgentEnv.config_init()[1][0].api_key == "", "a file cannot send a key of the process anywhere"
    monkeypatch.setenv("ATROPOS_SERVER_BASE_URL", "http://10.0.0.2:9/v1")
    assert GSM8kAgentEnv.config_init()[1][0].api_key == "of the process"


def test_answers_and_solutions_of_rows() -> None:
    assert final_answer(r"\boxed{ 3 } of 5") == "3"
    assert final_answer("3 of 5") is None
    assert final_answer("3 of 5", accept_last_number=True) == "5"
    assert final_answer("none", accept_last_number=True) is None
    solution = worked_solution({"question": "", "answer": "72", "solution": ROWS[0]["answer"]})
    assert list(solution.steps) == ["print(48/2)", "print(48+24)"]
    assert solution.answer == "72"
    for text, answer in (("1,200", "1200"), ("(3,4)", "(3,4)"), (r"\{1,2\}", r"\{1,2\}"), ("1,2", "1,2")):
        row = {"question": "", "answer": text, "solution": f"#### {text}"}
        assert worked_solution(row).answer == answer


async def test_commas_between_the_members_of_an_answer_stay(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"question": "Which point?", "answer": "#### (3,4)"}))
    settings = {"dataset_name": str(tmp_path / "one.jsonl"), "total_steps": 1, "group_size": 1}
    for said, reward in (("(3, 4)", 1.0), ("(34)", 0.0)):
        (tmp_path / said).mkdir()
        async with ScriptedServer([say(rf"\boxed{{{said}}}")]) as server:
            result = await make(GSM8kAgentEnv, server, tmp_path / said, **settings).process_manager()
        assert rollouts(result.files.groups)[0]["reward"] == reward
