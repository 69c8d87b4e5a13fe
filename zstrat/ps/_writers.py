"""Which own updates of each process were applied already.

A program updates variables outside of closures, too. Such an update has a number that
its *writer* gave it, so that it may be sent again when nobody knows whether it arrived.
The law of this file: the mark of a writer is raised by that writer's pushes alone.
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
class Writers:
    """Of one session on the parameter server ``task``."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._ledgers: OrderedDict[int, Ledger] = OrderedDict()

    def __len__(self) -> int:
        """Numbers that are remembered."""
        return sum(map(len, self._ledgers.values()))

    def ledger_of(self, push: Push) -> Ledger:
        """Where an own update is looked up, with the mark of its writer as it says.

        Raises:
            InvalidArgumentError: Its writer counts this very push among those that are
                over.
        """
        if push.low_water > push.step:
            raise InvalidArgumentError(
                f"{self._task}: update {push.step} of a program says that all of its "
                f"updates below {push.low_water} are over, itself among them"
            )
        ledger = self._ledgers.get(push.writer)
        if ledger is None:
            ledger = self._ledgers[push.writer] = Ledger()
            if len(self._ledgers) > WRITERS:
                self._ledgers.popitem(last=False)
        self._ledgers.move_to_end(push.writer)
        ledger.raise_to(push.low_water)
        return ledger
