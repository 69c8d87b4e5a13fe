"""Describes the tree of an optimizer to a parameter server, as data.

A coordinator has sent the transformation itself. The process that applies gradients,
which may be a worker, sends the variables that are the leaves of the tree, and its
structure. The server traces the transformation on the same tree, and refuses the
description if its trace divides into other updates of leaves than the sender's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.errors import InvalidArgumentError

from ._leaf import leaf_rule
from ._structure import TreeStructure
from ._transformation import Extras, RandomNumbers, shaped
from ._tree import TreeRule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._leaf import LeafRule
    from ._transformation import Shape

MAX_DESCRIPTION_BYTES: Final = 1 << 24
"""Largest size in bytes of one description: enough for a tree of a hundred thousand
leaves."""

_MALFORMED: Final = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError
)  # fmt: skip


@dataclass(frozen=True)
class Binding:
    """An optimizer and the variables that it updates. ``keys`` has, for each leaf of
    the tree in order, the keys of the components of its variable."""

    rule: TreeRule
    keys: tuple[tuple[int, ...], ...]

    def encoded(self) -> bytes:
        """Encodes the binding for the wire.

        Raises:
            ValueError: The tree has containers of classes that a server does not know,
                and the optimizer does something else with containers of other classes;
                or ``update`` takes arguments that are not arrays.
        """
        rule = self.rule
        # An object, such as a function, has a meaning only in the process that made it.
        if rule.extras.static:
            names = ", ".join(repr(name) for name, _ in rule.extras.static)
            raise ValueError(
                f"optimizer {rule.name!r} runs on the parameter servers, and its "
                f"update takes {names}, which is not an array and cannot be sent "
                "there: train such an optimizer with a strategy of one process or of "
                "several that work together (MirroredStrategy, "
                "MultiWorkerMirroredStrategy)"
            )
        if not rule.structure.is_plain:
            _require_mirrored(rule)
        return json.dumps(
            {
                "structure": rule.structure.plain(),
                "kinds": [_plain_kind(kind) for kind in rule.kinds],
                "gradients": [jnp.dtype(dtype).name for dtype in rule.gradients],
                "further": TreeStructure(rule.extras.treedef).plain(),
                "further_kinds": [_plain_kind(kind) for kind in rule.extras.kinds],
                "wide": rule.wide,
                "early": rule.early,
                "grows": rule.grows,
                "random": [rule.random.kind, rule.random.is_partitionable],
                "keys": self.keys,
                # Another version of optax or jax may cut the program otherwise, which
                # is found out when the server compares.
                "cut": _cut_of(rule),
            },
            separators=(",", ":"),
        ).encode()

    @staticmethod
    def decoded(name: str, transformation: Any, data: bytes) -> Binding:
        """Decodes the result of `encoded`, with the transformation that this process
        has. Traces the transformation.

        Raises:
            InvalidArgumentError: The data is malformed, or the trace of the optimizer
                divides into other updates of leaves here than at the sender.
        """
        # Before it is parsed: it came from another task.
        if len(data) > MAX_DESCRIPTION_BYTES:
            raise InvalidArgumentError(
                f"the tree of optimizer {name!r} takes {len(data)} bytes, the limit "
                f"is {MAX_DESCRIPTION_BYTES}"
            )
        try:
            described = json.loads(data)
            further = TreeStructure.from_plain(described["further"]).treedef
            kinds = tuple([_kind(plain) for plain in described["further_kinds"]])
            rule = TreeRule(
                name,
                transformation,
                TreeStructure.from_plain(described["structure"]),
                tuple([_kind(plain) for plain in described["kinds"]]),
                tuple([jnp.dtype(plain) for plain in described["gradients"]]),
                Extras(further, kinds),
                bool(described["wide"]),
                bool(described["early"]),
                bool(described["grows"]),
                random=_random(*described["random"]),
            )
            keys = tuple([tuple(map(int, each)) for each in described["keys"]])
            if not len(rule.kinds) == len(rule.gradients) == len(keys):
                raise ValueError("lists of different lengths")
            wanted = described["cut"]
        except _MALFORMED as error:
            raise InvalidArgumentError(
                f"not the tree of optimizer {name!r}: {type(error).__name__}: {error}"
            ) from error
        # After the `try`: its own errors say more than that the bytes are malformed.
        _require_same_cut(rule, wanted)
        return Binding(rule, keys)

    def rules(self) -> list[LeafRule]:
        """Returns the update rule of each leaf."""
        return [leaf_rule(self.rule, leaf) for leaf in range(len(self.keys))]

    def operands(
        self, gradients: Mapping[int, Sequence[np.ndarray]]
    ) -> list[np.ndarray]:
        """Computes the operands of an update, which may depend on the gradients of
        several leaves (a global norm), by a compiled program.

        Args:
            gradients: By key of the component: an array, or distinct indices ``[n]``
                and rows ``[n, ...]``. A missing gradient counts as zeros.
        """
        whole: list[np.ndarray] = []
        sizes: list[int | None] = []
        kinds = self.rule.gradients_at(None)
        for kind, keys in zip(kinds, self.keys, strict=True):
            parts = [gradients[key] for key in keys if key in gradients]
            is_of_rows = bool(parts) and all(len(part) == 2 for part in parts)
            arrays = [part[-1] for part in parts]
            if is_of_rows:
                count = sum(map(len, arrays))
                # To a power of two, so that few programs are compiled.
                more = (1 << max(0, count - 1).bit_length()) - count
                arrays.append(np.zeros((more, *kind.shape[1:]), arrays[0].dtype))
            elif not parts:
                arrays = [np.zeros(kind.shape, kind.dtype)]
            whole.append(np.concatenate(arrays) if len(arrays) > 1 else arrays[0])
            sizes.append(len(whole[-1]) if is_of_rows else None)
        of_rows = tuple(sizes) if any(sizes) else None
        compute = self.rule.remembered(
            ("operands", of_rows),
            lambda: jax.jit(lambda given: self.rule.cut(of_rows).computed(given, ())),
        )
        with self.rule.precision():
            return [np.asarray(x) for x in compute(whole)]


def _random(kind: str, is_partitionable: bool) -> RandomNumbers:
    result = RandomNumbers(str(kind), bool(is_partitionable))
    if result.is_set:
        jax.random.key(0, impl=result.kind)  # refuses an unknown kind
    return result


def _require_same_cut(rule: TreeRule, wanted: Any) -> None:
    try:
        # Through JSON, where tuples become lists.
        found = json.loads(json.dumps(_cut_of(rule)))
    except Exception as error:  # whatever the transformation raises, to the caller
        raise InvalidArgumentError(
            f"optimizer {rule.name!r} cannot be traced on its tree here: "
            f"{type(error).__name__}: {error}"
        ) from error
    if found != wanted:
        raise InvalidArgumentError(
            f"optimizer {rule.name!r} is another program here than where its gradients "
            "are computed: run the same versions of optax and jax, and the same "
            f"JAX_ENABLE_X64, on all tasks (expected {wanted}, traced {found})"
        )


def _cut_of(rule: TreeRule) -> Any:
    """Describes the slots and operands of each leaf, as plain data that the server
    compares with its own trace."""
    # A callback would run in a process that does not have the user's function.
    if acts := rule.update().acts or rule.init().acts:
        raise ValueError(
            f"it calls back into Python ({acts}), which a parameter server does not "
            "run: take the callback out"
        )
    cut = rule.cut()
    if cut.coupling is not None:
        raise ValueError("it looks at several variables at a time")
    return {
        "slots": [
            [slot.name for slot in leaf_rule(rule, leaf).slots]
            for leaf in range(len(rule.kinds))
        ],
        "operands": [_plain_kind(kind) for kind in cut.operand_kinds],
        "uses": cut.uses,
    }


def _require_mirrored(rule: TreeRule) -> None:
    """Refuses a tree if the optimizer depends on the classes of its containers.

    Raises:
        ValueError: The optimizer does something else on a tree of other containers with
            the same keys.
    """
    structure = TreeStructure.from_plain(rule.structure.plain())
    # Without the programs that the original has traced.
    mirrored = replace(rule, structure=structure, _programs={})
    try:
        same = str(mirrored.update().closed) == str(rule.update().closed)
    except Exception:  # it asks for what only the real containers have
        same = False
    if not same:
        raise ValueError(
            f"optimizer {rule.name!r} looks at the containers of its tree "
            f"({rule.structure.treedef}), whose classes a parameter server does not "
            "know: use dicts, lists and tuples, or optimizers that go by paths "
            "(jax.tree_util.tree_map_with_path)"
        )


def _plain_kind(kind: Any) -> list[Any]:
    return [list(kind.shape), jnp.dtype(kind.dtype).name]


def _kind(plain: Sequence[Any]) -> Shape:
    dims, dtype = plain
    return shaped([int(dim) for dim in dims], jnp.dtype(dtype))
