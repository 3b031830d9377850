"""Servers and suites for tests, of users too. A name is imported when it is first used.

* `FakeServer`: the HTTP APIs of vLLM, SGLang, OpenAI and Atropos, with a real tokenizer and no model
* `ScriptedServer`: OpenAI's chat route that plays messages, with `say` and `call`
* `ParserSuite`, `EngineSuite`, `ExportSuite`, `DoorSuite`: the conformance suites of tool-call parsers, token engines,
  exports and doors
* `backend_suite`: that of sandbox backends (`from lachesis_testing.backend_suite import *`)
"""

from typing import TYPE_CHECKING

from backends.lazy import lazy_names

if TYPE_CHECKING:
    from lachesis_testing.door_suite import DoorSuite
    from lachesis_testing.engine_suite import EngineSuite
    from lachesis_testing.export_suite import ExportSuite, example_groups
    from lachesis_testing.fake_server import (
        Ask,
        Codec,
        Echo,
        FakeModel,
        FakeServer,
        Fault,
        Lengths,
        RandomTokens,
        RandomWords,
        Reply,
        Scripted,
        ToolUser,
        fake_tokenizer,
        letter_swapped,
    )
    from lachesis_testing.parser_suite import Case, FormatLimits, ParserSuite
    from lachesis_testing.scripted_server import ScriptedServer, call, say
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "lachesis_testing.door_suite": ["DoorSuite"],
            "lachesis_testing.engine_suite": ["EngineSuite"],
            "lachesis_testing.export_suite": ["ExportSuite", "example_groups"],
            "lachesis_testing.fake_server": [
                "Ask",
                "Codec",
                "Echo",
                "FakeModel",
                "FakeServer",
                "Fault",
                "Lengths",
                "RandomTokens",
                "RandomWords",
                "Reply",
                "Scripted",
                "ToolUser",
                "fake_tokenizer",
                "letter_swapped",
            ],
            "lachesis_testing.parser_suite": ["Case", "FormatLimits", "ParserSuite"],
            "lachesis_testing.scripted_server": ["ScriptedServer", "call", "say"],
        },
    )

__all__ = [
    "Ask",
    "Case",
    "Codec",
    "DoorSuite",
    "Echo",
    "EngineSuite",
    "ExportSuite",
    "FakeModel",
    "FakeServer",
    "Fault",
    "FormatLimits",
    "Lengths",
    "ParserSuite",
    "RandomTokens",
    "RandomWords",
    "Reply",
    "Scripted",
    "ScriptedServer",
    "ToolUser",
    "call",
    "example_groups",
    "fake_tokenizer",
    "letter_swapped",
    "say",
]
