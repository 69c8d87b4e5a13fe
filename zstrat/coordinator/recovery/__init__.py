"""Restores lost parameter servers from the last checkpoint, in a session under another
number."""

from __future__ import annotations

from ._inventory import Inventory as Inventory
from ._inventory import RestorePoint as RestorePoint
from ._inventory import entry_of as entry_of
from ._recovery import Recovery as Recovery
from ._session_renewal import SessionRenewal as SessionRenewal
