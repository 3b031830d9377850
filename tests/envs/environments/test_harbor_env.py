"""Task folders, played and graded in local sandboxes with this machine's programs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from backends import SandboxSpec, create_backend
from backends.errors import SettingsError
from lachesis.cli import main
from lachesis.settings.server_settings import ServerConfig
from lachesis.tool_context.pace import MachineOverloaded
from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.harbor import CAUSES, HarborEnv, Invalid, grade_again
from lachesis_envs.harbor.artifacts import artifacts_of
from lachesis_envs.harbor.not_run import not_run
from lachesis_envs.harbor.places import opened, places_of
from lachesis_envs.harbor.task_attacks import ATTACKS
from lachesis_envs.harbor.trial import Trial, solve
from lachesis_envs.harbor.verdicts import mean_of_steps, parsed_rewards
from lachesis_envs.harbor.verifying import Play, Verification
from lachesis_envs.task_folders import Task, TaskError, read_task
from lachesis_tools import ToolSessions
from tests.run import ALL
from tests.support.busy_machine import busy_machine, quiet_machine
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import ROOT, make, rollouts

CHECK = """#!/bin/bash
if [ "$(cat answer.txt)" = 42 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
ARTIFACT = 'artifacts = ["/app/answer.txt"]\n'


def task_at(folder: Path, toml: str = "", **files: str) -> Path:
    """A task: write 42 into answer.txt. `files` by path, with `__` for `/` and `_` for `.` in the last part."""
    texts = {
        "task.toml": f'{toml}\n[environment]\nworkdir = "/app"\nnetwork_mode = "no-network"\n',
        "instruction.md": "Write 42 into answer.txt.",
        "environment/Dockerfile": "FROM debian:13\nWORKDIR /app\n",
        "tests/test.sh": CHECK,
        "solution/solve.sh": "#!/bin/bash\necho 42 > answer.txt\n",
        **files,
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


class Played:
    """Sandboxes for trials without an environment."""

    def __init__(self, sessions: ToolSessions) -> None:
        self.sessions = sessions

    async def trial(self, task: Task, agent: str = "oracle", **options: Any) -> Any:
        """The verdict on an agent: `oracle`, or a shell command."""
        trial, more = Trial(task, **options), True
        async with opened(self.sessions, task.name, SandboxSpec(workdir="/app")) as ctx:
            while more:
                await trial.begin(ctx)
                await (solve(trial, ctx, timeout=30) if agent == "oracle" else ctx.terminal(agent))
                more = await trial.finish(ctx)
        return trial.verdict()


@pytest.fixture
async def played() -> Any:
    async with ToolSessions(create_backend("local")) as sessions:
        yield Played(sessions)


async def evaluated(tmp_path: Path, tasks: Path, policy: Any = (), **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The result of an evaluation, and the records of its rollouts by the order of tasks."""
    tmp_path.mkdir(exist_ok=True)
    async with ScriptedServer(policy or [say("Done.")]) as server:
        chosen = {"dataset_name": str(tasks), "task_images": False, "max_infra_retries": 2, **settings}
        result = await make(HarborEnv, server, tmp_path, **chosen)._run_evaluate()
    found = rollouts(result.files.groups) + rollouts(result.files.groups.with_name("samples.failed.jsonl"))
    return result, found


async def test_a_data_set_is_played_by_its_solutions_and_graded_as_declared(tmp_path: Path) -> None:
    task_at(tmp_path / "tasks/open")
    task_at(tmp_path / "tasks/sealed", ARTIFACT)
    result, found = await evaluated(tmp_path, tmp_path / "tasks", agent="oracle")
    assert result.summary.reward.mean == 1.0
    records = {record["verifier"]["grading"]: record for record in found}
    assert set(records) == {"in_place", "seal"}
    assert records["in_place"]["metrics"]["reward/in_place"] == 1.0  # the label goes where the number goes
    assert "reward/in_place" not in records["seal"]["metrics"]
    assert [record["metrics"]["tampered"] for record in found] == [0.0, 0.0]
    kept = tmp_path / "eval" / records["seal"]["verifier"]["artifacts"]
    assert (kept / "artifacts/app/answer.txt").read_text() == "42\n"
    assert (kept / "verifier/reward.txt").read_text() == "1\n"
    assert [entry["status"] for entry in json.loads((kept / "artifacts/manifest.json").read_text())] == ["ok", "ok"]
    assert not [path for path in kept.parent.iterdir() if path.name.startswith(".")]


RUNNER = """#!/bin/bash
cat answer.txt; curl -LsSf https://nowhere.invalid/install.sh | sh
uvx pytest /tests
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.mark.parametrize("toml", ["", ARTIFACT])
async def test_tests_that_cannot_download_what_runs_them_are_no_score_of_0(tmp_path: Path, toml: str) -> None:
    task_at(tmp_path / "tasks/one", toml, **{"tests/test.sh": RUNNER})
    (record,) = (await evaluated(tmp_path, tmp_path / "tasks", agent="oracle"))[1]
    assert (record["outcome"], record["reward"], record["verifier"]["cause"]) == ("infra_error", None, "network")
    assert "they have no uvx" in record["reason"] and "--env.terminal_network true" in record["reason"]


async def test_a_score_that_tests_gave_without_a_program_is_kept(played: Played, tmp_path: Path) -> None:
    script = f"#!/bin/bash\ncurl https://nowhere.invalid/ | sh; uvx pytest /tests\n{CHECK}"
    task = read_task(task_at(tmp_path, **{"tests/test.sh": script}))
    verdict = await played.trial(task)
    assert "uvx: command not found" in verdict.record["stdout"] and verdict.reward.value == 1.0


async def test_an_agent_that_claims_so_keeps_its_score(played: Played, tmp_path: Path) -> None:
    said = "Could not resolve host: a\nuvx: command not found\nNo module named pytest"
    task = read_task(task_at(tmp_path, **{"tests/test.sh": f"#!/bin/bash\ncat answer.txt 2>&1\n{CHECK}"}))
    verdict = await played.trial(task, f"printf '{said}' > answer.txt")
    assert verdict.reward.value == 0.0 and verdict.record["cause"] is None and said in verdict.record["stdout"]


@pytest.mark.parametrize(
    ("output", "missing"),
    [
        ("curl: (6) Could not resolve host: astral.sh\n/tests/test.sh: line 9: uvx: command not found", {"uvx"}),
        ("/usr/bin/python3: No module named pytest", {"pytest"}),
        ("E: Unable to locate package jq\n/tests/test.sh: 3: jq: not found", {"jq"}),
        ("error: Failed to fetch: `https://pypi.org/simple/pytest/`", {"pytest"}),
        ("error: No interpreter found for Python 3.13 in managed installations", {"interpreter"}),
        ("/tests/test.sh: line 2: jq: command not found", set()),
        ("ModuleNotFoundError: No module named 'solution'", set()),
        ("W: Failed to fetch http://deb.debian.org/  Could not resolve\n3 passed in 0.01s", set()),
        ("Could not resolve host: a\ncurl: command not found\n= 1 failed, 2 passed in 0.01s =", set()),
        ("No module named pytest\nRan 2 tests in 0.001s\n\nFAILED (failures=1)", set()),
    ],
)
def test_what_tests_lack_is_in_their_output(output: str, missing: set[str]) -> None:
    assert not_run(output) == missing


async def test_a_model_plays_and_nobody_plays(tmp_path: Path) -> None:
    task_at(tmp_path / "task", ARTIFACT)
    answers = [call(("terminal", {"command": "echo 42 > answer.txt"})), say("Done.")]
    _, (record,) = await evaluated(tmp_path / "model", tmp_path / "task", answers)
    assert (record["reward"], record["tool_calls"]) == (1.0, 1)
    result, (record,) = await evaluated(tmp_path / "nop", tmp_path / "task", agent="nop")
    assert (record["reward"], record["turns"], result.summary.reward.mean) == (0.0, 0, 0.0)


async def test_no_reward_file_is_an_error_and_no_score(tmp_path: Path) -> None:
    task_at(tmp_path / "task", ARTIFACT, **{"tests/test.sh": "echo broken; exit 3\n"})
    _, (record,) = await evaluated(tmp_path, tmp_path / "task", agent="oracle")
    assert (record["outcome"], record["reward"], record["attempts"]) == ("infra_error", None, 1)
    assert record["verifier"]["cause"] == "no_reward_file" and record["verifier"]["stdout"] == "broken\n"
    assert "exit code 3" in record["reason"]


STEPS = """
[[steps]]
name = "first"
min_reward = 0.5
[[steps]]
name = "second"
"""


def two_steps(folder: Path, toml: str = "") -> Path:
    steps = {f"steps/{name}/instruction.md": f"The {name} step." for name in ("first", "second")}
    second = CHECK.replace("answer.txt", "second.txt")
    task_at(folder, **steps, **{"steps/second/tests/test.sh": second, "steps/first/workdir/setup.sh": "echo 1 > made"})
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(toml + text + STEPS)
    return folder


async def test_a_model_plays_steps_in_one_sandbox_and_one_conversation(tmp_path: Path) -> None:
    two_steps(tmp_path / "task")
    answers = [
        call(("terminal", {"command": "cat made; echo 42 > answer.txt"})),
        say("The first is done."),
        call(("terminal", {"command": "ls /tests /logs/verifier; cat answer.txt"})),
        say("I give up."),
    ]
    _, (record,) = await evaluated(tmp_path, tmp_path / "task", answers)
    assert record["reward"] == 0.5 and [step["rewards"]["reward"] for step in record["verifier"]["steps"]] == [1.0, 0.0]
    groups = [json.loads(line) for line in (tmp_path / "eval/samples.jsonl").read_text().splitlines()]
    said = [message["content"] or "" for message in groups[0]["messages"][0]]
    assert [text for text in said if text.endswith("step.")] == ["The first step.", "The second step."]
    seen = json.loads(said[6])["output"]
    assert "42" in seen and "test.sh" not in seen and "reward" not in seen  # nothing of the first grading is left


@pytest.mark.parametrize(
    ("agent", "strategy", "rewards"),
    [
        ("echo 42 > answer.txt; echo 42 > second.txt", "mean", [1.0, 1.0]),
        ("echo 42 > second.txt", "mean", [0.0]),  # below min_reward: the second step is not played
        ("echo 42 > answer.txt", "final", [1.0, 0.0]),
    ],
)
async def test_steps_are_combined_as_the_task_says(
    tmp_path: Path, played: Played, agent: str, strategy: str, rewards: list[float]
) -> None:
    task = read_task(two_steps(tmp_path / "task", f'multi_step_reward_strategy = "{strategy}"\n'))
    verdict = await played.trial(task, agent)
    assert [(step["name"], step["rewards"]["reward"]) for step in verdict.record["steps"]] == [
        *zip(("first", "second"), rewards, strict=False)
    ]
    assert verdict.reward.value == (rewards[-1] if strategy == "final" else sum(rewards) / len(rewards))


async def test_tampering_in_a_later_step_is_the_cause_of_all(tmp_path: Path, played: Played) -> None:
    folder = two_steps(tmp_path / "task", 'artifacts = ["/app/answer.txt", "/app/second.txt"]\n')
    (folder / "steps/second/tests/test.sh").write_text(f"bash ./second.txt\n{CHECK}")
    agent = "echo 42 > answer.txt; echo 'echo {} > /logs/verifier/reward.json' > second.txt"
    verdict = await played.trial(read_task(folder), agent)
    assert (verdict.reward.value, verdict.record["cause"]) == (0.5, "tampered")
    assert [step["cause"] for step in verdict.record["steps"]] == [None, "tampered"]


async def test_a_step_that_comes_to_no_verdict_is_not_tried_where_the_agent_was(tmp_path: Path, played: Played) -> None:
    folder = two_steps(tmp_path / "task", 'artifacts = ["/app/answer.txt"]\n')
    (folder / "tests/test.sh").write_text(f"[ -e /used ] && exit; . ./answer.txt; {CHECK}")
    verdict = await played.trial(read_task(folder), "echo 'touch /used; exit' > answer.txt")
    assert (verdict.reward.value, verdict.record["cause"]) == (0.0, "no_verdict")


async def test_a_separate_verifier_gets_the_artifacts_alone(tmp_path: Path, played: Played) -> None:
    verifier = '[verifier]\nenvironment_mode = "separate"\nenv = {WANTED = "${HARBOR_WANTED:-42}"}\n'
    collect = '[[verifier.collect]]\ncommand = "cp answer.txt /logs/artifacts/collected.txt"\n'
    test = '#!/bin/bash\nls /app\n[ "$(cat /logs/artifacts/collected.txt)" = "$WANTED" ]\n'
    test += 'echo "{\\"reward\\": $((1 - $?)), \\"speed\\": 0.25}" > /logs/verifier/reward.json\n'
    task = read_task(task_at(tmp_path / "task", verifier + collect, **{"tests/test.sh": test}))
    verdict = await played.trial(task, "echo 42 > answer.txt; touch other", keep=tmp_path / "kept")
    assert verdict.record["grading"] == "separate" and verdict.record["stdout"] == ""  # neither file is in /app
    assert (verdict.reward.value, verdict.reward.components) == (1.0, {"speed": 0.25})
    fresh = ToolContext(played.sessions.open("again", spec=SandboxSpec(workdir="/app")))
    again = await grade_again(task, task.steps[0], fresh, tmp_path / "kept")
    assert again.rewards == verdict.rewards


@pytest.mark.parametrize(
    ("toml", "cause"),
    [
        ('[verifier]\nenv = {KEY = "${HARBOR_IS_NOT_SET}"}', "variable"),
        ('[verifier]\nenv = {KEY = "${PATH}"}', "variable"),
        ('[verifier]\nuser = "somebody"', "user"),
        ('[agent]\nuser = "somebody"', "user"),
        ("[verifier]\ntimeout_sec = 0.5", "verifier_timeout"),
        ('[environment.healthcheck]\ncommand = "echo no; false"\ninterval_sec = 0.01', "healthcheck"),
    ],
)
async def test_what_cannot_be_had_has_a_cause(tmp_path: Path, played: Played, toml: str, cause: str) -> None:
    task = read_task(task_at(tmp_path / "task", toml, **{"tests/test.sh": "sleep 60"}))
    with pytest.raises((Invalid, MachineOverloaded)) as raised:
        await played.trial(task, "true")
    if isinstance(raised.value, MachineOverloaded):  # other tests may keep the machine busy
        assert cause == "verifier_timeout"
    else:
        assert raised.value.cause is CAUSES[cause] and not raised.value.cause.valid


@pytest.mark.parametrize(
    ("toml", "field"),
    [
        ('[environment.env]\nKEY = "${HARBOR_SECRET}"\n', "environment.env.KEY"),
        ('[verifier]\nenv = {KEY = "${HARBOR_SECRET}"}\n', "verifier.env.KEY"),
        ('[solution]\nenv = {KEY = "${HARBOR_SECRET}"}\n', "solution.env.KEY"),
    ],
)
async def test_a_task_has_no_variable_of_the_owner_that_the_run_does_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toml: str, field: str
) -> None:
    monkeypatch.setenv("HARBOR_SECRET", "s3cret")
    folder = task_at(tmp_path / "task", toml, **{"solution/solve.sh": 'echo 42 > answer.txt; echo "got $KEY"'})
    with pytest.raises(TaskError, match=rf"{field}.*HARBOR_SECRET.*--env.task_variables '\[HARBOR_SECRET\]'"):
        await evaluated(tmp_path, folder, agent="oracle")
    _, (record,) = await evaluated(tmp_path, folder, agent="oracle", task_variables=["HARBOR_SECRET"])
    assert record["reward"] == 1.0 and ("s3cret" in json.dumps(record)) == ("verifier" not in field)


async def test_a_variable_that_is_not_allowed_leaves_the_default_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HARBOR_SECRET", "s3cret")
    toml = '[environment.env]\nKEY = "${HARBOR_SECRET:-plain}"\n'
    folder = task_at(tmp_path / "task", toml, **{"solution/solve.sh": 'echo 42 > answer.txt; echo "got $KEY"'})
    _, (record,) = await evaluated(tmp_path, folder, agent="oracle")
    assert "got plain" in json.dumps(record) and "s3cret" not in json.dumps(record)
    assert "--env.task_variables '[HARBOR_SECRET]'" in caplog.text


async def test_an_image_that_cannot_be_made_is_the_cause_in_the_record_and_in_a_job(tmp_path: Path) -> None:
    task_at(tmp_path / "task", **{"environment/Dockerfile": "FROM nowhere.invalid/unknown:1\n"})
    result, (record,) = await evaluated(tmp_path, tmp_path / "task", agent="oracle", task_images=True)
    assert (record["outcome"], record["reward"], record["attempts"]) == ("infra_error", None, 1)
    assert record["verifier"] == {"cause": "image_failed"} and "not in the table of bases" in record["reason"]
    assert "tampered" not in record["metrics"]
    failed = result.files.groups.with_name("samples.failed.jsonl")
    assert main(["export", str(failed), "--format", "harbor", "--out", str(tmp_path / "job")]) == 0
    (trial,) = (tmp_path / "job").glob("*/result.json")
    assert json.loads(trial.read_text())["exception_info"]["exception_type"] == "SandboxBuildFailedError"


async def test_root_is_who_owns_the_sandbox(tmp_path: Path, played: Played) -> None:
    toml = '[agent]\nuser = "agent"\n[verifier]\nuser = "root"'
    assert (await played.trial(read_task(task_at(tmp_path / "task", toml)))).reward.value == 1.0


@pytest.mark.parametrize(
    ("data", "name", "rewards"),
    [
        (b"1", "reward.txt", {"reward": 1.0}),
        (b" 0.5\n", "reward.txt", {"reward": 0.5}),
        (b'{"reward": 1, "x": true}', "reward.json", {"reward": 1.0, "x": 1.0}),
        (b"{}", "reward.json", {}),
        (b"", "reward.txt", "empty_reward_file"),
        (b"", "reward.json", "empty_reward_file"),
        (b"\n", "reward.txt", "not_a_reward"),
        (b"nan", "reward.txt", "not_a_reward"),
        (b"inf", "reward.txt", "not_a_reward"),
        (b"passed", "reward.txt", "not_a_reward"),
        (b"\xff", "reward.txt", "not_a_reward"),
        (b'{"reward": NaN}', "reward.json", "not_a_reward"),
        (b'{"reward": 1e309}', "reward.json", "not_a_reward"),
        (b'{"reward": "1"}', "reward.json", "not_a_reward"),
        (b'{"reward": null}', "reward.json", "not_a_reward"),
        (b"1", "reward.json", "not_a_reward"),
        (b"[" * 100_000, "reward.json", "not_a_reward"),
        (b'{"reward": 1' + b"0" * 400 + b"}", "reward.json", "not_a_reward"),
    ],
)
def test_a_verdict_file_is_finite_numbers_or_an_error(data: bytes, name: str, rewards: Any) -> None:
    if isinstance(rewards, dict):
        assert parsed_rewards(data, name) == rewards
    else:
        with pytest.raises(Invalid) as raised:
            parsed_rewards(data, name)
        assert raised.value.cause.name == rewards


def test_the_mean_of_steps_counts_what_is_missing_as_nothing() -> None:
    assert mean_of_steps([{"reward": 1.0}, {"reward": 0.0, "speed": 0.5}]) == {"reward": 0.5, "speed": 0.25}


async def test_reward_json_is_read_first(tmp_path: Path, played: Played) -> None:
    both = "echo 0 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json\n"
    task = read_task(task_at(tmp_path / "task", **{"tests/test.sh": both}))
    assert (await played.trial(task, "true")).reward.value == 1.0


RUN_OF_THE_AGENT = "#!/bin/bash\npython3 answer.py > /dev/null\necho 0 > /logs/verifier/reward.txt\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "cause"),
    [
        ("import os; os.makedirs('/tmp/a'); os.symlink('/tmp/a', '/logs/verifier/reward.json')", "tampered"),
        ("open('/logs/verifier/reward.json', 'w').write('{\"reward\": 1}')", "tampered"),
        ("import os; os.mkdir('/logs/verifier/reward.json')", "no_verdict"),
        ("import os; os.mkfifo('/logs/verifier/reward.json')", "no_verdict"),
        ("import os; os.kill(os.getppid(), 9)", "no_verdict"),
        ("import time; time.sleep(60)", "no_verdict"),
    ],
)
async def test_code_that_the_tests_run_neither_forges_nor_prevents_the_verdict(
    tmp_path: Path, played: Played, attack: str, cause: str
) -> None:
    toml = 'artifacts = ["/app/answer.py"]\n[verifier]\ntimeout_sec = 2\n'
    task = read_task(task_at(tmp_path / "task", toml, **{"tests/test.sh": RUN_OF_THE_AGENT}))
    with quiet_machine():
        verdict = await played.trial(task, f"cat > answer.py <<'EOF'\n{attack}\nEOF")
    assert (verdict.reward.value, verdict.record["cause"]) == (0.0, cause)


@pytest.mark.parametrize("toml", ["", ARTIFACT], ids=["in_place", "seal"])
@pytest.mark.parametrize("last", ["ln -s /tmp/x /logs/verifier/reward.txt", "chmod 000 /logs/verifier"])
async def test_tests_that_hide_their_own_verdict_make_no_agent_a_cheat(
    tmp_path: Path, played: Played, toml: str, last: str
) -> None:
    task = read_task(task_at(tmp_path / "task", toml, **{"tests/test.sh": f"echo 1 > /tmp/x\n{last}\n"}))
    for agent in ("oracle", "true"):
        with pytest.raises(Invalid) as raised:
            await played.trial(task, agent)
        assert raised.value.cause.name == "not_a_reward" and "without the agent's work" in str(raised.value)


async def test_what_is_excluded_is_removed_from_read_only_folders_too(tmp_path: Path, played: Played) -> None:
    toml = 'artifacts = [{source = "/app/out", exclude = ["conftest.py", "cache"]}]\n'
    test = "cd out; [ $(ls ro) = kept ] && [ $(stat -c %a ro) = 555 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    task = read_task(task_at(tmp_path / "task", toml, **{"tests/test.sh": test}))
    agent = "mkdir -p out/ro/cache; cd out/ro; touch conftest.py kept cache/file; chmod 555 cache ."
    assert (await played.trial(task, agent)).reward.value == 1.0


@pytest.mark.long
@pytest.mark.parametrize("toml", ["", 'artifacts = ["/app/answer.py"]'], ids=["in_place", "seal"])
async def test_slow_tests_on_an_overloaded_machine_are_no_score_of_0(tmp_path: Path, played: Played, toml: str) -> None:
    spin = "python3 -c 'import time\nwhile time.process_time() < 0.7: pass'"
    slow = f"[ ! -f /app/answer.py ] || {spin}\n[ ! -f /app/answer.py ]; echo $? > /logs/verifier/reward.txt\n"
    task = read_task(task_at(tmp_path / "task", f"{toml}\n[verifier]\ntimeout_sec = 1.5\n", **{"tests/test.sh": slow}))
    with busy_machine():
        try:
            assert (await played.trial(task, "touch answer.py")).reward.value == 1.0
        except MachineOverloaded as error:
            assert "test.sh took longer than 1.5 s" in str(error)


@pytest.mark.long
@pytest.mark.parametrize("hang", ["while :; do :; done", "sleep 600"], ids=["loop", "sleep"])
@pytest.mark.parametrize("toml", ["", 'artifacts = ["/app/answer.sh"]'], ids=["in_place", "seal"])
async def test_an_answer_that_hangs_is_a_score_of_0_on_an_overloaded_machine_too(
    tmp_path: Path, played: Played, toml: str, hang: str
) -> None:
    test = "[ ! -f /app/answer.sh ] || bash /app/answer.sh\necho 0 > /logs/verifier/reward.txt\n"
    task = read_task(task_at(tmp_path / "task", f"{toml}\n[verifier]\ntimeout_sec = 1\n", **{"tests/test.sh": test}))
    with busy_machine(12):
        verdict = await played.trial(task, f"echo '{hang}' > answer.sh")
    assert (verdict.reward.value, verdict.record["cause"]) == (0.0, "no_verdict")


async def test_tests_that_the_agent_stops_in_its_sandbox_are_a_score(tmp_path: Path, played: Played) -> None:
    hook = '[[verifier.collect]]\ncommand = "true"\n'
    test = "#!/bin/bash\n/usr/bin/printf 1 > /logs/verifier/reward.txt\n"
    task = read_task(task_at(tmp_path / "task", hook, **{"tests/test.sh": test}))
    verdict = await played.trial(task, "rm /usr/bin/printf; mkdir /usr/bin/printf")
    assert (verdict.reward.value, verdict.record["cause"]) == (0.0, "no_verdict")
    assert verdict.reward.components == {"in_place": 1.0}


async def test_a_later_step_that_the_agent_keeps_from_beginning_is_its_fault(tmp_path: Path) -> None:
    task = two_steps(tmp_path / "task")
    (task / "steps/second/workdir").mkdir()
    (task / "steps/second/workdir/setup.sh").write_text("mkdir -p data && touch data/file\n")
    answers = [call(("terminal", {"command": "echo 42 > answer.txt; touch data"})), say("Done.")]
    _, (record,) = await evaluated(tmp_path / "model", task, answers)
    assert (record["outcome"], record["reward"]) == ("agent_fault", 0.0)
    (task / "steps/second/workdir/setup.sh").write_text("exit 3\n")
    _, (record,) = await evaluated(tmp_path / "broken", task, answers)
    assert (record["outcome"], record["reward"], record["verifier"]["cause"]) == ("infra_error", None, "setup")


async def test_a_link_that_leads_out_of_an_artifact_costs_nothing_else(tmp_path: Path, played: Played) -> None:
    test = CHECK.replace("answer.txt", "out/answer.txt")
    task = read_task(task_at(tmp_path / "task", 'artifacts = ["/app/out"]\n', **{"tests/test.sh": test}))
    verdict = await played.trial(task, "mkdir out; echo 42 > out/answer.txt; ln -s /usr/bin/python3 out/python")
    assert verdict.reward.value == 1.0 and "rejected python" in verdict.record["notes"][0]


SUITE = """#!/bin/bash
if python3 -m unittest discover -s /tests -p 'check_*.py'; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SUITE_CODE = """
import pathlib, unittest
class Check(unittest.TestCase):
    def test_answer(self):
        self.assertEqual(pathlib.Path("/app/answer.txt").read_text(), "42\\n")
"""


@pytest.fixture
def in_image(python_image: Path) -> list[str]:
    """Arguments of `verify`. Its search for leaks takes seconds in all of this machine's /usr."""
    (python_image / "app").mkdir()
    return ["--image", str(python_image), "--workdir", "/app", "--times", "1"]


def test_a_sound_task_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"tests/test.sh": SUITE, "tests/check_answer.py": SUITE_CODE}
    folder = task_at(tmp_path / "sound", ARTIFACT, **files)
    chosen = [f"--only={attack.name}" for attack in ATTACKS[:: 1 if ALL else 12]]
    assert (
        main(["tasks", "verify", "-o", str(tmp_path / "trials"), str(folder), "--no-images", "--times", "1", *chosen])
        == 0
    )
    assert f"0/{len(chosen)}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.long) for number in (signal.SIGTERM, signal.SIGINT))],
)
def test_a_verification_that_was_stopped_goes_on_where_it_was_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    task_at(tmp_path / "tasks/one", ARTIFACT)
    task_at(tmp_path / "tasks/two", ARTIFACT, **{"instruction.md": "Write 42 into answer.txt, please."})
    command = [sys.executable, "-m", "lachesis", "tasks", "verify", "tasks", "--no-images", "--times", "3"]
    command += ["--only", "a time bomb", "--at-once", "2"]
    world = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    trials = tmp_path / "data/tasks-verify/trials.jsonl"
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=world,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    ) as stopped:
        assert stopped.stderr is not None and stopped.stderr.readline() == "verify: trials 0/18\n"
        while not (trials.exists() and trials.read_bytes().count(b"\n") >= 2):
            assert stopped.poll() is None
            time.sleep(0.02)
        stopped.send_signal(number)
        said = stopped.stderr.read()
        assert stopped.wait() == (-9 if number == signal.SIGKILL else 130)
    assert number == signal.SIGKILL or "start again to continue" in said
    finished = sum("play" in line for line in trials.read_text().splitlines())
    assert 2 <= finished < 18
    done = subprocess.run(command, cwd=tmp_path, env=world, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert f"18 trials, {finished} of them before this start" in done.stdout
    end = time.monotonic() + 60
    while list(temporary.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []


def test_an_unsound_task_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], in_image: list[str]) -> None:
    files = {
        "tests/test.sh": SUITE,
        "tests/check_answer.py": SUITE_CODE,
        "environment/solve.sh": "echo 42 > answer.txt\n",
    }
    folder = task_at(tmp_path / "unsound", **files)
    arguments = [*in_image, "--only", "sitecustomize", "--only", "usercustomize.py ends"]
    assert main(["tasks", "verify", "-o", str(tmp_path / "trials"), str(folder), *arguments, "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "usercustomize.py ends Python" in problem and "declare `artifacts`" in problem
    (folder / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    assert main(["tasks", "verify", "-o", str(tmp_path / "trials"), str(folder), *arguments]) == 1
    assert "nop is not 0, but 1" in capsys.readouterr().out


def test_tests_that_believe_a_program_of_the_image_are_hackable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_image: list[str]
) -> None:
    test = "#!/bin/bash\nif grep -q '^42$' answer.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    folder = task_at(tmp_path / "task", **{"tests/test.sh": test})
    arguments = [*in_image, "--only", "programs in /usr/bin", "--json"]
    assert main(["tasks", "verify", "-o", str(tmp_path / "trials"), str(folder), *arguments]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("1 attacks are worth something: programs in /usr/bin")
    assert main(["tasks", "verify", "-o", str(tmp_path / "trials"), str(folder), *arguments, "--grading", "seal"]) == 0


def test_a_leak_by_any_name_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_image: list[str], python_image: Path
) -> None:
    folder = task_at(tmp_path / "leaking", ARTIFACT)
    (python_image / "app/hint").write_text((folder / "solution/solve.sh").read_text())
    assert (
        main(
            [
                "tasks",
                "verify",
                "-o",
                str(tmp_path / "trials"),
                str(folder),
                *in_image,
                "--only",
                "a time bomb",
                "--json",
            ]
        )
        == 1
    )
    assert json.loads(capsys.readouterr().out)["problems"] == [
        "the agent can read /app/hint (solution/solve.sh). Next step: take it out of environment/"
    ]


def test_a_flaky_solution_and_an_attack_without_a_verdict_are_problems(tmp_path: Path) -> None:
    plays = [Play("oracle", 1.0, "", 1.0), Play("oracle", 0.0, "late", 1.0), Play("nop", 0.0, "", 1.0)]
    task = read_task(task_at(tmp_path / "task"))
    assert Verification(task, "seal", plays).problems == ["oracle is not always 1, but 0: late"]
    found = Verification(task, "seal", [*plays[::2], Play("a time bomb", None, "it is gone", 1.0)]).problems
    assert found == ["1 attacks came to no verdict (a time bomb): it is gone"]


async def test_each_attack_can_be_carried_out() -> None:
    assert len(ATTACKS) >= 20
    backend = create_backend("local")

    async def carried_out(script: str) -> int:
        sandbox = await backend.create(SandboxSpec(workdir="/app"))
        try:
            done = await sandbox.exec(f"{script}\n", timeout=60, fresh=True)
            return done.exit_code if not done.stderr else -1
        finally:
            await sandbox.close()

    for some in (ATTACKS[:15], ATTACKS[15:]):
        assert await asyncio.gather(*(carried_out(attack.script) for attack in some)) == [0] * len(some)


async def test_tasks_that_cannot_be_played_are_named_before_anything_is(tmp_path: Path) -> None:
    task_at(tmp_path / "tasks/good", ARTIFACT)
    bad = task_at(tmp_path / "tasks/bad", "[environment.unknown]\nkey = 1")
    config: dict[str, Any] = {"data_dir_to_save_evals": str(tmp_path / "eval"), "agent": "oracle", "task_images": False}
    servers = [ServerConfig(model_name="reference")]
    env = HarborEnv(HarborEnv.env_config_cls(dataset_name=str(tmp_path / "tasks"), **config), servers)
    with pytest.raises(TaskError, match=str(bad)):
        await env._run_evaluate()
    with pytest.raises(SettingsError, match="dataset_name"):
        await HarborEnv(HarborEnv.env_config_cls(**config), servers)._run_evaluate()
    _, found = await evaluated(tmp_path, tmp_path / "tasks", agent="oracle", unplayable="skip")
    assert [record["reward"] for record in found] == [1.0]


@pytest.mark.parametrize(
    ("asked", "run", "memory", "disk"),
    [
        ("memory_mb = 2048\nstorage_mb = 10240", {}, 3072, None),
        ("memory_mb = 256\nstorage_mb = 100", {}, 356, 100),
        ("storage_mb = 100", {}, None, 100),
        ("memory_mb = 256", {"memory_bytes": 512 << 20}, 512, None),
        ("memory_mb = 256", {"disk_bytes": 3072 << 20}, 256 + 3072, 3072),
    ],
)
async def test_files_in_memory_take_none_of_the_memory_that_a_task_asks_for(
    tmp_path: Path, asked: str, run: dict[str, int], memory: int | None, disk: int | None
) -> None:
    task = read_task(task_at(tmp_path, **{"task.toml": f"[environment]\n{asked}\n"}))
    places = await places_of(task, create_backend("local"), SandboxSpec(**run), images=False, grading="auto")  # type: ignore[arg-type]
    found = [value and value >> 20 for value in (places.agent.memory_bytes, places.agent.disk_bytes)]
    assert found == [memory, disk]


def test_artifacts_stay_below_their_folder(tmp_path: Path) -> None:
    step = read_task(task_at(tmp_path, 'artifacts = ["//etc/x", "///y", "/a/b"]\n')).steps[0]
    kept = [artifact["destination"] for artifact in artifacts_of(step)]
    assert kept == ["logs/artifacts", "etc/x", "y", "a/b"]


def test_the_page_has_the_table_of_causes() -> None:
    page = (ROOT / "docs/harbor.md").read_text()
    yes = {True: "yes", False: "no"}
    for cause in CAUSES.values():
        row = (f"`{cause.name}`", yes[cause.retry], yes[cause.grade], yes[cause.valid], cause.fault, cause.meaning)
        assert f"| {' | '.join(row)} |" in page
