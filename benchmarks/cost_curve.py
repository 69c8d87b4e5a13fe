"""``python -m benchmarks.cost_curve docs/all_reduce_cost.png``: cost of an all-reduce
against ranks, drawn (with matplotlib, of the extra ``examples``).

Dots: the schedules that zstrat runs, carried out on a clock over lines of 25 Gb/s and
50 us, from 2 to 1,024 ranks. Lines: what the textbook says of each algorithm, step
after step. Halving and doubling lies below its line, by up to a quarter, where latency
counts as much as bytes: its blocks go on one by one, and do not wait for the end of a
step. Two trees lie above theirs, by up to a fifth, where they carry many chunks: those
on their way up and those on their way down wait for each other.

The clock counts lines, not the work of a rank on each hop, of which ``direct`` has the
most: so the rules take it in small groups only. ``tree`` is not drawn for 64 MiB, which
all its hops carry whole: no rule takes it there.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.line_cost import LinkCost, cost

RANKS: Final = [2**n for n in range(1, 11)]
SIZES: Final = {"4 KiB": 4096, "1 MiB": 2**20, "64 MiB": 2**26}
LINE: Final = LinkCost()
CHUNK: Final = 2**20


def ring(ranks: int, nbytes: int) -> float:
    """2 (p - 1) hops of a p-th of the bytes (Patarasuk and Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", 2009)."""
    hops = 2 * (ranks - 1)
    return hops * (LINE.latency + nbytes / ranks / LINE.bandwidth)


def direct(ranks: int, nbytes: int) -> float:
    """Two steps, in each of them p - 1 hops of a p-th of the bytes on every line."""
    moved = 2 * (ranks - 1) / ranks * nbytes
    return 2 * LINE.latency + moved / LINE.bandwidth


def halving_doubling(ranks: int, nbytes: int) -> float:
    """2 log p steps, 2 (p - 1) / p of the bytes (Thakur, Rabenseifner and Gropp,
    "Optimization of collective communication operations in MPICH", 2005)."""
    steps = 2 * math.log2(ranks)
    moved = 2 * (ranks - 1) / ranks * nbytes
    return steps * LINE.latency + moved / LINE.bandwidth


def tree(ranks: int, nbytes: int) -> float:
    """Up and down a binomial tree, all bytes in each of 2 log p steps (Thakur et al.:
    a reduce, then a broadcast)."""
    steps = 2 * math.ceil(math.log2(ranks))
    return steps * (LINE.latency + nbytes / LINE.bandwidth)


def double_tree(ranks: int, nbytes: int) -> float:
    """Half of the bytes up and down each of two binary trees, chunk behind chunk, so
    that every line carries twice the bytes and no more (Sanders, Speck and Traeff,
    "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009).

    The first chunk takes log p steps up and as many down, each of two hops, one for
    either child; the root has one child alone. Each further chunk costs a rank two hops
    from its children and one from its parent in one tree, and one in the other, where
    it is a leaf; two ranks are a root and a leaf in both.
    """
    depth = math.ceil(math.log2(ranks))
    chunks = max(1, -(-nbytes // (2 * CHUNK)))
    hop = nbytes / 2 / chunks / LINE.bandwidth
    first = 2 * depth * (LINE.latency + 2 * hop) - 2 * hop
    return first + (chunks - 1) * (4 if ranks > 2 else 2) * hop


TEXTBOOK: Final[dict[str, Any]] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "direct": direct,
    "tree": tree,
    "double_tree": double_tree,
}
_STYLES: Final = dict(zip(TEXTBOOK, ("oC0", "sC1", "DC2", "vC3", "^C4"), strict=True))


def main() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    figure, panels = plt.subplots(1, len(SIZES), figsize=(12, 4.4), sharex=True)
    for panel, (name, nbytes) in zip(panels, SIZES.items(), strict=True):
        for algorithm in TEXTBOOK:
            if not (algorithm == "tree" and nbytes == max(SIZES.values())):
                _draw(panel, algorithm, nbytes)
        panel.set(title=f"all-reduce of {name}", xlabel="ranks", xticks=RANKS[1::2])
        panel.set_xticklabels([f"{n:,}" for n in RANKS[1::2]])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.minorticks_off()
        panel.grid(axis="y", linewidth=0.3)
    panels[0].set_ylabel("milliseconds")
    panels[0].legend(title="dots: run on a clock\nlines: textbook", fontsize=8)
    figure.tight_layout()
    figure.savefig(Path(sys.argv[1]), dpi=110)


def _draw(panel: Any, algorithm: str, nbytes: int) -> None:
    ours = [cost("all_reduce", algorithm, n, nbytes, LINE) * 1e3 for n in RANKS]
    style = {"markersize": 5, "markerfacecolor": "none", "label": algorithm}
    (drawn,) = panel.loglog(RANKS, ours, _STYLES[algorithm], **style)
    book = [TEXTBOOK[algorithm](n, nbytes) * 1e3 for n in RANKS]
    panel.loglog(RANKS, book, color=drawn.get_color(), linewidth=1)


if __name__ == "__main__":
    main()
