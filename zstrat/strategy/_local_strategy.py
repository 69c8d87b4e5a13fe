"""What strategies have in common whose replicas run on devices of this process alone,
as one `LocalMesh`: whoever makes the variables, and wherever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ._extended import StrategyExtended
from ._strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import jax

    from zstrat.variables import Creator

    from .replica._collective import Team
    from .replica._local_run import LocalMesh

_Face = TypeVar("_Face", bound=StrategyExtended)


class LocalStrategy(Strategy, Generic[_Face]):
    """Base of these. A subclass, which is final, sets what is declared here when it is
    made, and says where elements of datasets go."""

    _mesh: LocalMesh
    _variables: Creator
    _extended: _Face

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of this process: one for each device, or for the several logical
        devices of a replica."""
        return self._mesh.replicas

    @property
    def extended(self) -> _Face:
        return self._extended

    def _creator(self) -> Creator:
        return self._variables

    def _devices(self) -> Sequence[jax.Device]:
        return self._mesh.devices

    def _team(self) -> Team:
        return self._mesh.team

    def _run_replicas(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        return self._mesh.run(fn, args, kwargs)
