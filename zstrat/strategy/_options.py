"""Options, as TF has them: of collectives between processes, of ``run``, of datasets.

Options of collectives belong to a strategy, or to one call of
`ReplicaContext.all_reduce`, `all_gather` or `reduce_to`. They determine how processes
exchange values that are reduced. Within a process XLA reduces and waits for no other
process, so they have no effect there.

Options of datasets determine how elements get to the replicas.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.variables import is_staging, recorder

if TYPE_CHECKING:
    from zstrat.collectives import Group
    from zstrat.strategy.replica._collective import Team


class CommunicationImplementation(enum.Enum):
    """The implementations of collectives between processes: those of TF, and others.

    AUTO, RING and TREE differ in the algorithm of an all-reduce between hosts, in which
    the first process of each host takes part. Inside a host the processes use shared
    memory. Other collectives than all-reduces are always as with AUTO.
    """

    AUTO = "AUTO"
    """The algorithm is chosen by the size of the array and the number of hosts."""
    RING = "RING"
    """The hosts form a ring ("ring" in `zstrat.collectives.ALGORITHMS`): for large
    arrays and not too many hosts."""
    TREE = "TREE"
    """The hosts form two binary trees ("double_tree" in
    `zstrat.collectives.ALGORITHMS`): takes few steps among many hosts."""
    XLA = "XLA"
    """XLA executes collectives, in one program over the devices of all processes (gloo
    on CPU, NCCL on GPU, the interconnect of a TPU)."""
    NCCL = "NCCL"
    """The same as XLA."""


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of collectives between processes.

    Args:
        bytes_per_pack: Small arrays are sent in packs; a pack that has reached this
            size gets no further array. 0: zstrat decides.
        timeout_seconds: How long one collective may wait for the other processes; None:
            the default.
        implementation: A `CommunicationImplementation`, or its name in any case.

    Raises:
        ValueError: Negative bytes or seconds, or an unknown implementation.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(
                f"`bytes_per_pack` must be greater than or equal to 0, got "
                f"{self.bytes_per_pack}"
            )
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(
                f"`timeout_seconds` must be None or positive, got "
                f"{self.timeout_seconds}"
            )
        if isinstance(self.implementation, str):
            object.__setattr__(self, "implementation", _named(self.implementation))
        if not isinstance(self.implementation, CommunicationImplementation):
            raise ValueError(
                "`implementation` must be a CommunicationImplementation, got "
                f"{self.implementation!r}"
            )

    @property
    def is_xla(self) -> bool:
        """Whether XLA executes the collectives."""
        return self.implementation in (
            CommunicationImplementation.XLA,
            CommunicationImplementation.NCCL,
        )

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Returns these options, replaced by those of ``options`` that are not the
        default."""
        if options is None:
            return self
        default = CommunicationOptions()
        return CommunicationOptions(
            options.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds
            if options.timeout_seconds is None
            else options.timeout_seconds,
            self.implementation
            if options.implementation is default.implementation
            else options.implementation,
        )


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``strategy.run``, which TF's XLA reads. None of them changes a result
    here: jax compiles for each shape that occurs.

    Args:
        experimental_enable_dynamic_batch_size: Whether the last batch may be smaller.
        experimental_bucketizing_dynamic_shape: Whether shapes are rounded up for the
            compiler.
        experimental_xla_options: Further options of XLA.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None


def _named(name: str) -> CommunicationImplementation:
    try:
        return CommunicationImplementation(name.upper())
    except ValueError:
        known = ", ".join(repr(member.value) for member in CommunicationImplementation)
        raise ValueError(f"implementation {name!r}: expected one of {known}") from None


def called_with(team: Team, options: object, call: str) -> Team:
    """Returns the team with the options of one call.

    Raises:
        TypeError: ``options`` are not `CommunicationOptions`.
        ValueError: ``options`` ask for something that can only be chosen for the whole
            strategy, or that XLA does not offer.
    """
    if options is None:
        return team
    if not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"{call}: options must be a zs.CommunicationOptions or None, got "
            f"{type(options).__name__} {options!r:.80}"
        )
    # In one process nothing is exchanged.
    if team.channel is None or options == CommunicationOptions():
        return team
    if team.channel.mesh is None:
        _require_own_way(options, call)
    elif recorder.get() is not None or is_staging():
        _require_none_of_xla(options, call)
    return replace(team, channel=team.channel.under(options))


def _require_own_way(options: CommunicationOptions, call: str) -> None:
    if options.is_xla:
        raise ValueError(
            f"{call}: options.implementation={options.implementation.value}, and the "
            "processes of this strategy are not one job of XLA: give "
            "communication_options with this implementation to the strategy, or leave "
            "it out of the options of the call"
        )


