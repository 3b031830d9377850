"""The title and the main text of an HTML page."""

from __future__ import annotations

from backends.errors import SettingsError


def html_text(data: bytes) -> tuple[str, str]:
    """Title and text, without navigation, footers and repeated paragraphs. Takes milliseconds: not for the event loop.

    Raises:
        SettingsError: trafilatura is not installed.
    """
    try:
        import trafilatura
    except ModuleNotFoundError:
        raise SettingsError("HTML pages need trafilatura: pip install 'lachesis-tools[web]'") from None
    tree = trafilatura.load_html(data)
    if tree is None:
        return "", ""
    title = str(tree.findtext(".//title") or "").strip()
    text = trafilatura.extract(data, include_comments=False) or trafilatura.html2txt(data)
    return title, str(text).strip()
