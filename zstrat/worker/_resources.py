"""What a coordinator has put on this worker: code, arguments, datasets. Used on the
executor thread.

Everything here is unpickled or built by user code, so it lives on the executor thread.
Arguments are kept as bytes and unpickled when they are first used: they refer to
resources by number, and when a resource is built again, the same arguments have to find
the new one. The law: what was loaded never refers to a resource that was dropped.
"""

from __future__ import annotations

import inspect
import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
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
    Lease,
    LeasedSource,
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
from zstrat.wire import LEASE, LayoutMessage

from ._closure import check_layout
from ._leased_iterator import LeasedIterator
from ._resident import Residents

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.config import Limits
    from zstrat.errors import ZstratError
    from zstrat.wire import Arrays, BuildResource, PlainTree

Load = Callable[[bytes, Sequence[np.ndarray], Callable[[int], object]], object]
"""The type of `zstrat.program.load`: takes code, its large arrays, and a function that
returns the resource of a number."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Leases = Mapping[int, Sequence[Lease]]
"""The leases of one step: by number of the iterator, in the order of its draws."""

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
    """Stands in for a resource that could not be built; using it raises ``error``."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error: Final = error


@final
@dataclass(slots=True)
class _Shipped:
    """Pickled code or arguments, and the unpickled object; ``uses`` are the numbers of
    the resources that the object refers to."""

    code: bytes
    arrays: Arrays = ()
    loaded: Any = _NOT_LOADED
    uses: set[int] = field(default_factory=set)


