"""What TF 1.12's strategies write into the configuration of a session."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SessionConfig:
    """The two fields of TF's ``ConfigProto`` that a strategy sets. zstrat has no
    sessions: programs that hand one to ``configure`` may read it again."""

    device_filters: list[str] = field(default_factory=list)
    isolate_session_state: bool = True
