"""``python -m benchmarks.cost_curve FILE``: cost of an all-reduce against ranks, drawn.

The schedules that zstrat runs, carried out on a clock over lines of 25 Gb/s and 50 us,
from 2 to 1,024 ranks; beside them what the textbook says of each algorithm.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Final

from zstrat.collectives import Line, cost

RANKS: Final = [2**n for n in range(1, 11)]
SIZES: Final = {"4 KB": 4096, "1 MB": 2**20, "64 MB": 2**26}
LINE: Final = Line()
CHUNK: Final = 2**20


def ring(ranks: int, nbytes: int) -> float:
    """2 (p - 1) hops of a p-th of the bytes (Patarasuk and Yuan 2009)."""
    hops = 2 * (ranks - 1)
    return hops * (LINE.latency + nbytes / ranks / LINE.bandwidth)


def halving_doubling(ranks: int, nbytes: int) -> float:
    """2 log p hops, 2 (p - 1) / p of the bytes (Thakur et al. 2005)."""
    hops = 2 * math.log2(ranks)
    moved = 2 * (ranks - 1) / ranks * nbytes
    return hops * LINE.latency + moved / LINE.bandwidth


def tree(ranks: int, nbytes: int) -> float:
    """Up and down a binomial tree, all bytes in every hop, chunk behind chunk."""
    depth = math.ceil(math.log2(ranks))
    chunks = max(1, -(-nbytes // CHUNK))
    hop = nbytes / chunks / LINE.bandwidth
    # The root takes one chunk after the other from each of its children.
    return 2 * depth * (LINE.latency + hop) + 2 * (chunks - 1) * depth * hop


TEXTBOOK: Final[dict[str, Any]] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "tree": tree,
}


def main() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    path = Path(sys.argv[1])
    figure, panels = plt.subplots(1, len(SIZES), figsize=(12, 4), sharex=True)
    for panel, (name, nbytes) in zip(panels, SIZES.items(), strict=True):
        for algorithm, formula in TEXTBOOK.items():
            ours = [cost("all_reduce", algorithm, n, nbytes, LINE) * 1e3 for n in RANKS]
            (drawn,) = panel.loglog(RANKS, ours, "o", markersize=4, label=algorithm)
            book = [formula(n, nbytes) * 1e3 for n in RANKS]
            panel.loglog(RANKS, book, color=drawn.get_color(), linewidth=1)
        panel.set(title=f"all-reduce of {name}", xlabel="ranks", xticks=RANKS[1::3])
        panel.set_xticklabels([f"{n:,}" for n in RANKS[1::3]])
        panel.minorticks_off()
    panels[0].set_ylabel("milliseconds")
    panels[0].legend(title="dots: run on a clock\nlines: textbook", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
