"""What the pipeline knows of plans: as long as there are such plans, and no longer."""

import gc
import types
import weakref

import numpy as np

import zstrat.program as zs
from zstrat.variables import VariableSpec, handle
from zstrat.worker import Catalog


def variable(key, shape, dtype="float32"):
    return handle(
        VariableSpec(key, f"v{key}", shape, dtype, ps=0), types.SimpleNamespace()
    )


def test_plans_that_nobody_has_are_forgotten():
    catalog, bias = Catalog(), variable(1, (3,))
    step = zs.function(lambda x: x + bias.value())
    plan = step.plan((np.ones((2, 3), np.float32),))
    needs = catalog.of(plan)
    assert catalog.of(plan) is needs
    assert needs.nbytes == 12
    gone = weakref.ref(plan)
    del step, plan
    gc.collect()
    assert gone() is None


def test_rows_that_wait_for_the_next_level_are_counted_by_id():
    table, chain = variable(2, (10, 4)), variable(3, (10,), "int32")

    @zs.function
    def step(ids):
        following = zs.embedding_lookup(chain, ids)
        return zs.embedding_lookup(table, ids), zs.embedding_lookup(table, following)

    needs = Catalog().of(step.plan((np.zeros(1000, np.int32),)))
    assert needs.advances == 1
    assert needs.blocks == (1000 * (4 + 16), 1000 * 16)
