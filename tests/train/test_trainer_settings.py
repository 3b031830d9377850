"""The settings of the trainer: one file for trainer and environment, and nothing is dropped."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from backends.errors import SettingsError
from lachesis.cli import main as lachesis
from lachesis.runs.run_folder import OtherSettings
from lachesis.settings.server_settings import ServerConfig
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_testing.fake_server import fake_tokenizer
from lachesis_tokens.prompts.model_folders import tokenizer_of
from lachesis_tokens.server.serving import load_tokenizer
from lachesis_train.trainer.checkpoints import Checkpoint
from lachesis_train.trainer.learning_rate import learning_rate
from lachesis_train.trainer.settings import EnvSettings, Settings, TrainingSettings
from lachesis_train.verbs import train
from lachesis_train.verbs.launch_training import EXAMPLE, main, make_parser, read_settings
from lachesis_train.verbs.training_parts import LazyTokenizer

FILE = """
env: {group_size: 4, batch_size: 16, rollout_server_url: "http://h:1", total_steps: 7, max_turns: 3, dataset: x}
openai: [{model_name: big, base_url: "http://localhost:8011/v1", server_type: sglang, api_key: x}]
tinker: {lora_rank: 8, learning_rate: 1.0e-3, max_token_trainer_length: 512, wandb_project: p}
"""


@pytest.fixture
def read(tmp_path: Path) -> object:
    def reader(text: str = FILE, **training: object) -> Settings:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return read_settings(path, {"training": training})

    return reader


def test_a_file_of_tinker_atropos_is_understood(read) -> None:
    found = read()
    assert (found.base_model, found.served_model, found.port, found.num_steps) == ("big", "big", 8011, 7)
    assert found.training.lora_rank == 8
    assert found.registration.batch_size == 16
    assert found.registration.max_token_len == 512
    assert found.registration.acknowledges


def test_flags_win_over_the_file(read) -> None:
    assert read(lora_rank=2, num_steps=3, port=0).training.lora_rank == 2
    assert read(num_steps=3).num_steps == 3
    assert read(base_model="other").base_model == "other"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "training: {learning_rat: 1}",
            r"c\.yaml, line 1: unknown setting training.learning_rat; did you mean learning_rate?",
        ),
        (
            "env: {group_sise: 1}\ntraining: {base_model: m, num_steps: 1}",
            r"c\.yaml, line 1: unknown setting env.group_sise; did you mean group_size?",
        ),
        ("env: {batch_size: 0}", r"c\.yaml, line 1: env.batch_size: must be at least 1, or -1 .*got 0"),
        ("env: {group_size: x}\nmax_agent_turns: 1\nfoo: 2", "(?s)line 1: env.*line 2: .* under env:.*line 3: unknown"),
        ("trainer: {}", "unknown setting .*trainer; did you mean tinker"),
        ("training: {}\ntinker: {}", "same section"),
        ("training: [1]", "training: must be a mapping of settings"),
        ("training: {num_steps: 1}", "no model to train: set --training.base_model"),
        ("training: {base_model: m}", "number of steps is unknown: set --training.num_steps"),
        ("training: {base_model: m, num_steps: 1}\nenv: {group_size: 3, batch_size: 8}", "not a multiple of env.group"),
        ("training: {loss: grpo}", "training.loss: .*'importance_sampling', 'ppo', .*'gspo' or 'dppo'.*got 'grpo'"),
        ("training: {loss: ppo, max_importance_ratio: 2}", "has no effect with loss ppo, .*training.clip_high"),
        ("training: {loss: cispo, clip_low: null}", "set both training.clip_low and training.clip_high to null"),
        ("training: {engine_full_finetuning: true, train_mlp: false}", "trains all parameters in float32: leave"),
        ("training: {engine_full_finetuning: true, engine_dtype: bfloat16}", "trains all parameters in float32: leave"),
        ("training: {reject_ratio_below: 1.01, reject_ratio_above: 0.99}", "reject_ratio_below must be less than"),
        ("training: {teacher_weight: 2}", "training.teacher_weight has an effect only with training.teacher_url"),
        ("training: {teacher_model: m}", "training.teacher_model has an effect only with training.teacher_url"),
        (
            "training: {base_model: m, num_steps: 1, mask_truncated_completions: true}\nenv: {tree_at: 'turns:2'}",
            "env.tree_at: rollouts would branch, and training.mask_truncated_completions .*: unset it",
        ),
        ("training: {learning_rate: -1}", r"c\.yaml, line 1: training.learning_rate: .*at least 0"),
    ],
)
def test_a_mistake_is_named_with_what_was_meant(read, text: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        read(text)


def test_an_installed_command_trains_on_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert lachesis(["train", "--sft", "samples.jsonl", "--sft.min_reward", "1"]) == 2
    assert "no model to train: set --training.base_model" in capsys.readouterr().err
    assert lachesis(["train", "--sft", "samples.jsonl", "--training.base_model", "m"]) == 2
    assert "there is no file or folder samples.jsonl; name trajectories with --sft" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        lachesis(["train", "--sft=samples.jsonl", "--sft.min_rewrd", "1"])
    assert "error: unknown setting --sft.min_rewrd; did you mean --sft.min_reward?" in (capsys.readouterr().err)


def test_the_command_ends_with_2_for_settings_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--training.num_steps", "3"]) == 2
    assert "no model to train" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--training.learning_rat", "3"])
    assert "did you mean --training.learning_rate" in capsys.readouterr().err
    for of_files, meant in ([], "--env.batch_size?"), (["--sft", "samples.jsonl"], "--sft.batch_size?"):
        with pytest.raises(SystemExit):
            main([*of_files, "--batch-size", "4"])
        assert f"unknown setting --batch-size; did you mean {meant}" in capsys.readouterr().err


def test_missing_packages_are_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("torch", "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # the SDK's stored key
    settings = ["--training.base_model", "tiny", "--training.num_steps", "1"]
    assert main(settings) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "torch, peft: pip install" in words
    assert "make train-venv" in words
    assert main([]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "no settings are given: the model of " in words and "torch, peft: pip install" in words
    assert read_settings(EXAMPLE, {}).base_model == "smollm2"
    with pytest.raises(SettingsError, match="torch, peft"):
        train.main(["--env", "tool_call", *settings])
    assert not list(tmp_path.iterdir())


def test_every_setting_has_a_flag_and_a_row_in_the_docs() -> None:
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "training.md").read_text() + (docs / "settings.md").read_text()
    flags = {flag for action in make_parser()._actions for flag in action.option_strings}
    for namespace, model in (("training", TrainingSettings), ("env", EnvSettings)):
        for name in model.model_fields:
            assert f"--{namespace}.{name}" in flags
            assert f"`{name}`" in page, name


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", [0.5, 1.0, 0.8828427, 0.6, 0.3171573, 0.2]),
    ],
)
def test_the_learning_rate_rises_and_falls_as_named(kind, rates: list[float]) -> None:
    settings = TrainingSettings(
        learning_rate=1.0, warmup_steps=2, learning_rate_schedule=kind, min_learning_rate_ratio=0.2
    )
    assert [learning_rate(settings, step, 6) for step in range(1, 7)] == pytest.approx(rates)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (6, 2), (4, 3), (2, 2)])
def test_no_step_is_made_with_a_rate_of_0(kind, steps: int, warmup: int) -> None:
    settings = TrainingSettings(learning_rate=1.0, warmup_steps=warmup, learning_rate_schedule=kind)
    assert all(learning_rate(settings, step, steps) > 0 for step in range(1, steps + 1))
    assert learning_rate(settings, steps + 1, steps) == pytest.approx(0)


def test_truncated_importance_sampling_is_cispo_without_a_lower_bound(read) -> None:
    assert read().loss == ("importance_sampling", {})
    assert read().ratio_bounds is None
    assert read(max_importance_ratio=3.0).loss == ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 3.0})
    assert read(loss="ppo", clip_high=0.3).ratio_bounds == (0.8, 1.3)


def test_each_loss_is_sent_with_the_keys_of_the_wire(read) -> None:
    """Those that SkyRL 0.4.0 takes for each (`ForwardBackwardInput` in its `tinker/api.py`)."""
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.25}
    for loss in ("ppo", "cispo", "gspo"):
        assert read(loss=loss, clip_high=0.25).loss == (loss, clip)
    assert read(loss="dppo", delta_high=0.1).loss == ("dppo", {"delta_low": 0.2, "delta_high": 0.1})
    assert read(loss="cispo", clip_low=None, clip_high=None).loss == ("cispo", {})
    # Bounds of a sequence, or of a probability, are none of a token's ratio.
    assert read(loss="gspo").ratio_bounds is read(loss="dppo").ratio_bounds is None
    assert read(loss="cispo", clip_low=None, clip_high=None).ratio_bounds is None


def test_only_what_decides_the_weights_has_to_stay_the_same(read) -> None:
    first = read().content()
    assert first == read(port=1, run_dir="x", num_steps=9, save_checkpoint_interval=1, engine_threads=2).content()
    for change in ({"learning_rate": 1.0}, {"loss": "ppo"}, {"base_model": "m"}, {"kl_penalty": 0.1}):
        assert read(**change).content() != first
    # With a schedule the last step decides the learning rate of all of them.
    assert (
        read(learning_rate_schedule="linear").content() != read(learning_rate_schedule="linear", num_steps=9).content()
    )


def test_a_model_of_the_engine_has_its_tokenizer_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer and `serve` load it by the model's name, which the hub does not know."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SettingsError, match=r"model 'tiny' must be made first .*lachesis-rl\[torch\]"):
        tokenizer_of("tiny")
    folder = tmp_path / "lachesis/models/tiny-qwen3-1"
    fake_tokenizer().save_pretrained(str(folder))
    (folder / "config.json").write_text("{}")
    own, name, _ = load_tokenizer(ServerConfig(model_name="tiny"), HermesAgentEnvConfig(), None)
    assert (len(own), name) == (len(fake_tokenizer()), "tiny")
    assert len(LazyTokenizer(read_settings(None, {"training": {"base_model": "tiny", "num_steps": 1}})).get()) == len(
        own
    )
    assert tokenizer_of("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def test_a_run_of_an_older_version_goes_on_with_the_defaults_of_new_settings(read, tmp_path: Path) -> None:
    now = read().content()
    before = {name: value for name, value in now.items() if name != "training.delta_low"}
    kept = Checkpoint(run_id="r", step=1, batch_id=1, instance=None, state="s", sampler=None, settings=before)
    kept.write(tmp_path)
    found = Checkpoint.of_run(tmp_path, now, resume=True)
    assert found is not None
    assert found.settings == now
    with pytest.raises(OtherSettings, match=r"training.delta_low: 0.2 then, 0.1 now"):
        Checkpoint.of_run(tmp_path, read(delta_low=0.1).content(), resume=True)


def test_a_training_run_ends_with_a_table_and_the_next_commands(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=400)
    train.show_end(console, 0, tmp_path, [("policy --run-dir x", "serves it"), ("eval y", "plays it")])
    lines = console.file.getvalue().splitlines()
    assert [line[:8].strip() for line in lines] == ["run", "report", "logs", "next", ""]
    assert lines[0].endswith("trained") and lines[4].endswith("eval y   (plays it)")
    train.show_end(console, 1, tmp_path, [("policy", "serves it")])
    assert "exit code 1" in console.file.getvalue() and console.file.getvalue().count("serves it") == 1
