"""Runs vLLM's tool parsers without vLLM's dependencies: their modules from an unpacked wheel, the rest as placeholders.

Only the parser modules are vLLM's. Requests, tools and results are plain records instead of pydantic
models, which does not slow them down, and the tokenizer knows every special token.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

REAL = ("vllm.tool_parsers", "vllm.parser", "vllm.reasoning", "vllm.utils.collection_utils")
"""The modules that run. All others of vLLM are placeholders."""
FOREIGN = ("torch", "xgrammar", "openai_harmony", "mistral_common", "ijson", "prometheus_client", "partial_json_parser")
QUIET = logging.getLogger("vllm placeholder")
QUIET.disabled = True


class Record:
    """Any value, with any attribute."""

    def __init__(self, *_: object, **values: object) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

    def __class_getitem__(cls, item: object) -> type[Record]:
        return cls

    def model_dump(self, **_: object) -> dict[str, Any]:
        return {key: value.model_dump() if isinstance(value, Record) else value for key, value in vars(self).items()}


class _Words(type):
    def __getattr__(cls, name: str) -> Record:
        if name.startswith("__"):
            raise AttributeError(name)
        return Record(value=f"[{name.upper()}]")


class SpecialTokens(metaclass=_Words):
    """Mistral's markers: every one is its name in capitals and brackets."""


class _StandIns(MetaPathFinder, Loader):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.absent = {name for name in FOREIGN if importlib.util.find_spec(name) is None}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        real = any(name == module or name.startswith(f"{module}.") for module in REAL)
        root = name.partition(".")[0]
        return ModuleSpec(name, self, is_package=True) if root in self.absent or (root == "vllm" and not real) else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__path__ = [str(self.folder.joinpath(*name.split(".")))] if name.startswith("vllm") else []
        module.__getattr__ = lambda attribute: _placeholder(module, attribute)  # type: ignore[method-assign]


def _placeholder(module: ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value: Any
    if module.__name__ == "vllm.envs":
        value = 1 if name.endswith("_SECONDS") else False
    elif name == "SpecialTokens":
        value = SpecialTokens
    elif name == "init_logger":
        value = lambda *_: QUIET  # noqa: E731
    elif name[0].islower():
        value = lambda *_, **__: False  # noqa: E731
    else:
        value = type(name, (Record,), {})
    setattr(module, name, value)
    return value


class _Vocabulary(dict[str, int]):
    """A vocabulary that holds every token."""

    def __missing__(self, token: str) -> int:
        self[token] = len(self) + 1
        return self[token]

    def __contains__(self, token: object) -> bool:
        return True

    def get(self, token: str, default: Any = None) -> int:
        return self[token]


class _Tokenizer:
    all_special_tokens: tuple[str, ...] = ()
    all_special_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.vocab = _Vocabulary()

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.vocab[token]

    def encode(self, text: str, **_: object) -> list[int]:
        return [self.vocab[text]]


class VLLMParsers:
    """The parsers in `folder`, which holds the wheel's `vllm/`. One per process, as it replaces vLLM in imports."""

    def __init__(self, folder: Path, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        if not (folder / "vllm" / "tool_parsers").is_dir():
            raise FileNotFoundError(f"{folder} holds no vllm/tool_parsers")
        sys.meta_path.insert(0, _StandIns(folder))
        self.manager = importlib.import_module("vllm.tool_parsers").ToolParserManager
        self.protocol = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
        self.request = self._request(tools)
        self.tools = self.request.tools
        self.tokenizer = _Tokenizer()

    def _request(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        parameters = [
            self.protocol.ChatCompletionToolsParam(type="function", function=Record(**tool["function"]))
            for tool in tools
        ]
        return self.protocol.ChatCompletionRequest(tools=parameters, tool_choice="auto", include_reasoning=True)

    def names(self) -> list[str]:
        """The names that `--tool-call-parser` takes."""
        return list(self.manager.list_registered())

    def serve(
        self, name: str, text: str, tools: Sequence[Mapping[str, Any]], reasoning: str | None = None
    ) -> tuple[str | None, list[tuple[str, str]]]:
        """What a server makes of a whole completion: the content, and the calls as names and JSON.

        `reasoning` is the name of a reasoning parser. Raises any error of vLLM's classes.
        """
        request = self._request(tools)
        made = importlib.import_module("vllm.parser.parser_manager").ParserManager.get_parser(
            tool_parser_name=name, reasoning_parser_name=reasoning, enable_auto_tools=True
        )
        _, content, calls = made(self.tokenizer, request.tools).parse(text, request, enable_auto_tools=True)
        return content, [(call.name, call.arguments) for call in calls or ()]

    def parse(self, name: str) -> Callable[[str], int]:
        """Construct a parser and parse, as a server does for each request. Returns the number of calls.

        Raises any error that keeps vLLM's class from running here.
        """
        parser = self.manager.get_tool_parser(name)

        def run(text: str) -> int:
            return len(parser(self.tokenizer, self.tools).extract_tool_calls(text, self.request).tool_calls or ())

        run("")
        return run
