"""Time lines of a run, recorded by all tasks of a session."""

from ._profile import MAX_BYTES as MAX_BYTES
from ._profile import SECONDS as SECONDS
from ._profile import Profile as Profile
