"""The HTTP server in front of a policy."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from aiohttp import web

from lachesis_client.client_settings import ServerSettings
from lachesis_client.errors import ContextExhausted, PromptError, RequestRejected
from lachesis_messages.errors import MessageError
from lachesis_tokens.model_routes.host import model_info, model_list
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.prompts.vocabulary import ANY_ROW
from lachesis_tokens.server.completion_reader import CompletionReader
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tokens.templates.forced_calls import ToolChoiceError
from lachesis_tokens.templates.parser_match import parser_for
from lachesis_tokens.wire.openai_chat import error
from lachesis_tokens.wire.request import JSON, Refused
from lachesis_tokens.wire.service import WebService, has_bearer
from lachesis_tokens.wire.visitors import is_loopback
from lachesis_tokens.wire.writing import dump, load
from lachesis_train.policy import CurrentPolicy
from lachesis_train.policy_server.engine import EngineFailed, PolicyEngine
from lachesis_train.policy_server.routes import PolicyHost, Routes
from tool_call_parsers import ToolCallParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log: Final = logging.getLogger(__name__)
_NO_LIMIT: Final = 2**24
"""Tokenizers that know no limit have a much greater number."""
Answer = Callable[[JSON], Awaitable[bytes]]


class PolicyServer(WebService):
    """Serves the current version of a policy; an async context manager.

    Args:
        policy: its samplers make the tokens.
        tokenizer: the model's, with its chat template.
        model_name: the name that requests have to use, if they use one.
        host, port: the address. Port 0 is a free port.
        token: the bearer token that every route but `/health` then requires.
        tool_call_parser: reads calls from chat completions that were offered tools.
        prompts: the prompt builder, where the tokenizer's own template is not to be used.
        context_length: tokens of prompt and completion together; None is the tokenizer's `model_max_length`.
            `max_tokens` is lowered to the room that a prompt leaves.
        max_concurrency: requests that are sampled at once. The others wait.
        max_waiting: requests that may wait. Further ones are answered with 429.
        retry_after: seconds that clients are asked to wait after 429 and 503.
        wandb_info: what `/wandb_info` answers: Atropos' `group` and `project`.
    """

    title: ClassVar[str] = "the policy server"

    def __init__(
        self,
        policy: CurrentPolicy,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_name: str,
        host: str = "127.0.0.1",
        port: int = 8001,
        token: str | None = None,
        tool_call_parser: ToolCallParser | str = "hermes",
        prompts: PromptBuilder | None = None,
        context_length: int | None = None,
        max_concurrency: int = 256,
        max_waiting: int = 1024,
        retry_after: float = 1.0,
        wandb_info: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__(host, port, has_token=bool(token), others="give it a token, which they send as api_key")
        self.policy = policy
        self.model_name = model_name
        if context_length is None and tokenizer.model_max_length <= _NO_LIMIT:
            context_length = tokenizer.model_max_length
        self.context_length = context_length
        self.in_flight = 0
        """Requests that are sampled or wait."""
        self._tokenizer_name = str(tokenizer.name_or_path)
        self._address_text = f"{host}:{port}"
        self._is_public = not is_loopback(host) and not token
        self._token = token or ""
        self._most = max_concurrency + max_waiting
        self._retry_after = {"Retry-After": f"{retry_after:g}"}
        self._wandb_info = dict(wandb_info or {"group": None, "project": None})
        prompts = prompts or PromptBuilder(tokenizer)
        parser = tool_call_parser
        if isinstance(parser, str):
            parser = parser_for(prompts, parser)
        engine = PolicyEngine(
            policy,
            ServerSettings(PolicyEngine.base_url, model_name, max_concurrency=max_concurrency),
            end_of_turn=prompts.end_of_turn,
            decode=CompletionReader(tokenizer, parser).decode,
            context_length=context_length,
        )
        self._host = PolicyHost(
            policy, TokenServer([engine], prompts, parser, rows=ANY_ROW), model_name, context_length
        )

    async def start(self) -> None:
        """Bind the port and start to answer. Raises `SettingsError` where the address cannot be bound."""
        await super().start()
        if self._is_public:
            _log.warning(
                "the policy server listens on %s without a token: anybody who reaches it can sample the policy",
                self._address_text,
            )

    def routes(self) -> Iterable[web.RouteDef]:
        """Those of `docs/policy-server.md`."""
        answers = Routes(self._host)
        return (
            web.post("/v1/completions", self._sampling(answers.completions)),
            web.post("/v1/chat/completions", self._sampling(answers.chat)),
            web.post("/generate", self._sampling(answers.generate)),
            web.post("/inference/v1/generate", self._sampling(answers.generate_ids)),
            web.post("/tokenize", self._sampling(answers.tokenize)),
            web.get("/v1/models", self._facts(self._models)),
            *(web.get(path, self._facts(self._model_info)) for path in ("/get_model_info", "/model_info")),
            web.get("/wandb_info", self._facts(lambda: self._wandb_info)),
            web.get("/health", self._health),
        )

    def _sampling(self, answer: Answer) -> Any:
        async def handle(request: web.Request) -> web.Response:
            try:
                self._authorize(request)
                if self.in_flight >= self._most:
                    raise Refused(
                        429, f"{self.in_flight} requests are in flight; ask again later", code="rate_limit_exceeded"
                    )
                self.in_flight += 1
                try:
                    return _response(200, await self._answer(answer, request))
                finally:  # also if the client is gone, which cancels this task
                    self.in_flight -= 1
            except Refused as refused:
                return self._refusal(refused)

        return handle

    async def _answer(self, answer: Answer, request: web.Request) -> bytes:
        """The answer. Errors become what the client may read of them."""
        try:
            return await answer(load(await request.read()))
        except web.HTTPRequestEntityTooLarge as large:
            raise Refused(413, f"the body is too large: {large.text}") from None
        except ContextExhausted as too_long:
            raise Refused(400, f"the prompt is too long: {too_long.body}", code="context_length_exceeded") from None
        except RequestRejected as rejected:
            raise Refused(rejected.status, rejected.body) from None
        except (MessageError, PromptError, ToolChoiceError) as wrong:
            raise Refused(400, str(wrong)) from None
        except RecursionError:
            raise Refused(400, "the body is nested too deeply") from None
        except EngineFailed as failed:
            raise Refused(503, f"the engine failed: {failed}", code="engine_failed") from None
        except Refused:
            raise
        except Exception as failure:
            _log.exception("the policy server failed")
            raise Refused(
                500, f"the policy server failed: {type(failure).__name__}: {failure}", code="policy_server_failed"
            ) from failure

    def _facts(self, facts: Callable[[], Any]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            try:
                self._authorize(request)
            except Refused as refused:
                return self._refusal(refused)
            return _response(200, facts())

        return handle

    def _authorize(self, request: web.Request) -> None:
        if self._token and not has_bearer(request, self._token):
            raise Refused(401, "the bearer token is missing or wrong; set api_key to it", code="invalid_api_key")

    def _refusal(self, refused: Refused) -> web.Response:
        return _response(refused.status, error(refused), self._retry_after if refused.status in (429, 503) else None)

    def _models(self) -> JSON:
        return model_list(self._host, owned_by="lachesis", policy_server=True, root=self._tokenizer_name)

    def _model_info(self) -> JSON:
        return {**model_info(self._host), "weight_version": self.policy.current.name}

    async def _health(self, request: web.Request) -> web.Response:
        current = self.policy.current
        return _response(
            200,
            {"status": "ok", "version": current.name, "step": current.step, "in_flight": self.in_flight},
        )


def _response(status: int, body: Any, headers: Mapping[str, str] | None = None) -> web.Response:
    raw = body if isinstance(body, bytes) else dump(body)
    return web.Response(status=status, body=raw, content_type="application/json", headers=headers)
