"""What the pipeline knows of plans: as long as there are such plans, and no longer."""

import gc
import types
import weakref

import numpy as np

import zstrat.program as zs
from zstrat.variables import VariableSpec, handle
from zstrat.worker._needs import Catalog


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
