"""The title and the main text of an HTML page."""

from __future__ import annotations

from backends.errors import SettingsError


def html_text(page: bytes | str) -> tuple[str, str]:
    """Title and text, without navigation, footers and repeated paragraphs. Takes milliseconds: not for the event loop.

    Args:
        page: text where the server said its charset; otherwise bytes, of which the page itself may say it.

    Raises:
        SettingsError: trafilatura is not installed.
    """
    try:
        import trafilatura
    except ModuleNotFoundError:
        raise SettingsError("HTML pages need trafilatura: pip install 'lachesis-rl[web]'") from None
    tree = trafilatura.load_html(page)
    if tree is None:  # it takes nothing for a page that does not say so at its beginning
        page = f"<html>{page}</html>" if isinstance(page, str) else b"<html>" + page + b"</html>"
        if (tree := trafilatura.load_html(page)) is None:
            return "", ""
    title = str(tree.findtext(".//title") or "").strip()
    text = trafilatura.extract(page, include_comments=False) or trafilatura.html2txt(page)
    return title, str(text).strip()
