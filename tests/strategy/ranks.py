"""Several ranks as threads of one process, and what brings them together."""

import threading
from unittest.mock import patch

import jax
import numpy as np

from zstrat.cluster import ClusterSpec, SimpleClusterResolver
from zstrat.strategy import MultiWorkerMirroredStrategy

TIMEOUT = 250.0


class Board:
    """Where the ranks lay their arrays down; ``calls`` are the collectives so far."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.given = [None] * size
        self.calls = []

    def meet(self, rank, what, arrays, combine):
        self.given[rank] = (what, arrays)
        self.barrier.wait()
        assert len({said for said, _ in self.given}) == 1, self.given
        found = combine([arrays for _, arrays in self.given])
        if rank == 0:
            self.calls.append(what)
        self.barrier.wait()
        return found


class Threads:
    """The collective of one rank."""

    generation = 0

    def __init__(self, board, rank, options=None):
        self.board, self.rank, self.options = board, rank, options

    def under(self, options):
        """Its calls say the options, too."""
        return Threads(self.board, self.rank, options)

    @property
    def size(self):
        return self.board.size

    def all_reduce(self, tree, op="sum"):
        join = {"sum": lambda x: sum(x[1:], start=x[0]), "max": lambda x: np.max(x, 0)}[
            op
        ]
        return self._meet(
            (op, tuple((a.dtype.name, a.shape) for a in tree)),
            tree,
            lambda ranks: [np.asarray(join(x)) for x in zip(*ranks, strict=True)],
        )

    def all_gather(self, tree, axis=0):
        return self._meet(
            ("gather", tuple((a.dtype.name, a.shape[1:]) for a in tree)),
            tree,
            lambda ranks: [np.concatenate(x, axis) for x in zip(*ranks, strict=True)],
        )

    def broadcast(self, tree, root=0):
        return self._meet(
            ("broadcast", tuple((a.dtype.name, a.shape) for a in tree)),
            tree,
            lambda ranks: [np.array(x) for x in ranks[root]],
        )

    def _meet(self, what, tree, combine):
        if self.options is not None:
            what = (*what, self.options)
        return self.board.meet(self.rank, what, list(tree), combine)


def ranks(size, program, most=None):
    """Runs ``program(strategy, rank)`` as so many ranks; what they return, in order.

    Of many devices each has its own ones, ``most`` of them at most. Programs of two
    ranks on the same devices would wait for each other: XLA has as many threads as
    there are devices, and each part of a program keeps one until all of its parts have
    begun.
    """
    board, making = Board(size), threading.Lock()
    devices = jax.local_devices()
    own = len(devices) // size if len(devices) > 2 * size else 0
    spec = ClusterSpec({"worker": [f"127.0.0.1:{9000 + n}" for n in range(size)]})
    found, errors = [None] * size, []

    def one(rank):
        try:
            resolver = SimpleClusterResolver(spec, task_type="worker", task_id=rank)
            mine = devices[rank * own : (rank + 1) * own][:most] or devices
            with making, patch.object(jax, "local_devices", lambda: mine):
                strategy = MultiWorkerMirroredStrategy(
                    resolver, group=lambda *_: Threads(board, rank)
                )
            board.barrier.wait()
            found[rank] = program(strategy, rank)
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=one, args=(n,)) for n in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    if errors:
        raise next(
            (e for e in errors if not isinstance(e, threading.BrokenBarrierError)),
            errors[0],
        )
    return found
