"""Faults at random for as long as is asked, with everything counted.

    make chaos                              ten minutes
    make chaos ARGS="--seconds 60 --seed 7"
    make chaos ARGS="--rounds 50"           so many rounds, however long they take
    make chaos ARGS="--only network"        rounds of one kind alone

Rounds follow each other, of four kinds in turn; in each, a new cluster trains while
faults come.

- *torn*: faults of tasks, and of lines by relays.
- *wavering*: the same, with eager steps besides that do something else when they run
  again: they, and only they, may fail for that.
- *bereft*: a parameter server is killed and started again. Then, and only then, its
  variables are lost, and every error has to say so or that it is away.
- *replicated*: servers have second copies; they are killed, told to end, frozen and cut
  off, one at a time, and nobody may hear of it.
- *network*: each task on a machine of its own, whose cable is pulled or whose packets
  are lost; with network namespaces, so root alone can have it.
"""

import argparse
import itertools
import os
import random
import subprocess
import sys
import time

import chaos_cluster
import chaos_network
from chaos_cluster import Cluster
from chaos_network import COUNT, Network
from chaos_work import WAYS, Work

import zstrat as zs
from zstrat.testing import NoNamespacesError, switched_network

FAULTS = 8
"""Of one round."""
KINDS = "torn", "wavering", "bereft", "replicated", "network"


class Totals:
    def __init__(self):
        self.lost = self.doubled = self.false = 0
        self.elsewhere = 0
        """Rounds in which another program found something wrong."""

    def add(self, work, *, killed=False):
        """Counts what is wrong with the words of a round."""
        for error in work.errors:
            if isinstance(error, zs.ResultLostError):
                continue  # it says where the step was applied, and of variables nothing
            if isinstance(error, zs.RetryDiffersError) and really_differed(error):
                continue
            allowed = isinstance(error, zs.PSUnavailableError | zs.CancelledError)
            if not allowed or ("lost" in str(error) and not killed):
                self.false += 1
                print(f"  FALSE WORDS: {type(error).__name__}: {error}")

    @property
    def are_bad(self):
        return bool(self.lost or self.doubled or self.false or self.elsewhere)

    def __str__(self):
        return (
            f"{self.lost} lost, {self.doubled} doubled, {self.false} false words in "
            f"all, {self.elsewhere} bad rounds on the network"
        )


def really_differed(error):
    """Whether the two runs of an eager step went different ways."""
    before, now = [
        [way for way in WAYS if f" of '{way}" in did]  # or of a part of it
        for did in (error.before, error.now)
    ]
    return before != now


def spare(work, count=1):
    """Waits until steps end well, so that a fault hits a cluster at work."""
    while work.progress.acquire(blocking=False):
        pass
    for _ in range(count):
        if not work.progress.acquire(timeout=120):
            raise TimeoutError("no step ended for two minutes")


def torn(rng, totals, faults, place, *, wavers=False, pause=0.0):
    """One round of ``faults``, in their order, in a ``place`` that has a cluster."""
    with place as cluster, cluster.strategy() as strategy:
        work = Work(strategy, pause, wavers)
        work.start()
        try:
            few = 1 if pause else 3
            for name in faults:
                spare(work, few)
                fault = getattr(cluster, name)
                print(f"  {name}: {fault.__doc__.split('. ')[0].splitlines()[0]}")
                fault(rng)
            spare(work, 2 * few)
        finally:
            work.stop()
        lost, doubled = work.verdict()
        totals.lost, totals.doubled = totals.lost + lost, totals.doubled + doubled
        totals.add(work)
        for words, count in work.words.most_common():
            print(f"  {count:5d} x {words}")


def on_the_network(seed, faults=()):
    """A round on machines of their own, as a program on the last of them; ``faults``:
    these alone. Whether nothing was wrong.

    Raises:
        NoNamespacesError: There can be no machines here.
    """
    with switched_network(2 * COUNT + 1) as machines:
        command = [*machines.inside(machines.names[-1]), sys.executable, __file__]
        command += ["--inside", machines.name, "--seed", str(seed), "--faults", *faults]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, env=env).returncode == 0


def bereft(totals):
    """A round in which a server is lost for certain."""
    with Cluster() as cluster, cluster.strategy() as strategy:
        work = Work(strategy)
        work.start()
        try:
            spare(work, 5)
            cluster.local.kill("ps:1")
            cluster.local.restart("ps:1")
            time.sleep(5.0)
        finally:
            work.stop()
        totals.add(work, killed=True)
        said = any(getattr(error, "lost", False) for error in work.errors)
        totals.false += not said
        print(f"  {len(work.errors)} errors; the loss was {'' if said else 'NOT '}said")


def replicated(rng, totals):
    """A round in which no loss is heard of."""
    with Cluster(num_ps=rng.choice([2, 3]), replicas=1) as cluster:
        with cluster.strategy() as strategy:
            work = Work(strategy)
            work.start()
            try:
                for name in rng.choices(chaos_cluster.SURVIVED, k=FAULTS):
                    paired(strategy)
                    spare(work, 3)
                    fault = getattr(cluster, name)
                    print(f"  {name}: {fault.__doc__.splitlines()[0]}", flush=True)
                    fault(rng)
                spare(work, 6)
            finally:
                work.stop()
            lost, doubled = work.verdict()
            totals.lost, totals.doubled = totals.lost + lost, totals.doubled + doubled
            totals.false += len(work.errors)
            for words, count in work.words.most_common():
                print(f"  FALSE WORDS: {count:5d} x {words}")


def paired(strategy):
    """Waits until each server has a second copy."""
    session = strategy.session

    async def whole():
        until = session.portal.loop.time() + 120
        await session.cluster.replication.wait_whole(until)

    session.run(whole(), "waiting for second copies", 150.0)


def play(kind, rng, totals):
    """A round."""
    match kind:
        case "torn" | "wavering":
            faults = rng.choices(chaos_cluster.HARMLESS + chaos_cluster.TOLD, k=FAULTS)
            torn(rng, totals, faults, Cluster(), wavers=kind == "wavering")
        case "bereft":
            bereft(totals)
        case "replicated":
            replicated(rng, totals)
        case "network":
            try:
                totals.elsewhere += not on_the_network(rng.randrange(2**32))
            except NoNamespacesError as error:
                print(f"  left out: {error}")


def played_inside(name, seed, faults):
    """The one round of a program on a machine of its own."""
    rng, totals = random.Random(seed), Totals()
    pause = 0.3 if faults else 0.0  # some steps under way are enough for a short round
    kinds = chaos_network.HARMLESS + chaos_network.TOLD
    some = faults or rng.choices(kinds, k=FAULTS)
    torn(rng, totals, some, Network(name), pause=pause)
    return totals


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rounds", type=int, help="so many, and no limit of time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--faults", nargs="*", default=(), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside:
        sys.exit(played_inside(asked.inside, asked.seed, asked.faults).are_bad)
    rng, totals = random.Random(asked.seed), Totals()
    end = time.monotonic() + asked.seconds
    for number in range(asked.rounds) if asked.rounds else itertools.count():
        if asked.rounds is None and time.monotonic() >= end:
            break
        kind = asked.only or KINDS[number % len(KINDS)]
        print(f"round {number + 1}: {kind}", flush=True)
        play(kind, rng, totals)
        print(f"  so far: {totals}", flush=True)
    sys.exit(totals.are_bad)


if __name__ == "__main__":
    main()
