"""The message history of a rollout: a list for its users, an immutable graph inside.

Every node points to its parent, and the head is one leaf. Appending adds a node. An edit adds nodes from its place on
and keeps the old ones as a branch. No record is ever changed or lost, and every completion stays reachable in the exact
context in which it was sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from operator import index as as_index
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, SupportsIndex, overload
from weakref import WeakValueDictionary

from lachesis_messages import graph_walks
from lachesis_messages.encoded import EncodedMessages, EncodedPath, encode_path
from lachesis_messages.frozen import thaw
from lachesis_messages.messages import Message, OpenAIMessage
from lachesis_messages.responses import (
    ChatResponse,
    Discarded,
    MessageLike,
    Node,
    Origin,
    ToolResponse,
    as_message,
    nearest_sampled,
)

if TYPE_CHECKING:
    from lachesis_messages.editing import MessageView
    from lachesis_messages.tokens import TokenPrefix


class _Written(NamedTuple):
    """A message to be recorded, and the node that it copies, edits or replaces."""

    message: Message
    origin: Origin = None
    source: Node | None = None


class MessageHistory(MutableSequence[OpenAIMessage]):
    """A conversation that behaves as a list of OpenAI dicts.

    It supports indices, slices, iteration, `in`, `+`, `==` (with any list of messages), `append`, `insert`, `del`,
    `pop`, and assignment to indices and slices. `history[2]["content"] = text` edits a message, and so does
    `history[4]["tool_calls"][0]["function"]["arguments"] = text`. Each change is validated as a whole; MessageError
    names the index of a malformed message. Iteration and slices return read-only dicts. Messages have one
    canonical form: `content` is always present, nulls are left out, and reasoning is under `reasoning`. `==` compares
    in that form, and an assignment of an equal message is not an edit.

    An edit costs O(messages after it). It copies these as context, which no longer counts as sampled (`Node.sampled`),
    and the originals go to `discarded`. `completions()` still has everything.

    Ephemeral messages (system prompts, prefill) do not belong here; the sender of a request adds them.
    Not thread-safe: one rollout, one history.
    """

    __slots__ = (
        *("_before", "_discarded", "_encoded", "_frozen", "_homes", "_nodes", "_path", "_prompts", "_snapshot"),
        "_views",
    )

    def __init__(self, messages: Iterable[MessageLike] = ()) -> None:
        self._path: list[Node] = []  # root to head; the graph itself lives in the nodes' parent pointers
        self._nodes: list[Node] = []  # all, in the order of creation
        self._discarded: list[Discarded] = []
        self._homes: dict[int, Node] = {}  # id of an origin or of a completion's tokens -> its first node
        self._prompts: dict[int, tuple[TokenPrefix, Node | None]] = {}  # id of a prompt -> the prompt and its head
        self._views: WeakValueDictionary[Node, MessageView] | None = None
        self._encoded: dict[str | None, EncodedPath] = {}
        self._frozen = False
        self._before: MessageHistory | None = None  # of another rollout, with which this one begins
        self._snapshot: MessageHistory | None = None
        self.extend(messages)

    @classmethod
    def of_nodes(cls, sampled: Iterable[Node], head: Node | None) -> MessageHistory:
        """The history of completions that were recorded elsewhere, and of the messages before them.

        `sampled` are their nodes in the order of sampling. The path leads to `head`, which is one of their nodes or an
        ancestor; every other conversation is a branch.
        """
        history = cls()
        seen: set[Node] = set()
        for node in sampled:
            line: list[Node] = []
            above: Node | None = node
            while above is not None and above not in seen:
                line.append(above)
                above = above.parent
            seen.update(line)
            history._nodes += reversed(line)
        line = []
        while head is not None:
            line.append(head)
            head = head.parent
        history._path = line[::-1]
        for node in history._nodes:
            origin = node.origin
            if origin is not None:
                history._homes.setdefault(id(origin), node)
            if isinstance(origin, ChatResponse) and origin.tokens is not None:
                history._homes.setdefault(id(origin.tokens.after), node)
                history._prompts.setdefault(id(origin.tokens.prompt), (origin.tokens.prompt, node.parent))
        history._discarded = graph_walks.branches(history._nodes, history._path)
        return history

    # The list

    def __len__(self) -> int:
        return len(self._path)

    @overload
    def __getitem__(self, index: SupportsIndex) -> OpenAIMessage: ...
    @overload
    def __getitem__(self, index: slice) -> list[OpenAIMessage]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> OpenAIMessage | list[OpenAIMessage]:
        """A dict that writes through for an index, read-only dicts for a slice."""
        if isinstance(index, slice):
            return [node.item for node in self._path[index]]
        return self._view(self._place(index))

    def __iter__(self) -> Iterator[OpenAIMessage]:
        for node in self._path:
            yield node.item

    def __reversed__(self) -> Iterator[OpenAIMessage]:
        for node in reversed(self._path):
            yield node.item

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """The first index from `start` to before `stop` of a message that equals `value`, else ValueError."""
        for place in range(*slice(start, stop).indices(len(self._path))):
            if self._path[place].item == value:
                return place
        raise ValueError("no message of the history equals this one")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MessageHistory):
            return len(self) == len(other) and (not self._path or self._path[-1].digest == other._path[-1].digest)
        if not isinstance(other, (list, tuple)):
            return NotImplemented
        return len(self) == len(other) and all(_same(node, item) for node, item in zip(self._path, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """A plain list for one request; the history does not change."""
        return [*self, *other]

    def __radd__(self, other: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [*other, *self]

    def __repr__(self) -> str:
        dropped = f", {len(self._discarded)} discarded branches" if self._discarded else ""
        return f"<MessageHistory of {len(self)} messages{dropped}>"

    def append(self, message: MessageLike) -> None:
        """Adds one message at the head. Raises MessageError, which names the index, if it is malformed.

        A completion counts as sampled here (`Node.sampled`) unless its tokens, or an earlier record of it in this
        history, show another context.
        """
        self._push(self._written(message, len(self._path)))

    def extend(self, messages: Iterable[MessageLike]) -> None:
        """Adds all messages, or none if one is malformed."""
        for written in self._all_written(messages, len(self._path)):
            self._push(written)

    # Edits

    @overload
    def __setitem__(self, index: SupportsIndex, message: MessageLike) -> None: ...
    @overload
    def __setitem__(self, index: slice, message: Iterable[MessageLike]) -> None: ...
    def __setitem__(self, index: SupportsIndex | slice, message: Any) -> None:
        if not isinstance(index, slice):
            place = self._place(index)
            written = self._written(message, place, self._path[place])
            self._edit(place, [written, *self._path[place + 1 :]], f"replacement of message {place}")
            return
        places = range(*index.indices(len(self._path)))
        if places.step == 1:
            start, stop = places.start, max(places.start, places.stop)
            written_all = self._all_written(message, start, self._path[start:stop])
            reason = f"replacement of {_named(start, stop)}" if stop > start else f"insertion at {start}"
            self._edit(start, [*written_all, *self._path[stop:]], reason)
            return
        given = list(message)
        if len(given) != len(places):
            raise ValueError(f"{len(given)} messages for an extended slice of {len(places)}")
        written_all = [self._written(item, place, self._path[place]) for item, place in zip(given, places, strict=True)]
        if written_all:
            start = min(places)
            tail: list[Node | _Written] = [*self._path[start:]]
            for place, written in zip(places, written_all, strict=True):
                tail[place - start] = written
            self._edit(start, tail, f"replacement of {len(places)} messages from {start} on")

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        if isinstance(index, slice):
            places = range(*index.indices(len(self._path)))
        else:
            place = self._place(index)
            places = range(place, place + 1)
        if not places:
            return
        start, stop = min(places), max(places) + 1
        if len(places) == stop - start:
            self._edit(start, self._path[stop:], f"deletion of {_named(start, stop)}")
        else:
            tail = [node for place, node in enumerate(self._path[start:], start) if place not in places]
            self._edit(start, tail, f"deletion of {len(places)} messages from {start} on")

    def insert(self, index: SupportsIndex, message: MessageLike) -> None:
        """Adds a message before `index`. The messages from `index` on are copied after it."""
        place, _, _ = slice(index, None).indices(len(self._path))
        self._edit(place, [self._written(message, place), *self._path[place:]], f"insertion at {place}")

    def pop(self, index: SupportsIndex = -1) -> OpenAIMessage:
        """Deletes a message and returns it as a plain dict."""
        node = self._path[self._place(index)]
        del self[index]
        message: OpenAIMessage = thaw(node.item)
        return message

    def clear(self) -> None:
        self._edit(0, [], "clear")

    def reverse(self) -> None:
        self._edit(0, self._path[::-1], "reverse")

    def rewind(self, length: int, reason: str, *, attempt: bool = False) -> None:
        """Shortens the conversation to its first `length` messages. The others go to `discarded`.

        `attempt` means that they could not be used and will be sampled again: nothing that they requested was done.
        """
        if not 0 <= length <= len(self._path):
            raise ValueError(f"cannot rewind to {length} messages: the history has {len(self._path)}")
        self._edit(length, [], reason, attempt=attempt)

    # The graph

    @property
    def head(self) -> Node | None:
        """The last node of the current path; None while it is empty."""
        return self._path[-1] if self._path else None

    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the current path, first to last."""
        return tuple(self._path)

    def all_nodes(self) -> tuple[Node, ...]:
        """Every node of every branch in creation order: parents and sources come first."""
        before = self._before
        return tuple(self._nodes if before is None else before._path + self._nodes[len(before._nodes) :])

    def responses(self) -> Iterator[ChatResponse]:
        """The completions on the current path, first to last, including those that are only context there."""
        return (node.origin for node in tuple(self._path) if isinstance(node.origin, ChatResponse))

    def ended_on(self) -> list[ChatResponse]:
        """The completions up to the one with which the conversation ended, first to last: those of the current path,
        and those of the messages that were removed from its end."""
        return graph_walks.ended_on(self.all_nodes(), self._path)

    def replaced_attempts(self) -> tuple[ChatResponse, ...]:
        """The completions of discarded attempts, including those of sub-agents: they were removed by
        `rewind(..., attempt=True)`, and the conversation continued, or was sampled again, from the same position.

        Nothing else is a discarded attempt: not the branches that a compaction or an edit left, not the other
        completions of n, not the last attempt of an agent that gave up. These had consequences, or ended the
        conversation.
        """
        return self._own(graph_walks.replaced_attempts(self))

    def message_digests(self) -> dict[int, str]:
        """By `id(tokens.after)` of each completion that was sampled where it is recorded, sub-agents' included: the
        digest of the conversation up to it (`Node.digest`)."""
        return graph_walks.message_digests(self)

    def completions(self) -> tuple[ChatResponse, ...]:
        """Every completion ever recorded, in order and each once: of all branches, of the history from which this one
        was forked (but not with `fork(own=False)`), and of sub-agents (`ToolResponse.chat`), which come at the position
        of their result."""
        return self._own(graph_walks.completions(self))

    def _own(self, found: list[ChatResponse]) -> tuple[ChatResponse, ...]:
        if self._before is None:
            return tuple(found)
        given = set(map(graph_walks.identity, graph_walks.completions(self._before)))
        return tuple(each for each in found if graph_walks.identity(each) not in given)

    @property
    def discarded(self) -> tuple[Discarded, ...]:
        """The branches that the conversation left or did not follow, in that order."""
        return tuple(self._discarded[0 if self._before is None else len(self._before._discarded) :])

    def branch(self, response: ChatResponse, reason: str) -> Node:
        """Records a completion that was sampled after the head but is not continued: one of n, a failed attempt.

        The head does not move; the node is the only one of a new entry of `discarded`. Appending the same response
        after the same head continues it.
        """
        node = self._made(self._written(response, len(self._path)))
        self._discarded.append(Discarded(reason, len(self._path), (node,)))
        return node

    def record_prompt(self, prompt: TokenPrefix) -> None:
        """Records `prompt` as the prompt for the conversation in its current form.

        A completion of this prompt then counts as sampled where the conversation is still the same, even if it was
        edited in between or if `prompt` shares nothing with earlier prompts.
        """
        self._check_open()
        self._prompts[id(prompt)] = prompt, self.head

    def to_mermaid(self, *, width: int = 60) -> str:
        """The graph as a Mermaid flowchart: messages, completions with their metadata, tool results with a sub-agent's
        chat, discarded branches with their reasons. A dashed line leads to the node that a node copies, edits or
        replaces. Texts are cut to `width` characters."""
        from lachesis_messages import drawing  # no rollout needs it

        return drawing.to_mermaid(self, width=width)

    def to_dot(self, *, width: int = 60) -> str:
        """The graph of `to_mermaid` in the language of Graphviz."""
        from lachesis_messages import drawing

        return drawing.to_dot(self, width=width)

    # Copies

    def to_openai(self, reasoning_field: str | None = None) -> list[OpenAIMessage]:
        """New plain dicts for a request; see `Message.to_openai` for `reasoning_field`."""
        return [node.message.to_openai(reasoning_field) for node in self._path]

    def encoded(self, reasoning_field: str | None = None) -> EncodedMessages:
        """The JSON of `to_openai` for a request. Only messages that are new since the last call cost time."""
        return encode_path(self._path, reasoning_field, self._encoded)

    def fork(self, *, own: bool = True) -> MessageHistory:
        """A copy that shares all records so far and grows independently.

        `own` false is for another rollout that goes on from here: the conversation so far is its context, without the
        branches that this one left, and none of the completions in it is its own.
        """
        other = MessageHistory()
        other._path = list(self._path)
        other._nodes = list(self._nodes)
        other._discarded = list(self._discarded)
        other._homes = dict(self._homes)
        other._prompts = dict(self._prompts)
        other._before = self._before if own else self.frozen()
        return other

    def begun_with(self, before: MessageHistory | None) -> MessageHistory:
        """A fork, of which what it was at the time of `before` is another rollout's, and nothing if that is None."""
        other = self.fork()
        other._before = before
        return other

    def frozen(self) -> MessageHistory:
        """This history as it is now: a fork that cannot be changed (TypeError); the same one until this changes."""
        if self._frozen:
            return self
        last = self._snapshot
        if last is None or (len(last._nodes), last._discarded) != (len(self._nodes), self._discarded):
            last = self._snapshot = self.fork()
            last._frozen = True
        return last

    def __copy__(self) -> MessageHistory:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> MessageHistory:
        return self.fork()  # nodes are immutable

    def __reduce__(self) -> NoReturn:
        raise TypeError("a MessageHistory cannot be pickled; pickle its to_openai(), or the records of its samples()")

    # How nodes are made

    def _written(self, given: MessageLike, index: int, replaces: Node | None = None) -> _Written:
        """Parse `given`. A completion or tool result of this history is recognised by identity, as response or item."""
        origin: Origin = None
        if isinstance(given, ChatResponse) and given.purpose == "given":
            given = given.message
        if isinstance(given, (ChatResponse, ToolResponse)):
            origin = given
        elif isinstance(given, dict) and id(known := getattr(given, "origin", None)) in self._homes:
            origin = known  # an Item or a MessageView
        return _Written(as_message(given, index), origin, self._home(origin) or replaces)

    def _home(self, origin: Origin) -> Node | None:
        """The first node of a completion (identified by its tokens) or of a tool result."""
        if isinstance(origin, ChatResponse) and origin.tokens is not None:
            return self._homes.get(id(origin.tokens.after))
        return self._homes.get(id(origin))

    def _all_written(self, given: Iterable[MessageLike], start: int, replaced: Iterable[Node] = ()) -> list[_Written]:
        sources = iter(replaced)
        return [self._written(message, place, next(sources, None)) for place, message in enumerate(given, start)]

    def _made(self, written: _Written) -> Node:
        self._check_open()
        origin, head = written.origin, self.head
        sampled = isinstance(origin, ChatResponse) and self._is_sampled_here(origin)
        node = Node.after(head, written.message, origin, sampled=sampled, source=written.source)
        self._nodes.append(node)
        if origin is not None:
            self._homes.setdefault(id(origin), node)  # the node keeps it alive, so the id is not reused
        if isinstance(origin, ChatResponse) and origin.tokens is not None:
            self._homes.setdefault(id(origin.tokens.after), node)
            if node.sampled:
                self._prompts.setdefault(id(origin.tokens.prompt), (origin.tokens.prompt, node.parent))
        return node

    def _check_open(self) -> None:
        if self._frozen:
            raise TypeError("the chat of a tool response cannot be changed: change a fork() of it")

    def _push(self, written: _Written) -> None:
        self._path.append(self._made(written))

    def _is_sampled_here(self, response: ChatResponse) -> bool:
        """Whether `response` was sampled in the context of the head, as far as identities show."""
        head = self.head
        if response.tokens is None:
            home = self._homes.get(id(response))
            return home is None or _same_context(home.parent, head)
        prompt = response.tokens.prompt
        if id(prompt) in self._prompts:
            return _same_context(self._prompts[id(prompt)][1], head)
        # A prompt continues only turns with the same tools and template; others are rendered anew.
        nearest, later = nearest_sampled(head, response.tokens.context)
        # A prompt adds one piece to the ids that it continues, a few where context is inserted or an answer is opened.
        # Many more pieces than messages contain turns that are not on this path.
        pieces_left = 2 * later + 2
        for piece in prompt.lineage():
            if id(piece) in self._homes:
                return piece is nearest
            pieces_left -= 1
            if pieces_left < 0:
                return False
        return nearest is None

    # How the path is changed

    def _place(self, index: SupportsIndex) -> int:
        place = as_index(index)
        length = len(self._path)
        if not -length <= place < length:
            raise IndexError(f"no message {place}: the history has {length}")
        return place % length

    def _edit(self, start: int, tail: Sequence[Node | _Written], reason: str, *, attempt: bool = False) -> None:
        """Replace the path from `start` on by `tail`: nodes in their place stay, the others are created or copied."""
        self._check_open()
        kept = 0
        for entry, node in zip(tail, self._path[start:], strict=False):
            if entry is not node and not (isinstance(entry, _Written) and _is_no_edit(entry, node)):
                break
            kept += 1
        start += kept
        left = tuple(self._path[start:])
        if left:
            self._discarded.append(Discarded(reason, start, left, attempt, edit=len(tail) > kept))
            del self._path[start:]
        for entry in tail[kept:]:
            if isinstance(entry, _Written):
                self._push(entry)
            else:
                copy = Node.copied(self.head, entry)
                self._nodes.append(copy)
                self._path.append(copy)
                self._move_view(entry, copy, len(self._path) - 1)

    def _view(self, place: int) -> MessageView:
        if self._views is None:
            self._views = WeakValueDictionary()
        node = self._path[place]
        view = self._views.get(node)
        if view is None:
            from lachesis_messages.editing import MessageView  # most rollouts never edit a message

            view = self._views[node] = MessageView(node, place, self._rewrite)
        return view

    def _move_view(self, node: Node, to: Node, place: int) -> None:
        view = self._views.pop(node, None) if self._views else None
        if view is not None and self._views is not None:
            view._moved(to, place)
            self._views[to] = view

    def _rewrite(self, node: Node, place: int, plain: OpenAIMessage) -> Node:
        if place >= len(self._path) or self._path[place] is not node:
            from lachesis_messages.editing import StaleMessage

            raise StaleMessage(
                f"this message is no longer part of the conversation (it was message {place}); "
                "read the one to change from the history again"
            )
        message = as_message(plain, place)
        if node.says(message):
            return node
        said = message.to_openai(reasoning_field="reasoning")
        keys = [key for key in {**node.item, **said} if node.item.get(key) != said.get(key)]
        reason = f"edit of message {place}: {', '.join(keys)}"
        self._edit(place, [_Written(message, None, node), *self._path[place + 1 :]], reason)
        self._move_view(node, self._path[place], place)
        return self._path[place]


def _is_no_edit(written: _Written, node: Node) -> bool:
    return (written.origin is None or written.origin is node.origin) and node.says(written.message)


def _same_context(one: Node | None, other: Node | None) -> bool:
    """Whether two nodes end the same conversation with the same last sampled completion."""
    if one is None or other is None or one is other:
        return one is other
    return one.digest == other.digest and nearest_sampled(one)[0] is nearest_sampled(other)[0]


def _same(node: Node, item: Any) -> bool:
    if node.item == item:
        return True
    try:
        return as_message(item).to_openai(reasoning_field="reasoning") == node.item
    except ValueError:
        return False


def _named(start: int, stop: int) -> str:
    return f"message {start}" if stop == start + 1 else f"messages {start} to {stop - 1}"
