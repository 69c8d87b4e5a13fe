from zstrat.config import MISTAKEN as MISTAKEN

from ._arguments import folder as folder
from ._arguments import index_of as index_of
from ._arguments import jobs_of as jobs_of
from ._arguments import options_from as options_from
from ._arguments import parser as parser
from ._arguments import settings_of as settings_of
from ._main import leave as leave
from ._main import run as run
from ._main import run_evaluator as run_evaluator
from ._supervision import ParentWatch as ParentWatch
