"""`Inventory`: remembers what the servers of a session hold, to create it again.

Law: data only. Handles would keep the strategy alive that owns the connection, and a
restore has to continue while the program drops some handles.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, final

from zstrat.initializers import constant
from zstrat.program import dump_code
from zstrat.wire import InitialEntry, VariableEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from zstrat.coordinator.rounds import RestoredRounds
    from zstrat.ps import PsClient
    from zstrat.variables import VariableSpec
    from zstrat.wire import TableEntry


class RestorePoint(Protocol):
    """A complete checkpoint, as far as it concerns the parameter servers of one
    session."""

    @property
    def path(self) -> str: ...

    @property
    def variables(self) -> frozenset[int]:
        """Keys of the variables whose values are in the checkpoint."""

    @property
    def optimizers(self) -> frozenset[int]:
        """Numbers of the optimizers whose slots are in the checkpoint."""

    @property
    def lacks(self) -> Sequence[str]:
        """Names of other things that the checkpoint lacks."""

    @property
    def places(self) -> Mapping[int, Sequence[str]]:
        """Positions of per-worker iterators, by number of the iterator, one for each
        input pipeline (share of the dataset)."""

    @property
    def rounds(self) -> Mapping[int, RestoredRounds]:
        """By outer optimizer: the rounds from which its windows of local steps
        continue."""

    async def check(self) -> None:
        """Reads the whole checkpoint.

        Raises:
            DataLossError: The checkpoint is damaged.
            NotFoundError, OSError: The checkpoint no longer exists.
        """

    async def fill(self, client: PsClient) -> None:
        """Loads the checkpoint into all servers, whose variables exist. On the client's
        loop.

        Raises:
            PSUnavailableError: A server is lost.
            ZstratError, OSError: As `zstrat.Checkpoint.restore`.
        """


@final
class Inventory:
    """The variables, the optimizers, and the pytrees to which optimizers are bound, of
    one session. On the loop."""

    def __init__(self) -> None:
        self._variables: dict[int, VariableSpec] = {}
        self._optimizers: dict[int, tuple[str, bytes]] = {}
        self._trees: dict[tuple[int, bytes], None] = {}
        """Bindings of optimizers that this program has sent. Workers send those of
        their own steps in each session, before the first gradient."""
        self._tables: dict[int, tuple[int, TableEntry, bytes]] = {}
        """Parts of tables (which take any id), by key: server, entry, and the
        initializer."""
        self._initial: dict[int, np.ndarray] = {}
        """First values of variables that no checkpoint holds, by key."""

    def created(self, specs: Iterable[VariableSpec]) -> None:
        self._variables.update((spec.key, spec) for spec in specs)

    def created_tables(
        self, tables: Iterable[tuple[VariableSpec, TableEntry]], code: bytes
    ) -> None:
        for spec, entry in tables:
            self._variables[spec.key] = spec
            self._tables[spec.key] = spec.ps, entry, code

    def deleted(self, specs: Iterable[VariableSpec]) -> None:
        for spec in specs:
            self._variables.pop(spec.key, None)
            self._tables.pop(spec.key, None)
            self._initial.pop(spec.key, None)

    def note_initial(
        self, specs: Iterable[VariableSpec], values: Iterable[np.ndarray]
    ) -> None:
        """Stores the first values of variables that cannot be saved."""
        keys = [spec.key for spec in specs]
        self._initial.update(zip(keys, values, strict=True))

    def registered(self, optimizer: int, name: str, code: bytes) -> None:
        self._optimizers[optimizer] = name, code

    def bound(self, optimizer: int, tree: bytes) -> None:
        self._trees[optimizer, tree] = None

    def withdrawn(self, optimizers: Iterable[int]) -> None:
        gone = set(optimizers)
        for number in gone:
            self._optimizers.pop(number, None)
        for at in [at for at in self._trees if at[0] in gone]:
            del self._trees[at]

    def missing_in(self, point: RestorePoint) -> list[str]:
        """Returns the names of variables and optimizers that would have no value if
        servers were filled from this checkpoint."""
        variables = [
            f"variable {spec.name!r}"
            for key, spec in self._variables.items()
            if key not in point.variables and key not in self._initial
        ]
        optimizers = [
            f"optimizer {name!r}"
            for number, (name, _) in self._optimizers.items()
            if number not in point.optimizers
        ]
        # Each name once, in order: several optimizers may have the same.
        return list(dict.fromkeys((*variables, *optimizers, *point.lacks)))

    async def create_again(self, client: PsClient, timeout: float) -> None:
        """Creates everything on empty servers. Variables are zero, or have their first
        values if these are known.

        Args:
            timeout: Seconds for creating the variables.

        Raises:
            PSUnavailableError: A server is lost.
        """
        specs = [s for s in self._variables.values() if s.key not in self._tables]
        initial = self._initial
        # In the order in which a program does it: optimizers after their variables, and
        # trees after their optimizers.
        for ps, entry, code in self._tables.values():
            await client.create_tables([(ps, entry)], code)
        entries = [(spec.ps, _zeros(spec)) for spec in specs if spec.key not in initial]
        await client.create(
            [
                (spec.ps, entry_of(spec), initial[spec.key])
                for spec in specs
                if spec.key in initial
            ]
        )
        if entries:
            deadline = asyncio.get_running_loop().time() + timeout
            # Zeros, whatever the first values were: the checkpoint overwrites them, and
            # no value has to be sent.
            code = dump_code(constant(0))
            await client.initialize(entries, code, deadline=deadline)
        for number, (name, code) in self._optimizers.items():
            await client.create_optimizer(number, name, code)
        for number, tree in self._trees:
            await client.bind(number, tree)


def entry_of(spec: VariableSpec) -> VariableEntry:
    """Returns the entry, in a request to create variables, of one whose value is
    sent."""
    return VariableEntry(spec.key, spec.name, spec.trainable, spec.part is not None)


def _zeros(spec: VariableSpec) -> InitialEntry:
    shape = list(spec.shape)
    return InitialEntry(
        spec.key,
        spec.name,
        spec.trainable,
        spec.part is not None,
        spec.dtype,
        shape,
        shape,
        [0] * len(shape),
    )
