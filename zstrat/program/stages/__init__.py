"""Steps with collectives between processes: as a sequence of programs (stages), or as
one program."""

from __future__ import annotations

from zstrat.program._compile import settled as settled

from ._cross import PROCESS as PROCESS
from ._cross import Channel as Channel
from ._cross import Collective as Collective
from ._cross import CrossKind as CrossKind
from ._cross import crossing as crossing
from ._cross import first_of as first_of
from ._cross import gather_from as gather_from
from ._cross import gathered as gathered
from ._cross import sum_over as sum_over
from ._cross import within_mesh as within_mesh
from ._stages import Stage as Stage
from ._stages import stages as stages
