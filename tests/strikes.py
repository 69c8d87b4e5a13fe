"""Ctrl-C anywhere in a call of the main thread."""

from __future__ import annotations

import gc
import itertools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Strike:
    """Raises as Ctrl-C does, where Python looks for it for that time: a function
    begins, or one that is not written in Python has returned.

    Args:
        number: Which time that is.
        files: How the paths of files end in whose code it is looked for: a finalizer,
            say, is elsewhere, where nobody could catch it.
    """

    def __init__(self, number: int, files: tuple[str, ...]) -> None:
        self.left, self._files = number, files

    def __call__(self, frame: Any, event: str, value: object) -> None:
        if not frame.f_code.co_filename.endswith(self._files):
            return
        self.left -= event in ("call", "c_return")
        if event in ("call", "c_return") and not self.left:
            sys.setprofile(None)
            raise KeyboardInterrupt


def is_struck(call: Callable[[], object], number: int, *files: str) -> bool:
    """Calls it, and has Ctrl-C strike one place in code of these files; whether there
    are so many."""
    strike = Strike(number, files)
    gc.disable()  # it calls a function of jax, where nobody can catch what is raised
    try:
        sys.setprofile(strike)
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return strike.left <= 0


def strikes(call: Callable[[], object], *files: str, every: int = 1) -> Iterator[int]:
    """Has Ctrl-C strike each place of a call in turn, or one of so many; yields behind
    each."""
    for number in itertools.count(1, every):
        if not is_struck(call, number, *files):
            assert number > 3, "there were more, before names changed"
            return
        yield number
