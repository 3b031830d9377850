"""Atropos without atroposlib: the same settings, attributes and methods, and `BaseEnv` as a virtual base class."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from backends.errors import SettingsError
from backends.lazy import lazy_names
from benchmarks.agent_loop import tokenizer_folder
from lachesis import HermesAgentEnvConfig, ServerConfig
from lachesis.runs.atropos_base import INHERITED, MODULE
from lachesis_compat.atropos.package import APIServerConfig, BaseEnv, BaseEnvConfig, ServerBaseline
from tests.support.small_envs import ROOT, SortWords, make

OTHER_DEFAULTS = {"use_wandb": (True, False)}
"""Settings whose default differs on purpose: (Atropos', ours)."""


class Real(BaseEnv):  # type: ignore[misc]
    name = "real"

    async def setup(self) -> None: ...

    async def get_next_item(self) -> Any: ...

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...


def real(folder: Path, **settings: Any) -> Real:
    config = BaseEnvConfig(tokenizer_name=str(tokenizer_folder(folder)), use_wandb=False, **settings)
    server = APIServerConfig(base_url="http://127.0.0.1:1/v1", api_key="x", model_name="scripted", health_check=False)
    return Real(config, [server], testing=True)


def kind(annotation: Any) -> Any:
    """A type in a form in which Atropos' and ours can be compared."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [(member.name, member.value) for member in annotation]
    return re.sub(r"typing\.Optional\[(\w+)\]", r"\1 | None", str(annotation))


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


@pytest.mark.parametrize(
    ("atropos", "ours"),
    [(BaseEnvConfig, HermesAgentEnvConfig), (APIServerConfig, ServerConfig), (ServerBaseline, ServerConfig)],
)
def test_settings_have_the_names_types_and_defaults_of_atropos(atropos: type[BaseModel], ours: type[BaseModel]) -> None:
    assert atropos.model_fields.keys() <= ours.model_fields.keys()
    for name, field in atropos.model_fields.items():
        mine = ours.model_fields[name]
        assert field.default is not PydanticUndefined
        expected = OTHER_DEFAULTS.get(name, (field.default, field.default))
        assert (plain(field.default), plain(mine.default)) == (plain(expected[0]), plain(expected[1])), name
        assert kind(mine.annotation) == kind(field.annotation), name
        assert {str(limit) for limit in field.metadata} <= {str(limit) for limit in mine.metadata}, name


async def test_every_attribute_of_an_atropos_environment_is_there(tmp_path: Path) -> None:
    theirs = vars(real(tmp_path))
    ours = make(SortWords, "http://127.0.0.1:1/v1", tmp_path)
    assert {name for name in theirs if name not in vars(ours) and not hasattr(type(ours), name)} == set()
    compared = [name for name in theirs if name not in ("config", "server", "tokenizer", "items_sent_this_step")]
    kinds = {name: (type(theirs[name]), type(getattr(ours, name))) for name in compared}
    assert {name: kind for name, kind in kinds.items() if kind[0] is not kind[1]} == {}


async def test_every_method_of_an_atropos_environment_is_there(tmp_path: Path) -> None:
    class Counts(SortWords):
        def save_checkpoint(self, step: int, data: Any = None) -> None:
            super().save_checkpoint(step, {"curr_step": 7})

    env = make(Counts, "http://127.0.0.1:1/v1", tmp_path)
    names = {name for name in vars(BaseEnv) if not name.startswith(("__", "_abc"))}
    assert {name for name in names if not hasattr(env, name)} == set()
    assert set(INHERITED) <= names
    env.checkpoint_dir, env.wandb_prepend = str(tmp_path), "sort"
    env.save_checkpoint(3)
    env.curr_step = 3
    env.load_checkpoint()
    assert env.curr_step == 7
    assert env.derived_batch_size == env.config.batch_size
    assert await env.create_rollout_table({"a": 1}) == {"a": 1}
    assert inspect.iscoroutinefunction(Counts.handle_env)


async def test_an_evaluation_is_written_as_atropos_writes_it(tmp_path: Path) -> None:
    def written(folder: str) -> tuple[Any, str]:
        return json.loads((tmp_path / folder / "metrics.json").read_text()), (
            tmp_path / folder / "samples.jsonl"
        ).read_text().replace(" ", "")

    theirs = real(tmp_path, data_dir_to_save_evals=str(tmp_path / "theirs"))
    ours = make(SortWords, "http://127.0.0.1:1/v1", tmp_path, data_dir_to_save_evals=str(tmp_path / "ours"))
    arguments: dict[str, Any] = {
        "task_name": "words",
        "model_name": "m",
        "start_time": 1.0,
        "end_time": 3.5,
        "generation_parameters": {"temperature": 0.0},
        "samples": [{"a": "ä"}, {"b": 2}],
    }
    for env in (theirs, ours):
        await env.evaluate_log({"eval/reward": 0.5, "n": 2}, **arguments)
    assert written("ours") == written("theirs")
    await ours.evaluate_log({"n": 1}, start_time=0, end_time=2.5)
    assert written("ours")[0]["config_general"]["total_evaluation_time_seconds"] == "2.5"
    await ours.evaluate_log({"n": 1})
    given, _ = written("ours")
    assert given["config_general"]["model_name"] == "scripted"
    assert "atropos|sort-words_eval|0" in given["results"]


def test_objects_of_atropos_classes_are_accepted(tmp_path: Path) -> None:
    baseline = ServerBaseline(model_name="m", timeout=7)
    config = BaseEnvConfig(group_size=3, eval_handling="LIMIT_TRAIN", use_wandb=False)
    env = SortWords(config, baseline)  # type: ignore[arg-type]
    assert [(server.timeout, server.base_url) for server in env.server_configs] == [(7, "http://localhost:9004/v1")]
    assert (env.config.group_size, env.config.eval_handling.value) == (3, "LIMIT_TRAIN")
    one = ServerConfig(base_url="http://127.0.0.1:7/v1", model_name="m", api_key="k")
    assert SortWords(SortWords.env_config_cls(), one).server_configs == [one]
    theirs = APIServerConfig(base_url="http://127.0.0.1:7/v1", model_name="m", api_key="k")
    assert SortWords(SortWords.env_config_cls(), [theirs]).server_configs == [one]

    class Extended(APIServerConfig):  # type: ignore[misc]
        colour: str = "red"

    with pytest.raises(SettingsError, match=r"Extended cannot be used(.|\n)*colour"):
        SortWords(SortWords.env_config_cls(), [Extended()])


ORDERS = {
    "atroposlib first": ("from atroposlib.envs.base import BaseEnv", "from tests.support.small_envs import SortWords"),
    "atroposlib last": ("from tests.support.small_envs import SortWords", "from atroposlib.envs.base import BaseEnv"),
    "our module": (
        "from tests.support.small_envs import SortWords",
        "from lachesis_compat.atropos.package import BaseEnv",
    ),
    "an instance first": (
        "from tests.support.small_envs import SortWords; import pathlib; from tests.support.small_envs import make",
        "env = make(SortWords, 'http://127.0.0.1:1/v1', pathlib.Path(FOLDER))",
        "import sys; assert 'atroposlib' not in sys.modules",
        "from atroposlib.envs.base import BaseEnv; assert isinstance(env, BaseEnv)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    ["atroposlib last", *(pytest.param(name, marks=pytest.mark.long) for name in ORDERS if name != "atroposlib last")],
)
def test_environments_are_instances_of_atropos_base_class_whichever_is_loaded_first(order: str, tmp_path: Path) -> None:
    program = "\n".join(
        (
            f"FOLDER = {str(tmp_path)!r}",
            *ORDERS[order],
            "from lachesis import HermesAgentBaseEnv",
            "assert issubclass(SortWords, BaseEnv) and issubclass(HermesAgentBaseEnv, BaseEnv)",
            "class Later(SortWords): pass",
            "assert issubclass(Later, BaseEnv) and not issubclass(dict, BaseEnv)",
            "import inspect; assert 'class BaseEnv' in inspect.getsource(BaseEnv)",
        )
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


RACE = f"""
import sys, threading, time
thread = threading.Thread(target=__import__, args=["{MODULE}"])
thread.start()
while "{MODULE}" not in sys.modules:
    time.sleep(0.001)
from lachesis import HermesAgentBaseEnv
thread.join()
print(issubclass(HermesAgentBaseEnv, sys.modules["{MODULE}"].BaseEnv))
"""


@pytest.mark.slow
def test_a_thread_may_be_importing_atropos() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr


def test_an_import_that_fails_with_an_attribute_error_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_module.py").write_text("import os; os.nothing_here")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"half_module cannot be imported: .*nothing_here"):
        lazy_names("half", {"half_module": ["X"]})("X")
