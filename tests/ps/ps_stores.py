"""A store without a server: its three parts, one after the other."""

from zstrat.ps import create_plan
from zstrat.wire import Pushed


def create_in(store, entries, arrays):
    """Creates variables at once."""
    plan = create_plan(entries, arrays, store.variables)
    plan.compute()
    store.commit(plan)


def push_to(store, push):
    """Applies a push at once; returns its answer."""
    plan = store.plan_push(push)
    if isinstance(plan, Pushed):
        return plan
    plan.compute()
    return store.commit(plan)
