"""What holds a run up, in words, with the numbers that say so. Decides only.

The thread of a worker that runs steps does one of four things at a time: it prepares
(draws), computes, waits for values, or has nothing to do; their shares add up to its
time, whatever overlaps behind its back. The largest share says what limits the worker,
and what the parameter servers tell of themselves says who is behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NOTABLE: Final = 0.3
"""Shares of time below are nobody's limit."""
BUSY: Final = 0.5
"""A server that applies for so much of its time makes others wait."""
UNEQUAL: Final = 1.5
"""Bytes of a server, as times the mean of all, from which on it has too many."""
LEAST_BYTES: Final = 1e6
"""Bytes per second, over all servers, below which nobody waits for them."""
OLD: Final = 2.0
"""Median staleness, as times what so many workers make by themselves."""
SLOWER: Final = 0.8
"""A worker that does less than so many times what the median does is slow."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that holds the run up.

    ``share`` is that of the task's time, 0 to 1, by which limits are compared; of
    staleness and imbalance it says how far they are from what would be well.
    """

    task: str
    what: str
    """``compute``, ``pull``, ``push``, ``draw``, ``queue``, ``stale``, ``imbalance``.
    """
    share: float
    words: str
    advice: str
    numbers: dict[str, float] = field(default_factory=dict)


def limits(metrics: Mapping[str, Any]) -> list[Limit]:
    """What holds a run up, worst first.

    Args:
        metrics: As `ClusterCoordinator.metrics` gives them.
    """
    tasks = metrics.get("tasks", {})
    workers = _of_job(tasks, "worker")
    servers = _of_job(tasks, "ps")
    found: list[Limit] = []
    for name, worker in workers.items():
        found += _of_worker(name, worker, servers)
    for name, server in servers.items():
        found += _of_server(name, server)
    found += _imbalance(servers)
    found += _stale(metrics.get("staleness", {}), len(workers))
    return sorted(found, key=lambda limit: -limit.share)


