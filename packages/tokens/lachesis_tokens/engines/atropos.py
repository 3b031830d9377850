"""The `/generate` of the vLLM servers that Atropos' trainers ship (and of vLLM's early demonstration server)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lachesis_client.errors import BadResponse
from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.engines.http_engine import SingleRequestEngine, ids_or_none
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.engines.vllm import sampling_params


class AtroposEngine(SingleRequestEngine):
    """Atropos' legacy API: a prompt object and vLLM's sampling parameters in, one `{id: logprob}` a token out.

    The server passes every field but the prompt to vLLM's `SamplingParams`, so a request has no other field, not even
    the model's name. Logprobs are raw unless vLLM was started with `--logprobs-mode processed_logprobs`.
    """

    kind: ClassVar[str] = "atropos"
    modes: ClassVar[tuple[LogprobsKind, ...]] = ("raw", "processed")

    @property
    def url(self) -> str:
        """Outside `/v1`."""
        return f"{self.root_url}/generate"

    def finish_reasons(self, body: Mapping[str, Any]) -> Sequence[str]:
        """`finish_reasons`."""
        reasons = body.get("finish_reasons")
        return [reason for reason in reasons if isinstance(reason, str)] if isinstance(reasons, list) else []

    async def tokenize(self, text: str) -> list[int] | None:
        """See `ServerTokenizer`: by the echo of a completion of the text, in later versions."""
        answer = await self.send(self.url, {"prompt": text, "max_tokens": 1, "logprobs": 0}, max_retries=1)
        return ids_or_none(answer.body.get("prompt_token_ids"))

    def payload(self, prompt: PromptIds, sampling: Sampling, n: int) -> dict[str, Any]:
        """The prompt in addition to the sampling parameters."""
        params = {**self.extra(sampling), **sampling_params(sampling, n)}
        return {"prompt": {"prompt_token_ids": prompt}, **params}

    def read(self, body: Mapping[str, Any], prompt: PromptIds) -> list[Generation]:
        """`logprobs[completion][token] = [{id: logprob}]`; later versions also report `token_ids`."""
        completions, reasons, ids = body.get("logprobs"), body.get("finish_reasons"), body.get("token_ids")
        if not isinstance(completions, list) or not isinstance(reasons, list) or len(completions) != len(reasons):
            raise BadResponse(
                self.base_url,
                f"the answer has no logprobs and finish_reasons (its keys: {', '.join(map(str, body)) or 'none'})",
                "check that base_url points to a server with Atropos' /generate (stock vLLM: engine vllm)",
            )
        listed = ids if isinstance(ids, list) and len(ids) == len(completions) else [None] * len(completions)
        self.check_prompt(prompt, body.get("prompt_token_ids"), None)
        return [self._generation(*of_one) for of_one in zip(completions, listed, reasons, strict=True)]

    def _generation(self, entries: object, listed: object, reason: object) -> Generation:
        ids: list[object] = []
        logprobs: list[object] = []
        for entry in entries if isinstance(entries, list) else [None]:
            of_token = entry[0] if isinstance(entry, list) and len(entry) == 1 else entry
            if not isinstance(of_token, Mapping) or len(of_token) != 1:
                raise BadResponse(
                    self.base_url,
                    f"a sampled token came as {of_token!r}, not as one id with one logprob",
                    "set no logprobs of your own in extra_body",
                )
            [(token, logprob)] = of_token.items()
            ids.append(int(token) if isinstance(token, str) and token.isdecimal() else token)
            logprobs.append(logprob)
        if isinstance(listed, list) and listed != ids:
            raise BadResponse(
                self.base_url,
                "token_ids and the ids in logprobs differ",
                "update the server: its logprobs do not belong to the tokens that it sampled",
            )
        return self.generation(ids, logprobs, reason)
