"""Settings as class attributes: defaults of an environment, and what is wrong with them is an error of the class."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from backends.errors import SettingsError
from lachesis import HermesAgentBaseEnv, HermesAgentEnvConfig, ServerConfig
from lachesis.runs import command_line as cli
from lachesis.settings.chosen import as_env_config, is_chosen
from lachesis_tokens.server.serving import load_tokenizer

SERVER = ["--openai.base_url", "http://127.0.0.1:1/v1", "--openai.model_name", "m"]


class Short(HermesAgentBaseEnv):
    """Four settings, and no settings class."""

    toolsets = ["terminal"]  # noqa: RUF012
    max_turns = 8
    system_prompt = "Be brief."
    group_size = 2
    items = ("not", "a", "setting")

    async def get_next_item(self) -> Any: ...

    def format_prompt(self, item: Any) -> str:
        return ""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 0.0


class Longer(Short):
    max_turns = 9


def built(env_cls: type[HermesAgentBaseEnv], *flags: str) -> HermesAgentBaseEnv:
    _, settings = cli.read_settings(env_cls, ["process", *SERVER, *flags])
    return env_cls(**settings)


def test_class_attributes_are_defaults_that_flags_change(capsys: pytest.CaptureFixture[str]) -> None:
    config = built(Short).config
    assert (config.enabled_toolsets, config.max_agent_turns, config.group_size) == (["terminal"], 8, 2)
    assert config.system_prompt == "Be brief."
    assert built(Short, "--env.max_agent_turns", "3").config.max_agent_turns == 3
    with pytest.raises(SystemExit):
        cli.main(Short, ["process", "--help"])
    assert "Completions per rollout, including the final answer. (default: 8)" in " ".join(
        capsys.readouterr().out.split()
    )
    assert HermesAgentEnvConfig().max_agent_turns == 30, "nothing but the environment has changed"


def test_class_attributes_are_inherited_and_overridden() -> None:
    config = built(Longer).config
    assert (config.enabled_toolsets, config.max_agent_turns, config.group_size) == (["terminal"], 9, 2)
    assert built(Short).config.max_agent_turns == 8


def test_a_setting_read_from_the_environment_is_the_value_in_force() -> None:
    assert (Short.max_turns, Longer.max_turns, Short.toolsets) == (8, 9, ["terminal"])
    env: Any = built(Short, "--env.max_agent_turns", "3")
    assert (env.max_turns, env.system_prompt, env.items[0]) == (3, "Be brief.", "not")


def test_settings_of_the_base_class_keep_the_defaults_of_the_environment() -> None:
    server = ServerConfig(base_url="http://127.0.0.1:1/v1")
    env = Short(HermesAgentEnvConfig(total_steps=5, group_size=4), server)
    assert (env.config.total_steps, env.config.group_size, env.config.max_agent_turns) == (5, 4, 8)


def test_a_settings_class_may_add_settings_to_class_attributes() -> None:
    class Mixed(Short):
        class Config(Short.env_config_cls):  # type: ignore[name-defined,misc]
            difficulty: int = Field(default=3, description="How hard.")

        env_config_cls = Config
        max_turns = 4

    config: Any = built(Mixed, "--env.difficulty", "5").config
    assert (config.difficulty, config.max_agent_turns, config.group_size) == (5, 4, 2)


def test_settings_of_mixins_and_of_a_second_environment_count_as_well() -> None:
    class Patient:
        max_turns = 50

    class Both(Patient, Longer):
        pass

    class Other(Patient, Short):
        group_size = 6

    class Two(Longer, Other):
        pass

    assert built(Both).config.max_agent_turns == Both.max_turns == 50
    config = built(Two).config
    assert (config.max_agent_turns, config.group_size, config.enabled_toolsets) == (9, 6, ["terminal"])
    assert (Two.group_size, Two.max_turns) == (6, 9)


class Own(HermesAgentEnvConfig):
    max_agent_turns: int = 5


@pytest.mark.parametrize(
    ("bases", "attributes", "message"),
    [
        ((HermesAgentBaseEnv,), {"toolset": ["file"]}, r"Wrong\.toolset is not a setting; did you mean toolsets\?"),
        ((HermesAgentBaseEnv,), {"max_truns": 3}, "did you mean max_turns"),
        ((HermesAgentBaseEnv,), {"sytem_prompt": "x"}, "did you mean system_prompt"),
        ((HermesAgentBaseEnv,), {"max_turns": 3, "max_agent_turns": 4}, "max_turns and max_agent_turns are the same"),
        ((HermesAgentBaseEnv,), {"max_turns": "many"}, r"Wrong\.max_turns: .*integer.*'many'.*env\.max_agent_turns"),
        ((HermesAgentBaseEnv,), {"max_turns": 0}, "greater than or equal to 1"),
        ((HermesAgentBaseEnv,), {"toolsets": "terminal"}, "list"),
        ((HermesAgentBaseEnv,), {"toolsets": ["file", 3]}, r"Wrong\.toolsets\[1\]"),
        (
            (HermesAgentBaseEnv,),
            {"temperature": "hot"},
            r"Wrong\.temperature is not a setting; the setting is agent_temperature",
        ),
        ((HermesAgentBaseEnv,), {"temprature": 0.5}, "the setting is agent_temperature"),
        ((HermesAgentBaseEnv,), {"max_token": 5}, "the setting is max_token_length"),
        ((HermesAgentBaseEnv,), {"backend": "docker"}, "the setting is terminal_backend"),
        ((HermesAgentBaseEnv,), {"timeout": 5}, "rollout_timeout, reward_timeout or terminal_timeout"),
        ((HermesAgentBaseEnv,), {"model_name": "m"}, r"openai\.model_name, of the model server"),
        ((HermesAgentBaseEnv,), {"base_url": "http://a"}, r"openai\.base_url, of the model server"),
        ((HermesAgentBaseEnv,), {"maxTurns": 5}, "did you mean max_turns"),
        ((HermesAgentBaseEnv,), {"group_size": "3"}, r"Wrong\.group_size: .*integer \(got '3'\)"),
        ((HermesAgentBaseEnv,), {"group_size": 3.0}, "integer"),
        ((HermesAgentBaseEnv,), {"max_turns": True}, r"Wrong\.max_turns: .*integer \(got True\)"),
        ((HermesAgentBaseEnv,), {"rollout_timeout": "60"}, "number"),
        ((HermesAgentBaseEnv,), {"terminal_network": 1}, "boolean"),
        ((HermesAgentBaseEnv,), {"env_config_cls": Own, "max_turns": 3}, r"Own\.max_agent_turns are the same setting"),
        ((Short,), {"env_config_cls": Own}, "inherit from Short.env_config_cls"),
    ],
)
def test_conflicts_and_typos_are_errors_of_the_class(bases: Any, attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        built(type("Wrong", bases, attributes))


class Named(Short):
    tokenizer_name = HermesAgentEnvConfig().tokenizer_name


@pytest.mark.parametrize(
    ("env_cls", "flags", "chosen"),
    [
        (Short, [], False),
        (Short, ["--env.tokenizer_name", "theirs"], True),
        (Named, [], True),
    ],
)
def test_only_a_tokenizer_that_somebody_named_counts_as_set(
    env_cls: type[Short], flags: list[str], chosen: bool
) -> None:
    env = built(env_cls, *flags)
    assert is_chosen(env.config, "tokenizer_name") == chosen
    assert env.config.model_fields_set == ({"tokenizer_name"} if flags else set())


class OfItsModel(Short):
    """Its code names a model and the tokenizer of that model, as Atropos' environments do."""

    @classmethod
    def config_init(cls) -> tuple[Any, list[ServerConfig]]:
        config = cls.env_config_cls(tokenizer_name=HermesAgentEnvConfig().tokenizer_name)
        return config, [ServerConfig(model_name="its", base_url="http://h/v1", server_type="vllm")]


