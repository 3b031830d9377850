"""The reference policy of an environment, with the tokens that a model would have sampled to give its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

from lachesis.runs.reference_policy import MODEL_NAME, Policy, ReferencePolicy
from lachesis_client.chat_options import ChatOptions, Split
from lachesis_client.errors import RequestRejected, TemplateError
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.records.sampling_record import NOT_SAMPLED
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import SampledTokens
from lachesis_tokens.prompts.dataset_prompts import DatasetPrompts


class ReferenceTokens(ReferencePolicy):
    """See `ReferencePolicy`. Its rollouts have samples, with the prompts that the model gets in training.

    The logprobs are 0.0, since nothing was sampled: the samples are for cross-entropy only.
    """

    def __init__(self, policy: Policy | None, prompts: DatasetPrompts) -> None:
        super().__init__(policy)
        self.prompts = prompts

    async def chat(
        self, messages: Sequence[Message | Mapping[str, Any]], *, split: Split = "train", **options: Unpack[ChatOptions]
    ) -> ChatResponse:
        """See `ReferencePolicy.chat`. Raises `RequestRejected` also where the chat template cannot write the answer."""
        response = await super().chat(messages, split=split, **options)
        history = messages if isinstance(messages, MessageHistory) else MessageHistory(messages)
        tools = options.get("tools")
        try:
            prompt = self.prompts.prompt(history.nodes(), tools)
            ids = self.prompts.turn(MessageHistory([*history, response.message]).nodes(), tools)
        except TemplateError as error:
            raise RequestRejected(MODEL_NAME, 400, str(error), "set --env.chat_template FILE.jinja") from error
        tokens = SampledTokens.sample(
            prompt.prefix, ids, [0.0] * len(ids), end_of_turn=self.prompts.end_of_turn, context=prompt.context
        )
        return replace(response, tokens=tokens, sampling={"logprobs": NOT_SAMPLED})
