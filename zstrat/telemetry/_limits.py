"""Finds the bottlenecks of a run, with the numbers that show them. Without I/O.

The step thread of a worker does one thing at a time: it draws inputs, computes, waits
for values, waits for its pushes (in eager steps only), or is idle. The shares of these
activities add up to the thread's time, whatever other threads do meanwhile. The largest
share limits the worker, and the reports of the parameter servers show which server
causes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

NOTABLE: Final = 0.3
"""Share of a task's time below which an activity is not a bottleneck."""
BUSY: Final = 0.5
"""Share of a server's time that updates may take before they make workers wait."""
UNEQUAL: Final = 1.5
"""Multiple of the mean traffic of all servers from which a server has too much."""
LEAST_BYTES: Final = 1e6
"""Bytes per second of all servers together below which their traffic is not a
bottleneck."""
SMALL: Final = 64 * 1024
"""Bytes of an answer below which the round trip takes longer than the transfer."""
OLD: Final = 3.0
"""Multiple of the median staleness that the number of workers alone causes, from which
staleness is reported. One prefetched step, which the user asked for, doubles the median
or a little more."""
LONG_PHASE_SECONDS: Final = 10.0
"""Seconds after which an unfinished phase of a step is reported."""
WORST: Final = 3
"""Number of limits shown in addition to the slowest worker."""
SLOWER: Final = 0.8
"""Fraction of the median rate below which a worker is slow."""
ALONE: Final = 0.5
"""Share of the waits of rounds from which one worker that causes them counts as holding
the rounds up; below it several workers cause them in turn."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A bottleneck of the run.

    ``share``, by which limits are sorted, is the share of the task's time, 0 to 1. For
    an imbalance it is the share of time that workers wait for values, times this
    server's part of the bytes; for staleness ``1 - usual / median``; for rounds (joint
    updates by several workers) the share of time in which they waited for their last
    contribution alone.
    """

    task: str
    what: str
    """Kind of the bottleneck: ``compute``, ``pull of ps:1`` (``pull`` if the server is
    unknown), ``draw`` (of inputs), ``queue`` (of closures is empty), ``full queue``
    (the program waits), ``stale``, ``imbalance``; ``round``: rounds wait for the
    worker, ``lead``: a worker waits for the slowest one; ``push``: a worker waits for
    the pushes of eager steps, or a server is busy with updates."""
    share: float
    words: str
    advice: str
    numbers: dict[str, float] = field(default_factory=dict)


def limits(metrics: Mapping[str, Any]) -> list[Limit]:
    """Finds the bottlenecks of a run, the worst first.

    Args:
        metrics: The result of `ClusterCoordinator.metrics`.
    """
    tasks = metrics.get("tasks", {})
    workers = _of_job(tasks, "worker")
    servers = _of_job(tasks, "ps")
    found: list[Limit] = []
    queued, full = metrics.get("queued_closures", 0), metrics.get("queue_full", False)
    # Several may name one cause; a reader sees the largest share first.
    for name, worker in workers.items():
        found += _worker_limits(name, worker, servers, metrics)
    for name, rounds in metrics.get("rounds", {}).items():
        found += _round_limits(name, rounds, workers)
    if full:
        found.append(_full_queue_limit(queued))
    for name, server in servers.items():
        found += _server_limits(name, server)
    found += _imbalance_limits(servers, workers)
    found += _staleness_limits(metrics.get("staleness", {}), len(workers))
    return sorted(found, key=lambda limit: -limit.share)