def slowest(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """The worker that does the fewest steps, and why, in words; None if nobody works.

    ``task`` and ``why``. With several workers of about the same speed it is the one
    that waits most.
    """
    workers = _of_job(metrics.get("tasks", {}), "worker")
    servers = _of_job(metrics.get("tasks", {}), "ps")
    absent = {
        name: worker
        for name, worker in workers.items()
        if worker.get("state") not in ("open", "up")
    }
    working = {
        name: worker
        for name, worker in workers.items()
        if name not in absent and worker.get("steps_per_s")
    }
    for name, worker in absent.items():
        if worker.get("state") == "lost":
            reason = worker.get("last_error") or "nobody knows why"
            return {"task": name, "why": f"is lost: {reason}"}
    if not working:
        return None
    rates = sorted(worker["steps_per_s"] for worker in working.values())
    median = rates[len(rates) // 2]
    name, worker = min(
        working.items(), key=lambda item: (item[1]["steps_per_s"], item[0])
    )
    if worker["steps_per_s"] >= SLOWER * median:
        name, worker = max(working.items(), key=lambda item: (_waits(item[1]), item[0]))
    found = sorted(_of_worker(name, worker, servers), key=lambda limit: -limit.share)
    if not found:
        return {"task": name, "why": "nothing in particular holds it up"}
    return {"task": name, "why": found[0].words}


def _waits(worker: Mapping[str, Any]) -> float:
    time = worker.get("time", {})
    return float(time.get("draw", 0.0) + time.get("pull", 0.0))


def _of_job(tasks: Mapping[str, Any], job: str) -> dict[str, Mapping[str, Any]]:
    return {
        name: task
        for name, task in tasks.items()
        if name.partition(":")[0] == job and "/" not in name
    }


def _of_worker(
    name: str, worker: Mapping[str, Any], servers: Mapping[str, Mapping[str, Any]]
) -> list[Limit]:
    time: Mapping[str, float] = worker.get("time", {})
    phases = worker.get("phases", {})
    found = []
    for what, about in (
        ("draw", _draw),
        ("compute", _compute),
        ("pull", _pull),
        ("idle", _queue),
    ):
        share = min(1.0, time.get(what, 0.0))
        if share >= NOTABLE:
            words, advice, numbers = about(share, phases, worker, servers)
            kind = "queue" if what == "idle" else what
            found.append(Limit(name, kind, share, words, advice, numbers))
    return found


_Said = tuple[str, str, dict[str, float]]


def _draw(
    share: float, phases: Mapping[str, Any], worker: Mapping[str, Any], servers: Any
) -> _Said:
    del worker, servers
    return (
        f"waits for its dataset: draw is {share:.0%} of its time",
        "let the dataset read ahead and map in parallel: dataset.map(f, "
        "num_parallel_calls=zs.data.AUTOTUNE).prefetch(zs.data.AUTOTUNE), or cache it",
        _numbers("draw", phases),
    )


def _compute(
    share: float, phases: Mapping[str, Any], worker: Mapping[str, Any], servers: Any
) -> _Said:
    del worker, servers
    return (
        f"computes: the step itself is {share:.0%} of its time",
        "that is what a worker is for: add workers, or make the step cheaper",
        _numbers("compute", phases),
    )


def _pull(
    share: float,
    phases: Mapping[str, Any],
    worker: Mapping[str, Any],
    servers: Mapping[str, Mapping[str, Any]],
) -> _Said:
    blamed = _last_to_answer(worker) or _busiest(servers)
    numbers = _numbers("pull", phases)
    words = f"waits for values: pull is {share:.0%} of its time"
    if not blamed:
        return words, "pull less, or fetch ahead: ZSTRAT_PREFETCH", numbers
    server = servers.get(blamed, {})
    busy = server.get("busy", 0.0)
    out = server.get("bytes_out_per_s", 0.0)
    numbers |= {"busy": busy, "bytes_out_per_s": out}
    words = (
        f"waits for values of {blamed}: pull is {share:.0%} of its time "
        f"({blamed} sends {_size(out)}/s)"
    )
    advice = "add parameter servers, pull fewer bytes, or fetch ahead: ZSTRAT_PREFETCH"
    if busy >= BUSY:
        words += f", and applies updates for {busy:.0%} of its"
    return words, advice, numbers


def _queue(
    share: float, phases: Mapping[str, Any], worker: Mapping[str, Any], servers: Any
) -> _Said:
    del servers
    return (
        f"has nothing to do for {share:.0%} of its time",
        "schedule more steps before you join or fetch; fewer workers would do",
        _numbers("wait", phases) | {"waiting": worker.get("waiting", 0)},
    )


def _of_server(name: str, server: Mapping[str, Any]) -> Iterable[Limit]:
    busy = min(1.0, server.get("busy", 0.0))
    if busy < BUSY:
        return
    apply = server.get("apply", {})
    yield Limit(
        name,
        "push",
        busy,
        f"applies updates for {busy:.0%} of its time",
        "spread the variables over more parameter servers (a partitioner cuts large "
        "ones), or push less often",
        {"busy": busy, "p50": apply.get("p50", 0.0), "p99": apply.get("p99", 0.0)},
    )


def _imbalance(servers: Mapping[str, Mapping[str, Any]]) -> Iterable[Limit]:
    moved = {
        name: server.get("bytes_in_per_s", 0.0) + server.get("bytes_out_per_s", 0.0)
        for name, server in servers.items()
    }
    whole = sum(moved.values())
    if len(moved) < 2 or whole < LEAST_BYTES:
        return
    mean = whole / len(moved)
    name = max(moved, key=lambda each: (moved[each], each))
    if moved[name] < UNEQUAL * mean:
        return
    yield Limit(
        name,
        "imbalance",
        min(1.0, moved[name] / whole),
        f"moves {moved[name] / whole:.0%} of the bytes of all {len(moved)} parameter "
        f"servers ({_size(moved[name])}/s)",
        "cut its large variables: ParameterServerStrategy(variable_partitioner=...)",
        {each: float(rate) for each, rate in moved.items()},
    )


def _stale(staleness: Mapping[str, Any], workers: int) -> Iterable[Limit]:
    median = staleness.get("p50", 0.0)
    usual = max(1, workers - 1)
    if median <= OLD * usual:
        return
    yield Limit(
        "all workers",
        "stale",
        min(1.0, 1 - usual / median),
        f"steps compute from values that are {median:g} versions old (median); "
        f"{workers} workers make about {usual} by themselves",
        "fetch fewer steps ahead (ZSTRAT_PREFETCH), or lower the learning rate",
        {"p50": median, "p99": staleness.get("p99", 0.0)},
    )


def _last_to_answer(worker: Mapping[str, Any]) -> str:
    """The server whose answers ended most of its pulls; "" if nobody knows."""
    last: Mapping[str, float] = worker.get("slow_pulls", {})
    return max(last, key=lambda name: (last[name], name)) if last else ""


def _busiest(servers: Mapping[str, Mapping[str, Any]]) -> str:
    if not servers:
        return ""
    return max(
        servers, key=lambda name: (servers[name].get("bytes_out_per_s", 0.0), name)
    )


def _numbers(phase: str, phases: Mapping[str, Any]) -> dict[str, float]:
    summary = phases.get(phase, {})
    return {
        f"{phase}_{name}": float(summary.get(name, 0.0))
        for name in ("p50", "p90", "p99")
    }


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
