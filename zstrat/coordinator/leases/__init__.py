"""Assigns ranges of the examples of leased datasets to steps, each example once."""

from ._book import LeaseBook as LeaseBook
from ._book import OnError as OnError
from ._session_leases import REMEMBERED as REMEMBERED
from ._session_leases import Draw as Draw
from ._session_leases import SessionLeases as SessionLeases
