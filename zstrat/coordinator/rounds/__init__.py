"""Rounds of synchronous training: decides which gradients, contributed by steps, are
combined into one update of an optimizer, and orders that update."""

from __future__ import annotations

from ._optimizer_rounds import RestoredRounds as RestoredRounds
from ._optimizer_rounds import SessionRounds as SessionRounds
from ._optimizer_rounds import first_free_step as first_free_step
from ._optimizer_rounds import inherited_rounds as inherited_rounds
from ._round_closing import CoordinatorParts as CoordinatorParts
from ._round_closing import RoundClosing as RoundClosing
