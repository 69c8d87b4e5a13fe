"""The union of all messages that tasks may send each other, as plain values.

The messages are the only contract between tasks of different roles. A message is a
frozen dataclass of ints, strings, bytes and arrays; `_codec` derives the layout on the
wire and the validation from the annotations, so an added field is checked, too. A field
``arrays`` travels as raw buffer frames after the header.

The messages are by subject, a file for each, whose last lines list them: of connections
(`_link_messages`), of any task (`_task_messages`), of variables, snapshots, rounds,
replicas, closures (`_step_messages`) and groups. Numbers of kinds are part of the
protocol: never reuse one (the codec raises an error at import if two are equal).
Increase `PROTOCOL` with every change that an older peer would misunderstand.
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
"""The union of all classes of messages that a header can announce."""
