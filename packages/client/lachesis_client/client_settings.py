"""Settings of the client of one model server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lachesis_client.http_attempts import ARRAY as ARRAY
from lachesis_client.sampling import LogprobsKind


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Address of a model server and how to talk to it."""

    base_url: str
    """Includes the version, as for the openai package: `http://127.0.0.1:8000/v1`.

    A login in it (`http://user:password@host/v1`) is sent if there is no `api_key`.
    """
    model_name: str
    api_key: str = field(default="", repr=False)
    timeout: float = 1200.0
    """Seconds for one attempt, from connecting to the end of the answer."""
    max_concurrency: int = 512
    """Requests in flight at once."""
    max_eval_concurrency: int = 64
    """How many of these may have `split="eval"`. The `Balancer` enforces it."""
    weight: float = 1.0
    """Share of the requests that the `Balancer` sends here, relative to `weight * max_concurrency` of the others."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Sent with every request. The arguments of a call override it."""
    tool_call_parser: str | None = None
    """Reads calls from the text when the server returns none (Phase 1 servers without a parser)."""
    reasoning_field: Literal["reasoning_content", "reasoning"] | None = "reasoning_content"
    """The field that carries earlier reasoning back to the server. None omits it."""
    logprobs_mode: LogprobsKind | None = None
    """The kind of logprobs that the server was started with. None is the engine's default."""
    harmless_fields: tuple[str, ...] = ()
    """Fields of `extra_body` that `sampling_problem` does not know, but that do not affect sampling."""
    max_retries: int = 6
    """Further attempts after a failed one."""
    first_retry_delay: float | None = None
    """Seconds before the first of them, where the server requests none; twice as long before each later one. None is
    0.5."""
    retry_deadline: float = 300.0
    """Seconds after which no further attempt starts. A call ends within `retry_deadline + timeout`."""
    session_header: str | None = None
    """Header that names the rollout, for routers. None is the API's default (`HttpClient.session_header`), "" sends
    none."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request."""
    data_parallel_size: int = 1
    """Data-parallel ranks that the server balances itself. With more than one, each request names its rank."""
    routed_experts: bool = False
    """Whether every completion comes with the experts that processed its tokens (`Generation.experts`)."""
    sampling_mask: bool = False
    """Whether every completion comes with the ids that top-k, top-p and min-p left (`Generation.sampling_mask`)."""
    echo_limit: int | None = None
    """Tokens of the longest prompt that a token engine has repeated by the server, to compare its ids. For longer ones
    only the length is compared. None means no limit."""
