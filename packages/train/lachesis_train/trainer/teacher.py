"""On-policy distillation: another model says how likely it finds each token that the policy sampled.

The advantage of a token falls by `log q - log t`, q the sampler's probability and t the teacher's: the gradient of the
reverse KL divergence, estimated with the sampled tokens (arXiv 2306.13649). `penalise_divergence` adds it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Final

from backends.errors import ExitCode
from backends.tasks import run_all
from lachesis.settings.server_settings import key_for
from lachesis_client import ServerSettings
from lachesis_client.errors import InferenceError
from lachesis_tokens.engines.vllm import VLLMCompletions
from lachesis_tokens.prompts.tokenizer_proof import TokenizerProof
from lachesis_train.tinker_sdk import TrainingEngineError

_AT_ONCE: Final = 32


class Teacher:
    """A model behind vLLM's `/v1/completions` with `prompt_logprobs`, such as a policy server's.

    Args:
        tokenizer: the policy's. The teacher's must split text into the same ids, which is compared at the first call.
        settings: more fields of `ServerSettings`.
    """

    def __init__(self, url: str, model: str, tokenizer: Any, **settings: Any) -> None:
        self.url, self.model = url, model
        self._engine = VLLMCompletions(
            ServerSettings(base_url=url, model_name=model, api_key=key_for(url), max_concurrency=_AT_ONCE, **settings)
        )
        self._proof = TokenizerProof(tokenizer)
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each sequence, the logprob of each token after those before it. The first one is NaN.

        Raises:
            InferenceError: another try would not help; `TokenizersDiffer` where the ids mean other text to the teacher.
            TrainingEngineError: it does not answer, or not with logprobs.
        """
        try:
            await self._proof.prove(self._engine)
            return await run_all(self._of(list(ids)) for ids in sequences)
        except InferenceError as error:
            if error.exit_code == ExitCode.SETTINGS:
                raise
            raise TrainingEngineError(f"ask the teacher {self.model} at {self.url}", error) from error

    async def _of(self, ids: list[int]) -> list[float]:
        async with self._places:
            positions = (await self._engine.prompt_logprobs(ids, 0)).positions
        return [math.nan, *(entries[0][1] for entries in positions[1:])]

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()