@final
class Resources:
    """The functions (by digest), arguments and resources (by number) of one session.

    Args:
        task: Name of this worker in errors.
        context: Returns the input context for dataset functions.
        limits: Limits of the description of an element or a value.
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
        # By number: the objects that steps get, and those of them that have to be
        # closed.
        self._built: dict[int, object] = {}
        self._open: dict[int, Elements[Any] | StepIterator] = {}
        self.residents: Final = Residents()
        """The arrays that windows of local steps keep on this worker."""

    # Code

    def put_code(self, digest: bytes, code: bytes) -> None:
        """Unpickles a function, unless it was unpickled before.

        Raises:
            Exception: The error of unpickling; closures that use the function raise it,
                too.
        """
        if digest not in self._code:
            self._code[digest] = _Shipped(code)
        self.code(digest)

    def code(self, digest: bytes) -> Any:
        """Returns the object with that digest, the same object at every call.

        Raises:
            NotFoundError: The worker does not have the object.
            Exception: The error of unpickling.
        """
        shipped = self._code.get(digest)
        if shipped is None:
            raise NotFoundError(
                f"{self._task} has no function {digest.hex()}: the worker was "
                "restarted after the function was sent"
            )
        return self._loaded(shipped, self._captured)

    def functions(self) -> Iterable[object]:
        """Returns all unpickled functions. Safe to call from the loop."""
        return [shipped.loaded for shipped in list(self._code.values())]

    def inherit(self, other: Resources) -> None:
        """Takes over the code, and the arrays of windows of local steps, that the same
        coordinator's previous session had before its connection broke, so that the code
        is not compiled again."""
        for digest, shipped in other._code.items():
            # Code that refers to resources is left out: they are not here yet, and are
            # built again with other objects.
            if shipped.loaded is not _NOT_LOADED and not shipped.uses:
                self._code.setdefault(digest, shipped)
        self.residents.inherit(other.residents)

    # Arguments

    def put_arguments(self, number: int, code: bytes, arrays: Arrays) -> None:
        self._arguments[number] = _Shipped(code, arrays)

    def drop_arguments(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._arguments.pop(number, None)

    def arguments(self, number: int) -> Arguments:
        """Returns ``(args, kwargs)``, the same objects at every call.

        Raises:
            NotFoundError: The worker does not have these arguments.
            ClosureInputError: The arguments contain a resource that could not be built.
            OutOfRangeError: The arguments contain the iterator of an empty dataset.
            Exception: The error of unpickling.
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
            # Loading notes what it refers to, so `drop` knows what to load again.
            def resolve(resource: int) -> object:
                shipped.uses.add(resource)
                return find(resource)

            shipped.loaded = self._load(shipped.code, shipped.arrays, resolve)
            parse_no_flags()  # for modules that it imported: no absl program runs here
        return shipped.loaded

    # Resources

    def build(self, order: BuildResource) -> LayoutMessage:
        """Builds a resource, and replaces the previous one of its number.

        Returns:
            The layout of an iterator's elements, or of a value.

        Raises:
            OutOfRangeError: The dataset is empty.
            TypeError, ValueError: The function that makes the resource cannot be
                called, or its result has the wrong type or cannot be described.
            Exception: The error of that function.
        """
        self.drop([order.resource])
        try:
            built = self._make(order)
            if order.purpose == "value":
                self._built[order.resource] = built
                layout, what = _layout_of_value(built), "the value is a pytree"
            else:
                layout = self._iterate(order, built)
                what = "the dataset has elements"
            check_layout(layout, self._limits, what)
            return layout
        except BaseException as error:  # to the coordinator, and to closures
            if isinstance(error, pickle.PicklingError):
                error.add_note(_BY_NAME)
            self.drop([order.resource])
            # In its place, so that closures which use it fail with the reason and not
            # with "no resource".
            self._built[order.resource] = Broken(trim(error))
            raise

    def drop(self, numbers: Sequence[int]) -> None:
        """Closes and drops the resources of these numbers; ignores unknown ones."""
        gone = set(numbers)
        for number in numbers:
            self._built.pop(number, None)
            elements = self._open.pop(number, None)
            if elements is not None:
                _end(elements)
        # What was loaded holds the object that is gone; it is loaded again, with the
        # next one, when it is used.
        for shipped in (*self._arguments.values(), *self._code.values()):
            if not shipped.uses.isdisjoint(gone):
                shipped.loaded = _NOT_LOADED
                shipped.uses.clear()

    def close(self) -> None:
        """Closes all iterators and drops all code, arguments and resources."""
        self._arguments.clear()
        self._code.clear()
        self.drop(list(self._built))

    # Leases

    def examples(self, number: int) -> int:
        """Returns the number of examples of a leased dataset; 0 if the resource is not
        one."""
        built = self._built.get(number)
        return built.examples if isinstance(built, LeasedIterator) else 0

    def expect_leases(self, packed: bytes | memoryview) -> Leases:
        """Unpacks the leases of a step that will run, and starts to read their examples
        in advance."""
        leases: dict[int, list[Lease]] = {}
        for number, *lease in LEASE.iter_unpack(packed):
            leases.setdefault(number, []).append(Lease(*lease))
        for number, found in leases.items():
            if isinstance(built := self._built.get(number), LeasedIterator):
                built.expect(found)
        return leases

    def expect_no_leases(self) -> None:
        """Forgets the expected leases, because their steps were cancelled."""
        for built in self._built.values():
            if isinstance(built, LeasedIterator):
                built.expect_none()

    def to_note(self, leases: Leases) -> bytes:
        """Returns the leases that parameter servers are to mark as done, as bytes; see
        `Push`."""
        return b"".join(
            LEASE.pack(built.noted_as, *lease)
            for number, found in leases.items()
            if isinstance(built := self._built.get(number), LeasedIterator)
            and built.noted_as
            for lease in found
        )

    def begin_leases(self, leases: Leases) -> list[LeasedIterator]:
        """Makes the iterators yield these leases next; returns the iterators.

        Raises:
            NotFoundError, ClosureInputError: One of the iterators does not exist here.
        """
        begun = []
        for number, found in leases.items():
            iterator = self._resource(number)
            assert isinstance(iterator, LeasedIterator), iterator
            iterator.begin(found)
            begun.append(iterator)
        return begun

    def _resource(self, number: int) -> object:
        built = self._built.get(number)
        if isinstance(built, Broken):
            if isinstance(built.error, OutOfRangeError):
                # One object is raised each time: without this its traceback would grow.
                raise built.error.with_traceback(None)  # as at the end of any dataset
            raise ClosureInputError(
                f"an argument of the closure could not be built on {self._task}",
                built.error,
            )
        if built is None:
            raise NotFoundError(
                f"{self._task} has no resource {number}: its iterator was "
                "dropped. Iterate the dataset again. A step that captured an iterator "
                "keeps that of its first call: pass the iterator as an argument instead"
            )
        return built

    def _captured(self, number: int) -> object:
        """Returns a resource that code has captured. If the resource is missing,
        returns an iterator that raises only when an element is drawn."""
        try:
            return self._resource(number)
        except (ClosureInputError, NotFoundError, OutOfRangeError) as error:
            absent = StepIterator(_Absent(error))
            absent.is_resource = True
            return absent

    def _make(self, order: BuildResource) -> object:
        if order.purpose not in ("iterator", "value"):
            raise ValueError(
                f"purpose={order.purpose!r}: expected 'iterator' or 'value'"
            )
        maker = self.code(order.maker)
        args, kwargs = self.arguments(order.arguments)
        if not callable(maker):
            return maker  # a dataset itself
        if not args and not kwargs and _wants_context(maker):
            args = (self._context(),)
        try:
            return maker(*args, **kwargs)
        except OutOfRangeError as error:  # else it would mean the end of the dataset
            words = f"the function of a resource failed on {self._task}"
            raise ClosureInputError(words, error) from error

    def state(self, number: int) -> str:
        """Returns the position of an iterator as JSON; "" for an iterator that could
        not be built, which counts as being at its beginning.

        Raises:
            NotFoundError: There is no resource of this number.
            InvalidArgumentError: The position of the iterator cannot be saved; says
                why.
        """
        if isinstance(self._built.get(number), Broken):
            return ""
        self._resource(number)
        return json.dumps(_checkpointable(self._open.get(number)).get_state())

    def require_fit(self, number: int, state: str) -> None:
        """Checks that an iterator can continue at the position ``state``. Does not
        check an iterator that could not be built.

        Raises:
            NotFoundError: There is no resource of this number.
            InvalidArgumentError: The position is of other data; says why.
        """
        if not isinstance(self._built.get(number), Broken):
            self._resource(number)
            require_fit(_checkpointable(self._open.get(number)), json.loads(state))

    def _iterate(self, order: BuildResource, built: object) -> LayoutMessage:
        number, state = order.resource, order.state
        name = f"the dataset of {self._task}"
        parse_no_flags()  # for modules that the dataset function imported
        if is_huggingface(built):
            built = as_dataset(built)
        if isinstance(built, LeasedSource):
            leased = LeasedIterator(built, name, order.noted_as)
            self._built[number] = self._open[number] = leased
            return _layout_of_element(leased.first, name)
        if isinstance(built, StepDataset):  # a strategy's, of this worker's replicas
            iterator = self._open[number] = built.__iter__()
            # To the position first: the element that is looked at for its layout then
            # is the next one, and is given back.
            _go_to(iterator, state)
            first = iterator.draw()
            iterator.unread(first)
            iterator.is_resource = True
            self._built[number] = iterator
            return _layout_of_element(first, name)
        elements: Elements[Any]
        if isinstance(built, Dataset):
            elements = DatasetIterator(built.recipe, name)
        else:
            elements = Elements(built, name)  # type: ignore[arg-type]
        self._open[number] = elements
        _go_to(elements, state)
        layout = _layout_of_element(elements.peek(), name)
        # Asked of what the user returned: `Elements` does not show whether its source
        # fills one buffer again and again.
        steady = is_steady(built)
        built = self._built[number] = StepIterator(elements, name=name, steady=steady)
        built.is_resource = True
        return layout


