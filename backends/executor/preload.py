"""`/etc/ld.so.preload` is set aside while fresh commands run: who writes it changes every program that starts.

A fresh command that names the file sees it where it is.
"""

from __future__ import annotations

import contextlib
import os
import stat

NAME = "ld.so.preload"
_LARGEST = 1 << 16


class Preload:
    """Made before any command. All methods do what they can: who owns /etc can put much in the way of it."""

    def __init__(self, path: str = f"/etc/{NAME}") -> None:
        self.path, self.aside = path, ""
        self.first = self._facts()
        self.content = self._read() if self.first else None
        self.running = 0
        """Fresh commands that do not name it."""

    def expect(self, content: bytes | None) -> None:
        """The files are others, which commands may have changed; before any command, the file had this `content`."""
        self.first, self.content = (), content
        self.aside = ""

    def begin(self, command: str) -> bool:
        """Before a fresh command; whether `end` has to be called after it."""
        if NAME in command:
            self._put_back()
            return False
        self.running += 1
        with contextlib.suppress(OSError):
            facts = self._facts()
            if facts != self.first:
                if facts is not None:
                    aside = f"{self.path}.{os.urandom(8).hex()}"  # nothing can be in the way there
                    self._replace(self.path, aside)
                    self.aside = self.aside or aside
                if self.content is not None:
                    with open(self.path, "wb") as file:
                        file.write(self.content)
                self.first = self._facts()
        return True

    def end(self) -> None:
        """After a fresh command."""
        self.running -= 1
        if not self.running:
            self._put_back()

    def _put_back(self) -> None:
        if self.aside:
            aside, self.aside = self.aside, ""
            with contextlib.suppress(OSError):
                self._replace(aside, self.path)

    def _replace(self, path: str, target: str) -> None:
        try:
            os.replace(path, target)
        except PermissionError:  # the folder's owner may have closed it
            folder = os.path.dirname(path)
            os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | stat.S_IWUSR | stat.S_IXUSR)
            os.replace(path, target)

    def _facts(self) -> tuple[int, ...] | None:
        found: tuple[int, ...] = ()
        for look in (os.lstat, os.stat):  # of a link, both ends decide
            with contextlib.suppress(OSError):
                facts = look(self.path)
                found += (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        return found or None

    def _read(self) -> bytes | None:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        with open(fd, "rb") as file:
            return file.read(_LARGEST)
