"""``zstrat-ps``: stores variables, answers pulls and pushes, runs optimizers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zstrat.launch import choose_devices

from . import leave, options_from, parser, refusals, run

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a parameter server; ends the process with the exit codes of `_main`."""
    parsed = parser("ps", "A parameter server of zstrat.").parse_args(argv)
    with refusals("ps"):
        options = options_from(parsed, "ps")
    # Optimizers run in main memory, where the variables are stored: a ps that claimed
    # an accelerator would keep it from the worker on the same host.
    choose_devices({"JAX_PLATFORMS": "cpu"})
    # XLA's own threads. A ps computes on one thread anyway; with more, XLA splits
    # updates of a few hundred KiB, and scheduling the pieces takes half as much
    # processor time again (Adagrad on 8192 rows of 16: 340 us instead of 230), and
    # milliseconds on a host whose cores are all busy.
    os.environ.setdefault("NPROC", "1")
    leave(run(options))


if __name__ == "__main__":
    main()
