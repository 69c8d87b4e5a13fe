"""Containers that replicas return: in turns the same as of one program."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.strategy import regroup


@jax.tree_util.register_pytree_node_class
class Both:
    """A class of the user's with two members and a name."""

    def __init__(self, first, second, name):
        self.first, self.second, self.name = first, second, name

    def tree_flatten(self):
        return (self.first, self.second), self.name

    @classmethod
    def tree_unflatten(cls, name, members):
        return cls(*members, name)


def values(result):
    return [np.asarray(value).tolist() for value in result.values]


def in_both_ways(strategy, make):
    """What is returned by one program and in turns; by itself and in a step."""

    def replica(in_turns):
        if in_turns:
            zs.get_replica_context().merge_call(lambda strategy: None)
        number = zs.get_replica_context().replica_id_in_sync_group
        return make(jnp.asarray(number, jnp.float32))

    for in_turns in (False, True):
        for run in (strategy.run, zs.function(strategy.run)):
            yield run(lambda in_turns=in_turns: replica(in_turns))


def test_a_class_that_jax_knows(two):
    for found in in_both_ways(two, lambda x: Both(x, [x + 10], "name")):
        assert isinstance(found, Both)
        assert found.name == "name"
        assert values(found.first) == [0, 1]
        assert values(found.second[0]) == [10, 11]


def test_a_dictionary_with_a_default(two):
    def make(x):
        made = collections.defaultdict(list)
        made["b"], made["a"] = x, [x + 10]
        return made

    for found in in_both_ways(two, make):
        assert type(found) is collections.defaultdict
        assert found.default_factory is list
        assert sorted(found) == ["a", "b"]
        assert values(found["b"]) == [0, 1]
        assert values(found["a"][0]) == [10, 11]


def test_an_ordered_dictionary(two):
    def make(x):
        return collections.OrderedDict([("b", x), ("a", x + 10)])

    for found in in_both_ways(two, make):
        assert type(found) is collections.OrderedDict
        assert list(found) == ["b", "a"]
        assert values(found["a"]) == [10, 11]


def test_a_counter_is_not_counted():
    merged = regroup([collections.Counter(a=1), collections.Counter(a=2)])
    assert type(merged) is collections.Counter
    assert merged["a"].values == (1, 2)


def test_members_of_different_kinds_are_refused():
    with pytest.raises(ValueError, match=r"\[one\].*\[other\]"):
        regroup([Both(1, 2, "one"), Both(1, 2, "other")])
