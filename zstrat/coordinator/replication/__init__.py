"""Stores with a second copy: who has which, and what follows if one is lost."""

from __future__ import annotations

from ._placement import Attach as Attach
from ._placement import Copy as Copy
from ._placement import CopyPhase as CopyPhase
from ._placement import Detach as Detach
from ._placement import Drop as Drop
from ._placement import Host as Host
from ._placement import Lose as Lose
from ._placement import Promote as Promote
from ._placement import Serve as Serve
from ._placement import StorePlacement as StorePlacement
from ._replication import Replication as Replication
