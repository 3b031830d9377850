"""On-policy distillation: another model says how likely it finds each token that the policy sampled.

The advantage of a token falls by `log q - log t`, q the sampler's probability and t the teacher's: the gradient of the
reverse KL divergence, estimated with the sampled tokens (arXiv 2306.13649). `penalise_divergence` adds it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from backends.errors import ExitCode
from backends.tasks import run_all
from lachesis.settings.server_settings import key_for
from lachesis_client import ServerSettings
from lachesis_client.errors import BadResponse, InferenceError, RequestRejected
from lachesis_tokens.engines.vllm import VLLMCompletions
from lachesis_tokens.prompts.tokenizer_proof import TokenizerProof
from lachesis_train.tinker_sdk import TrainingEngineError

_AT_ONCE: Final = 32


class TeacherFailed(TrainingEngineError):
    """It did not answer, or not with logprobs."""

    weights_known = True


class Teacher:
    """A model behind vLLM's `/v1/completions` with `prompt_logprobs`, such as a policy server's.

    Args:
        tokenizer: the policy's. The teacher's must split text into the same ids, which is compared at the first call,
            and again after it was away.
        say: told once where the teacher has no way to say how it splits text.
        settings: more fields of `ServerSettings`.
    """

    def __init__(
        self, url: str, model: str, tokenizer: Any, *, say: Callable[[str], object] = print, **settings: Any
    ) -> None:
        self.url, self.model = url, model
        self._engine = VLLMCompletions(
            ServerSettings(base_url=url, model_name=model, api_key=key_for(url), max_concurrency=_AT_ONCE, **settings)
        )
        self._proof = TokenizerProof(tokenizer)
        self._proven: bool | None = None
        """None before the first answer."""
        self._say = say
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """For each sequence, the logprob of each token after those before it. The first one is NaN.

        Raises:
            InferenceError: another try would not help; `TokenizersDiffer` where the ids mean other text to the teacher.
            TeacherFailed: it does not answer, or not with logprobs.
        """
        try:
            proven = self._proven or await self._proof.prove(self._engine)
            found = await run_all(self._of(list(ids)) for ids in sequences)
            if proven:
                await self._proof.prove_again(self._engine)  # another one may have answered
        except InferenceError as error:
            if error.exit_code == ExitCode.SETTINGS or isinstance(error, RequestRejected):
                raise
            raise TeacherFailed(f"ask the teacher {self.model} at {self.url}", error) from error
        if not proven and self._proven is None:
            self._say(
                f"warning: nothing at {self.url} says how the teacher {self.model} splits text, so that another "
                "tokenizer would go unnoticed: make sure that it has that of the policy"
            )
        self._proven = proven
        return found

    async def _of(self, ids: list[int]) -> list[float]:
        async with self._places:
            positions = (await self._engine.prompt_logprobs(ids, 0)).positions
        found = [entries[0][1] if entries else math.nan for entries in positions[1:]]
        if not all(map(math.isfinite, found)):
            raise BadResponse(self.url, f"prompt_logprobs of {len(ids)} tokens came with some missing or not finite")
        return [math.nan, *found]

    async def close(self) -> None:
        """Close the connections."""
        await self._engine.close()
