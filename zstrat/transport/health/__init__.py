"""Reports the health of this process over HTTP: for probes, for Prometheus, for
people."""

from ._http import CONNECTIONS as CONNECTIONS
from ._http import BadRequest as BadRequest
from ._http import HttpServer as HttpServer
from ._http import HttpStream as HttpStream
from ._http import parse_request as parse_request
from ._page import PageToken as PageToken
from ._register import TelemetryNotices as TelemetryNotices
from ._register import process_report as process_report
from ._register import process_totals as process_totals
from ._register import register as register
from ._register import unregister as unregister
from ._served import HealthServer as HealthServer
from ._served import dashboard as dashboard
from ._served import serve_from_settings as serve_from_settings
from ._served import serve_http as serve_http
from ._watch import VIEWERS as VIEWERS
from ._watch import RunLook as RunLook
from ._watch import RunPicture as RunPicture
