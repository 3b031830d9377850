"""The tools that come with Lachesis, in the order in which models see them."""

from __future__ import annotations

from lachesis.tools.background import process
from lachesis.tools.files import read_file, write_file
from lachesis.tools.patch import patch
from lachesis.tools.python import python
from lachesis.tools.search import search_files
from lachesis.tools.terminal import terminal
from lachesis.tools.todo import todo
from lachesis.tools.tool_registry import ToolRegistry

BUILTIN_TOOLS = ToolRegistry([terminal, process, read_file, write_file, patch, search_files, python, todo])
"""Never changed: `BUILTIN_TOOLS.extended(my_tool)` is a new registry."""
