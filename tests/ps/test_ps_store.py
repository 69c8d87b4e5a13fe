"""The store against a dictionary of numpy arrays that forgets nothing."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ps_stores import create_in, push_to
from tiers import examples

from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.ps import OptimizerEngine, Store, create_plan
from zstrat.ps.store import PushPlan
from zstrat.wire import Push, Read, Update, UpdateOp, VariableEntry

SHAPES = {1: (), 2: (6,), 3: (4, 3), 4: (0, 2)}
DTYPES = {1: "f8", 2: "i4", 3: "f4", 4: "f4"}


def no_code(code: bytes) -> object:
    raise AssertionError("no optimizer is shipped here")


def new_store() -> Store:
    return Store(OptimizerEngine(no_code), task="/job:ps/task:0")


def entry(key: int, name: str = "") -> VariableEntry:
    return VariableEntry(key, name or f"v{key}", True, False)


def push(*updates, step=-1, part=0, low_water=0, session=7) -> Push:
    """``updates``: (key, op, arrays)."""
    entries = [Update(key, int(op), 0, len(arrays)) for key, op, arrays in updates]
    arrays = tuple(array for _, _, operands in updates for array in operands)
    return Push(session, step, part, low_water, entries, arrays)


def filled(key: int, number: int) -> np.ndarray:
    return np.full(SHAPES[key], number, DTYPES[key])


OPS = [UpdateOp.ASSIGN, UpdateOp.ADD, UpdateOp.SUB, UpdateOp.SCATTER_ADD]


@st.composite
def updates(draw, bad: bool = False):
    key = draw(st.sampled_from(sorted(SHAPES)))
    op = draw(st.sampled_from(OPS))
    number = draw(st.integers(-5, 5))
    if op is not UpdateOp.SCATTER_ADD or len(SHAPES[key]) == 0:
        op = UpdateOp.ADD if op is UpdateOp.SCATTER_ADD else op
        return key, op, (filled(key, number),)
    rows = SHAPES[key][0]
    count = draw(st.integers(0, 8)) if rows else 0
    indices = draw(
        st.lists(st.integers(0, max(rows - 1, 0)), min_size=count, max_size=count)
    )
    values = np.full((count, *SHAPES[key][1:]), number, DTYPES[key])
    return key, op, (np.array(indices, np.int64), values)


BAD = st.sampled_from(
    [
        (99, UpdateOp.ADD, (np.zeros(2),)),
        (2, UpdateOp.ADD, (np.zeros(6, "f4"),)),
        (2, UpdateOp.ADD, (np.zeros(5, "i4"),)),
        (3, UpdateOp.SCATTER_ADD, (np.array([4]), np.zeros((1, 3), "f4"))),
        (3, UpdateOp.SCATTER_ADD, (np.array([-1]), np.zeros((1, 3), "f4"))),
        (3, 77, (np.zeros((4, 3), "f4"),)),
        (3, UpdateOp.OPTIMIZE, (np.zeros((4, 3), "f4"),)),
    ]
)


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def create(self):
        self.store = new_store()
        keys = sorted(SHAPES)
        create_in(self.store, [entry(k) for k in keys], [filled(k, 1) for k in keys])
        self.model = {k: filled(k, 1) for k in keys}
        self.versions = dict.fromkeys(keys, 0)
        self.applied, self.low_water = set(), 0
        self.leases = []

    def _apply(self, some):
        for key, op, operands in some:
            old, dtype = self.model[key], DTYPES[key]
            match op:
                case UpdateOp.ASSIGN:
                    new = operands[0]
                case UpdateOp.ADD:
                    new = old + operands[0]
                case UpdateOp.SUB:
                    new = old - operands[0]
                case _:
                    new = old.copy()
                    for index, row in zip(*operands, strict=True):
                        new[index] += row
            self.model[key] = np.asarray(new, dtype)
            self.versions[key] += 1

    @rule(
        some=st.lists(updates(), max_size=5),
        step=st.integers(-1, 20),
        part=st.integers(0, 1),
        behind=st.integers(0, 6),
    )
    def push(self, some, step, part, behind):
        self.store.raise_mark(step - behind)
        self.low_water = max(self.low_water, step - behind)
        duplicate = step != -1 and (
            step < self.low_water or (step, part) in self.applied
        )
        answer = push_to(self.store, push(*some, step=step, part=part))
        assert answer.applied == (not duplicate)
        if not duplicate:
            self._apply(some)
            self.applied.add((step, part))
        assert answer.versions == [self.versions[key] for key, _, _ in some]

    @rule(
        some=st.lists(updates(), max_size=3),
        bad=BAD,
        at=st.integers(0, 3),
        step=st.integers(30, 31),
    )
    def a_push_that_is_refused_changes_nothing(self, some, bad, at, step):
        some.insert(min(at, len(some)), bad)
        with pytest.raises((InvalidArgumentError, NotFoundError)):
            push_to(self.store, push(*some, step=step))

    @rule(key=st.sampled_from(sorted(SHAPES)), known=st.booleans())
    def read_and_keep(self, key, known):
        version = self.versions[key] if known else -1
        versions, arrays = self.store.read([Read(key, version)])
        assert versions == [self.versions[key]]
        assert len(arrays) == (not known)
        self.leases += [(array, array.tobytes()) for array in arrays]

    @rule(data=st.data())
    def stop_looking(self, data):
        if self.leases:
            self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))

    @rule(key=st.sampled_from(sorted(SHAPES)))
    def create_again_changes_nothing(self, key):
        create_in(self.store, [entry(key)], [filled(key, 9)])

    @invariant()
    def the_store_is_the_model(self):
        keys = sorted(self.model)
        versions, arrays = self.store.read([Read(key, -1) for key in keys])
        assert versions == [self.versions[key] for key in keys]
        for key, array in zip(keys, arrays, strict=True):
            assert array.dtype == DTYPES[key]
            np.testing.assert_array_equal(array, self.model[key])

    @invariant()
    def what_was_handed_out_never_changes(self):
        for array, content in self.leases:
            assert array.tobytes() == content


TestStore = StoreMachine.TestCase
TestStore.settings = examples(60, stateful_step_count=30)


@pytest.fixture
def store() -> Store:
    store = new_store()
    create_in(store, [entry(2, "kernel"), entry(3)], [filled(2, 1), filled(3, 1)])
    return store


def test_creation_is_all_or_none(store):
    with pytest.raises(AlreadyExistsError, match=r"\b2\b.*'kernel'.*\[6\]"):
        create_in(
            store,
            [entry(8), entry(2, "other")],
            [np.zeros(1), np.float64(0).reshape(())],
        )
    assert 8 not in store
    with pytest.raises(InvalidArgumentError):
        create_in(store, [entry(8), entry(9)], [np.zeros(1)])
    with pytest.raises(InvalidArgumentError):
        create_in(store, [entry(8), entry(8)], [np.zeros(1)] * 2)
    assert len(store) == 2


def test_deletion_is_all_or_none_and_versions_never_return(store):
    for _ in range(3):
        push_to(store, push((2, UpdateOp.ADD, (filled(2, 1),))))
    with pytest.raises(NotFoundError):
        store.delete([2, 8])
    store.delete([2, 2])
    with pytest.raises(NotFoundError, match=r"task:0.*\b2\b"):
        store.read([Read(2, -1)])
    create_in(store, [entry(2)], [filled(2, 5)])
    versions, arrays = store.read([Read(2, 3)])
    assert versions == [4]
    assert (arrays[0] == 5).all()


def test_a_deletion_that_comes_again_deletes_what_is_left(store):
    """Also what an earlier program had created."""
    store.change_program()
    store.delete([2])
    with pytest.raises(NotFoundError):
        store.delete([2, 3])
    store.delete([2, 3], again=True)
    store.delete([2, 3], again=True)
    for key in (2, 3):
        with pytest.raises(NotFoundError):
            store.read([Read(key, -1)])


def test_arrays_must_be_those_that_the_updates_name(store):
    good = push((2, UpdateOp.ADD, (filled(2, 1),)))
    spare = Push(7, -1, 0, 0, good.updates, (*good.arrays, filled(2, 1)))
    with pytest.raises(InvalidArgumentError):
        push_to(store, spare)
    short = Push(7, -1, 0, 0, [Update(2, int(UpdateOp.ADD), 0, 2)], good.arrays)
    with pytest.raises(InvalidArgumentError, match=r"'kernel'.*\b1\b.*\b2\b"):
        push_to(store, short)
    named = Push(7, -1, 0, 0, [Update(2, int(UpdateOp.ADD), 5, 1)], good.arrays)
    with pytest.raises(InvalidArgumentError):
        push_to(store, named)


def test_a_duplicate_of_a_deleted_variable_is_answered(store):
    one = push((2, UpdateOp.ADD, (filled(2, 1),)), step=4)
    assert push_to(store, one).applied
    store.delete([2])
    answer = push_to(store, one)
    assert (answer.applied, answer.versions) == (False, [-1])
    assert store.statistics()["duplicates"] == 1


def test_a_plan_of_an_earlier_session_cannot_be_committed(store):
    plan = store.plan_push(push((2, UpdateOp.ADD, (filled(2, 1),)), step=1))
    assert isinstance(plan, PushPlan)
    creation = create_plan([entry(8)], [np.zeros(1)], store.variables)
    store.clear()
    for late in (plan, creation):
        late.compute()
        with pytest.raises(StaleSessionError):
            store.commit(late)
    assert len(store) == 0
    assert store.statistics()["remembered_steps"] == 0


def test_statistics_count_what_happened(store):
    store.read([Read(2, -1), Read(3, 0)])
    store.raise_mark(2)
    push_to(
        store,
        push(
            (2, UpdateOp.ADD, (filled(2, 1),)),
            (3, UpdateOp.SUB, (filled(3, 1),)),
            step=3,
        ),
    )
    assert store.statistics() == {
        "variables": 2,
        "bytes": 6 * 4 + 12 * 4,
        "held_bytes": 6 * 4 + 12 * 4,
        "slot_bytes": 0,
        "pulls": 1,
        "reads": 2,
        "unchanged": 1,
        "rows": 0,
        "pushes": 1,
        "updates": 2,
        "duplicates": 0,
        "contributions": 0,
        "contribution_bytes": 0,
        "remembered_steps": 1,
        "low_water": 2,
        "table_rows": 0,
        "table_id_bytes": 0,
        "table_waiting": 0,
        "table_births": 0,
        "table_removed": 0,
        "table_refused": 0,
    }


def test_nan_is_a_value(store):
    nan = np.full(SHAPES[3], np.nan, "f4")
    assert push_to(store, push((3, UpdateOp.ADD, (nan,)))).applied
    assert np.isnan(store.read([Read(3, -1)])[1][0]).all()


def test_a_step_below_the_low_water_mark_is_a_duplicate(store):
    add = 2, UpdateOp.ADD, (filled(2, 1),)
    store.raise_mark(5)
    assert push_to(store, push(add, step=5)).applied
    assert not push_to(store, push(add, step=4)).applied
    store.raise_mark(3)
    assert not push_to(store, push(add, step=4)).applied
    assert push_to(store, push(add, step=6)).applied


def test_what_a_push_says_of_the_mark_of_closures_is_not_believed(store):
    """It would have the pushes of everybody else counted as duplicates."""
    add = 2, UpdateOp.ADD, (filled(2, 1),)
    store.raise_mark(2)
    assert push_to(store, push(add, step=7, low_water=7)).applied
    assert push_to(store, push(add, step=-1, low_water=2**62)).applied
    assert push_to(store, push(add, step=3)).applied
    assert store.statistics()["low_water"] == 2


def test_a_step_beyond_all_that_can_be_remembered_is_refused(store):
    add = 2, UpdateOp.ADD, (filled(2, 1),)
    with pytest.raises(BusyError, match=f"step {2**62} cannot be remembered"):
        push_to(store, push(add, step=2**62, low_water=2**62))
    assert push_to(store, push(add, step=1)).applied
    assert store.statistics()["remembered_steps"] == 1


def two_values(store: Store):
    create_in(store, [entry(2), entry(3)], [filled(2, 1), filled(3, 1)])
    return store.variables[2].cell, store.variables[3].cell


def test_a_push_to_a_value_that_was_lost_changes_nothing():
    store = new_store()
    whole, lost = two_values(store)
    lost.take_back(None)
    lost.lose("XLA was out of memory")
    adds = (2, UpdateOp.ADD, [filled(2, 1)]), (3, UpdateOp.ADD, [filled(3, 1)])
    with pytest.raises(UnavailableError, match=r"task:0.*'v3'"):
        push_to(store, push(*adds, step=1))
    np.testing.assert_array_equal(whole.lease(), filled(2, 1))
    assign = 3, UpdateOp.ASSIGN, [filled(3, 5)]
    assert push_to(store, push(adds[0], assign, adds[1], step=1)).applied
    np.testing.assert_array_equal(whole.lease(), filled(2, 2))
    np.testing.assert_array_equal(lost.lease(), filled(3, 6))


def test_a_push_without_memory_for_one_of_its_values_changes_nothing(monkeypatch):
    store = new_store()
    free, looked_at = two_values(store)
    reader = looked_at.lease()
    adds = (2, UpdateOp.ADD, [filled(2, 1)]), (3, UpdateOp.ADD, [filled(3, 1)])

    def no_memory(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("zstrat.ps.store._cell.lasting", no_memory)
        with pytest.raises(ResourceExhaustedError, match=r"task:0.*'v3'"):
            push_to(store, push(*adds, step=1))
    np.testing.assert_array_equal(free.lease(), filled(2, 1))
    assert push_to(store, push(*adds, step=1)).applied
    np.testing.assert_array_equal(free.lease(), filled(2, 2))
    np.testing.assert_array_equal(looked_at.lease(), filled(3, 2))
    np.testing.assert_array_equal(reader, filled(3, 1))
