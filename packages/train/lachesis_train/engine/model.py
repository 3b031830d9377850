"""The base model and its LoRA adapters. One thread uses it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from backends.errors import SettingsError
from lachesis_train.engine.errors import RequestError

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP: Final = ("gate_proj", "up_proj", "down_proj")
UNEMBED: Final = "lm_head"
MAX_RANK: Final = 512


@dataclass(frozen=True)
class LoraSpec:
    """The parts of an adapter: the fields of Tinker's LoraConfig, and the engine's own start options."""

    rank: int = 32
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    alpha: float = 32.0
    layers: int | None = None
    """Only the last so many layers have adapters, so the backward pass ends there."""
    full: bool = False
    """All parameters are trained, and the rest of the specification means nothing."""

    def as_dict(self) -> dict[str, Any]:
        """JSON of the specification, as checkpoints keep it."""
        return asdict(self)


FULL: Final = LoraSpec(rank=0, full=True)


class Model:
    """A causal language model that transformers loads, with adapters by name of which at most one is in use.

    Full weights, which replace all of its own, have a name like an adapter.
    """

    def __init__(self, folder: Path, *, dtype: str = "float32", device: str = "cpu") -> None:
        """Raises SettingsError where the model cannot be used."""
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        self.folder = folder
        self.device = torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self.network: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, dtype), local_files_only=True
        ).to(self.device)
        self.network.requires_grad_(False)
        self.network.eval()  # no dropout: the trainer's logprobs are those of the sampler
        config = self.network.config.get_text_config()
        self.context_length = int(config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)
        self.layer_count = int(config.num_hidden_layers)
        self.end_ids = self._end_ids()
        self.pad_id = next(iter(sorted(self.end_ids)), 0)
        self._decoder = self.network.get_decoder()
        self._layers: list[Any] = []
        self._used: str | None = None
        self._base: dict[str, torch.nn.Parameter] = dict(self.network.named_parameters())
        names = {parameter: key for key, parameter in self._base.items()}  # a tied one has several places
        self._places = [
            (module, at, names[parameter])
            for module in self.network.modules()
            for at, parameter in module.named_parameters(recurse=False)
        ]
        self._full: dict[str, dict[str, torch.nn.Parameter]] = {}
        self._check_head()

    def _end_ids(self) -> frozenset[int]:
        named = self.network.generation_config.eos_token_id
        ids = {self.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
        return frozenset(int(token) for token in ids if token is not None)

    def _check_head(self) -> None:
        """The engine computes logits at chosen positions only, so nothing may come after the head."""
        ids = torch.arange(4, device=self.device)[None] % self.vocab_size
        with torch.inference_mode():
            whole = self.network(input_ids=ids).logits
            ours = self.logits(self.hidden(ids))
        if not torch.allclose(whole.float(), ours.float(), atol=1e-4, rtol=1e-3):
            raise SettingsError(
                f"model {self.folder}: {type(self.network).__name__} changes its logits after the head "
                "(soft-capping), which the engine does not support; use a model of the Llama, Qwen or Mistral family"
            )

    def hidden(self, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
        """The last hidden states, [batch, length, hidden], of `ids`, [batch, length]."""
        return self._decoder(input_ids=ids, **{"use_cache": False, **settings}).last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, [..., vocabulary], in the dtype of the model."""
        return self.network.get_output_embeddings()(hidden)

    def add_adapter(self, name: str, spec: LoraSpec, seed: int | None = None) -> None:
        """A new adapter, or a copy of all parameters, which changes nothing until it is trained. Raises RequestError
        for a specification that does not fit."""
        from peft import LoraConfig, inject_adapter_in_model

        if spec.full:
            self._full[name] = {key: torch.nn.Parameter(each.detach().clone()) for key, each in self._base.items()}
            return
        targets = [
            *(ATTENTION if spec.train_attn else ()),
            *(MLP if spec.train_mlp else ()),
            *((UNEMBED,) if spec.train_unembed else ()),
        ]
        if not 1 <= spec.rank <= MAX_RANK:
            raise RequestError(f"lora rank {spec.rank} is not between 1 and {MAX_RANK}")
        if not targets:
            raise RequestError("nothing to train: train_attn, train_mlp and train_unembed are all false")
        count = self.layer_count
        first = count - min(spec.layers or count, count)
        pattern = "|".join([*(str(layer) for layer in range(first, count))])
        kinds = "|".join(target for target in targets if target != UNEMBED)
        places = [rf".*\.layers\.({pattern})\..*\.({kinds})"] if kinds else []
        places += [UNEMBED] if spec.train_unembed else []
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            lora_dropout=0.0,
            target_modules="|".join(f"({place})" for place in places),
            task_type="CAUSAL_LM",
        )
        self.use(None)  # peft takes the gradient from all parameters that are in place
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns that a tied head cannot be merged, which nobody does here
            torch.manual_seed(torch.seed() if seed is None else seed)
            inject_adapter_in_model(config, self.network, name)
        self._find_layers()
        self._used = ""  # peft has switched some layers
        for parameter in self.parameters(name).values():
            parameter.data = parameter.data.float()

    def remove_adapter(self, name: str) -> None:
        """Free an adapter, or full weights."""
        if self._used == name:
            self.use(None)
        if self._full.pop(name, None) is not None:
            return
        for layer in self._layers:
            if name in layer.lora_A:
                layer.delete_adapter(name)
        self.network.peft_config.pop(name, None)

    def use(self, name: str | None) -> None:
        """Switch to an adapter, to full weights, or to the base model."""
        if name == self._used:
            return
        full = self._full.get(name or "")
        if full is not None or self._used in self._full:
            for module, at, key in self._places:
                setattr(module, at, (full or self._base)[key])
        for layer in self._layers:
            layer.enable_adapters(name is not None and full is None)
            if name is not None and full is None:
                layer.set_adapter(name)
        self._used = name

    def add_weights(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Full weights for sampling, which are not copied where the device has them."""
        on = {key: each.to(self.device) for key, each in tensors.items()}
        self._full[name] = {key: torch.nn.Parameter(each, requires_grad=False) for key, each in on.items()}

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """The parameters of an adapter, by names that do not contain the adapter's, or full weights."""
        return self._full.get(name) or dict(self._parameters(name))

    def _parameters(self, name: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for key, parameter in self.network.named_parameters():
            parts = key.split(".")
            if name in parts and ("lora_A" in parts or "lora_B" in parts):
                yield ".".join(part for part in parts if part != name), parameter

    def _find_layers(self) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._layers = [module for module in self.network.modules() if isinstance(module, BaseTunerLayer)]


def widened(logits: torch.Tensor) -> torch.Tensor:
    """In float32, or in what is more exact."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Logprobs in float32 or more, [n], of targets [n] under logits [n, vocabulary]."""
    return -torch.nn.functional.cross_entropy(widened(logits), targets, reduction="none")
