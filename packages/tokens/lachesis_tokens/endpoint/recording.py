"""The requests of one rollout to the model, and the history that is built from them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypedDict, TypeVar, Unpack

from backends.tasks import run_all
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult, TokenCount
from lachesis_client.affinity import Affinity
from lachesis_client.chat_format import read_finish_reason, read_usage
from lachesis_client.chat_options import ChatOptions, Split
from lachesis_client.errors import (
    ContextExhausted,
    ConversationRefused,
    InferenceError,
    PromptError,
    RequestRejected,
)
from lachesis_client.model_server import MessageServer, ModelServer
from lachesis_client.parse_thread import is_long, parse
from lachesis_client.sampling import Sampling, read_sampling
from lachesis_messages.encoded import EncodedPath, NodeMessages
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse, Node, Usage
from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.endpoint.request_times import RequestTimes
from lachesis_tokens.server.conversation_index import ConversationIndex, Found
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tokens.wire.request import JSON, ChatRequest, Refused, TextRequest
from lachesis_tokens.wire.writing import token_names

T = TypeVar("T")
_log: Final = logging.getLogger(__name__)


class RecordingOptions(TypedDict, total=False):
    """The arguments of `RecordingEndpoint.open`."""

    temperature: float | None
    """Of every completion, whatever the client sends; default 1."""
    max_tokens: int | None
    """Completion tokens of one request. The smaller of this and the client's limit holds. Default: the server's."""
    extra_body: Mapping[str, Any] | None
    """Further sampling parameters (`top_p`, ...) and fields of the model server."""
    split: Split
    """"train" (the default) or "eval"."""
    client_sampling: bool
    """Take the temperature and the other sampling parameters that clients send. A trainer rejects logprobs of mixed
    temperatures."""
    max_requests: int | None
    """Requests of the rollout that are answered."""
    rollout_token_budget: int | None
    """Tokens that the rollout samples."""
    affinity: Affinity | None
    """The group and the session of the rollout, for the choice of servers; default: those of a rollout on its own."""
    finish_abandoned: bool
    """Let a request whose client is gone go on until a client asks again. (It is cancelled by default.) A client that
    was stopped may have waited for a long completion or for a server that hangs: see `Recording.waited`."""


class Recording:
    """The model as one rollout's program sees it over HTTP. `RecordingEndpoint.open` makes it.

    Every completion is recorded before its answer is written, so a client that disconnects loses none.
    """

    def __init__(
        self,
        server: ModelServer,
        key: str,
        root_url: str,
        forget: Callable[[Recording], None],
        **options: Unpack[RecordingOptions],
    ) -> None:
        self.key = key
        self.base_url = f"{root_url}/{self.key}"
        """Clients append the route: OpenAI's `/v1`, Anthropic's `/v1/messages`."""
        self.sessions: set[str] = set()
        """See `RecordingEndpoint.accept_session`."""
        self.closed = False
        self._forget = forget
        self.error: Exception | None = None
        """The first failure of the infrastructure that a client met. Such a rollout has no score."""
        self._rejected: Exception | None = None
        """The first request whose content the model server or the chat template rejected, or that met a defect."""
        self._has_defect = False
        self.limit: str | None = None
        """The first limit that a client met: the model's context, or the recording's own."""
        self.refusal: str | None = None
        """How the model server first refused the content of a conversation, or withheld an answer."""
        self.refused: Counter[str] = Counter()
        """Requests that could not be answered, by the reason that the client read."""
        self.overruled: set[str] = set()
        """Parameters of clients that the settings of the run replaced."""
        self._server = server
        self._model = server.for_rollout()
        self._model.affinity = options.get("affinity") or self._model.affinity
        self._settings: JSON = {
            "temperature": options.get("temperature", 1.0),
            "max_tokens": options.get("max_tokens"),
            "extra_body": options.get("extra_body"),
        }
        self._split: Split = options.get("split", "train")
        self._client_sampling = options.get("client_sampling", False)
        self._max_requests = options.get("max_requests")
        self._rollout_token_budget = options.get("rollout_token_budget")
        self.answered: dict[str, list[JSON | Message]] = {}
        """Conversations of the responses route, each with its answer, by the id of the answer."""
        self.requests = 0
        """Those that were answered or are in flight."""
        self._held = 0
        """Tokens that requests in flight may sample, where there is a budget."""
        self._ended = asyncio.Event()
        self._conversations = ConversationIndex()
        self._encoded: dict[str | None, EncodedPath] = {}
        self._sampled: list[Node] = []
        self._call_ids: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.finish_abandoned = options.get("finish_abandoned", False)
        self._abandoned: set[asyncio.Task[Any]] = set()
        """The members of `_tasks` whose clients are gone."""
        self.times = RequestTimes()
        self.reading = asyncio.Lock()
        """Held while a large body is read."""

    # What clients ask

    async def chat(self, request: ChatRequest) -> list[ChatResponse]:
        """`n` answers, recorded. Raises `Refused`, `MessageError` and the errors of the model server."""
        with self.times.asked() as latencies:
            responses = await self._chat(request)
            latencies += [response.latency for response in responses]
        return responses

    async def _chat(self, request: ChatRequest) -> list[ChatResponse]:
        try:
            found = self._conversations.find(request.messages)
        except RecursionError:
            raise Refused(400, "messages: they are nested too deeply", param="messages") from None
        if isinstance(self._model, MessageServer):
            if request.logprobs:
                raise Refused(400, "logprobs: this model server reports none", param="logprobs")
            async with self._begun(request) as tokens:
                return await run_all(self._pass_on(found, request, tokens) for _ in range(request.n))
        self._refuse_wishes(request)
        async with self._begun(request) as tokens:
            responses = await self._model.continue_nodes(
                found.nodes,
                request.n,
                sampling=self._sampling(request, tokens),
                tools=request.tools,
                tool_choice=request.tool_choice,
                split=self._split,
            )
            return self._record(found, responses)

    async def text(self, request: TextRequest) -> list[ChatResponse]:
        """`n` continuations of a prompt, recorded. Raises as `chat`."""
        with self.times.asked() as latencies:
            responses = await self._text(request)
            latencies += [response.latency for response in responses]
        return responses

    async def _text(self, request: TextRequest) -> list[ChatResponse]:
        if isinstance(self._model, MessageServer):
            if request.logprobs:
                raise Refused(400, "logprobs: this model server reports none", param="logprobs")
            async with self._begun(request) as tokens:
                return await self._pass_on_text(request, tokens)
        rows = self._model.server.vocabulary.rows
        if not isinstance(request.prompt, str) and (largest := max(request.prompt)) >= rows:
            raise Refused(400, f"token id {largest} is out of vocabulary: the model has {rows}", param="prompt")
        async with self._begun(request) as tokens:
            responses = await self._model.continue_text(
                request.prompt, request.n, sampling=self._sampling(request, tokens), split=self._split
            )
            prompt = responses[0].tokens.prompt if responses[0].tokens is not None else TokenPrefix()
            parent = next((node for node in self._sampled if _after(node) is prompt.parent is not None), None)
            text = self._model.server.reader.decode(prompt.own_ids)
            return self._record_text(parent, text, responses)

    async def prompt_length(self, request: ChatRequest) -> int:
        """The tokens of the prompt of a request. Raises `Refused`, `MessageError` and `PromptError`."""
        if not isinstance(self._server, TokenServer):
            raise Refused(501, "tokens cannot be counted: this model server takes messages", code="not_supported")
        nodes = self._conversations.find(request.messages).nodes
        count = partial(self._server.prompts.prompt, nodes, request.tools)
        prompt = await parse(is_long(*(node.item for node in nodes)), count)
        return int(prompt.prefix.length)

    async def _pass_on_text(self, request: TextRequest, tokens: int | None) -> list[ChatResponse]:
        assert isinstance(self._model, MessageServer)
        self._note_overruled(request)
        sampling = {
            "temperature": self._settings["temperature"],
            **(self._settings["extra_body"] or {}),
            **(request.sampling if self._client_sampling else {}),
            **({"max_tokens": tokens} if tokens is not None else {}),
            **({"stop": list(request.stop)} if request.stop else {}),
        }
        began = time.monotonic()
        said = await self._model.completion(prompt=request.prompt, n=request.n, split=self._split, **sampling)
        usage = read_usage({"usage": dict(said.usage or {})})
        responses = [
            ChatResponse(
                Message("assistant", choice["text"]),
                read_finish_reason(choice.get("finish_reason")),
                model=said.model,
                usage=usage if index == 0 else Usage(0, 0),  # the server counts all choices together
                latency=time.monotonic() - began,
                sampling=sampling,
            )
            for index, choice in enumerate(map(dict, said.choices))
        ]
        prompt = request.prompt if isinstance(request.prompt, str) else json.dumps(request.prompt)
        return self._record_text(None, prompt, responses)

    def _record_text(self, parent: Node | None, prompt: str, responses: list[ChatResponse]) -> list[ChatResponse]:
        """The prompt becomes a message of the user."""
        asked = Node.after(parent, Message("user", prompt))
        self._sampled += [Node.after(asked, response.message, response) for response in responses]
        return responses

    def stopped_by(self, response: ChatResponse, stop: Sequence[str]) -> str | None:
        """The stop text that ended a completion, as far as its tokens show."""
        tokens = response.tokens
        if not stop or tokens is None or response.finish_reason is not FinishReason.STOP:
            return None
        assert isinstance(self._server, TokenServer)
        text = self._server.reader.decode(tokens.ids)
        found = [(at, marker) for marker in stop if (at := text.find(marker)) >= 0]
        return min(found)[1] if found else None

    async def _pass_on(self, found: Found, request: ChatRequest, tokens: int | None) -> ChatResponse:
        """One answer of an OpenAI-compatible server."""
        assert isinstance(self._model, MessageServer)
        wanted = dict(request.sampling) if self._client_sampling else {}
        self._note_overruled(request)
        extra = {**(self._settings["extra_body"] or {}), **request.wishes}
        options: ChatOptions = {
            "temperature": wanted.pop("temperature", self._settings["temperature"]),
            "max_tokens": tokens,
            "tools": request.tools,
            "tool_choice": request.tool_choice,
            "stop": list(request.stop) or None,
            "extra_body": {**extra, **wanted} or None,
        }
        messages = NodeMessages(found.nodes, self._encoded)
        response = await self._model.chat(messages, split=self._split, **options)
        return self._record(found, [response])[0]

    def token_names(self, response: ChatResponse) -> list[str]:
        """The text of each sampled token alone; the end of the turn included."""
        assert isinstance(self._server, TokenServer)
        return token_names(response, self._server.reader.decode)

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that `close` waits for or cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def abandon(self, work: asyncio.Task[Any]) -> None:
        """The client of this request is gone."""
        self._abandoned.add(work)
        work.add_done_callback(self._abandoned.discard)

    async def end_abandoned(self) -> None:
        """Cancel the requests whose clients are gone."""
        abandoned = set(self._abandoned)
        for task in abandoned:
            task.cancel()
        if abandoned:
            await asyncio.wait(abandoned)

    async def waited(self, seconds: float, patience: float | None) -> float:
        """Of the `seconds` that a client had until it was stopped, those in which it waited for the model server.

        Where these are more than half, a request in flight gets `patience` seconds to be answered: then it was a long
        completion, and no server that hangs.
        """
        stopped = time.monotonic()
        if self._tasks and self.times.waited(stopped) > seconds / 2:
            await asyncio.wait(self._tasks, timeout=patience)
        return self.times.waited(stopped)

    async def close(self, *, wait: float = 0.0) -> None:
        """Refuse later requests. Those in flight have `wait` seconds to end and are cancelled then."""
        self.closed = True
        self._forget(self)
        if self._tasks and wait > 0:
            await asyncio.wait(self._tasks, timeout=wait)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # What is recorded

    def completions(self) -> tuple[ChatResponse, ...]:
        """Every completion, in order."""
        return tuple(node.origin for node in self._sampled if isinstance(node.origin, ChatResponse))

    def history(self) -> MessageHistory:
        """All completions. The path is the main conversation, and all others are branches.

        The main conversation is the one that went on for longest, counted in completions of the rollout: it encloses
        those of its sub-agents. It ends with the last completion that has the same system message, since a compaction
        begins a new conversation.
        """
        return MessageHistory.of_nodes(self._sampled, self._head())

    def result(self, outcome: Outcome, reason: str) -> AgentResult:
        """The rollout as the agent loop would return it. A failure of the infrastructure has precedence."""
        history = self.history()
        path = list(history.responses())
        completions = self.completions()
        error = self.error if self.error is not None or completions else self._rejected
        if error is not None:
            outcome, reason = Outcome.INFRA_ERROR, f"the program's request failed: {error}"
        tokens = TokenCount()
        for response in completions:
            tokens.add(response.usage)
        return AgentResult(
            turns_used=len(path),
            finished_naturally=outcome is Outcome.COMPLETED,
            reasoning_per_turn=[response.message.reasoning for response in path],
            turn_responses=path,
            tool_errors=[],
            outcome=outcome,
            reason=reason,
            history=history,
            tokens=tokens,
            api_calls=len(completions),
            seconds_in_model=sum(response.latency for response in completions),
            seconds_waiting=self.times.waited(),
            error=error,
        )

    def _head(self) -> Node | None:
        if not self._sampled:
            return None
        began: dict[Node, int] = {}
        main, longest = self._sampled[0], 0
        for place, node in enumerate(self._sampled):
            above = node.parent
            while above is not None and above not in began:
                above = above.parent
            began[node] = place if above is None else began[above]
            if place - began[node] >= longest:  # of equal ones the last
                main, longest = node, place - began[node]
        return next(node for node in reversed(self._sampled) if _root(node) == _root(main))

    def _record(self, found: Found, responses: list[ChatResponse]) -> list[ChatResponse]:
        """Keep the responses. Returns them as the client reads them."""
        renamed = [response.with_new_call_ids(self._call_ids) for response in responses]
        if any(response.finish_reason is FinishReason.CONTENT_FILTER for response in responses):
            self.refusal = self.refusal or "the model server withheld an answer by its content filter"
        # Templates may write ids: results must name those that the model wrote.
        self._sampled += self._conversations.add(
            found, renamed if isinstance(self._model, MessageServer) else responses
        )
        return renamed

    # The limits and the parameters of a request

    @asynccontextmanager
    async def _begun(self, request: ChatRequest | TextRequest) -> AsyncIterator[int | None]:
        """Count a request if it is answered. Yields its `max_tokens`. Raises `Refused` if a limit is reached."""
        if self._max_requests is not None and self.requests >= self._max_requests:
            raise self._over(f"the limit of {self._max_requests} requests is reached")
        self.requests += 1
        try:
            async with self._budgeted(request) as tokens:
                yield tokens
        except BaseException:
            self.requests -= 1
            raise

    @asynccontextmanager
    async def _budgeted(self, request: ChatRequest | TextRequest) -> AsyncIterator[int | None]:
        """The `max_tokens` of a request, which are held of the budget. Raises `Refused` if it is used up."""
        wanted = [request.max_tokens, self._settings["max_tokens"]]
        if isinstance(self._server, TokenServer):
            wanted.append(self._server.max_tokens)
        tokens = min((limit for limit in wanted if limit is not None), default=None)
        if self._rollout_token_budget is None:
            yield tokens
            return
        # Requests at once share the budget: one waits while those in flight may use up what it wants.
        while self._held and not (tokens and tokens * request.n <= self._rest()):
            await self._ended.wait()
        if (rest := self._rest()) <= 0:
            raise self._over(f"the limit of {self._rollout_token_budget} sampled tokens is reached")
        tokens = min(tokens or rest, max(1, rest // request.n))
        self._held += tokens * request.n
        try:
            yield tokens
        finally:
            self._held -= tokens * request.n
            self._ended.set()
            self._ended = asyncio.Event()

    def _rest(self) -> int:
        """The tokens of the budget that neither were sampled nor are held for a request in flight."""
        counts = [response.usage.completion_tokens for response in self.completions()]
        if None in counts:
            raise InferenceError(
                "model server",
                "it reports no token usage, so rollout_token_budget cannot be kept",
                "leave rollout_token_budget out or use a server that reports usage",
            )
        return (self._rollout_token_budget or 0) - sum(count or 0 for count in counts) - self._held

    def _over(self, reason: str) -> Refused:
        self.limit = self.limit or reason
        return Refused(403, f"{reason}; this rollout is over", code="rollout_limit_reached")

    def _sampling(self, request: ChatRequest | TextRequest, max_tokens: int | None) -> Sampling:
        assert isinstance(self._server, TokenServer)
        given = {**self._settings, **(request.sampling if self._client_sampling else {})}
        self._note_overruled(request)
        server = self._server
        sampling = read_sampling(
            {**given, "stop": request.stop}, default_max_tokens=server.max_tokens, settings=server.sampling
        )
        return replace(sampling, max_tokens=min(sampling.max_tokens, max_tokens or sampling.max_tokens))

    def _note_overruled(self, request: ChatRequest | TextRequest) -> None:
        if not self._client_sampling:
            self.overruled.update(request.sampling)
        if isinstance(request, ChatRequest):
            self.overruled.update(request.overruled)

    def _refuse_wishes(self, request: ChatRequest) -> None:
        for name, value in request.wishes.items():
            if name in ("parallel_tool_calls", "reasoning_effort"):  # the model and its template decide
                self.overruled.add(name)
            elif value not in ({}, {"type": "text"}):
                raise Refused(
                    400,
                    f"{name} is not supported: tokens are sampled from the model's own distribution",
                    code="unsupported_parameter",
                    param=name,
                )

    # Failures

    def failed(self, error: Exception) -> None:
        """Note a failure that a client met.

        What a request says is the client's: a program could otherwise send nonsense so as not to be scored. Where no
        request at all was answered, the settings may be wrong. Servers fail with an `InferenceError`, and machines
        with an error number or without memory: any other error is a defect of this code that a request met, and is
        logged once for a rollout, with its traceback.
        """
        of_machine = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)
        is_defect = not isinstance(error, InferenceError) and not of_machine
        if is_defect:
            if not self._has_defect:
                _log.error("the endpoint failed at a request of a rollout, which goes on", exc_info=error)
            self._has_defect = True
        if isinstance(error, ConversationRefused):
            self.refusal = self.refusal or str(error)
        elif isinstance(error, ContextExhausted):
            self.limit = self.limit or str(error)
        elif (
            is_defect
            or isinstance(error, PromptError)
            or (isinstance(error, RequestRejected) and error.refuses_content)
        ):
            self._rejected = self._rejected or error
        else:
            self.error = self.error or error


def _after(node: Node) -> TokenPrefix | None:
    """The ids up to the end of a completion."""
    tokens = node.origin.tokens if isinstance(node.origin, ChatResponse) else None
    return tokens.after if tokens is not None else None


def _root(node: Node) -> str | None:
    """The system message of a conversation."""
    while node.parent is not None:
        node = node.parent
    return node.message.text if node.message.role == "system" else None
