"""What holds a run up, in words, with the numbers that say so. Decides only.

The thread of a worker that runs steps does one thing at a time: it prepares (draws),
computes, waits for values, waits for its pushes (in eager steps only: others go on), or
has nothing to do; their shares add up to its time, whatever overlaps behind its back.
The largest share says what limits the worker, and what the parameter servers tell of
themselves says who is behind it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
SMALL: Final = 64 * 1024
"""Bytes of an answer that is over sooner than its way there and back."""
OLD: Final = 3.0
"""Median staleness, as times what so many workers make by themselves. One step fetched
ahead doubles it or a little more, and was asked for."""
LONG_PHASE_SECONDS: Final = 10.0
"""Seconds after which it is said of a step that it has not ended."""
WORST: Final = 3
"""Limits that people are shown beside the slowest worker."""
SLOWER: Final = 0.8
"""A worker that does less than so many times what the median does is slow."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that holds the run up.

    ``share`` is that of the task's time, 0 to 1, by which limits are compared. For an
    imbalance it is the time that workers wait for values, times this server's part of
    the bytes; for staleness ``1 - usual / median``.
    """

    task: str
    what: str
    """``compute``, ``pull of ps:1`` (``pull``, if nobody knows of whom), ``draw``,
    ``queue``, ``full queue``, ``stale``, ``imbalance``; ``push``: of a worker, that its
    eager steps wait for their pushes, of a server, that it applies them."""
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
    queued, full = metrics.get("queued_closures", 0), metrics.get("queue_full", False)
    for name, worker in workers.items():
        found += _of_worker(name, worker, servers, queued, full)
    if full:
        found.append(_full(queued))
    for name, server in servers.items():
        found += _of_server(name, server)
    found += _imbalance(servers, workers)
    found += _stale(metrics.get("staleness", {}), len(workers))
    return sorted(found, key=lambda limit: -limit.share)


def slowest(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """The worker that does the fewest steps, and why, in words; None if nobody works.

    ``task`` and ``why``. With several workers of about the same speed it is the one
    that waits most. A worker that is lost is named only where no other one works.
    """
    workers = _of_job(metrics.get("tasks", {}), "worker")
    servers = _of_job(metrics.get("tasks", {}), "ps")
    working = {
        name: worker
        for name, worker in workers.items()
        if worker.get("state") in ("open", "up")
        and (worker.get("steps_per_s") or worker.get("now"))
    }
    if not working:
        for name, worker in workers.items():
            if worker.get("state") == "lost":
                reason = worker.get("last_error") or "nobody knows why"
                return {"task": name, "why": f"is lost: {reason}"}
        return None
    rates = {name: worker.get("steps_per_s", 0.0) for name, worker in working.items()}
    median = sorted(rates.values())[len(rates) // 2]
    name, worker = min(working.items(), key=lambda item: (rates[item[0]], item[0]))
    if rates[name] >= SLOWER * median:
        name, worker = max(working.items(), key=lambda item: (_waits(item[1]), item[0]))
    found = sorted(_of_worker(name, worker, servers), key=lambda limit: -limit.share)
    if not found:
        return {"task": name, "why": "is held up by nothing in particular"}
    return {"task": name, "why": found[0].words}


def held_up(metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """What people are shown of what holds a run up: the slowest worker, then the worst
    `limits` of others, each with ``task`` and ``why``."""
    first = metrics.get("slowest")
    found = [] if first is None else [first]
    others = [
        limit
        for limit in limits(metrics)
        if first is None or limit.task != first["task"]
    ]
    return found + [{"task": each.task, "why": each.words} for each in others[:WORST]]


def _waits(worker: Mapping[str, Any]) -> float:
    time = worker.get("time", {})
    return float(sum(time.get(what, 0.0) for what in ("draw", "pull", "push")))


def _of_job(tasks: Mapping[str, Any], job: str) -> dict[str, Mapping[str, Any]]:
    return {
        name: task
        for name, task in tasks.items()
        if name.partition(":")[0] == job and "/" not in name
    }


def _of_worker(
    name: str,
    worker: Mapping[str, Any],
    servers: Mapping[str, Mapping[str, Any]],
    queued: int = 0,
    full: bool = False,
) -> list[Limit]:
    time: Mapping[str, float] = worker.get("time", {})
    shares = {
        what: min(1.0, time.get(what, 0.0))
        for what in ("draw", "compute", "pull", "push", "idle")
    }
    found = []
    for what, share in shares.items():
        if share < NOTABLE:
            continue
        match what:
            case "draw" | "compute":
                words, advice = _OWN[what]
                words = f"{words} {percent(share)} of its time"
                numbers = _numbers(what, worker)
                limit = Limit(name, what, share, words, advice, numbers)
                found.append(_long(limit, worker))
            case "pull":
                found.append(_long(_pull(name, share, worker, servers), worker))
            case "push":
                found.append(_push(name, share, worker, servers))
            case _:
                found.append(_queue(name, share, worker, queued, full))
    return found


_OWN: Final = {
    "draw": (
        "waits for its dataset: draw is",
        "let the dataset read ahead and map in parallel: dataset.map(f, "
        "num_parallel_calls=zs.data.AUTOTUNE).prefetch(zs.data.AUTOTUNE), or cache it",
    ),
    "compute": (
        "computes: the step itself is",
        "that is what a worker is for: add workers, or make the step cheaper",
    ),
}
"""What a worker is held up by that nobody else has to do with, and advice."""


def _pull(
    name: str,
    share: float,
    worker: Mapping[str, Any],
    servers: Mapping[str, Mapping[str, Any]],
) -> Limit:
    # Whose answers ended most of its pulls; if nobody knows, who sends most.
    blamed = _most(worker.get("slow_pulls", {})) or _most(
        {each: server.get("bytes_out_per_s", 0.0) for each, server in servers.items()}
    )
    numbers = _numbers("pull", worker)
    words = f"waits for values: pull is {percent(share)} of its time"
    if not blamed:
        advice = "pull less, or fetch ahead: prefetch=1 (ZSTRAT_PREFETCH)"
        return Limit(name, "pull", share, words, advice, numbers)
    server = servers.get(blamed, {})
    busy, out = server.get("busy", 0.0), server.get("bytes_out_per_s", 0.0)
    pulls = server.get("pulls_per_s", 0.0)
    numbers |= {"busy": busy, "bytes_out_per_s": out, "pulls_per_s": pulls}
    words = (
        f"waits for values of {blamed}: pull is {percent(share)} of its time "
        f"({blamed} sends {size(out)}/s)"
    )
    if busy >= BUSY:
        words += f"; {blamed} spends {percent(busy)} of its own on updates"
        advice = (
            "spread its variables over more parameter servers: a partitioner cuts "
            "large ones"
        )
    elif pulls and out < SMALL * pulls:
        words += f"; an answer has {size(out / pulls)}, so the way takes the time"
        advice = (
            "fetch ahead: prefetch=1 (ZSTRAT_PREFETCH), read more in one step, or "
            "bring workers and parameter servers closer together"
        )
    else:
        advice = (
            "add parameter servers, pull fewer bytes, or fetch ahead: prefetch=1 "
            "(ZSTRAT_PREFETCH)"
        )
    return Limit(name, f"pull of {blamed}", share, words, advice, numbers)


def _push(
    name: str,
    share: float,
    worker: Mapping[str, Any],
    servers: Mapping[str, Mapping[str, Any]],
) -> Limit:
    words = (
        f"waits in eager steps until their pushes are applied: push is "
        f"{percent(share)} of its time"
    )
    numbers = _numbers("push", worker)
    advice = (
        "leave out eager=True, and the next step computes while updates travel; or "
        "push all variables of a step in one call"
    )
    applying = {each: server.get("busy", 0.0) for each, server in servers.items()}
    blamed = _most(applying)
    if blamed and applying[blamed] >= BUSY:
        numbers["busy"] = applying[blamed]
        busy = percent(applying[blamed])
        words += f"; {blamed} spends {busy} of its own on updates"
    return Limit(name, "push", share, words, advice, numbers)


def _long(limit: Limit, worker: Mapping[str, Any]) -> Limit:
    """The limit with what has not ended for long, if it is of that kind."""
    now: Mapping[str, Any] = worker.get("now") or {}
    seconds = now.get("seconds", 0.0)
    if seconds < LONG_PHASE_SECONDS or now.get("phase") != limit.what.partition(" ")[0]:
        return limit
    words = f"{limit.words}; step {now['step']} has been at it for {seconds:.0f} s"
    numbers = {**limit.numbers, "so_far": seconds}
    return replace(limit, words=words, numbers=numbers)


def _queue(
    name: str, share: float, worker: Mapping[str, Any], queued: int, full: bool
) -> Limit:
    words = f"has nothing to do for {percent(share)} of its time"
    advice = "schedule more steps before you join or fetch; fewer workers would do"
    if queued:
        words += f", though {queued} closures wait in the program"
        advice = (
            "let workers hold more: ClusterCoordinator(closures_in_flight=...) is too "
            "low, or left out better; or the program's process is short of a core"
        )
    elif full:
        words += ", and the program may not schedule more"
        advice = (
            "its queue is short, or full of large arguments: leave out "
            "ClusterCoordinator(max_queued=...); have workers make their batches "
            "themselves, by a per-worker dataset"
        )
    numbers = _numbers("wait", worker) | {
        "waiting": float(worker.get("waiting", 0)),
        "queued_closures": float(queued),
    }
    return Limit(name, "queue", share, words, advice, numbers)


def _full(queued: int) -> Limit:
    """No worker waits for it, so it is a remark."""
    return Limit(
        "program",
        "full queue",
        0.0,
        f"waits in schedule(): its queue is full, and {queued} closures are left in it",
        "workers are slower than the program: see what they are at, or add some",
        {"queued_closures": float(queued)},
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
        f"applies updates for {percent(busy)} of its time",
        "spread the variables over more parameter servers (a partitioner cuts large "
        "ones), or push less often",
        {"busy": busy, "p50": apply.get("p50", 0.0), "p99": apply.get("p99", 0.0)},
    )


def _imbalance(
    servers: Mapping[str, Mapping[str, Any]], workers: Mapping[str, Mapping[str, Any]]
) -> Iterable[Limit]:
    moved = {
        name: server.get("bytes_in_per_s", 0.0) + server.get("bytes_out_per_s", 0.0)
        for name, server in servers.items()
    }
    whole = sum(moved.values())
    if len(moved) < 2 or whole < LEAST_BYTES:
        return
    mean = whole / len(moved)
    name = _most(moved)
    if moved[name] < UNEQUAL * mean:
        return
    waiting = [each.get("time", {}).get("pull", 0.0) for each in workers.values()]
    yield Limit(
        name,
        "imbalance",
        min(1.0, max(waiting, default=0.0)) * moved[name] / whole,
        f"moves {percent(moved[name] / whole)} of the bytes of all {len(moved)} "
        f"parameter servers ({size(moved[name])}/s)",
        "cut its large variables: ParameterServerStrategy(variable_partitioner=...)",
        {each: float(rate) for each, rate in moved.items()},
    )


def _stale(staleness: Mapping[str, Any], workers: int) -> Iterable[Limit]:
    median = staleness.get("p50", 0.0)
    # Between a pull and its push each of the other workers pushes once.
    usual = max(1, workers - 1)
    if median <= OLD * usual:
        return
    yield Limit(
        "all workers",
        "stale",
        min(1.0, 1 - usual / median),
        f"compute from values that are {median:g} versions old (median); "
        f"{workers} workers make about {usual} by themselves",
        "fetch fewer steps ahead: prefetch=0 or 1 (ZSTRAT_PREFETCH); or lower the "
        "learning rate",
        {"p50": median, "p99": staleness.get("p99", 0.0)},
    )


def _most(amounts: Mapping[str, float]) -> str:
    """The name of the largest amount; "" if there is none."""
    return max(amounts, key=lambda name: (amounts[name], name), default="")


def _numbers(phase: str, worker: Mapping[str, Any]) -> dict[str, float]:
    summary = worker.get("phases", {}).get(phase, {})
    return {
        f"{phase}_{name}": float(summary.get(name, 0.0))
        for name in ("p50", "p90", "p99")
    }


def percent(share: float) -> str:
    """A part of a whole, 0 to 1, as people read it."""
    return f"{100 * share:.0f} %"


def size(number: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
