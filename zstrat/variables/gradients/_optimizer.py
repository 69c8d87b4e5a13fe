"""`Optimizer`: an optax transformation that updates variables.

The transformation is plain optax. It is traced on a tree of variables, and the traced
program shows what it does to each variable. The tree is ``params`` of
``zs.Optimizer(transformation, params=tree)``, or that of each ``apply_gradients(grads,
tree)``. Steps update all variables of this process together; parameter servers update
each of their variables separately.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax

from zstrat.codecs import wire_format
from zstrat.variables._creator import creator
from zstrat.variables._recorder import recorder
from zstrat.variables._storage import LOCAL, VariableAggregation
from zstrat.variables._variable import Variable

from ._gradient_call import (
    BindsAsync,
    GradientCall,
    require_mergeable,
    require_servers,
    seen,
)
from ._gradients_given import given_pairs, given_tree, traced
from ._optimizer_state import Hyperparameters, assign_state, state_of
from ._rounds import Rounds
from ._slots import SlotInfo
from ._tree_updates import apply_now, apply_now_async, lives_here, slot_rule

if TYPE_CHECKING:
    from zstrat.codecs import Wire
    from zstrat.optimizers import LeafRule, RandomNumbers, TreeRule, TreeStructure
    from zstrat.variables._abstract import AbstractVariable
    from zstrat.variables._storage import VariableHandle

    from ._gradient_call import GradientTarget
    from ._slots import SlotRule

# Negative: 0 is "no optimizer", and ids on parameter servers are positive.
_local_ids = itertools.count(-1, -1)


class Optimizer:
    """An optax transformation that updates variables.

    Args:
        transformation: Any optax ``GradientTransformation``, or an object that makes
            one (``optax.MultiSteps``). Variables of this process accept any
            transformation. Parameter servers update each variable separately: they
            accept values that depend on all gradients (a global norm), and refuse a
            transformation in which the update of one variable depends on others.
        params: The tree of variables that the optimizer updates: paths, labels and
            masks refer to this tree, and the constructor raises an error if the
            transformation cannot be applied to it. Default: the tree of each
            ``apply_gradients``.
        rounds: Applies the gradients of several steps as one update, for synchronous
            training on parameter servers. Default: each step is an update.
        wire: The format in which gradients travel to parameter servers: "bfloat16",
            "int8", "int4", "e3m0", "topk", or a `Wire`. Default: unchanged.
        count_iterations: Whether to keep TF's ``iterations``: an int32 variable that
            grows by one with each ``apply_gradients``, at the cost of one more (small)
            update per step.

    Raises:
        TypeError: ``transformation`` has no ``init`` and ``update``, ``params`` has
            leaves that are not variables, or the name is not a string.
        ValueError: The transformation cannot be applied to ``params``, or not where
            they are stored.
    """

    def __init__(
        self,
        transformation: Any,
        name: str | None = None,
        *,
        params: Any = None,
        rounds: Rounds | None = None,
        wire: Wire | str | None = None,
        count_iterations: bool = False,
    ) -> None:
        from zstrat.optimizers import RandomNumbers, checked

        self.name = "Optimizer" if name is None else name
        """The name of the optimizer in errors."""
        if not isinstance(self.name, str):
            raise TypeError(f"name={name!r:.80}: expected a string")
        if not isinstance(rounds, Rounds | None):
            raise TypeError(f"rounds={rounds!r:.80}: expected a zs.Rounds")
        self.rounds = rounds
        """Settings for merging the gradients of several steps to one update; None: each
        step is an update."""
        self.wire = wire_format(wire)
        """The format in which gradients are sent to parameter servers."""
        self.iterations: Variable | None = None
        """Number of calls of `apply_gradients` so far; None without
        ``count_iterations``."""
        self._transformation: Any = checked(transformation, self.name)
        self._random = RandomNumbers.of_this_thread()
        """The program's settings for random numbers, which parameter servers use
        too."""
        self._params = params
        # Before `id`: a bad tree should fail before anything is registered.
        tree = self._tree
        self._forget_traces()
        current = creator.get()
        self.is_local = current is None
        """Whether the optimizer was created outside of every scope."""
        self.id: int = (
            next_id() if current is None else current.register_optimizer(self)
        )
        """Id that is unique in the session; negative for an optimizer of this
        process."""
        try:
            if rounds is not None and self.id < 0:
                raise ValueError(
                    f"optimizer {self.name!r} has rounds, which need parameter "
                    "servers: create it in the scope of a "
                    "zs.ParameterServerStrategy, or leave out rounds="
                )
            if self.wire is not None and self.id < 0:
                raise ValueError(
                    f"optimizer {self.name!r} has wire={self.wire!r}, for "
                    "gradients that travel to parameter servers: create it in the "
                    "scope of a zs.ParameterServerStrategy, or leave out wire="
                )
            if tree is not None:
                self._require_possible(*tree)
            if count_iterations:
                self.iterations = self._counter()
        # Also after an interrupt: else the scope would keep the number of an optimizer
        # that does not exist.
        except BaseException:  # to the caller
            if current is not None:
                current.forget_optimizer(self.id)
            raise

    @functools.cached_property
    def _tree(self) -> tuple[TreeStructure, tuple[AbstractVariable, ...]] | None:
        """The tree of ``params``, flattened when it is first used: an unpickled handle
        may arrive before the class of its tree can be imported."""
        return None if self._params is None else _tree_of(self._params)

    def _forget_traces(self) -> None:
        self._rules: list[tuple[Any, TreeRule]] = []
        self.made: dict[Any, Any] = {}
        """A cache for objects that other modules make from the optimizer's traces."""
        self.moved: dict[tuple[int, ...], GradientCall] = {}
        """For each tree of variables that the optimizer has updated: a call without
        arrays, by the keys of the variables."""

    def _counter(self) -> Variable:
        return Variable(
            0,
            trainable=False,
            name=f"{self.name}/iterations",
            dtype="int32",
            # One per step, not one per replica.
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @property
    def transformation(self) -> Any:
        """The optax transformation."""
        return self._transformation

    @property
    def state(self) -> Any:
        """The present state of the optimizer as jax arrays, in optax's own structure.
        Variables that `apply_gradients` got in pairs form a list in the order of the
        pairs.

        The program can assign the state between steps: ``optimizer.state =
        optax.tree_utils.tree_set(optimizer.state, ...)``. If several programs share the
        variables, each of them must make the assignment.

        Cost: reads or writes all slots where they are stored. While steps run, the
        result may mix parts of several steps.

        Raises:
            RuntimeError: The tree of variables is not known, because the optimizer has
                updated no variables and has no ``params=``; it has updated several
                trees; or this is in a step.
            ValueError: The assigned state has another structure, or other shapes.
            TypeError: A leaf of the assigned state has a dtype of another kind.
        """
        return state_of(self)

    @state.setter
    def state(self, state: Any) -> None:
        assign_state(self, state)

    @property
    def hyperparams(self) -> Hyperparameters:
        """The hyperparameters of ``optax.inject_hyperparams``, by name.

        The program reads and assigns them between steps:
        ``optimizer.hyperparams["learning_rate"] = 1e-4``. If several programs share the
        variables (`MultiWorkerMirroredStrategy`), each of them must make the
        assignment.
        """
        return Hyperparameters(self)

    def apply_gradients(
        self,
        grads: Any,
        variables: Any = None,
        *,
        aggregate_gradients: bool = True,
        **extra: Any,
    ) -> None:
        """Updates each variable by its gradient.

        Args:
            grads: A pytree of gradients, each an array of its variable's shape and
                dtype, or `IndexedSlices` of some of its rows: only these rows and their
                slots are updated (Adam's moments of other rows do not decay, but the
                count of steps grows). Without ``variables``, TF's iterable of
                ``(gradient, variable)`` pairs. Where a gradient is None, the variable
                and its slots do not change. Optimizers that need a gradient per example
                (`optax.contrib.dpsgd`) take arrays ``[examples, ...]``, for variables
                of this process; arrays of several replicas are concatenated.
            variables: A pytree of variables of the same structure. Where it has None,
                ``grads`` must have None too.
            aggregate_gradients: Whether, in a replica function, gradients are summed
                over the replicas. False: the gradients are already the same in all
                replicas, because ``all_reduce`` has summed them; those of the first
                replica are used.
            extra: Further arguments of the transformation's ``update``
                (``value=loss``). A replica function averages floating-point arrays over
                the replicas, and uses other arrays of the first replica. Objects that
                are not arrays (``value_fn=``) need variables of this process.

        Raises:
            ValueError: The structures differ, a shape or dtype does not fit, all
                gradients are None, a variable occurs twice, or is on a parameter server
                that does not know this optimizer; or the optimizer cannot update these
                variables.
        """
        call = self._call(grads, variables, extra, is_reduced=not aggregate_gradients)
        recording = recorder.get()
        # Refused before anything is recorded or sent.
        if self.rounds is not None:
            in_step = recording is not None and not recording.live
            require_mergeable(call, self.rounds, in_step=in_step)
        if recording is None:
            apply_now(call, counts=True)
        else:
            recording.optimize(call)
            if self.iterations is not None:
                self.iterations.assign_add(1)
        # Last: a call that was refused has not moved anything.
        self._has_moved(call)

    async def apply_gradients_async(
        self, grads: Any, variables: Any = None, **extra: Any
    ) -> None:
        """Updates variables like `apply_gradients`, outside of steps, without blocking
        the running loop.

        Cancellation: some of the gradients may have been applied.
        """
        call = self._call(grads, variables, extra, is_reduced=False)
        if self.rounds is not None:
            require_mergeable(call, self.rounds, in_step=False)
        await apply_now_async(call)
        self._has_moved(call)

    def rule(
        self, call: GradientCall, *, is_here: bool, is_traced: bool = True
    ) -> TreeRule:
        """Returns the transformation on the tree of a call, which is traced once and
        cached.

        Args:
            is_traced: Whether to trace the update too, not only the initial state.

        Raises:
            ValueError: The transformation cannot be traced on that tree.
        """
        from zstrat.optimizers import RandomNumbers, TreeRule

        dtypes = tuple([seen(v.dtype, is_here=is_here) for v in call.targets])
        shapes = tuple([v.shape for v in call.targets])
        # Parameter servers compute with 64 bits where a variable has them, whatever
        # this program does.
        is_wide = not is_here and any(
            x.itemsize > (8 if x.kind == "c" else 4) for x in dtypes
        )
        wide = bool(jax.config.jax_enable_x64) or is_wide  # type: ignore[attr-defined]
        # In this process the thread's settings count at each update.
        random = RandomNumbers() if is_here else self._random
        # Also the further arguments and the thread's settings: the program depends on
        # all of them.
        key = (call.structure, shapes, dtypes, call.extras, wide, call.examples, random)
        for number, (known, rule) in enumerate(self._rules):
            if known == key:
                # Known, but perhaps only its state was traced (`_require_possible`).
                if is_traced:
                    rule = traced(call, rule, is_traced=True)
                    self._rules[number] = key, rule
                return rule
        kind: Any = jax.ShapeDtypeStruct  # untyped
        kinds = tuple(map(kind, shapes, dtypes))
        new = TreeRule(
            self.name,
            self._transformation,
            call.structure,
            kinds,
            dtypes,
            call.extras,
            wide,
            examples=call.examples,
            random=random,
        )
        new = traced(call, new, is_traced=is_traced)
        self._rules.append((key, new))
        return new

    def leaf_rule(self, tree: TreeRule, leaf: int) -> LeafRule:
        """Returns the rule that updates one leaf (variable) of a tree."""
        from zstrat.optimizers import leaf_rule

        return leaf_rule(tree, leaf)

    def slot_rule(self, variable: VariableHandle) -> SlotRule:
        """Returns the slots that the optimizer keeps for a variable of this process.

        Raises:
            RuntimeError: The optimizer has not updated the variable, and has no
                ``params=``.
        """
        place = self._place_of(variable)
        if place is None:
            raise RuntimeError(
                f"optimizer {self.name!r} has not updated variable {variable.name!r} "
                "yet: apply gradients first, or pass the tree to the optimizer, "
                "zs.Optimizer(transformation, params=params)"
            )
        call, leaf, number = place
        return slot_rule(call, leaf, number)

    def slots_beside(
        self, variable: AbstractVariable | VariableHandle
    ) -> list[SlotInfo] | None:
        """Lists the slots that the optimizer keeps for a variable; None if it has not
        updated the variable yet, and has no ``params=``."""
        place = self._place_of(variable.components[0])
        if place is None:
            return None
        call, leaf, _ = place
        rule = self.leaf_rule(call.rule(is_here=lives_here(call)), leaf)
        return [
            SlotInfo(slot.name, kind.dtype.name, tuple(kind.shape), slot.rows)
            for slot, kind in zip(rule.slots, rule.steady_kinds(), strict=True)
        ]

    @functools.cached_property
    def state_classes(self) -> dict[str, str]:
        """The classes of optax states, by the name of the slot that belongs to the
        state, as far as they are known without a tree."""
        from zstrat.optimizers import state_classes

        return state_classes(self._transformation)

    def _place_of(
        self, variable: VariableHandle
    ) -> tuple[GradientCall, int, int] | None:
        """Finds a variable among the known trees. Returns a call on its tree, the
        number of its leaf, and the number of its component; None if the variable is not
        found."""
        own = self._own_call()
        for call in [*self.moved.values()] if own is None else [own]:
            for leaf, target in enumerate(call.targets):
                for number, component in enumerate(target.components):
                    if component.spec.key == variable.spec.key:
                        return call, leaf, number
        return None

    async def bind_async(self, variable: AbstractVariable) -> None:
        """Sends the tree that contains a variable, if it is known, to the servers, so
        that these know the slots.

        Cancellation: the servers may have received the tree.
        """
        place = self._place_of(variable.components[0])
        if place is None:
            return
        for each in place[0].variables:
            if isinstance(each.storage, BindsAsync):
                await each.storage.bind_async(place[0])

    def known_call(self) -> GradientCall | None:
        """Returns a call without arrays on the optimizer's tree; None if the tree is
        not known.

        Raises:
            RuntimeError: The optimizer has updated several trees.
        """
        if self._tree is not None:
            # A call has seen further arguments and examples, which the bare tree has
            # not.
            return self.moved.get(_keys_of(self._tree[1])) or self._empty_call(
                *self._tree
            )
        if len(self.moved) > 1:
            raise RuntimeError(
                f"optimizer {self.name!r} has updated {len(self.moved)} trees of "
                "variables, and each has a state: make one optimizer for each, "
                "zs.Optimizer(transformation, params=params)"
            )
        return next(iter(self.moved.values()), None)

    def _own_call(self) -> GradientCall | None:
        """Returns a call on the tree of ``params`` whose update can be traced.

        None if there is no ``params``, or tracing needs something that no call has
        given yet (further arguments, gradients of examples).
        """
        if self._tree is None:
            return None
        call = self.known_call()
        assert call is not None
        try:
            call.rule(is_here=lives_here(call))
        # The trace lacks what a call would bring: not an error before there is a call.
        except ValueError:
            return None
        return call

    def _call(
        self, grads: Any, variables: Any, extra: dict[str, Any], *, is_reduced: bool
    ) -> GradientCall:
        tree = self._tree
        if variables is None:
            given = given_pairs(grads, tree)
        else:
            given = given_tree(grads, variables, tree)
        # Before gradients are converted, which may take a pass over each.
        for variable in given.moved:
            self._check_place(variable)
        return given.call(self, extra, is_reduced=is_reduced)

    def _has_moved(self, call: GradientCall) -> None:
        """Remembers the tree of a call in `moved`."""
        keys = _keys_of(call.targets)
        if keys not in self.moved:
            self.moved[keys] = self._empty_call(call.structure, call.targets, call)

    def _empty_call(
        self,
        structure: TreeStructure,
        targets: tuple[GradientTarget, ...],
        like: GradientCall | None = None,
    ) -> GradientCall:
        from zstrat.optimizers import Extras

        count = len(targets)
        return GradientCall(
            self,
            structure,
            targets,
            tuple(range(count)),
            (False,) * count,
            ((None,),) * count,
            Extras.none() if like is None else like.extras,
            examples=() if like is None else like.examples,
        )

    def _require_possible(
        self, structure: TreeStructure, targets: tuple[GradientTarget, ...]
    ) -> None:
        """Refuses, in the constructor, a transformation that parameter servers would
        refuse.

        Raises:
            ValueError: The transformation cannot be applied to these variables.
        """
        from zstrat.optimizers import takes_extras

        for variable in targets:
            self._check_place(variable)
        # Variables of this process take any transformation.
        if all(c.spec.ps == LOCAL for v in targets for c in v.components):
            return
        call = self._empty_call(structure, targets)
        # The state first, by itself: an error in `init` is final, one in `update` may
        # be a missing argument.
        call.rule(is_here=False, is_traced=False)
        try:
            rule = call.rule(is_here=False)
        except ValueError as error:
            lacks = isinstance(error.__cause__, TypeError | KeyError)
            if lacks and takes_extras(self._transformation):
                return  # arguments of its update, which no call has had yet
            raise
        require_servers(call, rule)

    def _check_place(self, variable: GradientTarget) -> None:
        # An optimizer of a scope was registered with the servers, and may update local
        # variables, too.
        for part in variable.components if self.is_local else ():
            if part.spec.ps != LOCAL:
                raise ValueError(
                    f"{part.spec} is stored on {part.device}, but optimizer "
                    f"{self.name!r} was created outside strategy.scope() and is not "
                    "known there: create it inside the scope"
                )

    def __reduce__(self) -> Any:
        params = None
        if self._tree is not None:
            structure, targets = self._tree
            params = structure.treedef.unflatten(targets)
        state = (self.id, self.name, self.is_local, self.iterations)
        asked = self.rounds, self.wire
        return _handle, (*state, *asked, self._transformation, self._random, params)

    def __repr__(self) -> str:
        return f"<zstrat.Optimizer {self.name!r}>"


def next_id() -> int:
    """Returns an unused id for a new optimizer of this process."""
    return next(_local_ids)


def unplaced(transformation: Any, name: str) -> Optimizer:
    """Makes an optimizer for copies of variables that its caller keeps. The variables
    themselves may be stored anywhere.

    Raises:
        TypeError: ``transformation`` has no ``init`` and ``update``.
    """
    from zstrat.optimizers import RandomNumbers, checked

    moves, random = checked(transformation, name), RandomNumbers.of_this_thread()
    # Not `is_local`, so that variables of servers are not refused.
    return _handle(next_id(), name, False, None, None, None, moves, random, None)


def _handle(
    optimizer: int,
    name: str,
    is_local: bool,
    iterations: Variable | None,
    rounds: Rounds | None,
    wire: Wire | None,
    transformation: Any,
    random: RandomNumbers,
    params: Any,
) -> Optimizer:
    # Not by the class, which would register another optimizer.
    handle = object.__new__(Optimizer)
    handle.id, handle.name, handle.is_local = optimizer, name, is_local
    handle.iterations, handle._transformation = iterations, transformation
    handle.rounds, handle.wire = rounds, wire
    handle._random = random
    handle._params = params
    handle._forget_traces()
    return handle


def _keys_of(targets: tuple[GradientTarget, ...]) -> tuple[int, ...]:
    return tuple([c.spec.key for v in targets for c in v.components])


def _tree_of(params: Any) -> tuple[TreeStructure, tuple[AbstractVariable, ...]]:
    from zstrat.optimizers import TreeStructure
    from zstrat.variables._abstract import AbstractVariable

    leaves, treedef = jax.tree.flatten(params)
    for leaf in leaves:
        if not isinstance(leaf, AbstractVariable):
            raise TypeError(
                "zs.Optimizer(params=) takes a pytree of zs.Variable objects, as "
                f"zs.create_variables gives; a leaf is {type(leaf).__name__}"
            )
        leaf.require_optimizable()
    return TreeStructure(treedef), tuple(leaves)
