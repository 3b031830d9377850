"""The `/generate` of the vLLM servers that Atropos' trainers ship (and vLLM's own demonstration server of old)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lachesis.inference.engines.base import Generation
from lachesis.inference.engines.http_engine import Reading, SingleRequestEngine
from lachesis.inference.engines.prompt_ids import PromptIds
from lachesis.inference.engines.vllm import sampling_params
from lachesis.inference.errors import BadResponse
from lachesis.inference.sampling import LogprobsKind, Sampling


class AtroposEngine(SingleRequestEngine):
    """Atropos' legacy shape: a prompt object and vLLM's sampling parameters in, one `{id: logprob}` a token out.

    The server hands every field but the prompt to vLLM's `SamplingParams`, so it is sent nothing else, the model's name
    included. Logprobs are raw unless vLLM was started with `--logprobs-mode processed_logprobs`.
    """

    kind: ClassVar[str] = "atropos"
    modes: ClassVar[tuple[LogprobsKind, ...]] = ("raw", "processed")

    @property
    def url(self) -> str:
        """Beside the version, not below it."""
        return f"{self.root_url}/generate"

    def broken_off(self, body: Mapping[str, Any]) -> str | None:
        """A finish reason of `abort` or `error`."""
        reasons = body.get("finish_reasons")
        broken = [reason for reason in reasons if reason in ("abort", "error")] if isinstance(reasons, list) else []
        return f"finish_reason {broken[0]!r}" if broken else None

    def payload(self, prompt: PromptIds, sampling: Sampling, n: int) -> dict[str, Any]:
        """The prompt beside the sampling parameters."""
        params = {**self.extra(sampling), **sampling_params(sampling, n)}
        return {"prompt": {"prompt_token_ids": prompt}, **params}

    def read(self, body: Mapping[str, Any]) -> Reading:
        """`logprobs[completion][token] = [{id: logprob}]`, and `token_ids` beside it in later versions."""
        completions, reasons, ids = body.get("logprobs"), body.get("finish_reasons"), body.get("token_ids")
        if not isinstance(completions, list) or not isinstance(reasons, list) or len(completions) != len(reasons):
            raise BadResponse(
                self.base_url,
                f"the answer has no logprobs and finish_reasons (its keys: {', '.join(map(str, body)) or 'none'})",
                "check that base_url is that of a server with Atropos' /generate (stock vLLM: kind vllm)",
            )
        listed = ids if isinstance(ids, list) and len(ids) == len(completions) else [None] * len(completions)
        return Reading(
            generations=[self._generation(*of_one) for of_one in zip(completions, listed, reasons, strict=True)],
            prompt_ids=body.get("prompt_token_ids"),
        )

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
                "update the server: its logprobs are not those of the tokens that it sampled",
            )
        return self.generation(ids, logprobs, reason)
