"""What mkdocs.yml cannot say: pages from outside docs/, their links, and anchors as GitHub makes them."""

from __future__ import annotations

import ast
import os
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("HermesAgentEnvConfig", "ServerConfig")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    for page, source in config.extra["outside"].items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=reference(text) if source.endswith(".py") else text))
    return files


def reference(source: str) -> str:
    """A page with the docstrings of the names that a module takes from others, for mkdocstrings."""
    found = {
        alias.name: f"{node.module}.{alias.name}"
        for block in ast.parse(source).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    parts = [
        "# Names and signatures\n\nThe docstrings of what `lachesis` exports; [the public interface](api.md) is a list."
    ]
    for name in sorted(found, key=str.lower):
        # Of settings, the page of settings tells more than the signature of a constructor.
        options = "    options: {members: false, show_signature: false}" if name in SETTINGS else ""
        more = "All of them: [settings](settings.md)." if name in SETTINGS else ""
        parts.append(f"::: {found[name]}\n{options}\n\n{more}")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The links of the page, which hold in the repository, as they are in the site."""
    outside = config.extra["outside"]
    own = page.file.src_uri
    folder = (ROOT / outside.get(own, f"docs/{own}")).parent
    pages = {ROOT / source: name for name, source in outside.items()}

    def in_site(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[1]))
        if target in pages:
            name = pages[target]
        elif target.exists() and target.is_relative_to(ROOT / "docs"):
            name = target.relative_to(ROOT / "docs").as_posix()
        else:
            return link[1]
        return os.path.relpath(name, Path(own).parent)

    return LINK.sub(in_site, markdown)


def on_post_build(config: Any) -> None:
    """Takes away what no reader of the site needs: sources of scripts, and the stemmers of other languages."""
    site = Path(config.site_dir)
    shutil.rmtree(site / "assets" / "javascripts" / "lunr")
    for path in site.rglob("*.map"):
        path.unlink()
