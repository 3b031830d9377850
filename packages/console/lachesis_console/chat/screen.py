"""What a person sees and types: lines that stay in the scrollback, and a prompt in the last one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.status import Status
from rich.text import Text

from lachesis_client.streaming import Delta
from lachesis_tools import ToolResult

T = TypeVar("T")

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SHOWN: Final = 2000
"""Characters of a result that are shown; `/history` shows all."""
PERSONALITIES: Final = {
    "plain": ("thinking", "dots"),
    "calm": ("(˘‿˘) taking a breath", "bouncingBar"),
    "kawaii": ("(◕‿◕) pondering", "moon"),
    "clerk": ("(•_•) filing the request", "line"),
}
"""What is shown while the model answers: words, and the name of one of rich's spinners."""
_CANCELS: Final[list[Callable[[], None]]] = []
"""What Ctrl-C does, innermost last."""


def clean(text: str) -> str:
    """`text` without characters that move the cursor, change colours or reverse the direction."""
    return _CONTROL.sub("�", text.replace("\r\n", "\n"))


async def interruptible(work: Awaitable[T]) -> T:
    """The result of `work`. Ctrl-C cancels it, and raises KeyboardInterrupt."""
    task, loop, before = asyncio.ensure_future(work), asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
    pressed: list[object] = []
    _CANCELS.append(lambda: pressed.append(task.cancel()))
    loop.add_signal_handler(signal.SIGINT, _CANCELS[-1])
    try:
        return await task
    except asyncio.CancelledError:
        if pressed:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        _CANCELS.pop()
        if _CANCELS:  # this was a question of a tool that can be interrupted too
            loop.add_signal_handler(signal.SIGINT, _CANCELS[-1])


class Screen:
    """Prints, and asks.

    Args:
        plain: no colours, no spinner, lines of the standard input as they come.
        history: the file of the lines that were typed.
    """

    def __init__(self, *, plain: bool = False, history: Path) -> None:
        # A closed standard input is None.
        self.plain = plain or sys.stdin is None or not (sys.stdin.isatty() and sys.stdout.isatty())
        if hasattr(sys.stdout, "reconfigure"):  # no character that the terminal lacks ends a chat
            sys.stdout.reconfigure(errors="backslashreplace")
        self.console = Console(emoji=False, markup=False, highlight=False, no_color=self.plain or None)
        self.personality = "plain"
        self.words: Callable[[], Sequence[str]] = lambda: ()
        """What the prompt completes."""
        self._history = history
        self._session: Any = None
        self._spinner: Status | None = None
        self.streamed = ""
        """The text of the last answer, as far as it was shown while it came."""
        self._column = 0
        self._coming: asyncio.Future[bytes] | None = None  # the line that is read, also after a Ctrl-C
        self._read = b""

    async def ask(self, prompt: str) -> str | None:
        """A line of the person; None at the end of the input. Ctrl-C raises KeyboardInterrupt."""
        if self.plain:
            if self._coming is None:
                self._coming = asyncio.get_running_loop().create_future()
                threading.Thread(target=self._read_line, args=(self._coming,), daemon=True).start()
            line, self._coming = await interruptible(asyncio.shield(self._coming)), None
            if not line:
                return None
            text = line.decode(errors="replace").rstrip("\r\n")
            self.console.print(f"{prompt}{clean(text)}", soft_wrap=self.plain)
            return text
        if self._session is None:
            self._session = self._prompt_session()
        try:
            return str(await self._session.prompt_async(prompt))
        except EOFError:
            return None

    def _read_line(self, coming: asyncio.Future[bytes]) -> None:
        """In a thread that the end of the process does not wait for, and so without the locks of `sys.stdin`."""
        with suppress(OSError):  # the terminal is gone
            while sys.stdin is not None and b"\n" not in self._read and (read := os.read(sys.stdin.fileno(), 1 << 16)):
                self._read += read
        line, end, self._read = self._read.partition(b"\n")
        with suppress(RuntimeError):  # the chat is
            coming.get_loop().call_soon_threadsafe(coming.set_result, line + end)

    def _prompt_session(self) -> Any:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.key_binding import KeyBindings

        keys, words = KeyBindings(), self.words

        @keys.add("escape", "enter")
        def _(event: Any) -> None:
            event.current_buffer.insert_text("\n")

        class Words(Completer):
            def get_completions(self, document: Any, complete_event: Any) -> Iterator[Completion]:
                typed = document.text_before_cursor
                if typed.startswith("/") and " " not in typed:
                    for word in words():
                        if word.startswith(typed):
                            yield Completion(word, start_position=-len(typed))

        class Typed(FileHistory):
            def store_string(self, string: str) -> None:
                if not re.match(r"/model(\s+\S+){3}", string):  # with a key
                    super().store_string(string)

        self._history.parent.mkdir(parents=True, exist_ok=True)
        self._history.touch(0o600)
        self._history.chmod(0o600)  # also one that is there already
        return PromptSession(
            history=Typed(self._history), completer=Words(), key_bindings=keys, complete_while_typing=False
        )

    @contextmanager
    def thinking(self) -> Iterator[None]:
        """A spinner, while nothing else is printed."""
        if self.plain:
            yield
            return
        words, spinner = PERSONALITIES[self.personality]
        self.streamed, self._column = "", 0
        with self.console.status(words, spinner=spinner) as self._spinner:
            yield
        if self._column:
            self.console.print()

    def stream(self, piece: Delta) -> None:
        """A piece of the answer, broken into lines at words."""
        if piece.kind == "restart" and self.streamed:
            self.console.print(Text("\n(the answer broke off and is asked for again)", style="dim"))
            self.streamed, self._column = "", 0
        if piece.kind != "text" or self._spinner is None:
            return
        if not self.streamed:
            self._spinner.stop()
            self.console.print(Text("agent: ", style="bold green"), end="")
            self._column = 7
        self.streamed += piece.text
        for part in re.findall(r"\n|[^\S\n]+|\S+", clean(piece.text)):
            if part == "\n" or self._column + cell_len(part) >= self.console.width:
                self.console.print()
                self._column = 0
            if part != "\n" and (self._column or not part.isspace()):
                self.console.print(part, end="", soft_wrap=True)
                self._column += cell_len(part)

    def note(self, text: str) -> None:
        """A line of the program itself."""
        self.console.print(Text(clean(text), style="dim"), soft_wrap=self.plain)

    def error(self, text: str) -> None:
        self.console.print(Text(f"error: {clean(text)}", style="red"), soft_wrap=self.plain)

    def said(self, who: str, text: str) -> None:
        """A message of the conversation."""
        style = {"agent": "green", "user": "cyan", "system": "magenta"}.get(who, "default")
        self.console.print(Text(f"{who}: ", style=f"bold {style}"), Text(clean(text)), sep="", soft_wrap=self.plain)

    def call(self, name: str, arguments: str) -> None:
        self.console.print(Text(f"→ {clean(name)} {clean(arguments)}"[:_SHOWN], style="yellow"), soft_wrap=self.plain)

    def result(self, name: str, result: ToolResult) -> None:
        text, style = clean(result.content), "red" if result.error else "default"
        more = f"\n… {len(text) - _SHOWN} characters more" if len(text) > _SHOWN else ""
        self.console.print(Text(f"← {clean(name)} ({result.duration:.2f} s)", style="yellow"), soft_wrap=self.plain)
        self.console.print(Text(f"{text[:_SHOWN]}{more}", style=style), soft_wrap=self.plain)
