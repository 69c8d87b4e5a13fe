"""What a coordinator put on this worker: code, arguments, datasets. Thread side.

Everything here is unpickled or built by user code, so it lives on the executor thread.
Arguments are kept as they came and unpickled when they are first used: they refer to
resources by number, and a resource that is built again has to be met by the same
arguments. The law: what was loaded never refers to a resource that is gone.
"""

from __future__ import annotations

import inspect
import json
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, final

import jax
import numpy as np

from zstrat.data import (
    CheckpointableIterator,
    Dataset,
    DatasetIterator,
    Elements,
    InputContext,
    as_dataset,
    is_huggingface,
    is_steady,
    kind_of,
    parse_no_flags,
    require_fit,
)
from zstrat.errors import (
    ClosureInputError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)
from zstrat.program import StepDataset, StepIterator, Structure, trim
from zstrat.program.trace import is_described, joined, refuse_random_keys
from zstrat.wire import LayoutMessage

from ._closure import check_layout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.config import Limits
    from zstrat.errors import ZstratError
    from zstrat.wire import Arrays, BuildResource, PlainTree

Load = Callable[[bytes, Sequence[np.ndarray], Callable[[int], object]], object]
"""`zstrat.program.load`: code, its large arrays, and what stands for a resource."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

NO_ARGUMENTS: Final = 0


_NOT_LOADED: Final = object()
_BY_NAME: Final = (
    "A dataset function of this program runs in a worker, where the script is not "
    "`__main__`, and a process pool finds functions by module and name alone: put "
    "those that it calls into a module that workers can import, or use "
    "multiprocessing.pool.ThreadPool"
)
_LOG: Final = logging.getLogger("zstrat.worker")


@final
class Broken:
    """Stands where something could not be loaded or built; whoever needs it raises."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error: Final = error


@final
@dataclass(slots=True)
class _Shipped:
    """Pickled code or arguments, and what they became; ``uses`` are the resources that
    they refer to."""

    code: bytes
    arrays: Arrays = ()
    loaded: Any = _NOT_LOADED
    uses: set[int] = field(default_factory=set)


