"""What replica functions of tests ask and do, and what comes back of them."""

import numpy as np

import zstrat as zs


def context():
    return zs.get_replica_context()


def number():
    """An int in turns, and traced in one program."""
    return context().replica_id_in_sync_group


def meet(merge_fn=lambda strategy: None):
    """From here on the replicas run in turns."""
    context().merge_call(merge_fn)


def values(result):
    """Those of a value per replica, as lists."""
    return [np.asarray(value).tolist() for value in result.values]


def copies(strategy, variable):
    """The values of the copies that replicas have of a variable, as lists."""
    return [c.numpy().tolist() for c in strategy.experimental_local_results(variable)]
