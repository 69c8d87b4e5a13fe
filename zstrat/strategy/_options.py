"""Options, as TF has them: of collectives between processes, and of ``run``."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class CommunicationImplementation(enum.Enum):
    """Who carries a collective out. TF's names, and what else there is here.

    AUTO, RING and TREE differ in how an all-reduce goes between hosts, where the first
    process of each host speaks for it. Inside a host memory is shared with any of them;
    other collectives than all-reduces are as with AUTO.
    """

    AUTO = "AUTO"
    """Chosen by the size of the array and the number of hosts."""
    RING = "RING"
    """Around a ring of the hosts (`zstrat.collectives.ring_all_reduce`): for large
    arrays and not too many hosts."""
    TREE = "TREE"
    """Up and down two binary trees of the hosts
    (`zstrat.collectives.double_tree_all_reduce`): few steps among many hosts."""
    XLA = "XLA"
    """XLA itself, in one program over the devices of all processes (gloo on CPU, NCCL
    on GPU, the interconnect of a TPU)."""
    NCCL = "NCCL"
    """The same as XLA."""


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of collectives between processes.

    Args:
        bytes_per_pack: Small arrays are sent in packs; one that is larger than this
            takes no more. 0: the group decides.
        timeout_seconds: How long one collective may wait for the other processes; None
            for the default of the group.
        implementation: A `CommunicationImplementation`, or its name in any case.

    Raises:
        ValueError: Negative bytes or seconds, or an implementation that there is not.
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
        """Whether XLA carries collectives out."""
        return self.implementation in (
            CommunicationImplementation.XLA,
            CommunicationImplementation.NCCL,
        )

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """These options with those of the other that are not the defaults."""
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
    """Options of ``strategy.run``, which TF's XLA reads: jax compiles for each shape as
    it comes, so that none of them changes a result.

    Args:
        experimental_enable_dynamic_batch_size: Whether the last batch may be smaller.
        experimental_bucketizing_dynamic_shape: Whether shapes are rounded up for the
            compiler.
        experimental_xla_options: Others of XLA.
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
