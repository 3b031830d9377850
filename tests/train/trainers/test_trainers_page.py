"""The snippets of docs/trainers.md do what the page says; the trainers are models of them."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from lachesis_train.trainers.items import item_of, write_items
from tests.support.trainer_cases import CASES, Cases, SkyClient, VerlClient, Weights, columns
from tests.train.trainers.test_contracts import CASES_ENV, types, verl_loop
from tests.train.trainers.test_skyrl import SETTINGS, batch, config

__all__ = ["types"]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "trainers.md"


def snippets(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text.replace("gsm8k", CASES_ENV) for text in found]


def test_the_file_of_items_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(snippets("py")[0], {})
    rows = [json.loads(line) for line in Path("items.jsonl").read_text().splitlines()]
    assert [item_of(row) for row in rows] == [item_of(row["metadata"]) for row in rows]
    assert [item_of(row)["case"] for row in rows] == list(CASES)
    assert rows[0]["prompt"] == [{"role": "user", "content": "case plain"}]


def test_items_that_json_changes_are_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Pairs(Cases):
        async def get_next_item(self) -> Any:
            return {"case": self.left.pop(), "answer": (3, 4)} if self.left else None

    write_items(Pairs, tmp_path / "pairs.jsonl", 2)
    assert "get {'case': 'declined', 'answer': [3, 4]} instead of {'case': 'declined', 'answer': (3, 4)}" in caplog.text
    caplog.clear()
    write_items(Cases, tmp_path / "cases.jsonl", 2)
    assert not caplog.text


async def test_the_generator_of_the_page_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "skyrl.train.entrypoints.main_base"
    for name in ("skyrl", "skyrl.train", "skyrl.train.entrypoints", place):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[place].BasePPOExp = object  # type: ignore[attr-defined]
    scope: dict[str, Any] = {}
    exec(snippets("py")[1], scope)
    weights = Weights()
    settings = SimpleNamespace(generator=config())
    made = scope["Experiment"]().get_generator(settings, weights.tokenizer, SkyClient(weights))
    output = await made.generate(batch(("plain",)))
    await asyncio.to_thread(made.close)
    assert len(output["response_ids"]) == 2


async def test_the_loop_of_the_page_plays(types: None) -> None:
    (entry,) = yaml.safe_load(snippets("yaml")[0])
    module, _, name = entry.pop("_target_").rpartition(".")
    assert entry.pop("name") == "lachesis"
    assert getattr(import_module(module), name) is type(verl_loop(VerlClient(Weights())))
    loop = verl_loop(VerlClient(Weights()), **{**entry, "settings": {**SETTINGS, **entry["settings"]}})
    if find_spec("hydra") is not None:  # as verl makes it

        def made(**given: Any) -> Any:
            import hydra
            from omegaconf import OmegaConf

            config = OmegaConf.create({**entry, "_target_": f"{module}.{name}"})
            return hydra.utils.instantiate(config=config, **given, processor=None, hf_model_type="qwen3")

        client = VerlClient(Weights())
        other = verl_loop(client, **entry)
        config = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=other.rollout)))
        loop = made(trainer_config=config, server_manager=client, tokenizer=client.weights.tokenizer)
        assert loop.shared is other.shared, "kept with the client"
    output = await loop.run({"temperature": 1.0}, **columns("plain"))
    await asyncio.to_thread(loop.shared.close)
    assert output.reward_score == 0.25


def test_the_options_of_slime_name_what_there_is() -> None:
    (_, options), settings = snippets("sh"), yaml.safe_load(snippets("yaml")[1])
    for place in re.findall(r"lachesis_train\.\S+", options):
        module, _, name = place.rpartition(".")
        assert callable(getattr(import_module(module), name))
    code = inspect.getsource(import_module("lachesis_train.trainers.slime"))
    assert set(settings) == {"lachesis_env", "lachesis_settings"}
    assert all(f'getattr(args, "{name}"' in code for name in settings)
