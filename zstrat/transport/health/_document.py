"""The page as one document, which needs nothing else and runs nothing else.

Its script and style are those of this package, by their digests: whatever else got into
the page, out of the name of a task or a line of a log, would not run, and could load
nothing and send nothing anywhere.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Final

from ._http import HttpAnswer

_SCRIPTS: Final = ("charts.js", "page.js")
"""In this order; what the first defines the second uses."""


@cache
def document() -> HttpAnswer:
    """The page, as it is answered."""
    style = f"\n{_asset('page.css')}"
    script = "\n" + "\n".join(map(_asset, _SCRIPTS))
    text = _asset("page.html").replace("{style}", style).replace("{script}", script)
    policy = (
        "default-src 'none'",
        f"script-src {_digest(script)}",
        f"style-src {_digest(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
    return HttpAnswer(
        200,
        text,
        "text/html; charset=utf-8",
        (
            ("Content-Security-Policy", "; ".join(policy)),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Frame-Options", "DENY"),
        ),
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text("utf-8")


def _digest(text: str) -> str:
    """As a policy names what may run. A browser takes it of the text in the element."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
