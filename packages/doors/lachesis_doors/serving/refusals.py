"""Rollouts that a trainer would train as something else than what was sampled: these are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

from lachesis.loop.rollout import Rollout
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client.client_settings import ServerSettings
from lachesis_client.sampling import LogprobsKind
from lachesis_messages.images import image_urls
from lachesis_messages.records.sampling_record import OTHER_FIELDS, sampling_problem
from lachesis_tokens.samples.samples import TokenSample
from lachesis_tokens.samples.verification import not_written, verify
from lachesis_tokens.server.serving import settings_problem

TOKEN_FIELDS: Final = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
"""Of an answer of NeMo Gym's model servers. They take them back with the message, to continue these very tokens."""
UNTRAINABLE: Final = "untrainable"
"""The kind of such a rollout, beside those of `Rollout.unscored_kind`."""


def problem_of_settings(server: Any, config: HermesAgentEnvConfig, named: Collection[str]) -> str | None:
    """Why no rollout with these settings could be trained. `named`: parameters that the requests of a trainer set."""
    for each in server.servers:
        for name in ("routed_experts", "sampling_mask"):
            if getattr(each.settings, name):
                return f"openai.{name} is set, which the trainer would not get; leave it out, or use lachesis train"
    engines: list[tuple[ServerSettings, LogprobsKind]] = [
        (each.settings, getattr(each, "logprobs", "processed")) for each in server.servers
    ]
    return settings_problem(engines, config, temperature=1.0, named={"temperature", *named}, masks=False)


def refusal(rollout: Rollout, server: Any, config: HermesAgentEnvConfig, named: Collection[str]) -> str:
    """Why a scored rollout may not be trained from its ids, masks and logprobs alone; empty where it may.

    `named`: the sampling parameters of the request. They are the trainer's own choice.
    """
    if rollout.reward is None or rollout.result is None:
        return ""
    samples: Sequence[TokenSample] = [sample for sample in rollout.samples if not sample.discarded]
    for sample in samples:
        for reason in (*not_written(sample), *verify(sample, on_policy=False), *_sampled_otherwise(sample, named)):
            return f"the rollout cannot be trained: {reason}"
    history = rollout.result.history
    if samples or not any(TOKEN_FIELDS[0] in said.message.extra for said in history.completions()):
        return ""
    # A chat server that reports tokens (NeMo Gym's) writes no certificate.
    if any(True for node in history.all_nodes() for _ in image_urls(node.message.content)):
        return "the rollout cannot be trained: it has images, which are not written"
    problem = problem_of_settings(server, config, named)
    return f"the rollout cannot be trained: {problem}" if problem else ""


def _sampled_otherwise(sample: TokenSample, named: Collection[str]) -> Iterator[str]:
    for span in sample.spans:
        record = {name: value for name, value in span.sampling.items() if name not in named}
        record[OTHER_FIELDS] = [name for name in record.get(OTHER_FIELDS) or () if name not in named]
        if "temperature" in named:
            temperature = span.sampling.get("temperature")
            # Raw logprobs are at temperature 1, whatever the trainer chose.
            raw = record.get("logprobs") == "raw" and temperature is not None
            record["temperature"] = temperature if raw else 1.0
        if problem := sampling_problem(record):
            yield f"turn {span.turn}: {problem}"