@final
class Resources:
    """Functions by digest, arguments and resources by number, of one session.

    Args:
        task: This worker, as errors name it.
        context: Says what dataset functions are told.
        limits: Of what describes an element or a value.
    """

    def __init__(
        self,
        task: str,
        load: Load,
        context: Callable[[], InputContext],
        limits: Limits,
    ) -> None:
        self._task, self._load, self._context = task, load, context
        self._limits: Final = limits
        self._code: dict[bytes, _Shipped] = {}
        self._arguments: dict[int, _Shipped] = {}
        self._made: dict[int, object] = {}
        self._open: dict[int, Elements[Any] | StepIterator] = {}

    # Code

    def put_code(self, digest: bytes, code: bytes) -> None:
        """Unpickles a function or a maker, unless it is here.

        Raises:
            Exception: Whatever unpickling raised; closures that use it raise it too.
        """
        if digest not in self._code:
            self._code[digest] = _Shipped(code)
        self.code(digest)

    def code(self, digest: bytes) -> Any:
        """The object of that digest, the same at every call.

        Raises:
            NotFoundError: It was not put here.
            Exception: Whatever unpickling raised.
        """
        shipped = self._code.get(digest)
        if shipped is None:
            raise NotFoundError(
                f"{self._task} has no function {digest.hex()}: it was restarted since "
                "the function was shipped"
            )
        return self._loaded(shipped, self._captured)

    def functions(self) -> Iterable[object]:
        """Everything that was unpickled. Safe to call from the loop."""
        return [shipped.loaded for shipped in list(self._code.values())]

    def inherit(self, other: Resources) -> None:
        """Takes over what the same coordinator shipped before its connection broke, so
        that nothing that was compiled is compiled again."""
        for digest, shipped in other._code.items():
            if shipped.loaded is not _NOT_LOADED and not shipped.uses:
                self._code.setdefault(digest, shipped)

    # Arguments

    def put_arguments(self, number: int, code: bytes, arrays: Arrays) -> None:
        self._arguments[number] = _Shipped(code, arrays)

    def drop_arguments(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._arguments.pop(number, None)

    def arguments(self, number: int) -> Arguments:
        """``(args, kwargs)``, the same objects at every call.

        Raises:
            NotFoundError: They were not put here.
            ClosureInputError: They contain a resource that could not be built.
            OutOfRangeError: They contain the iterator of a dataset of no element.
            Exception: Whatever unpickling raised.
        """
        if number == NO_ARGUMENTS:
            return (), {}
        shipped = self._arguments.get(number)
        if shipped is None:
            raise NotFoundError(f"{self._task} has no arguments {number}")
        arguments: Arguments = self._loaded(shipped, self._resource)
        return arguments

    def _loaded(self, shipped: _Shipped, find: Callable[[int], object]) -> Any:
        if shipped.loaded is _NOT_LOADED:

            def resolve(resource: int) -> object:
                shipped.uses.add(resource)
                return find(resource)

            shipped.loaded = self._load(shipped.code, shipped.arrays, resolve)
            parse_no_flags()  # of what it has imported: this is no program of absl's
        return shipped.loaded

    # Resources

    def build(self, order: BuildResource) -> LayoutMessage:
        """Builds a resource, in place of the one that had its number.

        Returns:
            The layout of an iterator's elements, or of a value.

        Raises:
            OutOfRangeError: The dataset has no element at all.
            TypeError, ValueError: The maker cannot be called, or makes the wrong thing,
                or one that cannot be described.
            Exception: Whatever the maker raised.
        """
        self.drop([order.resource])
        try:
            made = self._make(order)
            if order.purpose == "value":
                self._made[order.resource] = made
                layout, what = _layout_of_value(made), "the value is a pytree"
            else:
                layout = self._iterate(order.resource, made, order.state)
                what = "the dataset has elements"
            check_layout(layout, self._limits, what)
            return layout
        except BaseException as error:  # goes to the coordinator, and to its closures
            if isinstance(error, pickle.PicklingError):
                error.add_note(_BY_NAME)
            self.drop([order.resource])
            self._made[order.resource] = Broken(trim(error))
            raise

    def drop(self, numbers: Sequence[int]) -> None:
        """Closes iterators and forgets resources; unknown ones are no error."""
        gone = set(numbers)
        for number in numbers:
            self._made.pop(number, None)
            elements = self._open.pop(number, None)
            if elements is not None:
                _end(elements)
        for shipped in (*self._arguments.values(), *self._code.values()):
            if not shipped.uses.isdisjoint(gone):
                shipped.loaded = _NOT_LOADED
                shipped.uses.clear()

    def close(self) -> None:
        """Closes all iterators and forgets everything."""
        self._arguments.clear()
        self._code.clear()
        self.drop(list(self._made))

    def _resource(self, number: int) -> object:
        made = self._made.get(number)
        if isinstance(made, Broken):
            if isinstance(made.error, OutOfRangeError):
                raise made.error.with_traceback(None)  # as at the end of any dataset
            raise ClosureInputError(
                f"an argument of the closure could not be built on {self._task}",
                made.error,
            )
        if made is None:
            raise NotFoundError(
                f"{self._task} has no resource {number}, as its iterator was dropped: "
                "iterate the dataset again. A step that captured its iterator keeps "
                "the one of its first call; pass the iterator as an argument instead"
            )
        return made

    def _captured(self, number: int) -> object:
        """A resource that came with code, held by an object: one that is not here is
        missed only by who draws from it."""
        try:
            return self._resource(number)
        except (ClosureInputError, NotFoundError, OutOfRangeError) as error:
            absent = StepIterator(_Absent(error))
            absent.is_resource = True
            return absent

    def _make(self, order: BuildResource) -> object:
        if order.purpose not in ("iterator", "value"):
            raise ValueError(
                f"a resource is built to be an iterator or a value: {order.purpose!r}"
            )
        maker = self.code(order.maker)
        args, kwargs = self.arguments(order.arguments)
        if not callable(maker):
            return maker  # a dataset itself
        if not args and not kwargs and _wants_context(maker):
            args = (self._context(),)
        try:
            return maker(*args, **kwargs)
        except OutOfRangeError as error:  # else taken for the end of what it makes
            words = f"the function of a resource failed on {self._task}"
            raise ClosureInputError(words, error) from error

    def state(self, number: int) -> str:
        """The place of an iterator as JSON; "" where it began, as it had no element, or
        could not be built.

        Raises:
            NotFoundError: There is none of this number.
            InvalidArgumentError: It is no iterator whose place can be found again; says
                why.
        """
        if isinstance(self._made.get(number), Broken):
            return ""
        self._resource(number)
        return json.dumps(_checkpointable(self._open.get(number)).get_state())

    def require_fit(self, number: int, state: str) -> None:
        """Refuses the place of another dataset. Of an iterator that could not be built
        nobody knows where it can go.

        Raises:
            NotFoundError: There is none of this number.
            InvalidArgumentError: It is a place in other data; says why.
        """
        if not isinstance(self._made.get(number), Broken):
            self._resource(number)
            require_fit(_checkpointable(self._open.get(number)), json.loads(state))

    def _iterate(self, number: int, made: object, state: str) -> LayoutMessage:
        name = f"the dataset of {self._task}"
        parse_no_flags()  # of what the dataset function has imported
        if is_huggingface(made):
            made = as_dataset(made)
        if isinstance(made, StepDataset):  # a strategy's, of this worker's replicas
            iterator = self._open[number] = made.__iter__()
            _go_to(iterator, state)
            first = iterator.draw()
            iterator.unread(first)
            iterator.is_resource = True
            self._made[number] = iterator
            return _layout_of_element(first, name)
        elements: Elements[Any]
        if isinstance(made, Dataset):
            elements = DatasetIterator(made.recipe, name)
        else:
            elements = Elements(made, name)  # type: ignore[arg-type]
        self._open[number] = elements
        _go_to(elements, state)
        layout = _layout_of_element(elements.peek(), name)
        steady = is_steady(made)
        made = self._made[number] = StepIterator(elements, name=name, steady=steady)
        made.is_resource = True
        return layout


@final
class _Absent:
    """The elements of an iterator that is not here."""

    def __init__(self, error: ZstratError) -> None:
        self._error: Final = error

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NoReturn:
        raise self._error.with_traceback(None)


def _go_to(iterator: object, state: str) -> None:
    if state:
        _checkpointable(iterator).set_state(json.loads(state))


def _checkpointable(iterator: object) -> CheckpointableIterator:
    if not isinstance(iterator, CheckpointableIterator):
        raise InvalidArgumentError(
            "the place of this iterator cannot be saved: its dataset function returns "
            "something else than a zs.data.Dataset. Return one, such as "
            "zs.data.Dataset.from_generator(function)"
        )
    return iterator


def _end(elements: Elements[Any] | StepIterator) -> None:
    try:
        elements.close()
    except BaseException:  # of a user's source: to the log, its last user is gone
        _LOG.warning("%s could not be closed", elements.name, exc_info=True)


def _wants_context(maker: Callable[..., object]) -> bool:
    """Whether a dataset function takes an `InputContext`: its one parameter has no
    default (``lambda i=i: …`` binds a value), or is called ``input_context``."""
    try:
        parameters = list(inspect.signature(maker).parameters.values())
    except (TypeError, ValueError):  # a builtin that does not say: call it as it is
        return False
    if not parameters:
        return False
    first = parameters[0]
    if first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    return first.default is first.empty or first.name == "input_context"


def _layout_of_element(element: object, name: str) -> LayoutMessage:
    leaves, treedef = joined.flatten(element)
    structure = _plain(treedef)
    if not is_described(structure):
        raise TypeError(
            f"an element of {name} is a tree of arrays with a node that keeps more "
            "beside its arrays than numbers, text and tuples of these, so the program "
            f"cannot be told what it looks like: {treedef!s:.300}. Keep functions and "
            "other objects out of the elements: pass them to the step as arguments"
        )
    refuse_random_keys(leaves, name)
    arrays = [np.asarray(leaf) for leaf in leaves]
    for array in arrays:
        if array.dtype.kind in "OSUmM":
            raise TypeError(
                f"an element of {name} contains {kind_of(array)}, and a step draws "
                "arrays of numbers or booleans: map the dataset first, text to the "
                "indices of its words, say, or leave the component out"
            )
    return _layout(arrays, structure)


def _layout_of_value(value: object) -> LayoutMessage:
    """Of a pytree of arrays; of any other object an empty one."""
    leaves, treedef = joined.flatten(value)
    kinds = np.ndarray | np.generic | jax.Array
    if not all(isinstance(leaf, kinds) for leaf in leaves):
        return LayoutMessage(0, [], [], None)
    return _layout([np.asarray(leaf) for leaf in leaves], _plain(treedef))


def _plain(treedef: Any) -> PlainTree:
    return Structure(treedef, tuple(range(treedef.num_leaves))).plain


def _layout(arrays: Sequence[np.ndarray], structure: PlainTree) -> LayoutMessage:
    return LayoutMessage(
        0,
        [array.dtype.name for array in arrays],
        [list(array.shape) for array in arrays],
        structure,
    )
