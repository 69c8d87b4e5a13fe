"""``zstrat-ps``: holds variables, answers pulls and pushes, runs optimizers."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from zstrat.launch import choose_devices

from . import MISTAKEN, leave, order, parser, run

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends the process with the exit codes of `_main`."""
    parsed = parser("ps", "A parameter server of zstrat.").parse_args(argv)
    try:
        asked = order(parsed, "ps")
    except ValueError as error:
        print(f"zstrat-ps: {error}", file=sys.stderr)
        leave(MISTAKEN)
    # Optimizers run where the variables are, in this machine's memory: a ps that took
    # an accelerator would take it from the worker beside it.
    choose_devices({"JAX_PLATFORMS": "cpu"})
    # XLA's own threads. A ps computes on one thread as it is; with more, XLA cuts
    # updates of a few hundred KiB into pieces, and handing those out takes twice the
    # processor time of the arithmetic (Adagrad on 8192 rows of 16: 340 us against
    # 230), and milliseconds where all cores are busy.
    os.environ.setdefault("NPROC", "1")
    leave(run(asked))


if __name__ == "__main__":
    main()
