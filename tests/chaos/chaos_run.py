"""Faults at random for as long as is asked, with everything counted.

    make chaos                              ten minutes
    make chaos ARGS="--seconds 60 --seed 7"

Rounds follow each other; in each, a new cluster trains while faults come. In the last
fault of every third round a parameter server is killed and started again: then, and
only then, its variables are lost, and every error has to say so or that it is away.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from chaos_cluster import HARMLESS, TOLD, Cluster
from chaos_work import Work

import zstrat as zs

FAULTS = 8
"""Of one round."""


class Totals:
    def __init__(self):
        self.lost = self.doubled = self.false = 0

    def add(self, work, *, killed=False):
        """Counts what is wrong with the words of a round."""
        for error in work.errors:
            if isinstance(error, zs.ResultLostError):
                continue  # it says where the step was applied, and of variables nothing
            allowed = isinstance(error, zs.PSUnavailableError | zs.CancelledError)
            if not allowed or ("lost" in str(error) and not killed):
                self.false += 1
                print(f"  FALSE WORDS: {type(error).__name__}: {error}")

    def __str__(self):
        return (
            f"{self.lost} lost, {self.doubled} doubled, {self.false} false words in all"
        )


def spare(work, count=1):
    """Waits until steps end well, so that a fault hits a cluster at work."""
    while work.progress.acquire(blocking=False):
        pass
    for _ in range(count):
        if not work.progress.acquire(timeout=120):
            raise TimeoutError("no step ended for two minutes")


def torn(rng, totals, faults):
    """One round."""
    with Cluster() as cluster, cluster.strategy() as strategy:
        work = Work(strategy)
        work.start()
        try:
            for _ in range(faults):
                spare(work, 3)
                name = rng.choice(HARMLESS + TOLD)
                print(f"  {name}: {getattr(Cluster, name).__doc__.splitlines()[0]}")
                getattr(cluster, name)(rng)
            spare(work, 5)
        finally:
            work.stop()
        lost, doubled = work.verdict()
        totals.lost, totals.doubled = totals.lost + lost, totals.doubled + doubled
        totals.add(work)
        for words, count in work.words.most_common():
            print(f"  {count:5d} x {words}")


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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    rng, totals, number = random.Random(asked.seed), Totals(), 0
    end = time.monotonic() + asked.seconds
    while time.monotonic() < end:
        number += 1
        print(f"round {number}", flush=True)
        if number % 3:
            torn(rng, totals, FAULTS)
        else:
            bereft(totals)
        print(f"  so far: {totals}", flush=True)
    sys.exit(bool(totals.lost or totals.doubled or totals.false))


if __name__ == "__main__":
    main()