def _require_none_of_xla(options: CommunicationOptions, call: str) -> None:
    if options.timeout_seconds is not None:
        names = " or ".join(each.value for each in _ALGORITHMS)
        raise ValueError(
            f"{call}: options.timeout_seconds={options.timeout_seconds}, and with "
            "implementation=XLA the call is a part of a compiled step, which waits for "
            "the other processes as long as it takes: leave it out, or make the "
            f"strategy with implementation=AUTO, {names}"
        )
    if options.implementation in _ALGORITHMS:
        raise ValueError(
            f"{call}: options.implementation={options.implementation.value}, and the "
            "strategy was made with implementation=XLA, which chooses by itself: leave "
            "it out of the options of the call"
        )


_ALGORITHMS: Final = {
    CommunicationImplementation.RING: "ring",
    CommunicationImplementation.TREE: "double_tree",
}
"""The algorithm of an all-reduce between hosts; an implementation without an entry
chooses by size."""


@final
class ChosenGroup:
    """A collective of a strategy that applies its options
    (`zstrat.program.stages._cross.Collective`)."""

    def __init__(self, group: Group, options: CommunicationOptions) -> None:
        self._group = group
        self._options = options
        self._algorithm = _ALGORITHMS.get(options.implementation)
        self._timeout = options.timeout_seconds
        # 0 leaves it to the group.
        self._packs = options.bytes_per_pack or None

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def generation(self) -> int:
        return self._group.generation

    def all_reduce(self, tree: Any, op: str = "sum") -> Any:
        return self._group.all_reduce(
            tree,
            op,
            algorithm=self._algorithm,
            timeout=self._timeout,
            bytes_per_pack=self._packs,
        )

    def all_gather(self, tree: Any, axis: int = 0) -> Any:
        return self._group.all_gather(tree, axis, timeout=self._timeout)

    def broadcast(self, tree: Any, root: int = 0) -> Any:
        return self._group.broadcast(tree, root, timeout=self._timeout)

    def under(self, options: CommunicationOptions) -> ChosenGroup:
        return ChosenGroup(self._group, self._options.merge(options))

    def reform(self, *, timeout: float | None = None) -> None:
        self._group.reform(timeout=timeout)

    def close(self) -> None:
        self._group.close()


class InputReplicationMode(enum.Enum):
    """How many input functions are called in each worker.

    PER_WORKER: one in each worker, whose elements go to the replicas of the worker in
    turn. PER_REPLICA: one for each replica.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@final
@dataclass(frozen=True, slots=True)
class InputOptions:
    """Options of ``experimental_distribute_dataset`` and
    ``distribute_datasets_from_function``.

    Args:
        experimental_fetch_to_device: Whether elements are put on the devices of the
            replicas before they are drawn; None means True. If not, they stay numpy
            arrays until a step takes them.
        experimental_replication_mode: The number of input functions; PER_REPLICA is
            only for ``MirroredStrategy.distribute_datasets_from_function``.
        experimental_place_dataset_on_device: In TF the dataset itself may live on the
            device; here the host makes elements in any case. Needs PER_REPLICA, and
            ``experimental_fetch_to_device=False``.
        experimental_per_replica_buffer_size: Number of elements that are made in
            advance for each replica, at least 1.

    Raises:
        ValueError: Options exclude each other, or the buffer size is below 1.
        TypeError: The replication mode is not an `InputReplicationMode`.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = (
        InputReplicationMode.PER_WORKER
    )
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        mode = self.experimental_replication_mode
        if not isinstance(mode, InputReplicationMode):
            raise TypeError(
                "experimental_replication_mode must be a zs.InputReplicationMode, got "
                f"{mode!r}"
            )
        if self.experimental_per_replica_buffer_size < 1:
            raise ValueError(
                "experimental_per_replica_buffer_size must be at least 1, got "
                f"{self.experimental_per_replica_buffer_size}"
            )
        if not self.experimental_place_dataset_on_device:
            return
        if mode is not InputReplicationMode.PER_REPLICA:
            raise ValueError(
                "When `experimental_place_dataset_on_device` is set for dataset "
                "placement, you must also specify `PER_REPLICA` for the replication "
                "mode"
            )
        if self.fetches:
            raise ValueError(
                "`experimental_place_dataset_on_device` can not be set to True with "
                "experimental_fetch_to_device being True (its default): set "
                "experimental_fetch_to_device=False"
            )

    @property
    def fetches(self) -> bool:
        """Whether elements are put on the devices in advance."""
        return self.experimental_fetch_to_device in (None, True)

    @property
    def is_per_replica(self) -> bool:
        return self.experimental_replication_mode is InputReplicationMode.PER_REPLICA