def slowest(metrics: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the ``task`` with the fewest steps, and ``why``; None if no worker runs.

    Of several workers of about the same speed, returns the one that waits most; with
    rounds, in which all workers have the same speed, the one that the rounds wait for.
    A lost worker is returned only if no other worker runs.
    """
    workers = _of_job(metrics.get("tasks", {}), "worker")
    holding_up = [
        limit
        for name, rounds in metrics.get("rounds", {}).items()
        for limit in _round_limits(name, rounds, workers)
    ]
    if holding_up:
        worst = max(holding_up, key=lambda limit: limit.share)
        return {"task": worst.task, "why": worst.words}
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
                reason = worker.get("last_error") or "unknown reason"
                return {"task": name, "why": f"is lost: {reason}"}
        return None
    rates = {name: worker.get("steps_per_s", 0.0) for name, worker in working.items()}
    median = sorted(rates.values())[len(rates) // 2]
    name, worker = min(working.items(), key=lambda item: (rates[item[0]], item[0]))
    # All are about equally fast: the one that waits most shows what limits them.
    if rates[name] >= SLOWER * median:
        name, worker = max(working.items(), key=lambda item: (_waits(item[1]), item[0]))
    of_worker = _worker_limits(name, worker, servers, metrics)
    found = sorted(of_worker, key=lambda limit: -limit.share)
    if not found:
        return {"task": name, "why": "has no bottleneck"}
    return {"task": name, "why": found[0].words}


def held_up(metrics: Mapping[str, Any]) -> list[dict[str, str]]:
    """Selects the bottlenecks for people: the slowest worker, then the worst `limits`
    of other tasks, each with ``task`` and ``why``."""
    first = metrics.get("slowest")
    found = [] if first is None else [first]
    others = [
        limit
        for limit in limits(metrics)
        if first is None or limit.task != first["task"]
    ]
    worst = [{"task": limit.task, "why": limit.words} for limit in others[:WORST]]
    return found + worst


def _waits(worker: Mapping[str, Any]) -> float:
    time = worker.get("time", {})
    return float(sum(time.get(what, 0.0) for what in ("draw", "pull", "push")))


def _of_job(tasks: Mapping[str, Any], job: str) -> dict[str, Mapping[str, Any]]:
    return {
        name: task
        for name, task in tasks.items()
        if name.partition(":")[0] == job and "/" not in name
    }


def _worker_limits(
    name: str,
    worker: Mapping[str, Any],
    servers: Mapping[str, Mapping[str, Any]],
    metrics: Mapping[str, Any],
) -> list[Limit]:
    queued, full = metrics.get("queued_closures", 0), metrics.get("queue_full", False)
    time: Mapping[str, float] = worker.get("time", {})
    # At most 1: a phase that has not ended is counted from its begin.
    shares = {
        what: min(1.0, time.get(what, 0.0))
        for what in ("draw", "compute", "pull", "push", "idle")
    }
    found = []
    for what, share in shares.items():
        if share < NOTABLE:
            continue  # every worker waits a little for everything
        match what:
            case "draw" | "compute":
                words, advice = _OWN[what]
                words = f"{words} {percent(share)} of its time"
                numbers = _numbers(what, worker)
                limit = Limit(name, what, share, words, advice, numbers)
            # Before the plain pull: in rounds a wait for values is one for others.
            case "pull" if metrics.get("rounds"):
                limit = _round_pull_limit(name, share, worker)
            case "idle" if queued and metrics.get("largest_lead") is not None:
                limit = _lead_limit(name, share, worker)
            case "pull":
                limit = _pull_limit(name, share, worker, servers)
            case "push":
                limit = _push_limit(name, share, worker, servers)
            case _:
                limit = _idle_limit(name, share, worker, queued, full)
        # An eager step, which alone waits for pushes, is in one phase: computing.
        found.append(limit if what == "push" else _with_long_phase(limit, worker))
    return found


_OWN: Final = {
    "draw": (
        "waits for its dataset: draw is",
        "prefetch and map in parallel: dataset.map(f, "
        "num_parallel_calls=zs.data.AUTOTUNE).prefetch(zs.data.AUTOTUNE), or cache it",
    ),
    "compute": (
        "computes: the step itself is",
        "this is the ideal bottleneck: add workers, or make the step cheaper",
    ),
}
"""Description and advice for the bottlenecks of a worker that other tasks do not
cause."""


def _pull_limit(
    name: str,
    share: float,
    worker: Mapping[str, Any],
    servers: Mapping[str, Mapping[str, Any]],
) -> Limit:
    # The server that answered last most often, or else the one that sends most. A pull
    # waits for its last answer, so the servers before it are not to blame.
    sent = {
        name: server.get("bytes_out_per_s", 0.0) for name, server in servers.items()
    }
    blamed = _name_of_largest(worker.get("slow_pulls", {})) or _name_of_largest(sent)
    numbers = _numbers("pull", worker)
    words = f"waits for values: pull is {percent(share)} of its time"
    if not blamed:
        advice = "pull less, or prefetch: prefetch=1 (ZSTRAT_PREFETCH)"
        return Limit(name, "pull", share, words, advice, numbers)
    # Why that server is slow: it is busy, or far away, or sends too much.
    server = servers.get(blamed, {})
    busy, out = server.get("busy", 0.0), server.get("bytes_out_per_s", 0.0)
    pulls = server.get("pulls_per_s", 0.0)
    numbers |= {"busy": busy, "bytes_out_per_s": out, "pulls_per_s": pulls}
    words = (
        f"waits for values of {blamed}: pull is {percent(share)} of its time "
        f"({blamed} sends {size(out)}/s)"
    )
    if busy >= BUSY:
        words += f"; {blamed} spends {percent(busy)} of its time on updates"
        advice = (
            "spread its variables over more parameter servers; a partitioner splits "
            "large ones"
        )
    elif pulls and out < SMALL * pulls:
        words += f"; an answer has {size(out / pulls)}, so latency dominates"
        advice = (
            "prefetch: prefetch=1 (ZSTRAT_PREFETCH), read more in one step, or move "
            "workers and parameter servers closer together"
        )
    else:
        advice = (
            "add parameter servers, pull fewer bytes, or prefetch: prefetch=1 "
            "(ZSTRAT_PREFETCH)"
        )
    return Limit(name, f"pull of {blamed}", share, words, advice, numbers)


def _round_pull_limit(name: str, share: float, worker: Mapping[str, Any]) -> Limit:
    return Limit(
        name,
        "pull",
        share,
        "waits until its round is closed, and for the new values: pull is "
        f"{percent(share)} of its time",
        "see for whom rounds wait; zs.Rounds(backup=...) does without the last ones; "
        "if rounds wait for nobody, pull fewer bytes or add parameter servers",
        _numbers("pull", worker),
    )


def _lead_limit(name: str, share: float, worker: Mapping[str, Any]) -> Limit:
    return Limit(
        name,
        "lead",
        share,
        f"waits for the slowest worker for {percent(share)} of its time, as far ahead "
        "of it as staleness= allows",
        "see what slows that one down; or increase ParameterServerStrategy("
        "staleness=...)",
        _numbers("wait", worker),
    )


def _round_limits(
    optimizer: str, rounds: Mapping[str, Any], workers: Mapping[str, Mapping[str, Any]]
) -> Iterable[Limit]:
    recent = rounds.get("recent", {})
    count, seconds = recent.get("rounds", 0), recent.get("seconds", 0.0)
    waits = recent.get("waited_for", {})
    held = {worker: wait["seconds"] for worker, wait in waits.items()}
    whole = sum(held.values())
    if not count or not seconds or whole < NOTABLE * seconds:
        return
    # Waits of a round are those for its last contribution alone: all others were there.
    worst, share = _name_of_largest(held), min(1.0, whole / seconds)
    last = waits[worst]["rounds"]
    backup, size = rounds.get("backup", 0) + 1, rounds.get("workers", 0)
    # The others do without the last one, too, what they do while they wait for it.
    # At least a thousandth of the time: the waits may fill all of it.
    without = count / max(seconds - whole, 0.001 * seconds)
    alone = sorted(map(_rate_without_waits, workers.values()), reverse=True)
    # A round is as fast as its slowest worker, of those that it still waits for.
    if 0 < size - backup <= len(alone):
        without = min(without, alone[size - backup - 1])
    rate = count / seconds
    numbers = {"rounds_per_s": rate, "waited_s": whole, "with_backup": without}
    if held[worst] >= ALONE * whole:
        words = (
            f"holds up each round of {optimizer!r}: last in {percent(last / count)} of "
            f"them, {held[worst] / last:.2g} s each"
        )
    else:
        words = (
            f"and others hold up rounds of {optimizer!r} in turn: the last "
            f"contribution comes {whole / count:.2g} s after the one before"
        )
    advice = "train without rounds, or with staleness="
    if backup < size and without > rate:
        advice = (
            f"zs.Rounds(backup={backup}) would give about {without:.3g} rounds/s "
            f"instead of {rate:.3g}; or see what slows {worst} down"
        )
    yield Limit(worst, "round", share, words, advice, numbers)


def _rate_without_waits(worker: Mapping[str, Any]) -> float:
    """Returns the steps per second that a worker would make if it never waited for
    other tasks."""
    time = worker.get("time", {})
    busy = sum(time.get(what, 0.0) for what in ("draw", "compute", "push"))
    rate: float = worker.get("steps_per_s", 0.0)
    return rate / busy if busy else math.inf


def _push_limit(
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
        "omit eager=True, so that the next step computes while updates are sent; or "
        "push all variables of a step in one call"
    )
    busy = {name: server.get("busy", 0.0) for name, server in servers.items()}
    blamed = _name_of_largest(busy)
    if blamed and busy[blamed] >= BUSY:
        numbers["busy"] = busy[blamed]
        words += f"; {blamed} spends {percent(busy[blamed])} of its time on updates"
    return Limit(name, "push", share, words, advice, numbers)


def _with_long_phase(limit: Limit, worker: Mapping[str, Any]) -> Limit:
    """Adds the current phase of the worker to the limit if the phase has lasted for
    long."""
    now: Mapping[str, Any] = worker.get("now") or {}
    seconds = now.get("seconds", 0.0)
    if seconds < LONG_PHASE_SECONDS or now.get("phase") != limit.what.partition(" ")[0]:
        return limit
    words = f"{limit.words}; step {now['step']} has been in it for {seconds:.0f} s"
    numbers = {**limit.numbers, "so_far": seconds}
    return replace(limit, words=words, numbers=numbers)


def _idle_limit(
    name: str, share: float, worker: Mapping[str, Any], queued: int, full: bool
) -> Limit:
    words = f"is idle for {percent(share)} of its time"
    advice = "schedule more steps before join or fetch, or use fewer workers"
    if queued:
        words += f", although {queued} closures are queued in the program"
        advice = (
            "increase or omit ClusterCoordinator(closures_in_flight=...); or give the "
            "program's process another core"
        )
    elif full:
        words += ", and the queue of the program is full"
        advice = (
            "omit ClusterCoordinator(max_queued=...); if the queue is full of large "
            "arguments, create batches on the workers, with a per-worker dataset"
        )
    numbers = _numbers("wait", worker) | {
        "waiting": float(worker.get("waiting", 0)),
        "queued_closures": float(queued),
    }
    return Limit(name, "queue", share, words, advice, numbers)


def _full_queue_limit(queued: int) -> Limit:
    """Returns a limit with share 0, a mere remark, as no worker waits for a full
    queue."""
    return Limit(
        "program",
        "full queue",
        0.0,
        f"waits in schedule(): its queue of {queued} closures is full",
        "workers are slower than the program: see their limits, or add workers",
        {"queued_closures": float(queued)},
    )


def _server_limits(name: str, server: Mapping[str, Any]) -> Iterable[Limit]:
    busy = min(1.0, server.get("busy", 0.0))
    if busy < BUSY:
        return
    apply = server.get("apply", {})
    yield Limit(
        name,
        "push",
        busy,
        f"applies updates for {percent(busy)} of its time",
        "spread the variables over more parameter servers (a partitioner splits large "
        "ones), or push less often",
        {"busy": busy, "p50": apply.get("p50", 0.0), "p99": apply.get("p99", 0.0)},
    )


def _imbalance_limits(
    servers: Mapping[str, Mapping[str, Any]], workers: Mapping[str, Mapping[str, Any]]
) -> Iterable[Limit]:
    moved = {
        name: server.get("bytes_in_per_s", 0.0) + server.get("bytes_out_per_s", 0.0)
        for name, server in servers.items()
    }
    whole = sum(moved.values())
    # A little traffic is never even, and nobody waits for it.
    if len(moved) < 2 or whole < LEAST_BYTES:
        return
    mean = whole / len(moved)
    name = _name_of_largest(moved)
    if moved[name] < UNEQUAL * mean:
        return
    waits = [worker.get("time", {}).get("pull", 0.0) for worker in workers.values()]
    yield Limit(
        name,
        "imbalance",
        min(1.0, max(waits, default=0.0)) * moved[name] / whole,
        f"transfers {percent(moved[name] / whole)} of the bytes of all {len(moved)} "
        f"parameter servers ({size(moved[name])}/s)",
        "split its large variables: ParameterServerStrategy(variable_partitioner=...)",
        {server: float(rate) for server, rate in moved.items()},
    )


def _staleness_limits(staleness: Mapping[str, Any], workers: int) -> Iterable[Limit]:
    median = staleness.get("p50", 0.0)
    # Between a pull and its push every other worker pushes once.
    usual = max(1, workers - 1)
    if median <= OLD * usual:
        return
    yield Limit(
        "all workers",
        "stale",
        min(1.0, 1 - usual / median),
        f"compute with values that are {median:g} versions old (median); "
        f"{workers} workers alone cause about {usual}",
        "prefetch fewer steps: prefetch=0 or 1 (ZSTRAT_PREFETCH); or lower the "
        "learning rate",
        {"p50": median, "p99": staleness.get("p99", 0.0)},
    )


def _name_of_largest(amounts: Mapping[str, float]) -> str:
    """Returns the name of the largest amount; "" if there are no amounts."""
    # Equal amounts by name, so that the answer does not change from look to look.
    return max(amounts, key=lambda name: (amounts[name], name), default="")


def _numbers(phase: str, worker: Mapping[str, Any]) -> dict[str, float]:
    summary = worker.get("phases", {}).get(phase, {})
    return {
        f"{phase}_{name}": float(summary.get(name, 0.0))
        for name in ("p50", "p90", "p99")
    }


def percent(share: float) -> str:
    """Formats a share, 0 to 1, as a percentage."""
    return f"{100 * share:.0f} %"


def size(number: float) -> str:
    """Formats a number of bytes: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
