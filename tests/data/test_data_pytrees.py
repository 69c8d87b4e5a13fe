"""Elements of the user's classes: every operation gives what it gives for a dict."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import numpy as np
import pytest

from zstrat.data import Dataset, TensorSpec, as_dataset


class Named(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered:
    x: Any
    y: Any
    kind: str = dataclasses.field(default="known", metadata={"static": True})


@flax.struct.dataclass
class Flax:
    x: Any
    y: Any
    kind: str = flax.struct.field(default="known", pytree_node=False)


@jax.tree_util.register_pytree_node_class
class Pytree:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def tree_flatten(self):
        return (self.x, self.y), None

    @classmethod
    def tree_unflatten(cls, kept, children):
        del kept
        return cls(*children)


def ordered(x, y):
    return collections.OrderedDict(y=y, x=x)  # another order than that of the keys


KINDS = [Named, Registered, Flax, Pytree, ordered]
ROWS = {"x": np.arange(12.0).reshape(6, 2), "y": {"z": np.arange(6)}}


def get(element, name):
    return element[name] if isinstance(element, dict) else getattr(element, name)


def plain(element):
    """A dict that is equal for equal elements, whatever their class."""
    tree = {name: get(element, name) for name in "xy"}
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree)


def ragged(kind):
    return Dataset.from_generator(
        lambda: (kind(x=np.ones(n), y={"z": [n, n]}) for n in range(1, 4)),
        output_signature=kind(
            x=TensorSpec((None,)), y={"z": TensorSpec((2,), np.int32)}
        ),
    )


PIPELINES = {
    "slices": lambda of, kind: of,
    "map": lambda of, kind: of.map(lambda e: kind(x=get(e, "x") + 1, y=get(e, "y"))),
    "filter": lambda of, kind: of.filter(lambda e: get(e, "x").sum() > 3),
    "batch": lambda of, kind: of.shuffle(4, seed=1).batch(4),
    "unbatch": lambda of, kind: of.batch(4).unbatch(),
    "rebatch": lambda of, kind: of.batch(4).rebatch(3),
    "cache": lambda of, kind: of.cache().repeat(2),
    "zip": lambda of, kind: Dataset.zip(kind(x=of, y=of)).map(lambda e: get(e, "y")),
    "padded": lambda of, kind: ragged(kind).padded_batch(2),
    "padded to": lambda of, kind: ragged(kind).padded_batch(
        3,
        padded_shapes=kind(x=(4,), y={"z": (3,)}),
        padding_values=kind(x=np.float32(7), y={"z": 9}),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_class_that_jax_knows_is_structure(kind, pipeline):
    make = PIPELINES[pipeline]
    made = make(Dataset.from_tensor_slices(kind(**ROWS)), kind)
    of_dicts = make(Dataset.from_tensor_slices(ROWS), dict)
    elements = list(made)
    assert {type(element) for element in elements} == {type(kind(**ROWS))}
    assert [plain(e) for e in elements] == [plain(e) for e in of_dicts]
    spec, wanted = made.element_spec, of_dicts.element_spec
    assert type(spec) is type(kind(**ROWS))
    assert (get(spec, "x"), get(spec, "y")["z"]) == (wanted["x"], wanted["y"]["z"])


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_data_itself_where_a_strategy_distributes_it(kind):
    (batch,) = as_dataset(kind(**ROWS)).batch(6)
    assert plain(batch) == plain(ROWS)


@pytest.mark.parametrize("kind", [Registered, Flax])
def test_other_static_parts_are_another_structure(kind):
    elements = [kind(1, 2), kind(3, 4, "other")]
    with pytest.raises(ValueError, match="PyTreeDef"):
        list(Dataset.from_generator(lambda: elements).batch(2))


def test_what_it_is_padded_with_has_the_structure_of_an_element():
    with pytest.raises(TypeError, match="padded_shapes"):
        list(ragged(Flax).padded_batch(2, padded_shapes=((4,), (3,))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_variable_in_one_is_not_frozen(kind):
    import zstrat as zs

    with pytest.raises(TypeError, match=r"numpy\(\)"):
        Dataset.from_tensors(kind(x=1, y={"z": zs.Variable(3.0)}))
