"""What stands on a worker for things of the coordinator that an object holds.

A step that is a method travels with its object, and objects keep their coordinator and
their datasets at hand. On the worker nothing can be done with them but to ask for the
strategy: whoever tries is told there, in words.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn, final


@final
class CoordinatorOnWorker:
    """A coordinator on a worker: it has its ``strategy``, and refuses the rest."""

    def __init__(self, strategy: Any, kind: type) -> None:
        self.strategy = strategy
        self._kind = kind

    def __getattr__(self, name: str) -> NoReturn:
        # Of what no coordinator has, as of any object; so `hasattr` and `copy` work.
        if name.startswith("_") or name not in dir(self._kind):
            raise AttributeError(
                f"{self._kind.__name__} has no attribute {name!r}", name=name, obj=self
            )
        raise RuntimeError(in_step(f"coordinator.{name}"))

    def __repr__(self) -> str:
        return f"<zstrat.{self._kind.__name__} on a worker: it has its strategy alone>"


@functools.cache
def coordinator_on_worker(strategy: Any, kind: type) -> CoordinatorOnWorker:
    """The stand-in of this process; one object per strategy, as on the coordinator."""
    return CoordinatorOnWorker(strategy, kind)


@final
class DatasetOnWorker:
    """A `PerWorkerDataset` on a worker, which has iterators of it alone."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> NoReturn:
        raise RuntimeError(in_step(f"iter() of {self._name}"))

    def build(self) -> NoReturn:
        """Refused; see the class."""
        raise RuntimeError(in_step(f"build() of {self._name}"))

    @property
    def element_spec(self) -> NoReturn:
        """Refused; see the class."""
        raise RuntimeError(in_step(f"element_spec of {self._name}"))


def in_step(what: str) -> str:
    """Why something of the coordinator is refused in a step."""
    return (
        f"{what} is used in a step function, which runs on a worker: that belongs to "
        "the program that schedules. Use it outside of the step, and give the step "
        "what it needs as arguments"
    )
