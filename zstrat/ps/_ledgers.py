"""The ledgers of one session: of its closures, and of each writer's own updates.

A program updates variables outside of closures, too. Such an update has a number that
its *writer* gave it, so that it may be sent again when nobody knows whether it arrived.
The law of this file: the mark of the closures is raised by who holds the session, and
the mark of a writer by that writer's pushes alone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import InvalidArgumentError

from ._ledger import Ledger

if TYPE_CHECKING:
    from zstrat.wire import Push

WRITERS: Final = 4096
"""Processes whose own updates are remembered, the latest ones: a session has the
program that holds it, or one per worker, and those that were started anew."""


@final
class Ledgers:
    """Of the parameter server ``task``."""

    def __init__(self, task: str) -> None:
        self._task = task
        self.closures = Ledger()
        self._own: OrderedDict[int, Ledger] = OrderedDict()

    def __len__(self) -> int:
        """Steps and numbers that are remembered."""
        return len(self.closures) + sum(map(len, self._own.values()))

    def of(self, push: Push) -> Ledger:
        """Where the push is looked up, with the mark of its writer as it says.

        Raises:
            InvalidArgumentError: Its writer counts this very push among those that are
                over.
        """
        if not push.writer:
            return self.closures
        if push.low_water > push.step:
            raise InvalidArgumentError(
                f"{self._task}: update {push.step} of a program says that all of its "
                f"updates below {push.low_water} are over, itself among them"
            )
        ledger = self._own.get(push.writer)
        if ledger is None:
            ledger = self._own[push.writer] = Ledger()
            if len(self._own) > WRITERS:
                self._own.popitem(last=False)
        self._own.move_to_end(push.writer)
        ledger.raise_to(push.low_water)
        return ledger
