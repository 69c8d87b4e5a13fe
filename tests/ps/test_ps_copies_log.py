"""What is on its way to a backup: in order, once, bounded, and again after a break."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.errors import ProtocolError
from zstrat.ps.replication import WINDOW, ReplicationLog
from zstrat.ps.store import TwoLogs
from zstrat.wire import CopyParts, Done, RaiseMark

LARGE = np.empty(WINDOW // 3, np.uint8)  # never touched: it costs no memory

events = st.lists(
    st.sampled_from(("append", "large", "send", "arrive", "say", "hear", "break")),
    max_size=80,
)


@given(events)
def test_a_backup_gets_all_in_order_whatever_breaks(events):
    log = ReplicationLog()
    made, backup = [], []
    line, words = [], []  # on their way to the backup, and back
    for event in [*events, "break", *["send", "arrive", "say", "hear"] * 90]:
        match event:
            case "append" | "large":
                change = RaiseMark(0, len(made))
                if event == "large":
                    change = CopyParts([], (LARGE,))
                made.append(change)
                assert log.append(change) == len(made)
            case "send" if (change := log.next_change()) is not None:
                line.append(change)
            case "arrive" if line:
                backup.append(line.pop(0))
            case "say":
                words.append(len(backup))
            case "hear" if words:
                log.acknowledge(words.pop(0))
            case "break":
                line, words = [], []
                log.resume(len(backup))
        under_way = made[log.taken : len(backup)] + line
        assert sum(isinstance(change, CopyParts) for change in under_way) <= 3
        assert log.taken <= len(backup)
    assert all(one is other for one, other in zip(made, backup, strict=True))
    assert log.is_taken
    assert log.nbytes == 0


def test_numbers_that_cannot_be():
    log = ReplicationLog()
    for number in range(3):
        log.append(RaiseMark(0, number))
    with pytest.raises(ProtocolError):
        log.acknowledge(1)
    while log.next_change() is not None:
        pass
    log.acknowledge(2)
    log.acknowledge(1)  # late
    assert log.taken == 2
    with pytest.raises(ProtocolError):
        log.resume(1)
    with pytest.raises(ProtocolError):
        log.resume(4)


class HeldLog:
    """Has each answer wait in ``held``."""

    def __init__(self):
        self.changes, self.held = [], []

    def append(self, change):
        self.changes.append(change)

    def hold(self, message):
        self.held.append(asyncio.get_running_loop().create_future())
        return self.held[-1]


@pytest.mark.parametrize("last", [0, 1])
async def test_an_answer_leaves_when_both_of_two_logs_let_it(last):
    logs = HeldLog(), HeldLog()
    both = TwoLogs(*logs)
    both.append(RaiseMark(0, 1))
    assert [log.changes for log in logs] == [[RaiseMark(0, 1)]] * 2
    awaited = asyncio.get_running_loop().create_future()
    answer, _ = both.hold(Done()), both.answer(awaited, Done())
    for future in logs[1 - last].held:
        future.set_result(Done())
    await asyncio.sleep(0)
    assert (answer.done(), awaited.done()) == (False, False)
    answered, refused = logs[last].held
    answered.set_result(Done())
    refused.set_exception(ProtocolError("another process serves"))
    assert await answer == Done()
    with pytest.raises(ProtocolError):
        await awaited
