"""The page in a real browser without a window: what is seen there, and what is not.

Skipped where there is no chromedriver; `page_browser` says what to install.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from page_browser import browsing

import zstrat as zs
from zstrat.transport import Portal
from zstrat.transport.health import register, unregister

HOSTILE = "<img src=x onerror=alert(1)></script>\u2028 \udc80 'worker'"
SUMMARY = {"count": 9, "mean": 0.25, "p50": 0.2, "p90": 0.5, "p99": 1.0, "max": 2.0}
PHASES = ("wait", "draw", "pull", "compute", "push")


def summary(mean):
    return {**SUMMARY, "mean": mean}


def told():
    """As `metrics()`; every text in it is hostile."""
    phases = {phase: summary(0.001 * n) for n, phase in enumerate(PHASES, start=1)}
    return {
        "seconds": 75.0,
        "steps_per_s": 1234.5678,
        "examples_per_s": None,
        "queued_closures": 17,
        "staleness": {**SUMMARY, "buckets": [[0, 5], [1, 40], [3, 7]]},
        "tasks": {
            "ps:0": {
                "state": "open",
                "address": HOSTILE,
                "bytes_in_per_s": 2048.0,
                "bytes_out_per_s": 1024.0,
                "memory": 3 * 2**20,
                "cores": 1.25,
                "last_error": "",
                "log": "/a/long/path/to/the/folder/of/a/run/that/has/logs/ps-0.log",
            },
            HOSTILE: {
                "state": HOSTILE,
                "steps_per_s": 7.5,
                "phases": phases,
                "memory": 5 * 2**20,
                "last_error": HOSTILE,
            },
        },
        "rounds": {
            HOSTILE: {
                "workers": 4,
                "waiting": 3,
                "closed": 17,
                "per_s": 2.5,
                "late": {HOSTILE: 3},
                "dropped": {},
                "waited_for": {"worker:3": {"rounds": 9, "seconds": 1.5}},
            }
        },
        "leases": {
            HOSTILE: {"epoch": 1, "total": 80, "done": 20, "open": 3, "skipped": 4},
            "endless": {"epoch": 1, "total": None, "done": 20, "open": 3},
        },
        "scalars": {HOSTILE: [[0, 0.0, 2.0], [1, 1.0, None], [2, 2.0, 0.5]]},
        "logs": [[1.0, HOSTILE, HOSTILE, HOSTILE]],
        "slowest": {"task": HOSTILE, "why": HOSTILE},
    }


class Told:
    def __init__(self, metrics):
        self.metrics = metrics

    def readiness(self):
        return ""

    def statistics(self):
        return {"coordinator": self.metrics}


@contextlib.contextmanager
def running(metrics):
    portal, run = Portal("zstrat run of a test"), Told(metrics)
    register(run, HOSTILE.join(["chief:", ""]), portal.loop)
    try:
        yield run
    finally:
        unregister(run)
        portal.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


VALUE = "return Number(document.querySelector(arguments[0])?.value ?? NaN)"
TEXT = "return document.querySelector(arguments[0]).textContent.toWellFormed()"
STATE = "return document.getElementById('status').dataset.state === arguments[0]"


def value(browser, selector):
    return browser.run(VALUE, selector)


@pytest.mark.processes
def test_what_is_seen_is_what_the_run_told(browser):
    metrics = told()
    with running(metrics) as run, zs.dashboard() as server:
        browser.open(server.url)
        browser.wait("return document.querySelector('#tasks tr')")
        assert value(browser, "#tile-steps_per_s") == metrics["steps_per_s"]
        assert value(browser, "#tile-queued_closures") == 17
        assert value(browser, "#tile-memory") == 8 * 2**20
        assert not browser.run("return document.getElementById('tile-examples_per_s')")
        assert not browser.run("return document.getElementById('tile-largest_lead')")
        sums = [
            value(browser, f"{bars} data")
            for bars in ("#phases", "#bytes", "#memory", "#waited", "#leased")
        ]
        assert sums == [pytest.approx(0.015), 3072, 3 * 2**20, 1.5, 0.25]
        assert "3 leases open · 4 skipped" in browser.run(TEXT, "#leases")
        assert f"late: {HOSTILE} 3".replace("\udc80", "\ufffd") in browser.run(
            TEXT, "#rounds"
        )
        assert browser.run(
            "return [...document.querySelectorAll('#staleness data')].map(each =>"
            " Number(each.value))"
        ) == [5, 40, 7]
        # Texts are texts, wherever they came from, and nothing of them has run.
        shown = browser.run(TEXT, "main")
        server_row = "tr[data-task='ps:0'] td[data-label="
        assert browser.run(TEXT, f"{server_row}'Processor']") == "125 %"
        words = browser.run(TEXT, f"{server_row}'Last error, log file']")
        assert words == metrics["tasks"]["ps:0"]["log"]
        for text in (f"up: {HOSTILE} {HOSTILE}", f"{HOSTILE} {HOSTILE} {HOSTILE}"):
            assert text.replace("\udc80", "\ufffd") in shown
        assert browser.run("return document.images.length") == 0
        run.metrics = {**metrics, "steps_per_s": 0.0625}
        browser.wait(f"{VALUE} === 0.0625", "#tile-steps_per_s")
        # Of a log only the lines that are wanted.
        browser.type("#log-text", "no such line")
        browser.wait("return document.querySelectorAll('#logs li').length === 0")
        assert browser.log() == []
        server.close()
        browser.wait(STATE, "ended")
        assert value(browser, "#tile-steps_per_s") == 0.0625
        words = "The run has ended; this is its last picture."
        assert browser.run(TEXT, "#words") == words


@pytest.mark.processes
def test_it_can_be_read_in_the_dark_and_on_a_phone(browser):
    with running(told()), zs.dashboard() as server:
        browser.open(server.url)
        browser.wait("return document.querySelector('#tasks tr')")
        for scheme in ("light", "dark"):
            browser.dark(scheme)
            assert browser.run(CONTRAST) == []
        browser.devtools("Emulation.setDeviceMetricsOverride", PHONE)
        assert browser.run(OVERFLOWS) == []
        assert browser.run(BROKEN) == []
        browser.devtools("Emulation.clearDeviceMetricsOverride", {})
        assert browser.run(UNLABELLED) == []


PHONE = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}

CONTRAST = """
const light = (color) => {
  const parts = color.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const behind = (node) => {
  const color = getComputedStyle(node).backgroundColor, under = node.parentElement;
  return color === "rgba(0, 0, 0, 0)" && under ? behind(under) : color;
};
return [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility()
    && [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim()))
  .map((node) => {
    const style = getComputedStyle(node), isDrawn = node.namespaceURI.endsWith("svg");
    const one = light(isDrawn ? style.fill : style.color), other = light(behind(node));
    const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    return [node.tagName, node.textContent.slice(0, 40), ratio];
  }).filter(([, , ratio]) => ratio < 4.5);
"""
"""Texts that do not stand out from what is behind them, as WCAG 2 counts it."""

OVERFLOWS = """
const width = document.documentElement.clientWidth;
return [...document.querySelectorAll("main, .card, table, td, #logs li, #alerts li")]
  .filter((node) => node.getBoundingClientRect().right > width + 1)
  .map((node) => node.outerHTML.slice(0, 80));
"""

BROKEN = """
const pen = document.createElement("canvas").getContext("2d");
return [...document.querySelectorAll("td")].filter((cell) => cell.checkVisibility())
  .filter((cell) => {
    const label = getComputedStyle(cell, "::before");
    pen.font = label.font;
    return parseFloat(label.width) < pen.measureText(cell.dataset.label).width - 1;
  }).map((cell) => cell.dataset.label);
"""
"""Labels of cells that are narrower than their text, so that it breaks."""

UNLABELLED = """
return [...document.querySelectorAll("svg, section, select, input, [role=region]")]
  .filter((node) => node.checkVisibility()).filter((node) => !(
    node.getAttribute("aria-label") || node.closest("label") || node.querySelector("h2")
    || document.getElementById(node.getAttribute("aria-labelledby"))?.textContent))
  .map((node) => node.outerHTML.slice(0, 80));
"""


CHARTED = """
const [points, options] = arguments, holder = make("div");
at("rate").append(holder);
const words = { elapsed, plain, bytes }, y = words[options.y], x = words[options.x];
const steps = options.x === "elapsed" ? OF_CLOCKS : null;
const all = { ...options, name: "", xWords: x, yWords: y, xSteps: steps };
const chart = new LineChart(holder, all);
chart.show(points);
const [path] = holder.querySelectorAll(".curve");
const [, height] = path.getAttribute("d").match(/^M[0-9.]+ ([0-9.]+)/);
const texts = [...holder.querySelectorAll("text")].map((text) => [
  text.getAttribute("text-anchor") === "end" ? "y" : "x", text.textContent,
  Number(text.getAttribute("y")) - 4 - height]);
holder.remove();
return texts;
"""
"""Of a chart of these points: for each label of an axis which it is, its text, and how
far below the first point it is."""


AXES = [
    (
        [[5, 0.001], [85, 0.001]],
        {},
        {"0:20", "0:40", "1:00", "1:20"},
        {"0.0006", "0.0008", "0.001", "0.0012", "0.0014"},
    ),
    ([[0, -4], [50, -4]], {}, {"0 s", "20 s", "50 s"}, {"-5", "-4", "-3"}),
    ([[0, 0], [7300, 0]], {}, {"0:00:00", "1:00:00", "2:00:00"}, {"-0.4", "0"}),
    ([[0, 5000.1], [1, 5000.3]], {"x": "plain"}, {"0", "0.5"}, {"5,000.2"}),
    ([[0, 1e-12], [1, 3e-12]], {}, set(), {"1.00e-12", "2.00e-12", "3.00e-12"}),
    (
        [[0, 0], [1, 3 * 2**20]],
        {"y": "bytes", "fromZero": True},
        {"0 s", "1 s"},
        {"0 MiB", "1 MiB", "2 MiB", "3 MiB"},
    ),
]
"""Points, options, and labels of the axis of x and of that of y."""


@pytest.mark.processes
def test_an_axis_has_one_unit_and_its_labels_differ(browser):
    with running(told()), zs.dashboard() as server:
        browser.open(server.url)
        browser.wait("return document.querySelector('#tasks tr')")
        for points, options, x, y in AXES:
            options = {"x": "elapsed", "y": "plain", **options}
            found = browser.run(CHARTED, points, options)
            for axis, some in (("x", x), ("y", y)):
                shown = [text for which, text, _ in found if which == axis]
                assert len(shown) == len(set(shown))
                assert some <= set(shown)
            if points[0][1] == points[1][1]:  # beside its own value
                (beside,) = [
                    each for each in found if each[0] == "y" and abs(each[2]) < 1
                ]
                assert float(beside[1]) == points[0][1]


@pytest.mark.processes
def test_a_token_comes_in_once_and_leaves_the_address(browser):
    with running(told()), zs.dashboard("0.0.0.0:0", token="t" * 20) as server:
        browser.open(f"http://127.0.0.1:{server.port}/?token={'t' * 20}")
        browser.wait("return document.querySelector('#tasks tr')")
        at = f"http://127.0.0.1:{server.port}/"
        assert browser.run("return [location.href, document.cookie]") == [at, ""]


PROGRAM = """
import sys, zstrat as zs
print(zs.dashboard(sys.argv[1]).port, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def program(port):
    """A program that has a page, and its port."""
    command = [sys.executable, "-c", PROGRAM, f"127.0.0.1:{port}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as running:
        try:
            yield running, int(running.stdout.readline())
        finally:
            running.kill()


@pytest.mark.processes
def test_a_program_that_is_killed_leaves_its_picture_and_may_come_back(browser):
    with program(0) as (first, port):
        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait(STATE, "none")
        first.kill()
        browser.wait(STATE, "gone")
        assert browser.run(TEXT, "#words").startswith("The run has ended, or cannot be")
    with program(port):
        browser.wait(STATE, "none")
    browser.open("about:blank")


@pytest.mark.processes
def test_a_worker_that_is_killed_turns_red(browser):
    with zs.LocalCluster(1, 2) as cluster, zs.dashboard() as server:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            count = zs.Variable(jnp.zeros(()), name="count")

        @zs.function
        def step():
            count.assign_add(1.0)

        coordinator = zs.ClusterCoordinator(strategy)
        coordinator.schedule(step)
        coordinator.join()
        zs.log_scalar("loss", float(count.numpy()))
        browser.open(server.url)
        row = "return document.querySelector(`tr[data-task='worker:1']`)?.dataset.state"
        browser.wait(f"{row} === 'open'")
        steps = coordinator.metrics()["scheduled_closures"]
        browser.wait(f"{VALUE} === {steps}", "#tile-scheduled_closures")
        browser.wait("return document.querySelector('#scalars section')")
        cluster.kill("worker:1")
        browser.wait(f"{row} === 'lost'")
        color = "return getComputedStyle(document.querySelector(arguments[0])).color"
        red, fine = (
            browser.run(color, f"tr[data-task='worker:{n}'] .state") for n in (1, 0)
        )
        assert red != fine
        words = browser.run(TEXT, "#alerts")
        error = coordinator.metrics()["tasks"]["worker:1"]["last_error"]
        assert words.startswith("worker:1 is lost since ")
        assert words.endswith(f": {error}")
        strategy.close()
        browser.wait(STATE, "ended")
        assert value(browser, "#tile-scheduled_closures") == steps
