"""Traces step functions, to find what they do with variables and iterators."""

from __future__ import annotations

from ._capture import Capture as Capture
from ._capture import RecordedLookup as RecordedLookup
from ._captured import is_known as is_known
from ._captured import reached as reached
from ._eager import Immediate as Immediate
from ._eager import own_copy_later as own_copy_later
from ._eager import rows_now as rows_now
from ._flow import BodyProgram as BodyProgram
from ._flow import Discovery as Discovery
from ._flow import Flow as Flow
from ._flow import Placeholder as Placeholder
from ._flow import Replay as Replay
from ._flow import TraceFeed as TraceFeed
from ._flow import body_program as body_program
from ._flow import marked as marked
from ._int32_checks import downcast_message as downcast_message
from ._int32_checks import fits as fits
from ._int32_checks import is_integer_downcast as is_integer_downcast
from ._int32_checks import uncut as uncut
from ._iterator import StepIterator as StepIterator
from ._refusals import LOOKS as LOOKS
from ._refusals import is_of_shapes as is_of_shapes
from ._refusals import lookup_inside as lookup_inside
from ._refusals import refuse_random_keys as refuse_random_keys
from ._refusals import update_inside as update_inside
from ._signature import Plain as Plain
from ._signature import StrategyFingerprint as StrategyFingerprint
from ._signature import as_replica as as_replica
from ._signature import asked as asked
from ._signature import current_trace as current_trace
from ._signature import printed_before as printed_before
from ._signature import set_default_fingerprint as set_default_fingerprint
from ._signature import strategy_fingerprint as strategy_fingerprint
from ._structure import is_described as is_described
from ._structure import split as split
from ._tracebacks import claimed as claimed
from ._updates import apart_from_now as apart_from_now
from ._updates import device_storage as device_storage
from ._updates import has_copies as has_copies
from ._updates import is_apart as is_apart
from ._updates import is_on_read as is_on_read
from ._updates import moved as moved
from ._updates import rows_here as rows_here
from ._updates import updates_copies as updates_copies
