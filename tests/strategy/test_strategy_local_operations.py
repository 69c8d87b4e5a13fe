"""What replica functions compute: every operation in each way that a function runs, and
under each strategy. The oracle is numpy, and plain jax where dtypes are jax's own.

All operations of the table are in one replica function, so that it is compiled once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cluster import FakeCluster
from in_replicas import context, meet
from lockstep import KINDS, A, Copies, S
from ranks import ranks

import zstrat as zs

WAYS = [
    "by itself",
    "in a step",
    "captured in a step",
    "in turns",
    "in turns in a step",
    "eagerly",
    "on a worker",
]
STRATEGIES = {
    "one": lambda: zs.OneDeviceStrategy("CPU:3"),
    "two": lambda: zs.MirroredStrategy(["CPU:1", "CPU:2"]),
    "three": lambda: zs.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]),
    "one of several": lambda: zs.MirroredStrategy(["CPU:4"]),
    "none": zs.get_strategy,
    "central": lambda: zs.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:5"),
}
ALL, EVEN, ODD = slice(None), slice(0, None, 2), slice(1, None, 2)
COMBINATIONS = {
    ("two", "by itself"): (0, EVEN),
    ("processes of one", "in a step"): (1, ODD),
    ("three", "in a step"): (2, EVEN),
    ("two", "captured in a step"): (3, ALL),
    ("processes of two", "in a step"): (4, ODD),
    ("central", "by itself"): (5, ODD),
    ("two", "in turns in a step"): (0, ODD),
    ("processes of one", "in turns"): (1, EVEN),
    ("three", "in turns"): (2, ODD),
    ("two", "eagerly"): (3, ALL),
    ("processes of two", "in turns in a step"): (4, EVEN),
    ("central", "in turns in a step"): (5, EVEN),
    ("one", "in a step"): (3, ALL),
    ("one of several", "by itself"): (4, ALL),
    ("none", "in a step"): (0, ALL),
    ("two", "in a step"): (1, ODD),
    ("two", "in turns"): (1, EVEN),
    ("servers", "on a worker"): (2, EVEN),
    ("servers", "by itself"): (3, ODD),
    ("servers", "in turns"): (0, EVEN),
}
"""Each sixth operation on variables is tried in each of them, from that one on: so each
in one program and in turns. Of the others those: each in all ways, and under all
strategies. `make test-thorough` tries all of them in all."""
RARE = {("two", "in a step"), ("two", "in turns")}
"""For `make test-thorough` alone: three replicas do both, and two all others."""
pytestmark = pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")

RNG = np.random.default_rng(0)


def integers(dtype, *columns):
    """A value of each of four replicas: its rows of eight numbers."""
    return np.array(columns, dtype).T.reshape(4, 4, 2)


HIGH, LOW = 2**31 - 1, -(2**31)
# Four replicas have these. Powers of two are exact in products and in half precision.
DATA = {
    **{
        name: RNG.choice([-4, -2, -1, 1, 2, 4], (4, 4, 2)).astype(jnp.dtype(name))
        for name in ["float32", "float16", "bfloat16", "complex64"]
    },
    "bool": RNG.integers(0, 2, (4, 4, 2)).astype(bool),
    # Sums of these wrap, their means do not; float32 lacks some of them.
    "uint8": RNG.integers(0, 256, (4, 4, 2)).astype(np.uint8),
    "int8": integers(
        np.int8,
        [100, 100, 100, 100],
        [-128, -128, -127, 0],
        [127, 127, 127, 127],
        [-3, -2, 5, 1],
        [1, 2, 2, 3],
        [-1, -2, -2, 1],
        [7, -8, 7, 1],
        [3, 4, 0, 0],
    ),
    "int32": integers(
        np.int32,
        [16777217, 16777217, 16777219, 5],
        [HIGH, HIGH, HIGH, HIGH],
        [LOW, LOW, LOW, 0],
        [-3, -4, 5, 1],
        [7, 8, -9, 1],
        [16777217, 16777220, 1, 0],
        [-16777219, -16777218, 0, 3],
        [3, 3, 2, 18],
    ),
    "uint32": integers(
        np.uint32,
        [2**32 - 1] * 4,
        [2**31, 1, 1, 1],
        *[[n, n + 1, n + 1, n + 3] for n in range(6)],
    ),
}
NUMBERS = [100, 101, 102, 103]
"""Python numbers of the replicas."""
IDS = np.array([[0, 1, 1], [0, 3, 0], [2, 1, 0], [3, 3, 2]], np.int32)
"""Rows that the replicas update, some of them several times."""
LOOKED_UP = np.array([2, 0, 2])
BYTE, HALF = jnp.int8(3), jnp.float16(1.5)


class Read(NamedTuple):
    """An operation without a variable."""

    name: str
    fn: object
    """Of what a replica has of its own."""
    expected: object
    """Of what all replicas have; a list, or one value that is the same for all."""


def joined(axis, dtype):
    return lambda rows: np.concatenate(list(rows[dtype]), axis)


def meaned(values):
    if values.dtype.kind in "iub":
        return values.astype(float).mean(0).astype(np.float32)
    return values.sum(0, dtype=values.dtype) / values.dtype.type(len(values))


def slices(own, dtype="float32"):
    return zs.IndexedSlices(own[dtype][:3], own["ids"], (4, 2))


def parts_of(found):
    return {"values": found.values, "indices": found.indices}


def rows_joined(rows, scale):
    count = len(rows["ids"])
    return {
        "values": rows["float32"][:, :3].reshape(-1, 2) / (count if scale else 1),
        "indices": rows["ids"].reshape(-1),
    }


def weak(value):
    return lambda rows: value


def reads():
    """The operations without a variable, for the replicas of one process."""

    @jax.jit
    def plus_number(x):
        return x + jnp.float32(context().replica_id_in_sync_group)

    return [
        *[
            Read(f"sum of {d}", lambda own, d=d: context().all_reduce("sum", own[d]), e)
            for d in DATA
            for e in [
                lambda rows, d=d: rows[d].sum(0, dtype="int32" if d == "bool" else d)
            ]
        ],
        *[
            Read(
                f"mean of {d}",
                lambda own, d=d: context().all_reduce("MEAN", own[d]),
                lambda rows, d=d: meaned(rows[d]),
            )
            for d in DATA
        ],
        *[
            Read(
                f"{d} joined along {axis}",
                lambda own, d=d, axis=axis: context().all_gather(own[d], axis),
                joined(axis, d),
            )
            for d, axis in [("int8", 0), ("float32", 1), ("float16", -1), ("bool", -2)]
        ],
        *[
            Read(
                f"nothing of {shape} joined along {axis}",
                lambda own, s=shape, axis=axis: context().all_gather(
                    jnp.zeros(s), axis
                ),
                lambda rows, s=shape, axis=axis: np.concatenate(
                    [np.zeros(s, np.float32)] * len(rows["ids"]), axis
                ),
            )
            for shape, axis in [((0,), 0), ((0, 3), 0), ((3, 0), 1)]
        ],
        Read(
            "sum of a tree",
            lambda own: context().all_reduce(
                "sum", {"b": own["float32"], "a": [own["int8"], parts_of(slices(own))]}
            )["b"],
            lambda rows: rows["float32"].sum(0),
        ),
        Read(
            "sum of rows",
            lambda own: parts_of(context().all_reduce("sum", slices(own))),
            lambda rows: rows_joined(rows, False),
        ),
        Read(
            "mean of rows",
            lambda own: parts_of(context().all_reduce("mean", slices(own))),
            lambda rows: rows_joined(rows, True),
        ),
        Read(
            "number",
            lambda own: jnp.asarray(context().replica_id_in_sync_group),
            lambda rows: [np.int32(n) for n in range(len(rows["ids"]))],
        ),
        Read(
            "count",
            lambda own: context().num_replicas_in_sync * own["ids"],
            lambda rows: [len(rows["ids"]) * ids for ids in rows["ids"]],
        ),
        Read(
            "own",
            lambda own: {"tuple": (own["int8"] + 1, [own["bool"]]), "none": None},
            lambda rows: [
                {"tuple": (one + np.int8(1), [flag]), "none": None}
                for one, flag in zip(rows["int8"], rows["bool"], strict=True)
            ],
        ),
        Read(
            "compiled by the user",
            lambda own: plus_number(own["float32"]),
            lambda rows: [x + np.float32(n) for n, x in enumerate(rows["float32"])],
        ),
        Read(
            "in a loop",
            lambda own: jax.lax.fori_loop(
                0, 3, lambda n, x: x + own["float32"], 0.0 * own["float32"]
            ),
            lambda rows: [3 * x for x in rows["float32"]],
        ),
        # Python numbers take the dtype of what they meet; what replicas have together
        # has one of its own.
        *[
            Read(
                f"{strong.dtype} by a number",
                lambda own, strong=strong: strong * own["number"],
                lambda rows, strong=strong: [
                    np.asarray(strong * number) for number in rows["number"]
                ],
            )
            for strong in (BYTE, HALF)
        ],
        *[
            Read(
                f"byte by {name}",
                lambda own, name=name: BYTE * own[name],
                lambda rows: np.full(2, 300 % 256, np.uint8).astype(np.int8),
            )
            for name in ("returned", "returned in turns", "everywhere")
        ],
        Read(
            "weak sum",
            lambda own: BYTE * context().all_reduce("sum", 100),
            lambda rows: np.int32(300 * len(rows["ids"])),
        ),
        Read(
            "weak mean",
            lambda own: HALF * context().all_reduce("mean", jnp.asarray(2.0)),
            lambda rows: np.float32(3),
        ),
        Read(
            "weak mean of integers",
            lambda own: HALF * context().all_reduce("mean", 1),
            lambda rows: np.float32(1.5),
        ),
        Read(
            "weak parts",
            lambda own: HALF * context().all_gather(jnp.full(1, 2.0), 0),
            lambda rows: np.full(len(rows["ids"]), 3, np.float32),
        ),
        Read(
            "weak result",
            lambda own: jnp.full(2, 100) * 1,
            lambda rows: [np.full(2, 100, np.int32)] * len(rows["ids"]),
        ),
    ]


READS = reads()


class Write(NamedTuple):
    """An operation on a variable."""

    what: str
    kind: int
    dtype: str
    has_rows: bool

    @property
    def name(self):
        aggregation, synchronization = KINDS[self.kind]
        return f"{self.what} {self.dtype} {aggregation.name} {synchronization.name}"

    def variable(self):
        aggregation, synchronization = KINDS[self.kind]
        return zs.Variable(
            self.start, aggregation=aggregation, synchronization=synchronization
        )

    @property
    def start(self):
        return np.array([[8, 1], [16, 2], [32, 4], [64, 8]], self.dtype)

    @property
    def rows(self):
        # Which of two rows is the last one is nobody's promise.
        return 1 if self.what == "scatter_update" else 3

    def fn(self, own, variable, compiled=None):
        """``compiled`` reads the variable, and is compiled by the user: what jax has
        traced of it for a replica, or before the update, is nobody else's. Rows on
        servers are not looked up after an update."""
        is_looped = compiled is not None and not self.has_rows
        found = {"before": compiled()} if is_looped else {}
        update = getattr(variable, self.what)
        if self.has_rows:
            count = self.rows
            update(zs.IndexedSlices(own[self.dtype][:count], own["ids"][:count]))
        else:
            update(own[self.dtype])
        found["value"] = variable.value()
        if is_looped:
            found["after"] = compiled()
            found["in a loop"] = jax.lax.fori_loop(
                0, 1, lambda _, x: x + variable.value(), jnp.zeros((4, 2))
            )
        is_here = not variable.device.startswith("/job:ps")
        if is_here and self.what.endswith("add") and self.dtype == "float32":
            found["rows"] = variable.sparse_read(LOOKED_UP)
            found["looked up"] = zs.embedding_lookup(variable, jnp.asarray(LOOKED_UP))
        return found

    def apply(self, copies, rows):
        if self.has_rows:
            count = self.rows
            copies.write_rows(
                self.what, rows["ids"][:, :count], rows[self.dtype][:, :count]
            )
        else:
            copies.write(self.what, rows[self.dtype])


ROWS = ["add", "sub", "mul", "div", "min", "max", "update"]
WRITES = [
    *[
        Write(what, kind, "float32", False)
        for what in ("assign", "assign_add", "assign_sub")
        for kind in range(len(KINDS))
    ],
    *[
        Write(what, kind, dtype, False)
        for kind, (aggregation, _) in enumerate(KINDS)
        if aggregation in (A.MEAN, A.SUM)
        for what, dtype in [
            ("assign", "uint8"),
            ("assign_add", "int8"),
            ("assign", "int32"),
            ("assign", "uint32"),
        ]
    ],
    *[
        Write(f"scatter_{what}", kind, "float32", True)
        for what in ROWS
        for kind, (aggregation, how) in enumerate(KINDS)
        if how is S.ON_WRITE
        if ROWS.index(what) < 4 or aggregation in (A.ONLY_FIRST_REPLICA, A.NONE)
    ],
    *[
        Write(what, 1, dtype, True)
        for what, dtype in [
            ("scatter_add", "int32"),
            ("scatter_sub", "int32"),
            ("scatter_add", "int8"),
            ("scatter_add", "uint32"),
        ]
    ],
]


def weak_values(strategy, is_here):
    """Arrays that are as good as a Python number: what replicas have returned, and what
    all devices have."""
    number = jnp.full(2, 100)
    if len(strategy.extended.worker_devices) == 1 or not is_here:
        # A step takes no arguments that are bound to different devices.
        return dict.fromkeys(["returned", "returned in turns", "everywhere"], number)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("devices",))
    everywhere = jax.NamedSharding(mesh, jax.P())
    found = {
        "returned": strategy.run(lambda: number * 1),
        "returned in turns": strategy.run(lambda: (meet(), number * 1)[1]),
        "everywhere": jax.device_put(number, everywhere),
    }
    for value in found.values():
        for part in strategy.experimental_local_results(value):
            assert jax.typeof(part).weak_type
    return found


class Outcome(NamedTuple):
    """What one process has seen."""

    results: list
    """What each of its replicas has returned."""
    seen: dict
    """Values of variables outside of the replicas."""
    seen_in_step: dict
    copies: dict
    """Those of the replicas of this process."""


def writes_of(name, way, tier):
    """Those that are tried here, of those that the strategy allows."""
    start, step = (COMBINATIONS[name, way][0], 6) if tier == "some" else (0, 1)
    for number, write in enumerate(WRITES if name != "none" else ()):
        aggregation, synchronization = KINDS[write.kind]
        # Of several processes the means of integers are another code.
        is_exact = aggregation is A.MEAN and write.dtype != "float32"
        if (number - start) % step and not (is_exact and "processes" in name):
            continue
        if name == "servers" and synchronization is S.ON_READ:
            continue
        is_apart = KINDS[write.kind] == (A.NONE, S.ON_WRITE)
        if not is_apart or name not in ("central", "servers"):
            yield write


def reads_of(name, way, tier, operations):
    """Those that are tried here, of the operations without a variable."""
    return operations[COMBINATIONS[name, way][1] if tier == "some" else ALL]


def is_readable(write):
    return KINDS[write.kind] != (A.NONE, S.ON_READ)


def performed(strategy, writes, name, way, tier, cluster=None):
    """All operations, twice, in one replica function."""
    with strategy.scope():
        variables = {write: write.variable() for write in writes}
    compiled = {
        write: jax.jit(lambda v=v: v.value() * 1)
        for write, v in variables.items()
        if write.dtype == "float32"
    }
    own = strategy.experimental_distribute_values_from_function(
        lambda context: own_of(context.replica_id_in_sync_group)
    )

    own |= weak_values(strategy, is_here=cluster is None)
    operations = reads_of(name, way, tier, reads())

    def replica(own):
        if "turns" in way:
            meet()
        found = {read.name: read.fn(own) for read in operations}
        for write, variable in variables.items():
            found[write.name] = write.fn(own, variable, compiled.get(write))
        return found

    def step(own):
        return strategy.run(replica, args=(own,))

    if "captured" in way:
        do = zs.function(lambda: step(own))
    elif way in ("by itself", "in turns"):
        do = functools.partial(step, own)
    elif way == "on a worker":
        shipped = cluster.ship(zs.function(lambda: step(own)))
        do = functools.partial(cluster.run, shipped)
    else:
        do = functools.partial(zs.function(step, eager=way == "eagerly"), own)
    do()
    results = [
        jax.tree.map(np.asarray, found)
        for found in strategy.experimental_local_results(do())
    ]
    readable = {w.name: v for w, v in variables.items() if is_readable(w)}
    look = zs.function(lambda: {name: v.value() + 0 for name, v in readable.items()})
    return Outcome(
        results,
        {name: v.numpy() for name, v in readable.items()},
        jax.tree.map(np.asarray, look()),
        {
            write.name: [
                copy.numpy() for copy in strategy.experimental_local_results(variable)
            ]
            for write, variable in variables.items()
        },
    )


@functools.cache
def outcomes(name, way, tier):
    """Of each process, and how many replicas it has."""
    writes = list(writes_of(name, way, tier))
    if "processes" not in name:
        cluster = FakeCluster(devices=2) if name == "servers" else None
        strategy = STRATEGIES[name]() if cluster is None else cluster.strategy
        found = performed(strategy, writes, name, way, tier, cluster)
        return [found], strategy.num_replicas_in_sync
    local = 1 if name.endswith("one") else 2

    def program(strategy, rank):
        return performed(strategy, writes, name, way, tier)

    return ranks(2, program, local), local


@functools.cache
def copies_of(write, replicas, times=2):
    """After the operation was made so many times."""
    copies = Copies(KINDS[write.kind], write.start, replicas)
    for _ in range(times):
        write.apply(copies, rows_of(replicas))
    return copies


def own_of(number):
    own = {name: values[number] for name, values in DATA.items()}
    return own | {"ids": IDS[number], "number": NUMBERS[number]}


def rows_of(replicas):
    rows = {name: values[:replicas] for name, values in DATA.items()}
    return rows | {"ids": IDS[:replicas], "number": NUMBERS[:replicas]}


def require_equal(found, expected, where):
    assert found.dtype == expected.dtype, where
    assert found.shape == expected.shape, where
    if found.dtype.kind in "iub":
        np.testing.assert_array_equal(found, expected, err_msg=where)
    else:
        precision = {2: 1e-2, 4: 2e-6}.get(found.dtype.itemsize, 1e-6)
        wide = np.complex128 if found.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(
            found.astype(wide), expected.astype(wide), rtol=precision, err_msg=where
        )


TIERS = ["some", pytest.param("all", marks=pytest.mark.thorough)]


@pytest.fixture(params=TIERS)
def tier(request):
    return request.param


@pytest.fixture(
    params=[
        pytest.param(each, marks=[pytest.mark.thorough] if each in RARE else [])
        for each in COMBINATIONS
    ],
    ids=" ".join,
)
def combination(request, tier):
    return (*request.param, tier)


def local_results(combination):
    """Number of each replica and what it has returned; how many replicas there are."""
    processes, local = outcomes(*combination)
    found = [result for outcome in processes for result in outcome.results]
    assert len(found) == len(processes) * local
    for number, result in enumerate(found):
        yield number, result, len(found)


def test_what_replicas_compute(combination):
    for number, result, replicas in local_results(combination):
        for read in reads_of(*combination, READS):
            wanted = read.expected(rows_of(replicas))
            wanted = wanted[number] if isinstance(wanted, list) else wanted
            where = f"{read.name}, replica {number}"
            jax.tree.map(
                lambda one, other, where=where: require_equal(
                    one, np.asarray(other), where
                ),
                result[read.name],
                wanted,
            )


def test_what_replicas_read_of_variables_that_they_update(combination):
    for number, result, replicas in local_results(combination):
        for write in writes_of(*combination):
            own = copies_of(write, replicas).values[number]
            found = dict(result[write.name])
            where = f"{write.name}, replica {number}"
            if "before" in found:
                before = copies_of(write, replicas, 1).values[number]
                require_equal(found.pop("before"), before, where)
            for name in {"value", "after", "in a loop"} & {*found}:
                require_equal(found.pop(name), own, where)
            for rows in found.values():
                require_equal(rows, own[LOOKED_UP], where)


@pytest.mark.shows("VariableSynchronization.ON_WRITE")
@pytest.mark.shows("tf.Variable(aggregation=)")
def test_what_is_read_of_variables_afterwards(combination):
    processes, local = outcomes(*combination)
    for rank, outcome in enumerate(processes):
        for write in writes_of(*combination):
            wanted = copies_of(write, len(processes) * local)
            mine = wanted.values[rank * local : (rank + 1) * local]
            found = outcome.copies[write.name]
            assert len(found) in (1, local)
            for one, other in zip(found, mine, strict=False):
                require_equal(one, other, write.name)
            if wanted.seen is not None:
                seen = wanted.seen_from(rank * local)
                require_equal(outcome.seen[write.name], seen, write.name)
                require_equal(outcome.seen_in_step[write.name], seen, write.name)


REFUSED = [
    *[
        (f"scatter_{what}", kind, "float32", NotImplementedError, f"scatter_{what}")
        for what in ("min", "max", "update")
        for kind in (0, 1)
    ],
    *[
        (f"scatter_{what}", kind, "float32", NotImplementedError, f"scatter_{what}")
        for kind, what in enumerate(ROWS, start=4)
        if kind < len(KINDS)
    ],
    ("scatter_mul", 1, "int32", NotImplementedError, "scatter_mul"),
    ("scatter_div", 1, "int32", NotImplementedError, "scatter_div"),
]


@pytest.mark.parametrize("way", ["by itself", "in turns in a step"])
def test_what_is_refused_leaves_the_variable_as_it_is(way):
    """Rows that are not added have no sum, factors of integers no mean, and variables
    that are brought together when they are read no rows."""
    strategy = STRATEGIES["two"]()
    for what, kind, dtype, error, words in REFUSED:
        write = Write(what, kind, dtype, True)
        with strategy.scope():
            variable = write.variable()
        with pytest.raises(error, match=words):
            once(strategy, way, lambda own, w=write, v=variable: w.fn(own, v))
        for copy in strategy.experimental_local_results(variable):
            np.testing.assert_array_equal(copy.numpy(), write.start)


def once(strategy, way, fn):
    own = strategy.experimental_distribute_values_from_function(
        lambda context: own_of(context.replica_id_in_sync_group)
    )

    def replica(own):
        if "turns" in way:
            meet()
        return fn(own)

    def step(own):
        return strategy.run(replica, args=(own,))

    return (zs.function(step) if "step" in way else step)(own)


def test_what_has_no_one_value_is_not_read_outside():
    strategy = STRATEGIES["two"]()
    write = Write("assign", KINDS.index((A.NONE, S.ON_READ)), "float32", False)
    with strategy.scope():
        variable = write.variable()
    ids = np.array([0])
    with pytest.raises(ValueError, match="NONE"):
        variable.numpy()
    reads = [
        variable.value,
        lambda: variable.sparse_read(ids),
        lambda: zs.embedding_lookup(variable, ids),
    ]
    for read in reads:
        for do in (read, zs.function(read), lambda read=read: merged(strategy, read)):
            with pytest.raises(ValueError, match="NONE"):
                do()


def merged(strategy, read):
    return strategy.run(lambda: context().merge_call(lambda _: read()))
