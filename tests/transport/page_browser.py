"""A headless browser that a test drives: WebDriver's JSON over HTTP, and no library.

Where there is no chromedriver, or no browser beside it, such tests are skipped, and
`MISSING` says what to install.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import subprocess

import pytest

BROWSERS = ("chromium", "google-chrome", "chromium-browser", "google-chrome-stable")
MISSING = (
    "needs chromedriver and its browser: apt-get install chromium-driver (Debian), or "
    "Google Chrome and the chromedriver of its version"
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window of the browser."""

    def __init__(self, port, session):
        self._port, self._session = port, session

    def _ask(self, method, path, body=None):
        return asked(self._port, method, f"/session/{self._session}{path}", body)

    def open(self, address):
        self._ask("POST", "/url", {"url": address})

    def run(self, script, *arguments):
        """What the script returns that runs in the page."""
        body = {"script": script, "args": list(arguments)}
        return self._ask("POST", "/execute/sync", body)

    def wait(self, script, *arguments):
        """As soon as what the script returns in the page is something, that. It is the
        page that looks, at each of its pictures."""
        whole = (
            "const done = arguments[arguments.length - 1];"
            "const look = () => { const found = (function () {" + script + "})"
            ".apply(null, arguments);"
            "if (found) done(found); else setTimeout(look, 20); }; look();"
        )
        body = {"script": whole, "args": list(arguments)}
        return self._ask("POST", "/execute/async", body)

    def type(self, selector, text):
        using = {"using": "css selector", "value": selector}
        element = self._ask("POST", "/element", using)[ELEMENT]
        self._ask("POST", f"/element/{element}/value", {"text": text})

    def size(self, width, height):
        self._ask("POST", "/window/rect", {"width": width, "height": height})

    def log(self):
        """What the page had to complain of: refused scripts, errors."""
        return self._ask("POST", "/se/log", {"type": "browser"})

    def dark(self, scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", {"features": features})

    def devtools(self, command, params):
        body = {"cmd": command, "params": params}
        return self._ask("POST", "/goog/cdp/execute", body)

    def picture(self):
        """PNG, as base64."""
        return self._ask("GET", "/screenshot")


def asked(port, method, path, body=None):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=100)
    with contextlib.closing(line):
        text = None if body is None else json.dumps(body)
        line.request(method, path, text, {"Content-Type": "application/json"})
        value = json.loads(line.getresponse().read())["value"]
    assert not (isinstance(value, dict) and "error" in value), value
    return value


@contextlib.contextmanager
def browsing(folder):
    """A browser with a profile in ``folder``; both end with this."""
    driver = shutil.which("chromedriver")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if driver is None or browser is None:
        pytest.skip(MISSING)
    command = [driver, "--port=0", f"--log-path={folder}/chromedriver.log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = _port_of(process)
            session = asked(port, "POST", "/session", _wishes(browser, folder))
            try:
                yield Browser(port, session["sessionId"])
            finally:
                asked(port, "DELETE", f"/session/{session['sessionId']}")
        finally:
            process.terminate()
            process.stdout.close()


def _port_of(process):
    for line in process.stdout:
        if "started successfully on port" in line:
            return int(line.rstrip(".\n").rpartition(" ")[2])
    raise AssertionError("chromedriver said no port")


def _wishes(browser, folder):
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-quic",
        "--disable-sync",
        "--no-proxy-server",
        "--window-size=1200,1600",
        f"--user-data-dir={folder}/profile",
    ]
    return {
        "capabilities": {
            "alwaysMatch": {
                "goog:chromeOptions": {"binary": browser, "args": options},
                "goog:loggingPrefs": {"browser": "ALL"},
                "timeouts": {"script": 90_000},
            }
        }
    }
