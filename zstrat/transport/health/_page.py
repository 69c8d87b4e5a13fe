"""The web page of the HTTP port, as one document, and the token that a reader needs to
see it.

The document loads nothing else. Its policy allows the scripts and styles of this
package alone, by their digests: anything that got into the page from the name of a task
or a line of a log would not run, and could neither load nor send data.

If other machines can reach the port, the page is for users who have its token. The
token comes once in the address that its owner gives away (``/?token=...``); the page
then moves it into a cookie, so that it does not appear in a history, a log of a proxy
or a screenshot. Programs send ``Authorization: Bearer ...``.

Threats: guessing, so a token has to be long, and comparing takes the same time for all
wrong tokens; another site that uses the cookie, so browsers send it on navigation
alone, no request changes anything, and no other site can read an answer. A connection
is not encrypted: anyone who can read the network between can read the token. Use ``ssh
-L`` there.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Final, final
from urllib.parse import parse_qs

from zstrat.telemetry import COLUMNS, Kind, task_metrics

from ._http import HttpAnswer

if TYPE_CHECKING:
    from ._http import HttpRequest

_FORM: Final = re.compile(r"[A-Za-z0-9_-]{16,128}")
"""Form of a token: characters that are not special in an address or a cookie. 16 of
them are 96 bits."""


@final
class PageToken:
    """The token that readers of the web page at one port need.

    Args:
        secret: The token; None: a random one.

    Raises:
        ValueError: ``secret`` is short enough to be guessed, or has other characters
            than letters, digits, "_" and "-".
    """

    def __init__(self, secret: str | None = None) -> None:
        token = secrets.token_urlsafe(24) if secret is None else secret
        if _FORM.fullmatch(token) is None:
            raise ValueError(
                "the token of a page has 16 to 128 letters, digits, - and _, as "
                f"secrets.token_urlsafe() makes them; this one has {len(token)} "
                "characters, or others"
            )
        self.secret: Final = token

    def is_same(self, secret: str) -> bool:
        """Returns whether ``secret`` is the token. Takes the same time for all wrong
        texts."""
        # As bytes: for text it takes ASCII alone.
        return hmac.compare_digest(secret.encode(), self.secret.encode())

    def is_in_address(self, asked: HttpRequest) -> bool:
        """Returns whether the address of the request has the token, which the page then
        moves into a cookie."""
        return any(map(self.is_same, parse_qs(asked.query).get("token", ())))

    def is_shown(self, asked: HttpRequest, port: int) -> bool:
        """Returns whether the request has the token in the cookie, or in the header for
        programs."""
        scheme, _, secret = asked.authorization.partition(" ")
        if scheme.lower() == "bearer" and self.is_same(secret.strip()):
            return True
        pairs = (each.strip().partition("=") for each in asked.cookie.split(";"))
        return any(name == _name(port) and self.is_same(it) for name, _, it in pairs)

    def cookie(self, port: int) -> str:
        """Returns the value of ``Set-Cookie`` that stores the token. The cookie is Lax,
        so that a link in a letter works."""
        return f"{_name(port)}={self.secret}; Path=/; HttpOnly; SameSite=Lax"


def _name(port: int) -> str:
    """Returns the name of the cookie of a port. Browsers send the cookies of a host to
    all its ports, so each port needs its own name."""
    return f"zstrat_{port}"


_SCRIPTS: Final = ("charts.js", "page.js")
"""Files of the page's scripts, in this order: the second uses what the first
defines."""


@cache
def document() -> HttpAnswer:
    """Returns the answer with the web page."""
    style = f"\n{_asset('page.css')}"
    # The columns of the page are those of `zstrat top`, from one registry.
    known = {each.name: each for job in ("ps", "worker") for each in task_metrics(job)}
    numbers = [
        [heading, name, known[name].unit, known[name].kind is Kind.RATE]
        for name, heading in COLUMNS.items()
        if heading
    ]
    # In the script itself: the policy forbids to load anything else.
    parts = [f"const NUMBERS = {json.dumps(numbers)};", *map(_asset, _SCRIPTS)]
    script = "\n" + "\n".join(parts)
    text = _asset("page.html").replace("{style}", style).replace("{script}", script)
    policy = (
        # Nothing but what follows, whatever text of a task got into the page.
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
    """Returns the name of a script or style in a Content-Security-Policy: the digest of
    ``text``, the content of its element."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
