"""The messages of zstrat: all that tasks may say to each other, as plain values.

Peers of different roles meet here and nowhere else: the contract is data. A message is
a frozen dataclass of ints, strings, bytes and arrays; `_codec` derives the layout on
the wire and the validation from the annotations, so a field that is added is checked. A
field ``arrays`` travels as raw buffer frames after the header.

The messages are by subject, a file for each, whose last lines list them: of connections
(`_link_messages`), of any task (`_task_messages`), of variables, snapshots, rounds,
replicas, closures (`_step_messages`) and groups. Numbers of kinds are part of the
protocol: never reuse one (the codec refuses to start with two that are equal).
`PROTOCOL` grows with every change that an older peer would misunderstand.
"""

from __future__ import annotations

from ._link_messages import LinkMessage
from ._replication_messages import BackupMessage, ReplicationMessage
from ._round_messages import RoundMessage
from ._snapshot_messages import SnapshotMessage
from ._step_messages import StepMessage
from ._task_messages import GroupMessage, TaskMessage
from ._variable_messages import VariableMessage

Message = (
    LinkMessage
    | TaskMessage
    | VariableMessage
    | SnapshotMessage
    | StepMessage
    | RoundMessage
    | ReplicationMessage
    | BackupMessage
    | GroupMessage
)
"""Everything that a header can announce."""
