"""The messages of zstrat: all that tasks may say to each other, as plain values.

Peers of different roles meet here and nowhere else: the contract is data. A message is
a frozen dataclass of ints, strings, bytes and arrays; `_codec` derives the layout on
the wire and the validation from the annotations, so a field that is added is checked. A
field ``arrays`` travels as raw buffer frames behind the header.

The messages lie by subject: of connections (`_link_messages`), of any task
(`_task_messages`), of variables, snapshots, replicas, closures (`_step_messages`) and
groups.
Numbers of kinds are part of the protocol: never reuse one (the codec refuses to start
with two that are equal). `PROTOCOL` grows with every change that an older peer would
misunderstand.
"""

from __future__ import annotations

from ._backup_messages import BeginAnew as BeginAnew
from ._backup_messages import CopiedPart as CopiedPart
from ._backup_messages import CopiedSlot as CopiedSlot
from ._backup_messages import CopiedVariable as CopiedVariable
from ._backup_messages import CopyKept as CopyKept
from ._backup_messages import CopyLedger as CopyLedger
from ._backup_messages import CopyParts as CopyParts
from ._backup_messages import CopySlots as CopySlots
from ._backup_messages import CopyTree as CopyTree
from ._backup_messages import CopyVariables as CopyVariables
from ._backup_messages import CopyWhole as CopyWhole
from ._backup_messages import KeptOptimizer as KeptOptimizer
from ._backup_messages import LogMade as LogMade
from ._backup_messages import LogTaken as LogTaken
from ._backup_messages import OpenLog as OpenLog
from ._backup_messages import RaiseWriterMark as RaiseWriterMark
from ._group_messages import AbortCall as AbortCall
from ._group_messages import AskCall as AskCall
from ._group_messages import CallState as CallState
from ._group_messages import GroupFormed as GroupFormed
from ._group_messages import Hop as Hop
from ._group_messages import JoinGroup as JoinGroup
from ._group_messages import LeaveGroup as LeaveGroup
from ._group_messages import MemberEntry as MemberEntry
from ._link_messages import PROTOCOL as PROTOCOL
from ._link_messages import Again as Again
from ._link_messages import Beat as Beat
from ._link_messages import Chunk as Chunk
from ._link_messages import Credit as Credit
from ._link_messages import Goodbye as Goodbye
from ._link_messages import Hello as Hello
from ._link_messages import Job as Job
from ._link_messages import Mapped as Mapped
from ._link_messages import Offer as Offer
from ._link_messages import Placed as Placed
from ._link_messages import Released as Released
from ._replication_messages import AskCopies as AskCopies
from ._replication_messages import AttachBackup as AttachBackup
from ._replication_messages import BackupLost as BackupLost
from ._replication_messages import CopiesTold as CopiesTold
from ._replication_messages import DetachBackup as DetachBackup
from ._replication_messages import DropStore as DropStore
from ._replication_messages import HostStore as HostStore
from ._replication_messages import LeftCopy as LeftCopy
from ._replication_messages import MoveServer as MoveServer
from ._replication_messages import PromoteBackup as PromoteBackup
from ._replication_messages import StoreHosted as StoreHosted
from ._schema import Arrays as Arrays
from ._schema import PlainTree as PlainTree
from ._snapshot_messages import LoadEntry as LoadEntry
from ._snapshot_messages import LoadTensors as LoadTensors
from ._snapshot_messages import PinSnapshot as PinSnapshot
from ._snapshot_messages import ReadSnapshot as ReadSnapshot
from ._snapshot_messages import ReleaseSnapshot as ReleaseSnapshot
from ._snapshot_messages import SnapshotPart as SnapshotPart
from ._snapshot_messages import SnapshotPinned as SnapshotPinned
from ._snapshot_messages import SnapshotWritten as SnapshotWritten
from ._snapshot_messages import StoreEntry as StoreEntry
from ._snapshot_messages import StoreTensors as StoreTensors
from ._snapshot_messages import TensorEntry as TensorEntry
from ._snapshot_messages import WriteSnapshot as WriteSnapshot
from ._step_messages import Batch as Batch
from ._step_messages import BuildResource as BuildResource
from ._step_messages import CancelSteps as CancelSteps
from ._step_messages import Completion as Completion
from ._step_messages import Completions as Completions
from ._step_messages import Dispatch as Dispatch
from ._step_messages import DropArguments as DropArguments
from ._step_messages import DropResources as DropResources
from ._step_messages import DropResults as DropResults
from ._step_messages import Fetch as Fetch
from ._step_messages import Fetched as Fetched
from ._step_messages import LayoutMessage as LayoutMessage
from ._step_messages import Outcome as Outcome
from ._step_messages import Printed as Printed
from ._step_messages import PrintedText as PrintedText
from ._step_messages import PutArguments as PutArguments
from ._step_messages import PutCode as PutCode
from ._step_messages import ResourceBuilt as ResourceBuilt
from ._task_messages import AnswerReport as AnswerReport
from ._task_messages import AskClock as AskClock
from ._task_messages import Awaited as Awaited
from ._task_messages import AwaitedOptimizer as AwaitedOptimizer
from ._task_messages import BeginCapture as BeginCapture
from ._task_messages import Captured as Captured
from ._task_messages import ClockTold as ClockTold
from ._task_messages import CloseSession as CloseSession
from ._task_messages import Done as Done
from ._task_messages import EndCapture as EndCapture
from ._task_messages import Failure as Failure
from ._task_messages import Inspect as Inspect
from ._task_messages import JoinSession as JoinSession
from ._task_messages import OpenSession as OpenSession
from ._task_messages import ReportWorker as ReportWorker
from ._task_messages import SessionOpened as SessionOpened
from ._task_messages import Statistics as Statistics
from ._task_messages import Telemetry as Telemetry
from ._task_messages import WorkerReported as WorkerReported
from ._variable_messages import AppliedParts as AppliedParts
from ._variable_messages import AskParts as AskParts
from ._variable_messages import BindOptimizer as BindOptimizer
from ._variable_messages import CreateOptimizer as CreateOptimizer
from ._variable_messages import CreateVariables as CreateVariables
from ._variable_messages import DeleteVariables as DeleteVariables
from ._variable_messages import Exchange as Exchange
from ._variable_messages import Exchanged as Exchanged
from ._variable_messages import Fence as Fence
from ._variable_messages import Fenced as Fenced
from ._variable_messages import InitialEntry as InitialEntry
from ._variable_messages import InitializeVariables as InitializeVariables
from ._variable_messages import PartEntry as PartEntry
from ._variable_messages import Pull as Pull
from ._variable_messages import Pulled as Pulled
from ._variable_messages import PullRows as PullRows
from ._variable_messages import Push as Push
from ._variable_messages import Pushed as Pushed
from ._variable_messages import PushPart as PushPart
from ._variable_messages import RaiseMark as RaiseMark
from ._variable_messages import Read as Read
from ._variable_messages import StepRun as StepRun
from ._variable_messages import Update as Update
from ._variable_messages import UpdateOp as UpdateOp
from ._variable_messages import VariableEntry as VariableEntry
from ._variable_messages import Withdraw as Withdraw

