"""What NeMo Gym and prime-rl may not train is refused by name: a row of ids, masks and logprobs does not hold it, or
the settings sample from another distribution than the one that is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis.settings.server_settings import ServerConfig
from lachesis_testing.fake_server import FakeServer
from tests.doors.test_agent_serving import EnvClient, config, gym
from tests.doors.test_frames import Halves, halving
from tests.doors.test_serving import serving
from tests.support.pictures import image, text
from tests.support.scripted_server import ScriptedServer, say
from tests.support.small_envs import SortWords
from tests.support.training_runs import with_tokens


class Plain(SortWords):
    name = "plain"

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 0.5

    async def get_eval_items(self) -> Any:
        return [["pear"]]


class Sees(Plain):
    name = "sees"

    def format_prompt(self, item: Any) -> Any:
        return [text("What is on "), image(56, 28), text("this?")]


async def of_prime(
    env_cls: Any,
    folder: Path,
    model: FakeServer,
    *,
    split: str = "train",
    sampling: Any = None,
    config: ServerConfig | None = None,
    **more: Any,
) -> tuple[list[Any], Any]:
    """The deltas and the reply for one rollout of a trainer's client."""
    tokenizer = with_tokens(model, folder).tokenizer_name
    given = {} if config is None else {"model": config}
    async with serving("prime", env_cls, folder, enabled_toolsets=[], **given, **more) as service:
        client = EnvClient(service.root_url)
        try:
            about = {"type": "train", "base_url": model.base_url, "renderer_model_name": tokenizer, "headers": {}}
            sampling = sampling or {"temperature": 1.0}
            data = {"split": split, "index": 0}
            await client.send("run", task_data=data, client=about, model="fake", sampling=sampling)
            return await client.answer()
        finally:
            client.close()


def masked(found: dict[str, Any], why: str) -> bool:
    assert found["failure_kind"] == "lachesis:untrainable" and why in found["failure_reason"], found
    return bool(found["mask_sample"]) and found["reward"] == 0.0


async def test_images_are_refused_by_name(tmp_path: Path) -> None:
    async with FakeServer("Something.", images=True) as model:
        (delta,), reply = await of_prime(Sees, tmp_path, model)
        (error,) = reply["head"]["errors"]
        assert (reply["head"]["ok"], error["type"]) == (False, "untrainable") and "images" in error["message"]
        assert delta["errors"] == [error] and delta["set"]["rewards"] == {"reward": None}
        _, reply = await of_prime(Sees, tmp_path / "eval", model, split="test")
        assert reply["head"]["ok"], "nothing is trained on an evaluation"
        settings = with_tokens(model, tmp_path).model_copy(update={"engine": "vllm-generate"})
        async with gym(tmp_path, settings, Sees) as run:
            assert masked((await run(0))[1], "images")
    async with ScriptedServer(halving) as chat, gym(tmp_path, config(chat), Sees) as run:
        assert masked((await run(0))[1], "images"), "of a model server of NeMo Gym"
    async with ScriptedServer([say("Something.")]) as chat, gym(tmp_path, config(chat), Sees) as run:
        assert (await run(0))[1]["reward"] == 0.5, "there are no tokens to train"


@pytest.mark.parametrize(
    ("fields", "why"), [({"top_k": 5}, "top_k = 5"), ({"logit_bias": {"3": 1}}, "logit_bias"), ({"new": 1}, "new")]
)
async def test_settings_that_sample_from_another_distribution_are_refused(
    tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    async with FakeServer("Yes.") as model:
        with pytest.raises(SettingsError, match=why):
            async with gym(tmp_path, with_tokens(model, tmp_path), Plain, extra_body=fields):
                pass
        deltas, reply = await of_prime(Plain, tmp_path, model, extra_body=fields)
        (error,) = reply["head"]["errors"]
        assert (reply["head"]["ok"], deltas, error["type"]) == (False, [], "SettingsError") and why in error["message"]
        assert not [seen for seen in model.requests if seen.call is not None and seen.call.prompts], (
            "nothing is played in vain"
        )
        asked = {"temperature": 0.5, **{name: {"top_k": -1}.get(name, 0) for name in fields}}
        if why == "top_k = 5":
            _, reply = await of_prime(Plain, tmp_path / "again", model, extra_body=fields, sampling=asked)
            assert reply["head"]["ok"], "the request decides"
    async with ScriptedServer(halving) as chat, gym(tmp_path, config(chat), Halves, extra_body=fields) as run:
        assert masked((await run(1))[1], why), "of a model server of NeMo Gym, which may report no tokens"


@pytest.mark.parametrize("name", ["routed_experts", "sampling_mask"])
async def test_what_the_trainer_would_not_get_may_not_be_set(tmp_path: Path, name: str) -> None:
    async with FakeServer("Yes.", sampling_mask=True, experts=(2, 2, 8)) as model:
        settings = with_tokens(model, tmp_path).model_copy(update={"engine": "vllm-generate", name: True})
        with pytest.raises(SettingsError, match=f"openai.{name} is set"):
            async with gym(tmp_path, settings, Plain):
                pass


async def test_what_a_row_names_is_the_choice_of_the_trainer(tmp_path: Path) -> None:
    async with (
        FakeServer("Yes.") as model,
        gym(tmp_path, with_tokens(model, tmp_path), Plain, extra_body={"top_p": 0.9}) as run,
    ):
        assert masked((await run(0))[1], "top_p = 0.9")
        _, found = await run(0, temperature=1.0, top_p=0.8)
        assert (found["mask_sample"], found["reward"]) == (False, 0.5)
    async with FakeServer("Yes.", logprobs_mode="processed") as model:
        settings = with_tokens(model, tmp_path).model_copy(update={"logprobs_mode": "processed"})
        async with gym(tmp_path, settings, Plain) as run:
            assert not (await run(0, temperature=0.5))[1]["mask_sample"]


async def test_logprobs_at_temperature_1_of_tokens_at_another_are_refused(tmp_path: Path) -> None:
    """Whoever chose the temperature: the trainer's ratio of probabilities would be that of two distributions."""
    async with FakeServer("Yes.") as model:
        async with gym(tmp_path, with_tokens(model, tmp_path), Plain) as run:
            assert masked((await run(0, temperature=0.5))[1], "sampled at temperature 0.5")
            assert not (await run(0, temperature=1.0))[1]["mask_sample"]
        asked = {"temperature": 0.5}
        _, reply = await of_prime(Plain, tmp_path / "prime", model, sampling=asked)
        assert reply["head"]["ok"], "prime-rl's own vLLM reports processed logprobs"
        config = with_tokens(model, tmp_path).model_copy(update={"logprobs_mode": "raw"})
        _, reply = await of_prime(Plain, tmp_path / "raw", model, sampling=asked, config=config)
        assert "sampled at temperature 0.5" in reply["head"]["errors"][0]["message"]


async def test_a_completion_that_goes_on_after_its_end_of_turn_is_refused(tmp_path: Path) -> None:
    async with FakeServer("Yes.", faults=["double_end_of_turn"]) as model:
        _, reply = await of_prime(Plain, tmp_path, model)
        assert "goes on after its end-of-turn token" in reply["head"]["errors"][0]["message"]
        async with gym(tmp_path, with_tokens(model, tmp_path), Plain) as run:
            assert masked((await run(0))[1], "goes on after its end-of-turn token")
