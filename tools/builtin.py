"""The tools that come with Lachesis, in the order in which models see them."""

from __future__ import annotations

from tools.files import read_file, write_file
from tools.patch import patch
from tools.process import process
from tools.python import python
from tools.registry import ToolRegistry
from tools.search import search_files
from tools.terminal import terminal
from tools.todo import todo

BUILTIN_TOOLS = ToolRegistry([terminal, process, read_file, write_file, patch, search_files, python, todo])
"""Never changed: `BUILTIN_TOOLS.extended(my_tool)` is a new registry."""