Message = (
    Hello
    | Beat
    | Chunk
    | Credit
    | Goodbye
    | Offer
    | Mapped
    | Placed
    | Released
    | Failure
    | Again
    | Done
    | Inspect
    | Statistics
    | Telemetry
    | OpenSession
    | SessionOpened
    | JoinSession
    | CloseSession
    | ReportWorker
    | WorkerReported
    | AnswerReport
    | CreateVariables
    | InitializeVariables
    | DeleteVariables
    | CreateOptimizer
    | BindOptimizer
    | Withdraw
    | Pull
    | PullRows
    | Pulled
    | Push
    | Pushed
    | PushPart
    | AskParts
    | AppliedParts
    | Fence
    | Fenced
    | RaiseMark
    | Exchange
    | Exchanged
    | PinSnapshot
    | SnapshotPinned
    | WriteSnapshot
    | SnapshotWritten
    | ReadSnapshot
    | SnapshotPart
    | ReleaseSnapshot
    | LoadTensors
    | StoreTensors
    | PutCode
    | PutArguments
    | DropArguments
    | Dispatch
    | Completions
    | Printed
    | CancelSteps
    | Fetch
    | Fetched
    | DropResults
    | BuildResource
    | ResourceBuilt
    | DropResources
    | AskCopies
    | AttachBackup
    | BackupLost
    | CopiesTold
    | DetachBackup
    | DropStore
    | HostStore
    | MoveServer
    | PromoteBackup
    | StoreHosted
    | OpenLog
    | LogMade
    | LogTaken
    | BeginAnew
    | CopyVariables
    | CopySlots
    | CopyParts
    | CopyLedger
    | CopyKept
    | CopyTree
    | CopyWhole
    | RaiseWriterMark
    | JoinGroup
    | GroupFormed
    | Hop
    | AbortCall
    | AskCall
    | CallState
    | LeaveGroup
    | AskClock
    | ClockTold
    | BeginCapture
    | EndCapture
    | Captured
)
"""Everything that a header can announce."""
