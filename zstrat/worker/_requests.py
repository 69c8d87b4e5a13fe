"""What the coordinator that owns a worker may ask of it, and who carries it out.

Whatever unpickles or runs user code goes to the executor thread, in the order of its
arrival, so that a closure meets what was shipped before it; the rest is done on the
spot. Roles and sessions were checked before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, assert_never

from zstrat.wire import (
    BuildResource,
    CancelSteps,
    Dispatch,
    Done,
    DropArguments,
    DropResources,
    DropResults,
    Failure,
    Fetch,
    Fetched,
    Message,
    PutArguments,
    PutCode,
    ResourceBuilt,
)

from . import _closure

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from ._executor import Executor
    from ._resources import Resources
    from ._step_runner import StepRunner
    from ._worker_session import WorkerSession

Owned = (
    PutCode
    | PutArguments
    | DropArguments
    | Dispatch
    | CancelSteps
    | Fetch
    | DropResults
    | BuildResource
    | DropResources
)
"""Messages that belong to the open session."""


def serve(
    tenancy: WorkerSession, executor: Executor, message: Owned
) -> Message | Awaitable[Message]:
    """Begins what is asked; the answer comes at once or when it is done.

    Raises:
        NotFoundError: A result is not here.
    """
    shop = tenancy.shop
    resources = shop.resources
    match message:
        case Dispatch():
            tenancy.dispatch(message)
        case CancelSteps():
            tenancy.cancel()
        case PutArguments(arguments=number, code=code, arrays=arrays):
            executor.tell(partial(resources.put_arguments, number, code, arrays))
        case DropArguments(arguments=numbers):
            executor.tell(partial(resources.drop_arguments, numbers))
        case DropResources(resources=numbers):
            executor.tell(partial(resources.drop, numbers))
        case DropResults(steps=steps):
            tenancy.results.drop(steps)
        case Fetch(step=step):
            return Fetched(tuple(tenancy.results.of(step)))
        case PutCode(digest=digest, code=code):
            return executor.submit(partial(_put_code, resources, digest, code))
        case BuildResource():
            return executor.submit(partial(_build, shop, message))
        case _:
            assert_never(message)
    return Done()


def _put_code(resources: Resources, digest: bytes, code: bytes) -> Message:
    try:
        resources.put_code(digest, code)
    except BaseException as error:  # goes to the coordinator
        return Failure(_closure.plain(error))
    return Done()


def _build(shop: StepRunner, message: BuildResource) -> Message:
    try:
        return ResourceBuilt(shop.build(message))
    except BaseException as error:  # goes to the coordinator, with the user's lines
        return Failure(_closure.plain(error))
