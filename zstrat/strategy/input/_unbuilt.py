"""Datasets of a parameter-server strategy, where the coordinator holds them.

A worker distributes them over its replicas; the coordinator only says how. So what the
coordinator makes is a handle: it cannot be iterated, and what travels to a worker,
by itself or in the closure of a dataset function, is made there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn, final

from zstrat.data import as_dataset

from ._distributed_dataset import refuse_attribute
from ._inputs import (
    distributed_already,
    input_options,
    not_per_replica,
    refuse_distributed,
    require_function,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zstrat.strategy._strategy import Strategy

    from ._input_options import InputOptions


@final
class UnbuiltDataset:
    """A distributed dataset that workers will build.

    ``coordinator.create_per_worker_dataset`` takes it, or a function that makes one.

    Raises:
        NotImplementedError: ``options`` asks for PER_REPLICA.
        TypeError: It is no options; the source is no dataset, or no function.
        ValueError: The source is arrays whose first axes differ.
    """

    def __init__(
        self,
        strategy: Strategy,
        source: Any,
        options: InputOptions | None,
        *,
        is_function: bool,
    ) -> None:
        if input_options(options).is_per_replica:
            raise not_per_replica()
        if is_function:
            require_function(source)
        else:
            _require_dataset(source)
        self._strategy: Final = strategy
        self._source: Final = source
        self._options: Final = options
        self._is_function: Final = is_function

    def __iter__(self) -> Iterator[Any]:
        """Refused: there are no elements on the coordinator.

        Raises:
            ValueError: Always; says what to do.
        """
        raise _unbuilt("iter() of")

    @property
    def element_spec(self) -> Any:
        """Refused, as `__iter__`."""
        raise _unbuilt("the element_spec of")

    def __reduce__(self) -> Any:
        how = self._strategy, self._source, self._options, self._is_function
        return _built, how

    def __getattr__(self, name: str) -> NoReturn:
        refuse_attribute("distributed dataset", name)

    def __repr__(self) -> str:
        return "<zstrat distributed dataset, to be built by workers>"


def _require_dataset(source: object) -> None:
    """Refuses here what each worker would refuse."""
    if isinstance(source, UnbuiltDataset):
        raise distributed_already()
    refuse_distributed(source)
    as_dataset(source)


def _built(
    strategy: Strategy, source: Any, options: InputOptions | None, is_function: bool
) -> Any:
    if is_function:
        return strategy.distribute_datasets_from_function(source, options)
    return strategy.experimental_distribute_dataset(source, options)


def _unbuilt(what: str) -> ValueError:
    return ValueError(
        f"{what} a dataset of ParameterServerStrategy on the coordinator: its elements "
        "are made by the workers. Distribute it in a dataset function, hand that to "
        "`coordinator.create_per_worker_dataset(dataset_fn)`, and pass the iterator of "
        "what it returns to scheduled functions"
    )
