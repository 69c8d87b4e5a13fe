"""What a process brings in that lives for one task: jax and a few hundred modules."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def kept_for_good() -> Iterator[None]:
    """What is made inside stays until this process ends, and no collection of garbage
    looks at it, neither meanwhile nor later.

    With jax, one collection takes a fifth of a second, for which the loop stands still.
    There are a dozen while it is imported, and another at the end of the process. What
    is garbage by the end of the block stays, too: of imports, less than a MiB. For
    processes that are ours alone: it is all objects of the process that are set aside.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
