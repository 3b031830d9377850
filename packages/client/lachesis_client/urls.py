"""URLs of settings."""

from __future__ import annotations

import re

from pydantic import AfterValidator

_SCHEME = re.compile(r"^([a-zA-Z][\w+.-]*)?:?//")


def http_url(url: str | None) -> str | None:
    """`url`. Raises ValueError with the URL that was meant, where it does not begin with http:// or https://."""
    if not url or url.lower().startswith(("http://", "https://")):
        return url
    rest = _SCHEME.sub("", url)
    host = rest.partition("/")[0]
    public = ":" not in host and re.search(r"\.[a-zA-Z]+$", host)
    meant = f"{'https' if public else 'http'}://{rest}"
    also = "" if "/" in rest else f" (or {meant}/v1, where most servers have their API)"
    raise ValueError(f"a URL must begin with http:// or https://: write {meant}{also}")


HTTP_URL = AfterValidator(http_url)
"""For the annotation of a setting."""