class OfItsServer(Short):
    @classmethod
    def config_init(cls) -> tuple[Any, list[ServerConfig]]:
        server = {"model_name": "its", "base_url": "http://h/v1", "server_type": "vllm", "tokenizer_name": "own"}
        return cls.env_config_cls(), [ServerConfig(**server)]


DEFAULT_TOKENIZER = HermesAgentEnvConfig().tokenizer_name


@pytest.mark.parametrize(
    ("env_cls", "flags", "file", "loaded"),
    [
        (Short, [], {"model_name": "m", "base_url": "http://h/v1"}, "m"),
        (Named, ["--openai.model_name", "m"], {}, "m"),
        (OfItsModel, [], {}, DEFAULT_TOKENIZER),
        (OfItsModel, ["--openai.model_name", "its"], {}, DEFAULT_TOKENIZER),
        (OfItsModel, ["--openai.model_name", "m"], {}, "m"),
        (OfItsModel, [], {"model_name": "m"}, "m"),
        (OfItsModel, [], [{"model_name": "m", "base_url": "http://h/v1", "server_type": "vllm"}], "m"),
        (OfItsModel, ["--openai.model_name", "m", "--env.tokenizer_name", "mine"], {}, "mine"),
        (OfItsModel, ["--openai.model_name", "m", "--openai.tokenizer_name", "mine"], {}, "mine"),
        (OfItsModel, ["--openai.model_name", "m"], {"tokenizer_name": "mine"}, "mine"),
        (OfItsServer, [], {}, "own"),
        (OfItsServer, ["--openai.model_name", "m"], {}, "m"),
    ],
)
def test_a_tokenizer_in_code_is_that_of_the_model_in_code(
    env_cls: type[Short], flags: list[str], file: Any, loaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "settings.yaml"
    path.write_text(json.dumps({"openai": file}))
    found: list[str] = []
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", staticmethod(lambda name, **_: found.append(name)))
    server = ["--openai.server_type", "vllm", "--openai.base_url", "http://h/v1"] if isinstance(file, dict) else []
    _, settings = cli.read_settings(env_cls, ["serve", "--config", str(path), *server, *flags])
    env = env_cls(**settings)
    load_tokenizer(env.server_configs[0], env.config, None)
    assert found == [loaded]


def test_changes_in_place_count_as_set() -> None:
    base = HermesAgentEnvConfig()
    base.terminal_env["TOKEN"] = "1"
    config = as_env_config(base, Short.env_config_cls)
    assert (config.terminal_env, config.group_size) == ({"TOKEN": "1"}, 2)
    assert config.model_fields_set == {"terminal_env"}


def test_attributes_of_the_environment_itself_stay_possible() -> None:
    class Weather(Short):
        temperatures = (21, 23)
        model = "gfs"
        words = "hot"
        MAX_TURNS = 3
        rollout_timeout = 60
        eval_handling = "NONE"
        toolsets = ("terminal", "file")

        def timeout(self) -> int:
            return 1

    config = built(Weather).config
    assert (config.rollout_timeout, config.eval_handling, config.enabled_toolsets) == (
        60.0,
        "NONE",
        ["terminal", "file"],
    )


SCRIPT = """
from lachesis import HermesAgentBaseEnv

class Greeting(HermesAgentBaseEnv):
    {line}
    async def get_next_item(self): ...
    def format_prompt(self, item): ...
    async def compute_reward(self, item, result, ctx): ...

if __name__ == "__main__":
    Greeting.cli()
"""


@pytest.mark.parametrize("script", ["greeting.py", "other.py"])
def test_a_script_with_a_wrong_attribute_ends_with_one_line_and_2(tmp_path: Path, script: str) -> None:
    (tmp_path / "greeting.py").write_text(SCRIPT.format(line="max_truns = 3"))
    (tmp_path / "other.py").write_text("from greeting import Greeting\n\nGreeting.cli()\n")
    line = [sys.executable, script, "process", *SERVER]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    [said] = done.stderr.splitlines()
    assert said.startswith("error: Greeting.max_truns is not a setting; did you mean max_turns?")


def test_an_unknown_toolset_names_where_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Greeting(Short):
        toolsets = ["fiel"]  # noqa: RUF012

    def message(*flags: str) -> str:
        output = ["--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
        assert cli.main(Greeting, ["process", *SERVER, *output, *flags]) == 2
        return capsys.readouterr().err

    assert message().startswith("error: Greeting.toolsets: unknown toolset or tool 'fiel'")
    assert message("--env.enabled_toolsets", "[trminal]").startswith("error: env.enabled_toolsets: unknown")
    given = ["--env.enabled_toolsets", "[file]", "--env.disabled_toolsets", "[trminal]"]
    assert message(*given).startswith("error: env.disabled_toolsets: unknown")


def test_settings_of_class_attributes_can_be_pickled() -> None:
    config = Longer.env_config_cls(dataset_name="d")
    copy = pickle.loads(pickle.dumps(config))
    assert type(copy) is type(config) and copy == config


def test_environments_made_from_the_same_objects_share_no_settings() -> None:
    server, config = ServerConfig(base_url="http://x/v1", model_name="m"), Short.env_config_cls()
    one, two = Short(config, [server]), Short(config, [server])
    one.config.terminal_env["A"] = "1"
    one.server_configs[0].model_name = "other"
    assert two.config.terminal_env == config.terminal_env == {}
    assert two.server_configs[0].model_name == server.model_name == "m"


def test_a_field_of_a_settings_class_may_have_the_name_of_an_attribute_of_the_base_environment() -> None:
    class Config(HermesAgentEnvConfig):
        name: str = "a field"
        tools: list[str] = Field(default_factory=list)
        max_turns: int = 7

    class Titled(HermesAgentBaseEnv):
        name = "an environment"
        env_config_cls = Config
        max_agent_turns = 3

    config = Titled.env_config_cls()
    assert (Titled.name, config.name, config.max_turns, config.max_agent_turns) == ("an environment", "a field", 7, 3)


def test_a_settings_class_of_another_kind_is_an_error() -> None:
    class Odd(Short):
        env_config_cls = dict  # type: ignore[assignment]

    with pytest.raises(SettingsError, match=r"Odd\.env_config_cls must be a subclass of HermesAgentEnvConfig"):
        built(Odd)
    with pytest.raises(SettingsError, match=r"Odd\.env_config_cls"):
        Odd(HermesAgentEnvConfig(), ServerConfig(base_url="http://x/v1"))


class Graded(HermesAgentEnvConfig):
    grade: str = "a"
    low: int = 1
    high: int = 2

    @field_validator("grade")
    @classmethod
    def _check_grade(cls, value: str) -> str:
        if not value.isalpha():
            raise ValueError("has to be a letter")
        return value.upper()

    @model_validator(mode="after")
    def _check_range(self) -> Graded:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class OfGrade(Short):
    env_config_cls = type("GradedShort", (Graded, Short.env_config_cls), {})


def test_validators_of_fields_see_class_attributes() -> None:
    class Lower(OfGrade):
        grade = "b"

    config: Any = built(Lower).config
    assert config.grade == "B"
    with pytest.raises(SettingsError, match=r"Wrong\.grade: .*has to be a letter \(got '1'\); .*env\.grade"):
        built(type("Wrong", (OfGrade,), {"grade": "1"}))
    with pytest.raises(SettingsError, match=r"Wrong\.total_steps: .*at least 1"):
        built(type("Wrong", (Short,), {"total_steps": 0}))


def test_validators_run_once_and_those_that_need_more_wait_for_the_command(tmp_path: Path) -> None:
    class Model(HermesAgentEnvConfig):
        tags: Annotated[list[str], BeforeValidator(lambda text: text.split(","))] = Field(default=["x"])
        data: str = "/nowhere"

        @field_validator("group_size")
        @classmethod
        def _needs_another(cls, value: int, info: ValidationInfo) -> int:
            assert info.data["total_steps"]
            return value

        @model_validator(mode="after")
        def _read(self) -> Model:
            Path(self.data).stat()
            return self

    class Base(HermesAgentBaseEnv):
        env_config_cls = Model

    class Own(Base):
        tags = "a,b"
        group_size = 3

    assert (Own.tags, Own.group_size) == (["a", "b"], 3)
    config: Any = Own.env_config_cls(data=str(tmp_path))
    assert (config.tags, config.group_size) == (["a", "b"], 3)


def test_wrong_servers_of_config_init_are_named_without_their_keys() -> None:
    class Careless(Short):
        @classmethod
        def config_init(cls) -> Any:
            return cls.env_config_cls(), [ServerConfig(api_key=("sk-secret",))]  # type: ignore[arg-type]

    with pytest.raises(SettingsError, match=r"the defaults of Careless: openai\.api_key") as caught:
        built(Careless)
    assert "sk-secret" not in str(caught.value)


def test_defaults_that_contradict_each_other_are_an_error_of_the_command() -> None:
    class Reversed(OfGrade):
        low = 3

    with pytest.raises(SettingsError, match=r"the defaults of Reversed: env: low is above high"):
        built(Reversed)
    assert Reversed(Reversed.env_config_cls(high=5), ServerConfig(base_url="http://127.0.0.1:1/v1")).config.high == 5


async def test_assignments_and_properties_that_no_run_reads_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Dynamic(Short):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.system_prompt = "Be long."
            self.group_size = self.config.group_size

        @property
        def terminal_image(self) -> str:
            return "debian"

    env = built(Dynamic, "--testing")
    async with env.running():
        pass
    messages = [record.message.partition(", and")[0] for record in caplog.records]
    assert messages == ["Dynamic.system_prompt was assigned", "Dynamic.terminal_image is a property"]
