"""The metadata of a GGUF file, without the weights."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from backends.errors import ExitCode, LachesisError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


class GGUFError(LachesisError, ValueError):
    """The file is not GGUF, or lacks required metadata. The message names the file, the reason and the next step."""

    exit_code = ExitCode.SETTINGS

    def __init__(self, path: Path, reason: str, next_step: str) -> None:
        super().__init__(f"{path}: {reason}; {next_step}")


def read_metadata(path: str | Path) -> dict[str, Any]:
    """All keys with their values (numbers, bools, text, lists of these).

    In text, bytes that are not UTF-8 become lone surrogates. Raises `GGUFError` or `OSError`.
    """
    path = Path(path)
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise GGUFError(path, "it does not begin with GGUF", "give the path of a .gguf file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data, path).metadata()
            except (struct.error, IndexError, KeyError, MemoryError) as error:
                raise GGUFError(path, f"its metadata is damaged ({error!r})", "download the file again") from None


class _Reader:
    """Reads consecutive little-endian values from byte 4 on."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 4

    def metadata(self) -> dict[str, Any]:
        version = self._scalar("I")
        if version not in _VERSIONS:
            reason = f"it is GGUF version {version}, and {' and '.join(map(str, _VERSIONS))} are known"
            raise GGUFError(self._path, reason, "convert the model again")
        self._scalar("Q")  # the number of tensors
        return {self._text(): self._value(self._scalar("I")) for _ in range(self._scalar("Q"))}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        of, length = self._scalar("I"), self._scalar("Q")
        if of in _SCALARS:
            start, layout = self._at, struct.Struct(f"<{length}{_SCALARS[of]}")
            self._at += layout.size
            return list(layout.unpack_from(self._data, start))
        return [self._value(of) for _ in range(length)]

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _text(self) -> str:
        length = self._scalar("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise IndexError("a text goes beyond the end of the file")
        return self._data[start : self._at].decode("utf-8", "surrogateescape")
