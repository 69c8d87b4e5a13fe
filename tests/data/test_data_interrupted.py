"""A Ctrl-C while an element is drawn takes neither it nor its room in the buffer."""

import sys

import pytest

from zstrat.data import Prefetcher


class Interruption:
    """Raises KeyboardInterrupt before the n-th line that one function runs next."""

    def __init__(self, code, line):
        self._code, self._left = code, line

    def __enter__(self):
        sys.settrace(self._traced)

    def __exit__(self, *exc):
        sys.settrace(None)

    def _traced(self, frame, event, arg):
        if frame.f_code is not self._code:
            return None
        if event == "line":
            self._left -= 1
            if not self._left:
                raise KeyboardInterrupt
        return self._traced


def drawn_with_interruptions(before_line):
    """What a reader draws who is interrupted each time, at that line, and goes on."""
    prefetcher = Prefetcher(iter(range(40)), 2)
    get = type(prefetcher._buffer).get
    found = []
    for _ in range(20):
        try:
            with Interruption(get.__code__, before_line):
                found.append(next(prefetcher))
        except KeyboardInterrupt:
            found.append(next(prefetcher))
    found += prefetcher
    return found


@pytest.mark.parametrize("before_line", range(1, 9))
def test_the_reader_goes_on_where_it_was(before_line):
    assert drawn_with_interruptions(before_line) == list(range(40))
