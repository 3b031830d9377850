"""`environment.py serve` as users run it: killed, stopped, broken, refused, evaluated."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from backends import SandboxSpec, create_backend
from lachesis.loop.outcome import Outcome
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis.runs import command_line as cli
from lachesis.runs.decisions import Kept, LeftOut
from lachesis.runs.failures import FailureBrake, RunStopped
from lachesis.settings.server_settings import ServerConfig
from lachesis_client import RequestRejected, ServerUnavailable
from lachesis_client.errors import TemplateError
from lachesis_messages.tokens import PromptChecked, TokenPrefix
from lachesis_testing.fake_server import Ask, FakeServer, RandomWords, ToolUser, fake_tokenizer
from lachesis_testing.fake_server.completions import Reply
from lachesis_tokens.samples.decision import ANY_TRAINER, decide_for_training
from lachesis_tokens.samples.group_shapes import samples_from_atropos
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify
from lachesis_train.api import ApiSettings, RolloutApiServer
from tests.support.ports import free_port
from tests.support.serving_envs import Coins, Counted, Raising
from tests.support.small_envs import lines, sandboxes, start
from tests.support.stock_run_api import LIVENESS, StockRunApi, Trainer, run_api, until
from tests.support.token_trees import END, SAMPLING, Tree

__all__ = ["run_api"]

SMALL: dict[str, Any] = {
    "group_size": 2,
    "max_num_workers": 8,
    "max_token_length": 64,
    "max_agent_turns": 4,
    "enabled_toolsets": ["terminal"],
    "total_steps": -1,
    "steps_per_eval": 0,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    fake_tokenizer().save_pretrained(folder)
    return folder


def sometimes_a_tool(ask: Ask) -> Reply:
    """One rollout in five uses a tool, and with it a sandbox: enough to see whether one stays."""
    uses = ask.turn == 0 and ask.rng("choice").random() < 0.2
    return (ToolUser(1) if uses else RandomWords()).reply(ask)


def arguments(api: str, folder: Path, model: str, tokenizer: Path, **settings: Any) -> list[str]:
    env = {**SMALL, "rollout_server_url": api, "spool_path": str(folder / "spool"), **settings}
    flags = [part for name, value in env.items() for part in (f"--env.{name}", _text(value))]
    server = {"base_url": model, "model_name": "fake", "server_type": "vllm", "tokenizer_name": str(tokenizer)}
    return ["serve", *flags, *(part for name, value in server.items() for part in (f"--openai.{name}", value))]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class Command:
    """The command as a process of its own, its output in a file."""

    def __init__(self, name: str, flags: list[str]) -> None:
        self.process = start(["-m", "tests.support.serving_envs", name, *flags])
        self.text = ""
        self._reading = asyncio.create_task(asyncio.to_thread(self._read))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None)
        await self._reading
        return int(self.process.returncode)

    async def says(self, text: str) -> None:
        await until(lambda: text in self.text or self.process.poll() is not None)
        assert text in self.text, self.text


@asynccontextmanager
async def command(name: str, flags: list[str]) -> AsyncIterator[Command]:
    running = Command(name, flags)
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            running.process.kill()
        running.process.wait()
        await running._reading


@asynccontextmanager
async def trainer_at(api: StockRunApi, *, batch_size: int = 4) -> AsyncIterator[Trainer]:
    """A trainer that takes whatever comes, as long as the block lasts."""
    trainer = Trainer(api.url, batch_size=batch_size)
    await trainer.register()
    await trainer.poll()

    async def take() -> None:
        while True:
            if not await trainer.poll():
                await asyncio.sleep(0.05)

    taking = asyncio.create_task(take())
    try:
        yield trainer
    finally:
        taking.cancel()
        with suppress(asyncio.CancelledError):
            await taking


def finished(folder: Path) -> list[str]:
    """Ids of the groups in the outbox of a run that has ended."""
    with closing(sqlite3.connect(folder / "spool/outbox.db")) as database:
        return [group_id for (group_id,) in database.execute("SELECT group_id FROM groups WHERE sequences > 0")]


def check_arrived(trainer: Trainer, groups: list[str]) -> None:
    """Each finished group arrived once, all of its samples verify, and no rollout is in two."""
    arrived = Counter(group["group_overrides"]["group_id"] for group in trainer.groups)
    assert arrived == Counter(groups)
    samples = [sample for group in trainer.groups for sample in samples_from_atropos(group)]
    assert [reason for sample in samples for reason in verify(sample)] == []
    assert len({sample.rollout_id for sample in samples}) == len(samples)


def _alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@pytest.mark.slow
async def test_kill_9_during_200_rollouts_loses_and_doubles_no_group(tmp_path: Path, tokenizer: Path) -> None:
    items = 100
    async with StockRunApi() as api, FakeServer(sometimes_a_tool, vary=True, latency=(0.0, 0.2)) as model:
        flags = arguments(
            api.url,
            tmp_path,
            model.base_url,
            tokenizer,
            dataset_name=str(items),
            max_num_workers=32,
            max_batches_offpolicy=40,
        )
        async with trainer_at(api, batch_size=20) as trainer:
            for kill_at in (100, 220):  # of some 250 requests: a rollout takes one or two
                async with command("counted", flags) as run:
                    await until(lambda at=kill_at: len(model.requests) >= at)  # type: ignore[misc]
                    left = sandboxes()
                    run.send(signal.SIGKILL)
                    await run.ended()
                assert 0 < len(finished(tmp_path)) < items
                await until(lambda pids=left: not any(map(_alive, pids)))  # type: ignore[misc]
            async with command("counted", flags) as run:
                assert await run.ended() == 0, run.text
            await until(lambda: len(trainer.groups) >= items)
    assert len(finished(tmp_path)) == items
    check_arrived(trainer, finished(tmp_path))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"terminal_network": True}, True),
        ({"terminal_network": True, "rollout_server_token": "secret"}, False),
        ({"terminal_network": False}, False),
    ],
)
async def test_an_api_that_agents_could_reset_is_told(
    settings: dict[str, Any], told: bool, tmp_path: Path, tokenizer: Path
) -> None:
    """Its data is reset by a command in a sandbox that shares the network, where no token is asked for."""
    token = str(settings.get("rollout_server_token", ""))
    async with (
        RolloutApiServer(ApiSettings(tmp_path / "api.db", port=0, token=token)) as api,
        FakeServer(RandomWords(), latency=60.0) as model,
    ):
        flags = arguments(api.url, tmp_path, model.base_url, tokenizer, **settings)
        async with command("coins", flags) as run:
            await run.says("no trainer")
            assert ("they could reset its data" in run.text) == told, run.text
        backend, before = create_backend("local"), api.state.instance
        box = await backend.create(SandboxSpec(network=bool(settings["terminal_network"])))
        try:
            command_inside = f"""python3 -c "import urllib.request as r; r.urlopen('{api.url}/reset_data')" """
            await box.exec(command_inside, timeout=60)
        finally:
            await box.close()
        assert (api.state.instance != before) == told


@pytest.mark.slow
async def test_signals_and_a_start_with_other_settings(tmp_path: Path, tokenizer: Path, run_api: StockRunApi) -> None:
    async with run_api.wiped() as api, FakeServer(ToolUser(), latency=60.0) as model, trainer_at(api):
        flags = arguments(api.url, tmp_path, model.base_url, tokenizer, grace_period=600)
        async with command("coins", flags) as run:
            await until(lambda: model.stats["in_flight"] > 0)
            run.send(signal.SIGTERM)
            await run.says("another Ctrl-C or SIGTERM ends them at once")
            run.send(signal.SIGINT)
            assert await run.ended() == 0
            assert "stopping: SIGTERM" in run.text
            assert "the next start plays their items again" in run.text
        assert not sandboxes()
        await until(lambda: model.stats["in_flight"] == 0)
        async with command("coins", [*flags, "--env.group_size", "4", "--env.system_prompt", "Be brief."]) as run:
            assert await run.ended() == 2
            assert "group_size: 2 then, 4 now; system_prompt: None then, 'Be brief.' now" in run.text


async def test_a_reward_that_raises_is_shown_once_and_ends_the_run(
    tmp_path: Path, tokenizer: Path, run_api: StockRunApi
) -> None:
    async with run_api.wiped() as api, FakeServer("No.") as model, trainer_at(api) as trainer:
        env = make(Raising, tmp_path, api, model, tokenizer, max_num_workers=1, max_infra_retries=0)
        with pytest.raises(RunStopped, match=r"3 groups in a row without a scored rollout(.|\n)*KeyError: 'answer'"):
            await env.env_manager()
        assert trainer.groups == []
    said = (tmp_path / "console.txt").read_text()
    assert said.count("exception in the environment") == said.count("in compute_reward") == 1
    refused = lines(tmp_path / "spool" / "refused.jsonl")
    assert [line["reason"] for line in refused] == ["incomplete"] * 3
    assert all(line["tokens"] > 0 for line in refused), "what was sampled in vain is counted"


async def test_a_reward_that_gives_no_score_is_not_taken_for_broken_infrastructure(
    tmp_path: Path, tokenizer: Path, run_api: StockRunApi
) -> None:
    class Unsure(Coins):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            return None

    async with run_api.wiped() as api, FakeServer("No.") as model, trainer_at(api):
        env = make(Unsure, tmp_path, api, model, tokenizer, max_num_workers=1, max_infra_retries=0)
        with pytest.raises(RunStopped, match=r"3 groups in a row without .*: a reward returned None"):
            await asyncio.wait_for(env.env_manager(), LIVENESS)
    refused = lines(tmp_path / "spool" / "refused.jsonl")
    assert [line["reason"] for line in refused] == ["incomplete"] * 3
    assert all("a reward returned None" in line["detail"] and line["tokens"] > 0 for line in refused)


UNSCORED = Rollout("r", "key", 0, Outcome.COMPLETED, "the model answered", reward=None, result=None)
BROKEN = replace(UNSCORED, outcome=Outcome.INFRA_ERROR, reason="how it ended")
REJECTED = replace(BROKEN, error=RequestRejected("http://m/v1", 400, "frobnicate is no parameter"))
REFUSED = replace(BROKEN, error=TemplateError("the chat template", "it takes one call a turn", "give another"))


@pytest.mark.parametrize(
    ("rollout", "again", "message"),
    [
        (UNSCORED, False, "a reward returned None"),
        (replace(UNSCORED, traceback="KeyError: 'answer'\nTraceback ...\n"), False, "KeyError: 'answer'"),
        (replace(BROKEN, traceback="TypeError: no prompt\nTraceback ...\n"), False, "TypeError: no prompt"),
        (REJECTED, False, "how it ended"),
        (REFUSED, False, "how it ended"),
        (BROKEN, True, "how it ended"),
        (replace(BROKEN, error=ServerUnavailable("http://m/v1", "status 503", 7)), True, "how it ended"),
        (
            replace(BROKEN, outcome=Outcome.TIMEOUT, left_out="left out by its setting"),
            False,
            "left out by its setting",
        ),
    ],
)
def test_only_what_may_pass_by_itself_is_played_again(rollout: Rollout, again: bool, message: str) -> None:
    group = PlayedGroup("item", "key", [], [UNSCORED, rollout])
    decision = decide_for_training(group, Coins.env_config_cls(group_size=2), ANY_TRAINER)
    assert isinstance(decision, LeftOut)
    assert (decision.again, decision.detail.rpartition("left out: ")[2]) == (again, message)


def scored(name: str, reward: float = 1.0, *, prompt_checked: PromptChecked = "ids") -> Rollout:
    tree = Tree()
    tree.sample(TokenPrefix([1, 2, 3]), [4, END], sampling=SAMPLING, prompt_checked=prompt_checked)
    [sample] = samples(tree, rollout_id=name)
    result: Any = SimpleNamespace(
        samples=lambda rollout_id: [sample],
        tokens=SimpleNamespace(completion_tokens=2),
        repaired_calls=(0, 0),
        turn_responses=(),
    )
    return replace(UNSCORED, rollout_id=name, reward=reward, result=result)


def test_a_whole_group_is_not_played_again_because_a_rollout_was_replaced() -> None:
    group = PlayedGroup("item", "key", [], [BROKEN, scored("a"), scored("b")])
    decision = decide_for_training(group, Coins.env_config_cls(group_size=2, include_messages=False), ANY_TRAINER)
    assert isinstance(decision, LeftOut)
    assert (decision.reason, decision.again) == ("same scores", False)


def test_prompts_that_no_server_confirmed_are_trained_on_only_if_the_settings_say_so() -> None:
    group = PlayedGroup("item", "key", [], [scored("a"), scored("b", 0.0, prompt_checked="none")])
    refused = decide_for_training(group, Coins.env_config_cls(group_size=2), ANY_TRAINER)
    assert isinstance(refused, LeftOut)
    assert refused.reason == "unchecked prompts"
    assert not refused.again
    assert "rollout b, turn 0: the server repeated neither" in refused.detail
    allowed = decide_for_training(group, Coins.env_config_cls(group_size=2, unchecked_prompts="allow"), ANY_TRAINER)
    assert isinstance(allowed, Kept)
    brake = FailureBrake(Console(file=io.StringIO()), 3)
    for _ in range(2):
        brake.check("key", refused)
    with pytest.raises(RunStopped, match=r"3 groups in a row that are not sent.*--env\.unchecked_prompts allow"):
        brake.check("key", refused)


def test_a_run_ends_that_gets_nothing_but_refusals() -> None:
    brake = FailureBrake(Console(file=io.StringIO()), 3)

    def check(rollouts: list[Rollout]) -> None:
        group = PlayedGroup("item", "key", [], rollouts)
        brake.check("key", decide_for_training(group, Coins.env_config_cls(), ANY_TRAINER))

    scored = replace(UNSCORED, reward=1.0)
    for rollouts in ([REFUSED], [REJECTED], [scored, REJECTED], [REJECTED], [REFUSED]):
        check(rollouts)
    with pytest.raises(RunStopped, match="3 groups in a row without a scored rollout; the last one: how it ended"):
        check([REJECTED])


def make(
    kind: type[Coins], folder: Path, api: StockRunApi, model: FakeServer, tokenizer: Path, **settings: Any
) -> Coins:
    chosen = {
        **SMALL,
        "rollout_server_url": api.url,
        "spool_path": str(folder / "spool"),
        "data_dir_to_save_evals": str(folder / "eval"),
        **settings,
    }
    server = ServerConfig(
        base_url=model.base_url,
        model_name="fake",
        server_type="vllm",
        tokenizer_name=str(tokenizer),
        max_retries=0,
    )
    env = kind(kind.env_config_cls(**chosen), [server])
    env.console = Console(file=(folder / "console.txt").open("a"), width=300)
    return env


async def test_evaluations_play_the_same_items_and_never_a_folder_twice(
    tmp_path: Path, tokenizer: Path, run_api: StockRunApi
) -> None:
    (tmp_path / "eval" / "step-2").mkdir(parents=True)  # of a training that was begun anew
    async with run_api.wiped() as api, FakeServer(RandomWords(), vary=True) as model:
        env = make(
            Coins, tmp_path, api, model, tokenizer, steps_per_eval=2, eval_items=2, total_steps=4, include_messages=True
        )
        trainer = Trainer(api.url, batch_size=4)
        await trainer.register()
        await trainer.poll()
        run = asyncio.create_task(env.env_manager())
        for step in (2, 4):
            while trainer.steps < step:
                await trainer.take(len(trainer.groups) + 1)
            await until(lambda n=step // 2: len(list(tmp_path.glob("eval/*/metrics.json"))) >= n, run)  # type: ignore[misc]
        await run
    held_out = {"pear fig apple 0", "delta alpha 0"}
    evaluated = {
        path.parent.name: {line["item"] for line in lines(path)} for path in tmp_path.glob("eval/*/samples.jsonl")
    }
    assert evaluated == {"step-2-2": held_out, "step-4": held_out}
    trained = json.dumps([group["messages"] for group in trainer.groups])
    assert trainer.groups and "Write the words of" in trained and all(item not in trained for item in held_out)


async def test_evaluation_never_takes_all_items(tmp_path: Path, tokenizer: Path, run_api: StockRunApi) -> None:
    async with run_api.wiped() as api, FakeServer("Yes.") as model:
        env = make(Counted, tmp_path, api, model, tokenizer, steps_per_eval=2, dataset_name="6")
        with pytest.raises(RunStopped, match=r"all 6 items .*get_eval_items"):
            await env.env_manager()


@pytest.mark.slow
async def test_a_model_server_that_is_away_costs_time_and_no_item(
    tmp_path: Path, tokenizer: Path, run_api: StockRunApi
) -> None:
    items = 12
    async with run_api.wiped() as api, trainer_at(api) as trainer:
        port = free_port()  # to which it comes back
        async with FakeServer(RandomWords(), vary=True, latency=0.1, port=port) as model:
            env = make(Counted, tmp_path, api, model, tokenizer, dataset_name=str(items), max_infra_retries=0)
            run = asyncio.create_task(env.env_manager())
            await until(lambda: len(trainer.groups) >= 2, run)
        await until(lambda: "groups fail" in (tmp_path / "console.txt").read_text(), run)
        async with FakeServer(RandomWords(), vary=True, port=port):
            result = await run
        await until(lambda: len(trainer.groups) >= items)
    assert result.refused == {}
    assert "cannot connect: Connection refused" in (tmp_path / "console.txt").read_text(), "the reason is shown"
    check_arrived(trainer, finished(tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--openai.server_type", "openai"], "--openai.server_type vllm"),
        (["--env.agent_temperature", "0.7"], "env.agent_temperature to 1.0"),
        (["--openai.extra_body", "{top_p: 0.9}"], "top_p = 0.9"),
        (["--env.extra_body", "{typicality_v2: 3}"], "--openai.harmless_fields '[typicality_v2]'"),
        (["--openai.logprobs_mode", "temperature"], "openai.logprobs_mode"),
        (["--openai.extra_body", "{n: 2}"], "openai.extra_body sets n"),
        (["--openai.tokenizer_name", "/nowhere/at/all"], "--openai.tokenizer_name"),
        (["--env.chat_template", "BROKEN"], "--env.chat_template FILE.jinja"),
        (["--env.chat_template", "WITHOUT TOOLS"], "does not show it the tools"),
    ],
)
def test_refusals_are_usage_errors_and_post_nothing(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    templates = {
        "BROKEN": "{% for m in messages %}{{ m['content' }}{% endfor %}",
        "WITHOUT TOOLS": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }
    for number, (name, text) in enumerate(templates.items()):
        file = tmp_path / f"{number}.jinja"
        file.write_text(text)
        flags = [str(file) if flag == name else flag for flag in flags]
    nobody = "http://127.0.0.1:9"
    given = arguments(nobody, tmp_path, f"{nobody}/v1", tokenizer)
    assert cli.main(Coins, [*given, "--testing", *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "spool").exists()
