"""Who may send a request, and whether a client may send it twice.

The class of a request states both (`request`), and the tasks derive their checks from
it: a task answers no request whose class says nothing (`check_sender`).
"""

from __future__ import annotations

import enum
from dataclasses import field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, dataclass_transform

from zstrat.errors import PermissionDeniedError, ProtocolError

from ._link_messages import Job
from ._schema import message

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

COORDINATOR: Final = frozenset({Job.CHIEF})
WORKER: Final = frozenset({Job.WORKER})
SERVER: Final = frozenset({Job.PS})
TRAINING: Final = COORDINATOR | WORKER
READING: Final = TRAINING | {Job.EVALUATOR}
ANY_TASK: Final = frozenset(Job)


class Repeat(enum.Enum):
    """Whether a client may repeat a request that a parameter server may have carried
    out before its connection broke."""

    NEVER = "never"
    SAFE = "safe"
    """Carrying it out twice has the effect of once."""
    BY_STEP = "by step"
    """The server recognizes it by its ``step``; without a step it is not repeated."""


class RequestRule(NamedTuple):
    """The jobs whose tasks may send a request, and whether it may be repeated."""

    senders: frozenset[Job]
    repeat: Repeat


REQUESTS: Final[dict[type, RequestRule]] = {}
"""The rule of every request, by its class."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def request(*, by: frozenset[Job], repeat: Repeat) -> Callable[[type[T]], type[T]]:
    """Makes a class of messages that a task asks another one with (`message`)."""

    def decorate(cls: type[T]) -> type[T]:
        made = message(cls)
        REQUESTS[made] = RequestRule(by, repeat)
        return made

    return decorate


def check_sender(task: str, sender: str, role: Job, message: object) -> None:
    """Refuses a message that a task with this role may not send.

    Args:
        task: The receiver, for errors.

    Raises:
        PermissionDeniedError: Tasks of other roles may send it.
        ProtocolError: It is not a request.
    """
    kind = type(message)
    rule = REQUESTS.get(kind)
    if rule is None:
        raise ProtocolError(
            f"{task} got {kind.__name__} from {sender}, which is not a request"
        )
    if role not in rule.senders:
        raise PermissionDeniedError(
            f"{task} takes {kind.__name__} from {' or '.join(sorted(rule.senders))}, "
            f"and {sender} is {role}"
        )
