"""A small HTTP server that answers as a test says, in place of a service's, and
machines of which that is the metadata server."""

from __future__ import annotations

import http.server
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from tpu_service import ATTRIBUTES, tell

from zstrat.cluster import _gpu_shares


@dataclass
class Web:
    """``pages`` is path (with the query, if it matters) -> (status, headers, body);
    ``asked`` is path, query, and headers with their names in small letters."""

    pages: dict[str, tuple[int, dict[str, str], str]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, list[str]], dict[str, str]]] = field(
        default_factory=list
    )
    port: int = 0

    @property
    def host(self):
        return f"127.0.0.1:{self.port}"

    def put(self, path, body, status=200, **headers):
        text = body if isinstance(body, str) else json.dumps(body)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.pages[path] = (status, named, text)


@pytest.fixture
def web():
    pages = Web()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            parts = urlsplit(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            pages.asked.append((parts.path, parse_qs(parts.query), headers))
            known = pages.pages.get(self.path) or pages.pages.get(parts.path)
            status, named, text = known or (404, {}, "not found")
            self.send_response(status)
            for name, value in named.items():
                self.send_header(name, value)
            body = text.encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        pages.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield pages
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_share(monkeypatch):
    """Every test is a process that has not taken a share of its node's GPUs."""
    monkeypatch.setattr(_gpu_shares, "_taken", None)


RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
BUS = Path("/sys/bus/pci/devices")


@pytest.fixture
def kernel_chooses(monkeypatch):
    """Lets Linux tell other words of the ports that it chooses."""
    read_text = Path.read_text

    def tell(words):
        monkeypatch.setattr(
            Path,
            "read_text",
            lambda path, *how, **more: (
                words if path == RANGE else read_text(path, *how, **more)
            ),
        )

    return tell


@pytest.fixture
def cards(tmp_path, monkeypatch):
    """Lets Linux tell of these cards alone: of each its vendor and its device."""
    glob = Path.glob
    monkeypatch.setattr(
        Path,
        "glob",
        lambda path, *how: glob(tmp_path / "bus" if path == BUS else path, *how),
    )

    def plug(*pairs):
        for number, (vendor, device) in enumerate(pairs):
            card = tmp_path / "bus" / f"0000:00:{number:02x}.0"
            card.mkdir(parents=True)
            (card / "vendor").write_text(f"{vendor}\n")
            (card / "device").write_text(f"{device}\n")
        (tmp_path / "bus" / "0000:00:ff.0").mkdir()

    return plug


TPU_VARIABLES = (
    "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS",
    "TPU_NAME",
    "TPU_CONFIG",
    "TPU_WORKER_HOSTNAMES",
    "TPU_WORKER_ID",
    "TPU_ACCELERATOR_TYPE",
    "TPU_API_DISCOVERY_URL",
    "GCE_METADATA_HOST",
)


@pytest.fixture
def nowhere(monkeypatch):
    """A machine that is no TPU's, and has no metadata server."""
    for name in TPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")


@pytest.fixture
def metadata(web, monkeypatch):
    """A machine with a metadata server, which marks its answers as Google's."""
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
    monkeypatch.setenv("GCE_METADATA_HOST", web.host)
    for entry in (
        "worker-network-endpoints",
        "agent-worker-number",
        "accelerator-type",
    ):
        tell(web, f"{ATTRIBUTES}/{entry}", "<!DOCTYPE html><title>404</title>", 404)
    return web
