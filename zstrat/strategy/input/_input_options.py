"""What a user may say about how elements come to the replicas, in TF's words."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import final


class InputReplicationMode(enum.Enum):
    """How many input functions run.

    PER_WORKER: one in each worker, and its elements go to the replicas there in turn.
    PER_REPLICA: one for each replica.
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
            replicas before they are asked for; None, as True: yes. If not, they stay
            arrays of numpy until a step takes them.
        experimental_replication_mode: PER_REPLICA is for
            ``MirroredStrategy.distribute_datasets_from_function`` alone.
        experimental_place_dataset_on_device: In TF the dataset itself may live on the
            device; here elements are made by the host in any case. Needs PER_REPLICA,
            and ``experimental_fetch_to_device=False``.
        experimental_per_replica_buffer_size: How many elements are made in advance for
            each replica, at least 1.

    Raises:
        ValueError: Options that do not go together, or a buffer without room.
        TypeError: A replication mode that is none.
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
        """Whether elements go to the devices in advance."""
        return self.experimental_fetch_to_device in (None, True)

    @property
    def is_per_replica(self) -> bool:
        return self.experimental_replication_mode is InputReplicationMode.PER_REPLICA
