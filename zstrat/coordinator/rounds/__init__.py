"""Rounds: decides which contributions of steps become one update, and orders it."""

from __future__ import annotations

from ._optimizer_rounds import SessionRounds as SessionRounds
from ._round_closing import CoordinatorParts as CoordinatorParts
from ._round_closing import RoundClosing as RoundClosing
