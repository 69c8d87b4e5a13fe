"""One rank of a benchmark: ``python -m benchmarks.ranks SYSTEM WORK REPEATS [HOW]``.

Runs as several processes side by side. Rank 0 prints the median seconds of one call,
after a warm-up, as its last line. The systems are zstrat; ``gloo`` (of PyTorch) and
``mpi`` (mpi4py, started by mpirun) where they are installed; ``floor``: a numpy
reduction through shared memory that does nothing but copy and add, and spins; and
``ring`` and ``zmq_ring``: rings over bare sockets (`benchmarks.raw_ring`).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from multiprocessing import shared_memory
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks import raw_ring

if TYPE_CHECKING:
    from collections.abc import Callable

    Once = Callable[[], None]
    System = tuple[int, "Callable[[list[np.ndarray]], None]", Once]
    """This rank, what sums arrays over the ranks in place, and what ends it."""

MiB = 2**20
CHUNK: Final = MiB


def arrays_of(work: str) -> list[np.ndarray]:
    """``work``: bytes of one array, or "packed": 200 arrays, 100 MB in all."""
    if work != "packed":
        return [np.ones(int(work) // 4, np.float32)]
    sizes = np.geomspace(1024, 5.06e6, 200)
    sizes *= (100e6 - 200 * 1024) / (sizes.sum() - 200 * 1024)
    order = np.random.default_rng(0).permutation(200)
    return [np.ones(max(256, int(sizes[i])) // 4, np.float32) for i in order]


def main() -> None:
    system, work, repeats, *transport = sys.argv[1:]
    rank, reduce, end = SYSTEMS[system](*transport)
    arrays = arrays_of(work)
    times = []
    for _ in range(int(repeats)):
        for array in arrays:
            array.fill(rank + 1)
        began = time.perf_counter()
        reduce(arrays)
        times.append(time.perf_counter() - began)
    end()
    if rank == 0:
        print(json.dumps(statistics.median(times[len(times) // 4 :])))


def _place() -> tuple[int, list[str]]:
    """This rank, and the addresses of all."""
    config = json.loads(os.environ["TF_CONFIG"])
    return config["task"]["index"], config["cluster"]["worker"]


def _zstrat(transport: str = "auto") -> System:
    import zstrat as zs

    group = zs.collectives.Group(transport=transport)

    def reduce(arrays: list[np.ndarray]) -> None:
        if len(arrays) == 1:
            group.all_reduce(arrays[0], in_place=True)
        else:
            group.all_reduce(arrays)

    return group.rank, reduce, group.close


def _gloo() -> System:
    import torch
    import torch.distributed as dist

    rank, addresses = _place()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous = f"tcp://{addresses[0]}"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=len(addresses)
    )

    def reduce(arrays: list[np.ndarray]) -> None:
        tensors = [torch.from_numpy(array) for array in arrays]
        if len(tensors) == 1:
            dist.all_reduce(tensors[0])
            return
        flat = torch.cat(tensors)
        dist.all_reduce(flat)
        for tensor, part in zip(
            tensors, flat.split([t.numel() for t in tensors]), strict=True
        ):
            tensor.copy_(part)

    return rank, reduce, dist.destroy_process_group


def _mpi() -> System:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def reduce(arrays: list[np.ndarray]) -> None:
        for array in arrays:
            world.Allreduce(MPI.IN_PLACE, array)

    return world.Get_rank(), reduce, world.Barrier


def _floor() -> System:
    rank, addresses = _place()
    floor = _Floor(rank, len(addresses), addresses[0])

    def reduce(arrays: list[np.ndarray]) -> None:
        for array in arrays:
            floor.sum(array)

    return rank, reduce, floor.close


def _ring() -> System:
    rank, addresses = _place()
    return _of(rank, raw_ring.joined(rank, addresses))


def _zmq_ring() -> System:
    rank, addresses = _place()
    return _of(rank, raw_ring.ZmqRing(rank, addresses))


def _of(rank: int, ring: raw_ring.Ring | raw_ring.ZmqRing) -> System:
    def reduce(arrays: list[np.ndarray]) -> None:
        for array in arrays:
            ring.sum(array)

    return rank, reduce, ring.close


class _Floor:
    """Each rank copies a chunk into its slot, adds its share of all slots, and copies
    all shares out; between these it spins until every rank is as far."""

    def __init__(self, rank: int, size: int, address: str) -> None:
        self._rank, self._size = rank, size
        name = "zstrat-floor-" + address.rpartition(":")[2]
        nbytes = 4096 + (size + 1) * CHUNK
        if rank == 0:
            self._memory = shared_memory.SharedMemory(name, create=True, size=nbytes)
        else:
            self._memory = self._attach(name)
        self._steps = np.frombuffer(self._memory.buf, np.int64, 64 * 8)[:: 64 // 8]
        data = np.frombuffer(self._memory.buf, np.float32, offset=4096)
        self._slots = data.reshape(size + 1, CHUNK // 4)
        self._slots[rank] = 0  # touches the pages
        self._step = 0
        self._wait()

    @staticmethod
    def _attach(name: str) -> shared_memory.SharedMemory:
        while True:
            try:
                return shared_memory.SharedMemory(name)
            except (FileNotFoundError, ValueError):  # not made yet: this is a spin
                continue

    def sum(self, array: np.ndarray) -> None:
        for start in range(0, array.size, CHUNK // 4):
            self._sum(array[start : start + CHUNK // 4])

    def close(self) -> None:
        self._wait()
        del self._steps, self._slots
        self._memory.close()
        if self._rank == 0:
            self._memory.unlink()

    def _sum(self, chunk: np.ndarray) -> None:
        n, slots = chunk.size, self._slots
        low, high = n * self._rank // self._size, n * (self._rank + 1) // self._size
        slots[self._rank, :n] = chunk
        self._wait()
        total = slots[self._size, low:high]
        np.add(slots[0, low:high], slots[1, low:high], out=total)
        for other in range(2, self._size):
            total += slots[other, low:high]
        self._wait()
        chunk[:] = slots[self._size, :n]
        self._wait()

    def _wait(self) -> None:
        self._step += 1
        steps = self._steps
        steps[self._rank] = self._step
        tries = 0
        while steps[: self._size].min() < self._step:
            tries += 1
            if tries > 50:
                os.sched_yield()


SYSTEMS: Final = {
    "zstrat": _zstrat,
    "gloo": _gloo,
    "mpi": _mpi,
    "floor": _floor,
    "ring": _ring,
    "zmq_ring": _zmq_ring,
}

if __name__ == "__main__":
    main()
