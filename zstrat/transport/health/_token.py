"""Who may see the page of a port that other machines can reach: who has its token.

The token comes once in the address that its owner gives away (``/?token=...``); the
page then moves it into a cookie, so that it stands in no history, no log of a proxy and
no screenshot. Programs send ``Authorization: Bearer ...``.

Threats: guessing, so a token has to be long, and comparing takes the same time for all
wrong ones; another site that uses the cookie, so that it is sent by navigation alone,
nothing here changes anything, and no other site can read an answer. A connection is not
encrypted: whoever can read the network between can read the token, too. Use ``ssh -L``
there.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import TYPE_CHECKING, Final, final
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from ._http import HttpRequest

_FORM: Final = re.compile(r"[A-Za-z0-9_-]{16,128}")
"""What is no special character in an address and a cookie. 16 of them are 96 bits."""


@final
class PageToken:
    """The token of one port.

    Args:
        secret: The token; None makes one.

    Raises:
        ValueError: It is short enough to be guessed, or has other characters.
    """

    def __init__(self, secret: str | None = None) -> None:
        made = secrets.token_urlsafe(24) if secret is None else secret
        if _FORM.fullmatch(made) is None:
            raise ValueError(
                "the token of a page has 16 to 128 letters, digits, - and _, as "
                f"secrets.token_urlsafe() makes them; this one has {len(made)} "
                "characters, or others"
            )
        self.secret: Final = made

    def is_same(self, secret: str) -> bool:
        """Whether this text is the token. Takes the same time for all that are not."""
        return hmac.compare_digest(secret.encode(), self.secret.encode())

    def is_in_address(self, asked: HttpRequest) -> bool:
        """Whether the address itself has the token: it is to become a cookie."""
        return any(map(self.is_same, parse_qs(asked.query).get("token", ())))

    def is_shown(self, asked: HttpRequest, port: int) -> bool:
        """Whether the cookie, or the header for programs, has it."""
        scheme, _, told = asked.authorization.partition(" ")
        if scheme.lower() == "bearer" and self.is_same(told.strip()):
            return True
        pairs = (each.strip().partition("=") for each in asked.cookie.split(";"))
        return any(name == _name(port) and self.is_same(it) for name, _, it in pairs)

    def cookie(self, port: int) -> str:
        """The value of ``Set-Cookie``. A link in a letter works, so it is Lax."""
        return f"{_name(port)}={self.secret}; Path=/; HttpOnly; SameSite=Lax"


def _name(port: int) -> str:
    """Cookies do not know ports, and a host may have several."""
    return f"zstrat_{port}"
