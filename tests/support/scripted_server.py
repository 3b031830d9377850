"""The scripted server under the name that the tests import."""

from lachesis_testing.scripted_server import Answer, ScriptedServer, call, say

__all__ = ["Answer", "ScriptedServer", "call", "say"]
