"""How long the clients of a recording waited for the model server, with any number of requests at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Asked:
    began: float
    served: float | None = None
    """When the attempt that was answered began; None where none was."""
    ended: float | None = None
    gave_up: bool = False


@dataclass(slots=True)
class RequestTimes:
    """The requests of one recording."""

    _requests: list[_Asked] = field(default_factory=list)

    @contextmanager
    def asked(self) -> Iterator[list[float]]:
        """Around one request. The list that it gives takes the latencies of its answers."""
        request = _Asked(time.monotonic())
        self._requests.append(request)
        latencies: list[float] = []
        try:
            yield latencies
        except Exception:
            raise
        except BaseException:  # cancelled: the client is gone
            request.gave_up = True
            raise
        finally:
            request.ended = time.monotonic()
            if latencies:
                request.served = max(request.began, request.ended - max(latencies))

    def waited(self, until: float | None = None) -> float:
        """Seconds in which clients waited for the server, and none of their requests was served.

        They count up to `until` on the clock of `time.monotonic`, by default now. A request that is not answered, or
        failed, was not served. One that its client gave up before it asked again counts as served: a program could
        otherwise ask and give up to have its own time count as waiting. The last one may have been given up by the end
        of the program.
        """
        now = time.monotonic() if until is None else until
        last_began = max((request.began for request in self._requests), default=0.0)
        changes: list[tuple[float, int, int]] = []
        for request in self._requests:
            ended = now if request.ended is None else min(request.ended, now)
            served = ended if request.served is None else min(request.served, now)
            if request.gave_up and ended <= last_began:
                served = request.began
            changes += [(request.began, 1, 0), (served, -1, 1), (ended, 0, -1)]
        total, last, waiting, serving = 0.0, 0.0, 0, 0
        for at, more_waiting, more_serving in sorted(changes):
            if waiting and not serving:
                total += at - last
            last, waiting, serving = at, waiting + more_waiting, serving + more_serving
        return total
