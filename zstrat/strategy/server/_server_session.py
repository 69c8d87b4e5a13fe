"""What a strategy asks of the connection to its cluster, and nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from zstrat.variables import VariableSpec
    from zstrat.wire import InitialEntry, UpdateOp


class ServerSession(Protocol):
    """Every method blocks; the twins ``..._async`` may be awaited in any event loop."""

    @property
    def session(self) -> int:
        """A random number that tells this session from every other one."""
        ...

    def create_variables(
        self, variables: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> None: ...

    def delete_variables(self, specs: Sequence[VariableSpec]) -> None: ...

    def create_optimizer(self, optimizer: int, name: str, code: bytes) -> None: ...

    def read_slots(
        self, optimizer: int, specs: Sequence[VariableSpec]
    ) -> Sequence[Mapping[str, np.ndarray]]:
        """What an optimizer keeps beside variables, by name, as it is now."""
        ...

    def write_slot(
        self, optimizer: int, spec: VariableSpec, name: str, value: np.ndarray
    ) -> None:
        """Assigns one array that an optimizer keeps beside a variable."""
        ...

    def bind_optimizer(
        self, optimizer: int, data: bytes, servers: Sequence[int] | None = None
    ) -> None:
        """Tells parameter servers (None: all) which variables the optimizer moves:
        `zstrat.optimizers.Binding.encoded`. The same again is fine."""
        ...

    async def bind_optimizer_async(
        self, optimizer: int, data: bytes, servers: Sequence[int] | None = None
    ) -> None: ...

    def withdraw(
        self, specs: Sequence[VariableSpec], optimizers: Sequence[int]
    ) -> None:
        """Removes what this program has failed to create, as far as it is there."""
        ...

    def read(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]: ...

    async def read_async(self, specs: Sequence[VariableSpec]) -> list[np.ndarray]: ...

    def update(
        self,
        spec: VariableSpec,
        op: UpdateOp,
        optimizer: int,
        arrays: Sequence[np.ndarray],
    ) -> None: ...

    async def update_async(
        self,
        spec: VariableSpec,
        op: UpdateOp,
        optimizer: int,
        arrays: Sequence[np.ndarray],
    ) -> None: ...

    def initialize_variables(
        self, entries: Sequence[tuple[VariableSpec, InitialEntry]], code: bytes
    ) -> None:
        """Creates variables whose values their ps make, with one shipped initializer
        for all of them."""
        ...

    def read_rows(
        self, parts: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> list[np.ndarray]:
        """Rows ``[n, ...]`` of variables by indices ``[n]``. One request per ps."""
        ...

    async def read_rows_async(
        self, parts: Sequence[tuple[VariableSpec, np.ndarray]]
    ) -> list[np.ndarray]: ...

    def update_many(
        self,
        updates: Sequence[tuple[VariableSpec, UpdateOp, int, Sequence[np.ndarray]]],
    ) -> None:
        """Updates as in `update`, by one request per ps."""
        ...

    async def update_many_async(
        self,
        updates: Sequence[tuple[VariableSpec, UpdateOp, int, Sequence[np.ndarray]]],
    ) -> None: ...

    def close(self) -> None:
        """Ends the connection. Closing twice is fine."""
        ...
