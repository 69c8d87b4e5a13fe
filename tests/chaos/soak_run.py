"""Many sessions and closures on the same daemons, which are as large afterwards.

    make soak                                        200 sessions, 1,000,000 closures
    make soak ARGS="--sessions 20 --closures 20000"

Each session is that of a program which connects, makes variables and an optimizer,
trains and closes; besides, one in twenty is killed. Between two of them, when the
daemons have nothing to do, it is noted how large they are: memory, descriptors,
threads, entries of the tables that they tell of, now and then all objects of Python.
The sessions of the first third warm up; from then on nothing may grow, but for the
memory of this program, in which jax keeps what it has traced of its own functions.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from soak_session import census, play

import zstrat as zs
from zstrat.config import Settings
from zstrat.launch import observe
from zstrat.transport import run

KILLED = 20
"""One session in so many ends by a kill."""
LOOKS = 20
"""How often, in all, objects are counted."""

TABLES = (
    *(("endpoint", name) for name in ("remotes", "handlers")),
    ("endpoint", "counts", "newcomers"),
    *(("endpoint", "pool", name) for name in ("leases", "idle_bytes")),
    *(("service", name) for name in ("variables", "bytes", "held_bytes", "slot_bytes")),
    *(("service", name) for name in ("optimizers", "programs", "remembered_steps")),
    *(("service", name) for name in ("waiting", "kept_results", "cached_programs")),
    *(("service", name) for name in ("kept_bytes", "layouts", "functions")),
)
"""Of what a daemon says: what it keeps, and not what it has done so far."""

ALLOWED = {"memory": 0.1, "objects": 0.01}
"""By which share of it something may be larger in the end; all else by nothing. What a
peak took, the allocator of C keeps: now and then that is some MiB at once."""


def look(local):
    """By task, and for this program: what there is now, by name. Memory in MiB."""
    sights = run(observe(local.spec, Settings(), 30))
    found = {
        sight.task: told(sight) | process(local.pid(sight.task)) for sight in sights
    }
    return {**found, "program": process(os.getpid())}


def calm(looks):
    """The least of what was seen: a session that is just over is closed bit by bit."""
    return {
        task: {name: min(each[task][name] for each in looks) for name in values}
        for task, values in looks[0].items()
    }


def told(sight):
    assert not sight.problem, sight
    found = {" ".join(path): sight.number(*path) for path in TABLES}
    found["endpoint remotes"] = len(sight.values["endpoint"]["remotes"])
    return found


def process(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "memory": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
    }


def train_for_ever(spec):
    play(zs.ClusterSpec(spec), sys.maxsize, lambda: print("trains", flush=True))


def killed(local):
    """Has a program train, and kills it."""
    command = [sys.executable, __file__, "--train", json.dumps(local.spec.as_dict())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert "trains\n" in iter(program.stdout.readline, "")
        program.kill()


class Soak:
    """``seen`` is what `look` found, after each session."""

    def __init__(self, local, sessions, closures):
        self._local, self._sessions = local, sessions
        self._each = max(1, closures // sessions)
        self.seen = []

    def run(self):
        for number in range(1, self._sessions + 1):
            if number % KILLED == 0:
                killed(self._local)
            play(self._local.spec, self._each)
            gc.collect()
            self.seen.append(calm([look(self._local) for _ in range(3)]))
            if number % max(1, self._sessions // LOOKS) == 0:
                for task, count in census(self._local.spec).items():
                    self.seen[-1][task]["objects"] = count
                self._say(number)

    def grown(self):
        """What is larger in the end than when all was warm, in words."""
        few = max(1, len(self.seen) // 10)
        start = len(self.seen) // 3
        warm, end = self.seen[start : start + few], self.seen[-few:]
        found = []
        for task in end[-1]:
            for name in dict.fromkeys(name for seen in end for name in seen[task]):
                before, after = middle(warm, task, name), middle(end, task, name)
                print(f"  {task:9} {name:24} {before:12.1f} -> {after:12.1f}")
                if (task, name) == ("program", "memory"):
                    continue
                if after > before * (1 + ALLOWED.get(name, 0)):
                    found.append(f"{task}: {name} grew from {before:g} to {after:g}")
        return found

    def _say(self, number):
        words = [
            f"{task} {values['memory']:.0f} MiB {values.get('objects', 0)}"
            for task, values in self.seen[-1].items()
        ]
        print(
            f"  {time.strftime('%X')} {number} sessions: {', '.join(words)}", flush=True
        )


def middle(looks, task, name):
    """Of what was seen; of what is noted now and then, where it was."""
    seen = [each[task][name] for each in looks if name in each[task]]
    return statistics.median(seen) if seen else 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--closures", type=int, default=1_000_000)
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        train_for_ever(asked.train)
    with zs.LocalCluster(num_ps=2, num_workers=2) as local:
        soak = Soak(local, asked.sessions, asked.closures)
        soak.run()
        grown = soak.grown()
    print("\n".join(grown) or "flat")
    sys.exit(bool(grown))


if __name__ == "__main__":
    main()
