"""Optimizers see the tree of the variables that they move; this is their handle.

The transformation is plain optax. What it does to each variable is read from its
program, traced on the tree: ``zs.Optimizer(transformation, params=tree)``, or else the
tree of each ``apply_gradients(grads, tree)``. Variables of this process are moved by
steps that hold them all; a parameter server moves those that it has, one by one.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import jax

from zstrat.variables._creator import creator
from zstrat.variables._spec import LOCAL, VariableAggregation
from zstrat.variables._tracing import recorder
from zstrat.variables._variable import Variable

from ._gradient_call import BindsAsync, GradientCall, require_servers, seen
from ._gradients_given import given_pairs, given_tree
from ._optimizer_state import Hyperparameters, assign_state, state_of
from ._slots import SlotInfo
from ._transformation_trace import traced
from ._tree_updates import apply_now, apply_now_async, lives_here, slot_rule

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.optimizers import LeafRule, RandomNumbers, TreeRule, TreeStructure
    from zstrat.variables._abstract import AbstractVariable
    from zstrat.variables._storage import VariableHandle

    from ._gradient_call import GradientTarget
    from ._slots import SlotRule

# Negative: 0 stands for none, and those of parameter servers are above it.
_local_ids = itertools.count(-1, -1)


class Optimizer:
    """An optax transformation that moves variables.

    Args:
        transformation: Any optax ``GradientTransformation``, or an object that makes
            one (``optax.MultiSteps``). Variables of this process are moved by all of
            them; parameter servers move each variable by itself, with what can be
            computed of all gradients (a global norm), and refuse what mixes values.
        params: The tree of variables that it moves: paths, labels and masks are those
            of this tree, and what cannot be done with it is refused here. Without it,
            the tree is that of each ``apply_gradients``.
        count_iterations: Also keep TF's ``iterations``: an int32 variable that grows by
            one with each ``apply_gradients``. It is one more (small) update per step.

    Raises:
        TypeError: ``transformation`` has no ``init`` and ``update``, ``params`` has
            leaves that are no variables, or the name is no text.
        ValueError: It cannot be applied to ``params``, or not where they live.
    """

    def __init__(
        self,
        transformation: Any,
        name: str | None = None,
        *,
        params: Any = None,
        count_iterations: bool = False,
    ) -> None:
        from zstrat.optimizers import RandomNumbers, checked

        self.name = "Optimizer" if name is None else name
        """Names the optimizer in errors."""
        if not isinstance(self.name, str):
            raise TypeError(f"name={name!r:.80}: expected that of an optimizer, text")
        self.iterations: Variable | None = None
        """Number of calls of `apply_gradients` so far; None without
        ``count_iterations``."""
        self._transformation: Any = checked(transformation)
        self._random = RandomNumbers.of_this_thread()
        """Of the program, for parameter servers, whose processes were not told."""
        self._params = params
        tree = self._tree
        self._forget_traces()
        current = creator.get()
        self.is_local = current is None
        """Whether it was created outside every scope."""
        self.id: int = (
            next_id() if current is None else current.register_optimizer(self)
        )
        """Unique in the session; negative for an optimizer of this process."""
        try:
            if tree is not None:
                self._require_possible(*tree)
            if count_iterations:
                self.iterations = self._counter()
        except BaseException:  # to the caller, who has no optimizer
            if current is not None:
                current.forget_optimizer(self.id)
            raise

    @functools.cached_property
    def _tree(self) -> tuple[TreeStructure, tuple[AbstractVariable, ...]] | None:
        """The tree that it was given. Flattened when it is first wanted: a handle that
        arrives may do so before the class of its tree, whose methods use it."""
        return None if self._params is None else _tree_of(self._params)

    def _forget_traces(self) -> None:
        self._rules: list[tuple[Any, TreeRule]] = []
        self.made: dict[Any, Any] = {}
        """What others have made of its traces, by what they made it for."""
        self.moved: dict[tuple[int, ...], GradientCall] = {}
        """The last call on each tree, without its arrays, by its variables."""

    def _counter(self) -> Variable:
        return Variable(
            0,
            trainable=False,
            name=f"{self.name}/iterations",
            dtype="int32",
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @property
    def transformation(self) -> Any:
        """The optax transformation."""
        return self._transformation

    @property
    def state(self) -> Any:
        """The state of the optimizer as it is now, in optax's own structure; arrays of
        jax. It can be assigned, between steps, by the program:
        ``optimizer.state = optax.tree_utils.tree_set(optimizer.state, ...)``. Of
        several programs that hold a variable together each one assigns it.

        Cost: all of it is read from where it lives, or written there. While steps are
        under way, parts of several of them may be in it.

        Raises:
            RuntimeError: Its tree is not known: it has moved nothing, and ``params=``
                was not given. Or it has moved several trees. Or this is in a step.
            ValueError: The assigned state has another structure, or other shapes.
            TypeError: A leaf of it has a dtype of another kind.
        """
        return state_of(self)

    @state.setter
    def state(self, state: Any) -> None:
        assign_state(self, state)

    @property
    def hyperparams(self) -> Hyperparameters:
        """Those of ``optax.inject_hyperparams``, by name: to read, and to assign while
        training goes on, as ``optimizer.hyperparams["learning_rate"] = 1e-4``; between
        steps, by the program, not in a step. Of several programs that hold a variable
        together (`MultiWorkerMirroredStrategy`) each one assigns it."""
        return Hyperparameters(self)

    def apply_gradients(
        self,
        grads: Any,
        variables: Any = None,
        *,
        aggregate_gradients: bool = True,
        **extra: Any,
    ) -> None:
        """Moves each variable by its gradient.

        Args:
            grads: A pytree of gradients, each an array of its variable's shape and
                dtype, or `IndexedSlices` of some of its rows: only these rows, and
                what the optimizer keeps beside them, are moved (Adam's moments of
                other rows do not decay; steps are counted all the same). Or, without
                ``variables``, TF's iterable of ``(gradient, variable)`` pairs. A
                gradient that is None is left out: its variable rests, with all that is
                kept beside it.
                Optimizers that want a gradient of each example (`optax.contrib.dpsgd`)
                get arrays ``[examples, ...]``, where variables are in this process;
                those of several replicas are put one behind the other.
            variables: A pytree of the same structure. Where it has None, so must
                ``grads``.
            aggregate_gradients: In a replica function, gradients are summed over the
                replicas. False: they are the same in all replicas already, because
                ``all_reduce`` has made them so; those of the first replica are taken.
            extra: Further arguments of the transformation's ``update``
                (``value=loss``). In a replica function the mean over the replicas is
                taken of floating-point arrays, and the first replica's of others. What
                is no array (``value_fn=``) works where the variables are in this
                process.

        Raises:
            ValueError: The structures differ, a shape or dtype does not fit, no
                gradient is there at all, a variable is there twice, or lives on a
                parameter server that does not know this optimizer; or the optimizer
                cannot do this to these variables, in words that say what to do.
        """
        call = self._call(grads, variables, extra, is_reduced=not aggregate_gradients)
        recording = recorder.get()
        if recording is None:
            apply_now(call, counts=True)
        else:
            recording.optimize(call)
            if self.iterations is not None:
                self.iterations.assign_add(1)
        self._has_moved(call)

    async def apply_gradients_async(
        self, grads: Any, variables: Any = None, **extra: Any
    ) -> None:
        """`apply_gradients` outside a step, without blocking the running loop.

        Cancellation: some of the gradients may have been applied.
        """
        call = self._call(grads, variables, extra, is_reduced=False)
        await apply_now_async(call)
        self._has_moved(call)

    def rule(
        self, call: GradientCall, *, is_here: bool, is_traced: bool = True
    ) -> TreeRule:
        """The transformation on the tree of a call; traced once.

        Args:
            is_traced: Its update is traced, too; else its state alone.

        Raises:
            ValueError: It cannot be traced on that tree.
        """
        from zstrat.optimizers import RandomNumbers, TreeRule

        dtypes = tuple([seen(v.dtype, is_here=is_here) for v in call.targets])
        shapes = tuple([v.shape for v in call.targets])
        is_wide = not is_here and any(map(_is_wide, dtypes))
        wide = bool(jax.config.jax_enable_x64) or is_wide  # type: ignore[attr-defined]
        # Here they are drawn as the thread is told when it moves the variables.
        random = RandomNumbers() if is_here else self._random
        key = (call.structure, shapes, dtypes, call.extras, wide, call.examples, random)
        for number, (known, made) in enumerate(self._rules):
            if known == key:
                if is_traced:
                    made = traced(call, made, is_traced=True)
                    self._rules[number] = key, made
                return made
        kinds = tuple(map(_kind, shapes, dtypes))
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
        """What moves one leaf of a tree."""
        from zstrat.optimizers import leaf_rule

        return leaf_rule(tree, leaf)

    def slot_rule(self, variable: VariableHandle) -> SlotRule:
        """What the optimizer keeps beside a variable of this process.

        Raises:
            RuntimeError: It has not moved the variable, and ``params=`` was not given.
        """
        found = self._place_of(variable)
        if found is None:
            raise RuntimeError(
                f"optimizer {self.name!r} has not moved variable {variable.name!r} "
                "yet: apply gradients first, or name the tree when it is made, "
                "zs.Optimizer(transformation, params=params)"
            )
        call, leaf, number = found
        return slot_rule(call, leaf, number)

    def slots_beside(
        self, variable: AbstractVariable | VariableHandle
    ) -> list[SlotInfo] | None:
        """What the optimizer keeps beside a variable; None if it has not moved it yet,
        and ``params=`` was not given."""
        found = self._place_of(variable.components[0])
        if found is None:
            return None
        call, leaf, _ = found
        rule = self.leaf_rule(call.rule(is_here=lives_here(call)), leaf)
        return [
            SlotInfo(slot.name, kind.dtype.name, tuple(kind.shape), slot.rows)
            for slot, kind in zip(rule.slots, rule.steady_kinds(), strict=True)
        ]

    @functools.cached_property
    def state_classes(self) -> dict[str, str]:
        """The class of the state of optax that has what is kept beside a variable, by
        name; without that of which only a tree would say it."""
        from zstrat.optimizers import state_classes

        return state_classes(self._transformation)

    def _place_of(
        self, variable: VariableHandle
    ) -> tuple[GradientCall, int, int] | None:
        """The leaf that a variable is, and which of its components."""
        own = self._own_call()
        for call in [*self.moved.values()] if own is None else [own]:
            for leaf, target in enumerate(call.targets):
                for number, component in enumerate(target.components):
                    if component.spec.key == variable.spec.key:
                        return call, leaf, number
        return None

    async def bind_async(self, variable: AbstractVariable) -> None:
        """Sends the servers of a variable the tree that it belongs to, if that is
        known: then they know what is kept beside it.

        Cancellation: they may have got it.
        """
        found = self._place_of(variable.components[0])
        if found is None:
            return
        for each in found[0].variables:
            if isinstance(each.storage, BindsAsync):
                await each.storage.bind_async(found[0])

    def known_call(self) -> GradientCall | None:
        """A call on its tree without arrays, None if it has none yet.

        Raises:
            RuntimeError: It has moved several trees.
        """
        if self._tree is not None:
            return self.moved.get(_keys_of(self._tree[1])) or self._empty_call(
                *self._tree
            )
        if len(self.moved) > 1:
            raise RuntimeError(
                f"optimizer {self.name!r} has moved {len(self.moved)} trees of "
                "variables: make one optimizer for each, and name the tree, "
                "zs.Optimizer(transformation, params=params)"
            )
        return next(iter(self.moved.values()), None)

    def _own_call(self) -> GradientCall | None:
        """A call on the tree that it was given, whose update can be traced; None if it
        has no tree, or wants what no call has brought yet (further arguments, gradients
        of examples)."""
        if self._tree is None:
            return None
        call = self.known_call()
        assert call is not None
        try:
            call.rule(is_here=lives_here(call))
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
        for variable in given.moved:
            self._check_place(variable)
        return given.call(self, extra, is_reduced=is_reduced)

    def _has_moved(self, call: GradientCall) -> None:
        """A call was carried out, or noted: its tree is known from now on."""
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
        """Refuses at once what a parameter server would not do."""
        from zstrat.optimizers import takes_extras

        for variable in targets:
            self._check_place(variable)
        if all(c.spec.ps == LOCAL for v in targets for c in v.components):
            return
        call = self._empty_call(structure, targets)
        call.rule(is_here=False, is_traced=False)
        try:
            rule = call.rule(is_here=False)
        except ValueError as error:
            lacks = isinstance(error.__cause__, TypeError | KeyError)
            if lacks and takes_extras(self._transformation):
                return  # arguments of its update, which no call has told yet
            raise
        require_servers(call, rule)

    def _check_place(self, variable: GradientTarget) -> None:
        for part in variable.components if self.is_local else ():
            if part.spec.ps != LOCAL:
                raise ValueError(
                    f"{part.spec} lives on {part.device}, but optimizer "
                    f"{self.name!r} was created outside strategy.scope() and is not "
                    "known there: create it inside the scope"
                )

    def __reduce__(self) -> Any:
        params = None
        if self._tree is not None:
            structure, targets = self._tree
            params = structure.treedef.unflatten(targets)
        state = (self.id, self.name, self.is_local, self.iterations)
        return _handle, (*state, self._transformation, self._random, params)

    def __repr__(self) -> str:
        return f"<zstrat.Optimizer {self.name!r}>"


def next_id() -> int:
    """The number of an optimizer of this process."""
    return next(_local_ids)


def _handle(
    optimizer: int,
    name: str,
    is_local: bool,
    iterations: Variable | None,
    transformation: Any,
    random: RandomNumbers,
    params: Any,
) -> Optimizer:
    made = object.__new__(Optimizer)
    made.id, made.name, made.is_local = optimizer, name, is_local
    made.iterations, made._transformation = iterations, transformation
    made._random = random
    made._params = params
    made._forget_traces()
    return made


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


def _is_wide(dtype: Any) -> bool:
    return bool(dtype.itemsize > (8 if dtype.kind == "c" else 4))


def _kind(shape: tuple[int, ...], dtype: Any) -> Any:
    made: Callable[..., Any] = jax.ShapeDtypeStruct
    return made(shape, dtype)
