"""How the values of the local devices of one process are brought together: TF's hooks.

XLA reduces inside of steps; this is what ``strategy.extended`` asks outside of them. A
program may write its own, as for TF: a class with the hooks, given to the strategy.

Law of the file: what may be given is checked before a hook is called; a hook decides
how, and what it returns is the result.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

import jax

from zstrat.strategy.replica._per_replica import DistributedValues, PerReplica

from ._options import CommunicationOptions
from ._places import for_each, places, put
from ._values import is_whole, reduce_values, reduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.collectives import ReduceOp

    Pairs = Sequence[tuple[Any, Any]]


class CrossDeviceOps(abc.ABC):
    """Base of what reduces values of several devices; write `reduce_implementation`,
    and the other two hooks where they can do more than it."""

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: object = None,
    ) -> Any:
        """One value of the replicas' values.

        Args:
            destinations: Where it is wanted: a value per replica or a variable (where
                it lives), an array, or TF's name of a device. `Mirrored`, if that is
                on several devices, or a value of several replicas: of one for each.
            options: `CommunicationOptions` for the hook; left out: the default ones.

        Raises:
            ValueError: ``destinations`` is none of these, or there is no value.
            TypeError: The value is no array.
        """
        op = reduction(reduce_op)
        places(destinations)  # refuses what is none
        return self.reduce_implementation(
            op, _per_replica(per_replica_value), destinations, _options(options)
        )

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Pairs,
        options: object = None,
    ) -> list[Any]:
        """`reduce` of several values, in order; dense ones go together.

        Raises:
            ValueError: As `reduce`, or what is given is no list of pairs.
            TypeError: As `reduce`.
        """
        op = reduction(reduce_op)
        pairs = []
        for value, destination in checked_pairs(value_destination_pairs):
            places(destination)  # refuses what is none
            pairs.append((_per_replica(value), destination))
        return list(self.batch_reduce_implementation(op, pairs, _options(options)))

    def reduced(
        self, op: ReduceOp, pairs: Pairs, replicas: int, options: object = None
    ) -> list[Any]:
        """`batch_reduce` of pytrees, of which leaves that are not distributed are the
        same on all replicas.

        Raises:
            ValueError: As `reduce`, or such a leaf is to be summed over several
                replicas.
        """
        found: list[Any] = []
        wanted: list[tuple[int, int]] = []
        batch: list[tuple[Any, Any]] = []
        for number, (value, destination) in enumerate(pairs):
            places(destination)  # refuses what is none
            leaves, treedef = jax.tree.flatten(value, is_leaf=is_whole)
            found.append((leaves, treedef))
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, DistributedValues):
                    wanted.append((number, place))
                    batch.append((leaf, destination))
                else:
                    same = reduce_values(op, leaf, None, replicas)
                    leaves[place] = self.broadcast(same, destination)
        if len(batch) == 1:  # which TF gives to the hook for one value
            reduced = [self.reduce(op, *batch[0], options)]
        else:
            reduced = self.batch_reduce(op, batch, options) if batch else []
        for (number, place), value in zip(wanted, reduced, strict=True):
            found[number][0][place] = value
        return [treedef.unflatten(leaves) for leaves, treedef in found]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """The value where it is wanted: for a value per replica one for each.

        Raises:
            ValueError: ``destinations`` is no place.
        """
        places(destinations)  # refuses what is none
        return self.broadcast_implementation(tensor, destinations)

    # ---- hooks ---------------------------------------------------------------------

    @abc.abstractmethod
    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Any,
        options: Any,
    ) -> Any:
        """See `reduce`.

        Args:
            reduce_op: SUM or MEAN.
            per_replica_value: Of arrays or `IndexedSlices`, one for each replica, where
                they lie; of one replica for a value that was not distributed.
            options: `CommunicationOptions`.
        """

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: Any
    ) -> list[Any]:
        """See `batch_reduce`; one `reduce_implementation` after the other, if it is not
        overridden."""
        return [
            self.reduce_implementation(reduce_op, value, destination, options)
            for value, destination in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """See `broadcast`; copies, if it is not overridden."""
        return for_each(put(tensor, places(destinations)), destinations)


def checked_pairs(pairs: Pairs) -> Pairs:
    """The pairs, if they are.

    Raises:
        ValueError: They are no list of pairs.
    """
    if not isinstance(pairs, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs
    ):
        raise ValueError(
            "`value_destination_pairs` must be a list or a tuple of tuples of a value "
            "and its destination"
        )
    return pairs


def _per_replica(value: Any) -> DistributedValues:
    """One for each replica; a value that is not distributed is that of one device."""
    if not isinstance(value, DistributedValues):
        return PerReplica((value,))
    if not value.replicas:
        raise ValueError("`per_replica_value` must be non-empty")
    return value


def _options(options: object) -> object:
    return CommunicationOptions() if options is None else options
