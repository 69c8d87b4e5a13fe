"""The options of one call: of `ReplicaContext.all_reduce`, `all_gather`, `reduce_to`.

They say how processes exchange what is reduced, as those of the strategy do, for this
call. Within a process XLA reduces, and nobody is waited for: there is nothing that they
could change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zstrat.variables import is_staging, recorder

from ._options import CommunicationImplementation, CommunicationOptions

if TYPE_CHECKING:
    from zstrat.program._collective import Team


def called_with(team: Team, options: object, call: str) -> Team:
    """The replicas, as they are brought together by a call with these options.

    Raises:
        TypeError: They are no `CommunicationOptions`.
        ValueError: They ask for what is decided when a strategy is made, or for what
            XLA does not do.
    """
    if options is None:
        return team
    if not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"{call}: options must be a zs.CommunicationOptions or None, got "
            f"{type(options).__name__} {options!r:.80}"
        )
    if team.channel is None or options == CommunicationOptions():
        return team
    if team.channel.mesh is None:
        _require_own_way(options, call)
    elif recorder.get() is not None or is_staging():
        _require_none_of_xla(options, call)
    return replace(team, channel=team.channel.under(options))


def _require_own_way(options: CommunicationOptions, call: str) -> None:
    if options.is_xla:
        raise ValueError(
            f"{call}: options.implementation={options.implementation.value}, and the "
            "processes of this strategy are not one job of XLA: give "
            "communication_options with this implementation to the strategy, or leave "
            "it out of the options of the call"
        )


def _require_none_of_xla(options: CommunicationOptions, call: str) -> None:
    if options.timeout_seconds is not None:
        raise ValueError(
            f"{call}: options.timeout_seconds={options.timeout_seconds}, and with "
            "implementation=XLA the call is a part of a compiled step, which waits for "
            "the other processes as long as it takes: leave it out, or make the "
            "strategy with implementation=AUTO, RING or TREE"
        )
    own = CommunicationImplementation.RING, CommunicationImplementation.TREE
    if options.implementation in own:
        raise ValueError(
            f"{call}: options.implementation={options.implementation.value}, and the "
            "strategy was made with implementation=XLA, which chooses by itself: leave "
            "it out of the options of the call"
        )