@final
class _Absent:
    """The elements of an iterator that is missing: drawing one raises the error that
    says so."""

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
            "the position of this iterator cannot be saved, as its dataset function "
            "does not return a zs.data.Dataset: return one, such as "
            "zs.data.Dataset.from_generator(function)"
        )
    return iterator


def _end(elements: Elements[Any] | StepIterator) -> None:
    try:
        elements.close()
    except BaseException:  # of a user's source: to the log, as nobody uses it now
        _LOG.warning("%s could not be closed", elements.name, exc_info=True)


def _wants_context(maker: Callable[..., object]) -> bool:
    """Returns whether a dataset function takes an `InputContext`: its first parameter
    has no default (``lambda i=i: …`` binds a value), or is named ``input_context``."""
    try:
        parameters = list(inspect.signature(maker).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
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
            f"an element of {name} is a tree of arrays with a node that has other data "
            "than arrays, numbers, text and tuples of these, so it cannot be described "
            f"to the program: {treedef!s:.300}. Pass functions and other objects to "
            "the step as arguments, not in elements"
        )
    refuse_random_keys(leaves, name)
    arrays = [np.asarray(leaf) for leaf in leaves]
    # Kinds of dtypes that jax does not have: objects, bytes, text, times.
    for array in arrays:
        if array.dtype.kind in "OSUmM":
            raise TypeError(
                f"an element of {name} contains {kind_of(array)}, expected numbers or "
                "booleans: map the dataset first, for example text to indices of its "
                "words, or leave the component out"
            )
    return _layout(arrays, structure)


def _layout_of_value(value: object) -> LayoutMessage:
    """Returns the layout of a pytree of arrays; an empty one for other objects."""
    leaves, treedef = joined.flatten(value)
    # Other objects never leave this worker, so nobody has to know their form.
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
