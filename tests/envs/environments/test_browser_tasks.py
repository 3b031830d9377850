"""Things to do in a web application: all can be done, and nothing counts but what its server received."""

from __future__ import annotations

import json
import urllib.parse
from pathlib import Path
from typing import Any

from backends import create_backend
from lachesis.settings.server_settings import ServerConfig
from lachesis_envs.browser_tasks import Application, BrowserTasksConfig, BrowserTasksEnv
from lachesis_envs.browser_tasks.tasks import KINDS, BrowserTask, draw
from lachesis_tools import ToolSession, ToolSessions
from tests.support.browsers import needs_browser, on_request
from tests.support.scripted_server import ScriptedServer, say
from tests.support.small_envs import make, rollouts

REQUESTS = """
import json, sys, urllib.error, urllib.request
opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
for path, data in json.load(sys.stdin):
    try:
        done = opener.open(f"http://127.0.0.1:{sys.argv[1]}{path}", data and data.encode())
        print(done.status, done.url.partition(sys.argv[1])[2])
    except urllib.error.HTTPError as error:
        print(error.code, path)
"""


def test_tasks_of_a_seed_are_always_the_same_and_their_site_does_not_know_what_is_asked() -> None:
    tasks = draw(3, 40)
    assert tasks == draw(3, 40) != draw(4, 40)
    assert [kind for kind, _ in tasks[: len(KINDS)]] == [kind.__name__ for kind in KINDS]
    assert len({task.prompt for _, task in tasks}) == 40
    for kind, task in tasks:
        site = json.dumps(task.site())
        assert "/" in task.pages and task.received and "received" not in task.site()
        for action, _, name, *text in task.steps:
            assert name in site, (kind, name)
            assert action == "click" or text[0] in task.prompt or kind in ("contact", "extension"), (kind, text)


async def requested(sandbox: Any, application: Application, *requests: tuple[str, Any]) -> list[str]:
    sent = [(path, data if data is None else urllib.parse.urlencode(data)) for path, data in requests]
    command = f"{sandbox.python} -c '{REQUESTS}' {application.port}"
    done = await sandbox.exec(command, timeout=60, stdin=json.dumps(sent).encode(), fresh=True)
    return str(done.stdout.decode()).splitlines()


async def test_the_server_records_what_it_accepts(tmp_path: Path) -> None:
    env = environment(tmp_path)
    of_kind = {item["category"]: item for item in map(dict, env.held_out)}
    async with ToolSessions(create_backend("local"), run_id="tests") as sessions:
        item = of_kind["account"]
        task, tools = env.tasks[item["task"]], sessions.open("account")
        async with env.session(item, tools) as application:
            phone = dict(task.received[0][1])
            name, password = task.login
            answers = await requested(
                await tools.sandbox(),
                application,
                *(("/", None), ("/nothing", None), ("/account", None), ("/account/phone", phone)),
                ("/login", {"user": name, "password": "other"}),
                ("/account/phone", {**phone, "long": "x" * 70_000}),
                ("/login", {"user": name, "password": password}),
            )
            assert answers[:5] == ["200 /", "404 /nothing", "200 /login", "200 /login", "200 /login"]
            assert answers[5:] == ["413 /account/phone", "200 /account"]
            assert await application.received() == [], "nobody was logged in before"
            await earns(env, item, tools, application, task)
        item = of_kind["inbox"]
        tools = sessions.open("inbox")
        async with env.session(item, tools) as application:
            task = env.tasks[item["task"]]
            await earns(env, item, tools, application, task)
            await requested(await tools.sandbox(), application, ("/archive-all", {"id": "1"}))
            assert await env.compute_reward(item, Any, Scored(application)) == 0.0, "it changed something else as well"
            many = [("/archive", {"id": "x" * 65_000})] * 200
            await requested(await tools.sandbox(), application, *many)
            assert await application.received() is None, "the record is not whole any more"


class Scored:
    def __init__(self, application: Application) -> None:
        self.session = application


async def earns(env: Any, item: Any, tools: ToolSession, application: Application, task: BrowserTask) -> None:
    login = [("/login", {"user": task.login[0], "password": task.login[1]})] if task.login else []
    assert await env.compute_reward(item, Any, Scored(application)) == 0.0
    await requested(await tools.sandbox(), application, *login, *((path, dict(data)) for path, data in task.received))
    assert await env.compute_reward(item, Any, Scored(application)) == 1.0


def environment(folder: Path, **settings: Any) -> BrowserTasksEnv:
    chosen = {"group_size": 1, "data_path_to_save_groups": str(folder / "groups.jsonl"), **settings}
    return BrowserTasksEnv(BrowserTasksConfig(**chosen), [ServerConfig(model_name="reference")])


@needs_browser
async def test_the_reference_policy_does_a_task(tmp_path: Path) -> None:
    result = await environment(tmp_path, total_steps=1).process_manager()
    (rollout,) = rollouts(result.files.groups)
    assert (rollout["outcome"], rollout["reward"]) == ("completed", 1.0)


@on_request
async def test_the_reference_policy_does_all_tasks(tmp_path: Path) -> None:
    result = await environment(tmp_path, total_steps=20, max_num_workers=2).process_manager()
    assert (result.summary.rollouts, result.summary.reward.mean) == (20, 1.0)


@needs_browser
async def test_to_say_that_it_is_done_earns_nothing(tmp_path: Path) -> None:
    async with ScriptedServer([say("It is done, believe me.")]) as server:
        result = await make(BrowserTasksEnv, server, tmp_path, total_steps=2, group_size=1).process_manager()
    assert [rollout["reward"] for rollout in rollouts(result.files.groups)] == [0.0, 0.0]
