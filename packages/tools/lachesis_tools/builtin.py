"""The built-in tools, in the order in which models see them."""

from __future__ import annotations

from lachesis_tools.background import process
from lachesis_tools.files import read_file, write_file
from lachesis_tools.patch import patch
from lachesis_tools.python import python
from lachesis_tools.search import search_files
from lachesis_tools.terminal import terminal
from lachesis_tools.todo import todo
from lachesis_tools.tool_registry import ToolRegistry

BUILTIN_TOOLS = ToolRegistry([terminal, process, read_file, write_file, patch, search_files, python, todo])
"""Immutable: `BUILTIN_TOOLS.extended(my_tool)` returns a new registry."""
