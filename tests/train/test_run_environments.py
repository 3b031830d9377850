"""`environments:` of the settings file, and the names by which groups are told apart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends.errors import SettingsError
from lachesis.runs.run_folder import changes
from lachesis.settings.checked import read_yaml
from lachesis_testing.fake_server import FakeServer, RandomWords
from lachesis_tokens.samples.group_shapes import group_problems, samples_from_atropos, with_digest
from lachesis_train.curves.metrics import step_metrics
from lachesis_train.curves.records import GroupRecord
from lachesis_train.trainer.datums import prepare
from lachesis_train.trainer.environments import chosen_environments, read_environments
from lachesis_train.trainer.losses import data_and_losses, ratio_bounds
from lachesis_train.trainer.settings import Settings, TrainingSettings
from lachesis_train.verbs.launch_training import read_settings
from lachesis_view.curves import _of_steps
from lachesis_view.reports.training import write_report
from tests.support.own_api import AcknowledgingTrainer, OwnApi, own_api
from tests.support.trained_groups import group_body, step, trained
from tests.support.training_runs import serving, with_tokens

__all__ = ["own_api"]


def named(body: dict[str, Any], name: str) -> dict[str, Any]:
    return with_digest({**body, "group_overrides": {**body["group_overrides"], "environment": name}})


def settings(folder: Path, *entries: dict[str, Any], **training: Any) -> Settings:
    content = {
        "environments": [*entries],
        "training": {"base_model": "tiny", "num_steps": 3, **training},
    }
    (path := folder / "settings.yaml").write_text(yaml.safe_dump(content))
    return read_settings(path, {})


def test_entries_have_names_of_their_own() -> None:
    found = read_environments(
        [{"env": "tool_call"}, {"env": "a/my env.py:Words"}, {"env": "tool_call"}, {"env": "tool_call", "name": "x"}]
    )
    assert [each.name for each in found] == ["tool_call", "Words", "tool_call-2", "x"]
    assert [each.name for each in chosen_environments(found, [])] == ["tool_call", "Words", "tool_call-2", "x"]
    assert [each.name for each in chosen_environments(found, ["tool_call"])] == ["tool_call", "tool_call-2", "x"]
    chosen = chosen_environments(found, ["x", "gsm8k", "other.py:Words"])
    assert [(each.env, each.name) for each in chosen] == [
        ("tool_call", "x"),
        ("gsm8k", "gsm8k"),
        ("other.py:Words", "Words-2"),
    ]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tool_call": 2}, "environments: must be a list"),
        ([{"weight": 2}], r"environments\.0\.env"),
        ([{"env": "a", "weight": 0}], r"environments\.0\.weight"),
        ([{"env": "a", "wieght": 1}], r"environments\.0\.wieght"),
        ([{"env": "a", "name": "b/c"}], r"environments\.0\.name"),
        ([{"env": "a"}, {"env": "b", "name": "a"}], r"environments\.1\.name: a is the name of something else"),
        ([{"env": "trainer"}], r"environments\.0\.name: trainer is the name"),
        ([{"env": "a", "settings": {"batch_size": 8}}], r"environments\.0\.settings\.batch_size: it is one for"),
        ([{"env": "a", "training": {"learning_rate": 1}}], r"unknown setting environments\.0\.training\.learning_rate"),
    ],
)
def test_a_mistake_in_an_entry_is_named(given: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        read_environments(given)


def test_the_loss_of_an_environment_is_checked_and_part_of_what_a_run_resumes_with(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"environments: a: training.*max_importance_ratio has no effect"):
        settings(tmp_path, {"env": "a", "training": {"loss": "ppo"}}, max_importance_ratio=2.0)
    with pytest.raises(SettingsError, match=r"environments: a: training\.loss"):
        settings(tmp_path, {"env": "a", "training": {"loss": "pp"}})
    content = settings(tmp_path, {"env": "a", "training": {"loss": "ppo"}}, learning_rate=0.5).content()
    assert content["environments.a.loss"] == "ppo"
    assert "environments.a.loss" not in settings(tmp_path, {"env": "a"}).content()
    unbounded = settings(tmp_path, {"env": "a", "training": {"max_importance_ratio": None}}, max_importance_ratio=2.0)
    assert changes(unbounded.content(), settings(tmp_path, {"env": "a"}, max_importance_ratio=2.0).content())


def test_the_warm_start_of_an_environment_needs_that_of_the_run(tmp_path: Path) -> None:
    own = {"env": "a", "training": {"warm_start": 8}}
    with pytest.raises(SettingsError, match=r"environments: a: training\.warm_start replaces that of the run"):
        settings(tmp_path, own)
    for of_run in (0, 4):
        assert settings(tmp_path, own, warm_start=of_run).training.warm_start == of_run


def test_each_sequence_has_the_loss_of_its_environment_and_the_divisor_of_the_batch(tmp_path: Path) -> None:
    bodies = [
        named(group_body("a", "q", ["one", "two"], [1.0, 0.0]), "a"),
        named(group_body("b", "q", ["three", "four"], [1.0, 0.0]), "b"),
        group_body("c", "q", ["five", "six"], [1.0, 0.0]),
        named(group_body("d", "q", ["seven", "eight"], [1.0, 0.0]), "a"),
    ]
    of_run = settings(tmp_path, {"env": "a", "training": {"loss": "ppo", "clip_high": 0.3}}, {"env": "b"})
    batch = prepare(bodies, TrainingSettings())
    assert not batch.refused, "the names are covered by the digest"
    data, parts = data_and_losses(batch, of_run)
    assert [(list(part.places), part.loss, dict(part.parameters)) for part in parts] == [
        ([0, 1, 6, 7], "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.3}),
        ([2, 3, 4, 5], "importance_sampling", {}),
    ]
    one_loss, whole = data_and_losses(batch, settings(tmp_path, {"env": "a"}, {"env": "b"}))
    assert [list(part.places) for part in whole] == [[*range(8)]]
    for mine, other in zip(data, one_loss, strict=True):
        assert list(mine.inputs["advantages"]) == list(other.inputs["advantages"])
    assert ratio_bounds(batch, of_run) is None
    assert ratio_bounds(prepare(bodies[::3], TrainingSettings()), of_run) == (0.8, 1.3)


def test_a_name_that_was_changed_on_the_way_is_refused() -> None:
    body = named(group_body("a", "q", ["one", "two"], [1.0, 0.0]), "a")
    body["group_overrides"]["environment"] = "b"
    assert prepare([body], TrainingSettings()).refused[0][0] == "unproven"


def test_figures_are_by_environment(tmp_path: Path) -> None:
    groups = [
        trained(named(group_body("a", "q", ["one", "two"], [1.0, 0.0]), "a")),
        trained(named(group_body("b", "q", ["four", "four"], [0.25, 0.25]), "a")),
        GroupRecord(body=named(group_body("c", "q", ["five", "six"], [1.0, 0.5]), "b"), skipped="unproven"),
        trained(group_body("d", "q", ["seven", "eight"], [1.0, 0.0])),
        GroupRecord(body={"group_overrides": {"environment": "no/name"}, "scores": []}, skipped="unproven"),
    ]
    found = step_metrics(step(1, groups))
    own = {name: value for name, value in found.items() if name.startswith(("train/a/", "train/b/", "train/no"))}
    low, high = own.pop("train/a/reward_low"), own.pop("train/a/reward_high")
    assert low < 0.375 < high
    assert own.pop("train/b/reward_low") < 0.75 < own.pop("train/b/reward_high")
    assert own == {
        "train/a/reward": 0.375,
        "train/a/tokens": len("one") + len("two") + 2,
        "train/a/share": 0.5,
        "train/a/refused": 0,
        "train/b/reward": 0.75,
        "train/b/tokens": 0,
        "train/b/share": 0.25,
        "train/b/refused": 1,
    }
    lines = [{"step": number, **found} for number in (1, 2)]
    shown = [line for title, line in _of_steps(lines) if title == "reward by environment"]
    assert [(line["label"], line["x"], line["y"]) for line in shown] == [
        ("a", [1, 2], [0.375, 0.375]),
        ("b", [1, 2], [0.75, 0.75]),
    ]
    assert shown[0]["low"] == [low, low] and shown[0]["high"] == [high, high]


def test_the_report_has_the_evaluations_of_each_environment_with_their_intervals(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.5}\n')

    def evaluation(folder: str, mean: float) -> None:
        (path := tmp_path / "eval" / folder / "metrics.json").parent.mkdir(parents=True)
        figures = {"eval/avg_reward": mean, "eval/avg_reward_low": mean - 0.1, "eval/avg_reward_high": mean + 0.1}
        path.write_text(json.dumps({"results": {"all": figures}}))

    for folder, mean in (("one/step-4", 0.2), ("one/step-8", 0.3), ("one/step-8-2", 0.4), ("two/step-5", 0.7)):
        evaluation(folder, mean)
    page = write_report(tmp_path).read_text()
    assert [each in page for each in ("step 4: one 0.2", "step 8: one 0.4", "step 5: two 0.7")] == [True] * 3
    assert "step 8: one 0.3" not in page, "the later one counts"


def names(trainer: AcknowledgingTrainer) -> list[str]:
    return [group["group_overrides"]["environment"] for group in trainer.groups]


async def test_serve_sends_the_name_of_its_environment_under_its_digest(tmp_path: Path, own_api: OwnApi) -> None:
    async with own_api.wiped(), FakeServer(RandomWords()) as model:
        trainer = AcknowledgingTrainer(own_api.url, batch_size=4)
        await trainer.register()
        await trainer.poll()
        for name in (None, "second"):
            server = with_tokens(model, tmp_path)
            (tmp_path / str(name)).mkdir()
            env = serving(tmp_path / str(name), own_api, server, total_steps=-1, wandb_name=name)
            task = asyncio.create_task(env.env_manager())
            while (name or "coin-toss") not in names(trainer):
                await trainer.take(len(trainer.groups) + 2)
            task.cancel()
            await asyncio.wait([task])
    assert set(names(trainer)) == {"coin-toss", "second"}
    for group in trainer.groups:
        assert not group_problems(group, samples_from_atropos(group))


def test_the_configuration_of_two_environments_is_read() -> None:
    path = Path(__file__).parents[2] / "configs" / "train_two_environments.yaml"
    assert [each["env"] for each in read_yaml(path)["environments"]] == ["tool_call", "tool_result"]
    assert [each.name for each in read_settings(path, {}).environments] == ["tool_call", "tool_result"]
