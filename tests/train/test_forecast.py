"""What a step on the CPU takes is known before anything is sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.errors import SettingsError
from lachesis_tokens.prompts.vocabulary import ANY_ROW
from lachesis_train.trainer.forecast import (
    ModelShape,
    Work,
    check_memory,
    memory_of_machine,
    memory_of_step,
    rows_of_model,
)
from lachesis_train.trainer.settings import EnvSettings, Settings, TrainingSettings

SMOLLM2 = {
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
PARAMETERS = 134_515_008
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of SmolLM2-135M that say how large it is."""
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "smollm2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(2 * PARAMETERS)
    return folder


def settings(model: Path, tokens: int = 2048, *, group_size: int = 4, **training: object) -> Settings:
    return Settings(
        env=EnvSettings(group_size=group_size),
        training=TrainingSettings.model_validate({"max_token_trainer_length": tokens, **training}),
        served_model="m",
        base_model=str(model),
        tokenizer=None,
        port=0,
        num_steps=3,
    )


@pytest.mark.parametrize(("tokens", "measured"), [(1024, 3_780), (2048, 5_940), (4096, 10_540)])
def test_the_memory_of_a_step_is_about_what_was_measured(model: Path, tokens: int, measured: int) -> None:
    """Measured: the peak of the resident memory of a process that trains one sequence of SmolLM2, in MiB."""
    found = memory_of_step(ModelShape.of(model), settings(model), Work(1, tokens, 1))
    assert 0.85 < found / MIB / measured < 1.15


def test_the_memory_of_full_fine_tuning_is_about_what_was_measured(model: Path) -> None:
    """The same in the second step, with Adam's moments and two versions of the weights that were sampled."""
    found = memory_of_step(ModelShape.of(model), settings(model, engine_full_finetuning=True), Work(1, 1024, 1))
    assert 0.85 < found / MIB / 5_491 < 1.15


def test_the_rows_of_the_model_are_known_of_the_embedded_engine_on_any_device(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("cpu", "cuda"):
        assert rows_of_model(settings(model, engine_device=device)) == 49152
    assert rows_of_model(settings(model / "none")) == ANY_ROW
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")  # another engine, which knows what model that is
    assert rows_of_model(settings(model)) == ANY_ROW


def test_a_step_that_cannot_fit_is_refused_with_the_setting_to_change(model: Path) -> None:
    with pytest.raises(SettingsError, match=r"does not fit.* 8,191 tokens .* GiB, and there are 8.0 GiB") as refused:
        check_memory(settings(model, 8192), machine=8 * GIB)
    allowed = int(str(refused.value).split("max_token_trainer_length to ")[1].split()[0])
    check_memory(settings(model, allowed), machine=8 * GIB)
    with pytest.raises(SettingsError, match="does not fit"):
        check_memory(settings(model, allowed + 1), machine=8 * GIB)


def test_where_shorter_sequences_do_not_help_the_other_settings_are_named(model: Path) -> None:
    with pytest.raises(SettingsError, match=r"engine_lora_layers.*engine_dtype.*base_model"):
        check_memory(settings(model, 1024), machine=2 * GIB)
    check_memory(settings(model, 1024, engine_lora_layers=2), machine=2 * GIB)


def test_more_sequences_need_more_time_and_no_more_memory(model: Path) -> None:
    shape, chosen = ModelShape.of(model), settings(model)
    assert memory_of_step(shape, chosen, Work(64, 2048, 1)) == memory_of_step(shape, chosen, Work(8, 2048, 1))


@pytest.mark.parametrize("given", [{"engine_device": "cuda"}, {}])
def test_what_the_cpu_of_this_machine_does_not_train_is_not_refused(
    model: Path, given: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not given:
        monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    check_memory(settings(model, 8192, **given), machine=GIB)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/user/run", "user/run/memory.max"),
        ("0::/user/run", "user/memory.max"),
        ("4:cpu,memory:/user/run", "memory/user/run/memory.limit_in_bytes"),
        ("4:memory:/elsewhere", "memory/memory.limit_in_bytes"),
    ],
)
def test_the_memory_of_a_machine_is_at_most_that_of_the_control_group(tmp_path: Path, line: str, file: str) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nSwapTotal:        0 kB\n")
    (proc / "self/cgroup").write_text(line + "\n")
    limit = groups / file
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n" if "max" in file else f"{1 << 62}\n")
    assert memory_of_machine(proc, groups) == 16 * GIB
    limit.write_text(f"{3 * GIB}\n")
    assert memory_of_machine(proc, groups) == 3 * GIB
    assert memory_of_machine(tmp_path / "nothing", groups) == 0
    assert memory_of_machine() > 0
