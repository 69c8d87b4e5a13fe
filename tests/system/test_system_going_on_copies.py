"""Programs that are killed, and parameter servers whose second copies go on."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import programs
import pytest
from killed_program import Counting
from system_worlds import all_running, left, when

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.errors import InvalidArgumentError, PSUnavailableError
from zstrat.testing import leak_check

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]

SETTINGS = Settings(timeouts=Timeouts(liveness=30.0, reconnect=0.5, turn=30.0))
"""Who loses the other copy within half a minute of the program cannot know what that
has done: longer than this test."""
OPTIONS = {"resume": "run", "replicas": 1, "settings": SETTINGS}


@pytest.fixture
def local():
    with leak_check(), zs.LocalCluster(2, 1, settings=SETTINGS) as cluster:
        yield all_running(cluster)


def trained(work, numbers):
    work.schedule(numbers)
    work.coordinator.join()


def counted_once(work, numbers):
    return all((count.numpy()[list(numbers)] == 1).all() for count in work.counts)


def test_a_program_that_is_killed_goes_on_with_both_copies(local):
    script = Path(__file__).with_name("killed_program.py")
    run = [str(script), json.dumps(local.spec.as_dict()), "20", "40"]
    assert programs.run([*run, "1"]).returncode == -9
    with pytest.raises(InvalidArgumentError, match="replicas=1"):
        zs.ParameterServerStrategy(local.resolver, **{**OPTIONS, "replicas": 0})
    strategy = zs.ParameterServerStrategy(local.resolver, **OPTIONS)
    assert strategy.resumed
    work = Counting(strategy, learns=True)
    assert counted_once(work, range(21))
    assert max(count.numpy().max() for count in work.counts) == 1
    metrics = work.coordinator.metrics
    assert metrics()["stores_without_backup"] == 0
    trained(work, range(100, 110))

    # The backups of a program that went on take over; there is one process then.
    local.kill("ps:1")
    trained(work, range(110, 120))
    moved = work.w.numpy()
    left(strategy)
    local.restart("ps:1")
    strategy = zs.ParameterServerStrategy(local.resolver, **OPTIONS)
    work = Counting(strategy, learns=True)
    assert strategy.resumed
    assert counted_once(work, range(100, 120))
    assert work.w.numpy().tolist() == moved.tolist()
    local.kill("ps:0")  # which served all
    trained(work, range(120, 130))
    assert counted_once(work, [*range(21), *range(100, 130)])
    assert not any(count.numpy()[130:].any() for count in work.counts)

    # With the program goes one of two copies: the other one may lack something.
    local.restart("ps:0")
    strategy.session.run(_paired(strategy), "the test")
    left(strategy)
    local.kill("ps:1")
    local.restart("ps:1")
    # That ps knows by now, so no program needs to wait long for it to notice.
    quick = Settings(timeouts=Timeouts(liveness=1.0, reconnect=0.5, turn=30.0))
    options = {**OPTIONS, "settings": quick}
    with pytest.raises(PSUnavailableError, match=r"'run'.*on_ps_loss="):
        zs.ParameterServerStrategy(local.resolver, **options)
    with zs.ParameterServerStrategy(
        local.resolver, on_ps_loss="restore", **options
    ) as strategy:
        assert not strategy.resumed
        trained(work := Counting(strategy), range(10))
        assert counted_once(work, range(10))
        assert not work.counts[0].numpy()[10:].any()


def killed_and_started(local, pool, starting, task):
    """Killed when this returns, and there again some time later."""
    local.kill(task)
    starting.append(pool.submit(local.restart, task))


def test_a_server_is_killed_while_the_next_program_takes_over(local, caplog):
    """When all have said what they have; when the first store has two copies again."""
    caplog.set_level(logging.INFO, "zstrat.coordinator")
    strategy = zs.ParameterServerStrategy(local.resolver, **OPTIONS)
    trained(Counting(strategy, learns=True), range(10))
    moments = [
        ("resumes what was left", "ps:0"),
        ("resumes what was left", "ps:1"),
        ("has a backup, in the process of", "ps:1"),
    ]
    for n, (words, task) in enumerate(moments, 1):
        strategy.session.run(_paired(strategy), "the test")
        left(strategy)
        starting = []
        with ThreadPoolExecutor(1) as pool:
            act = partial(killed_and_started, local, pool, starting, task)
            with when(words, act):
                strategy = zs.ParameterServerStrategy(local.resolver, **OPTIONS)
            starting[0].result()
        assert strategy.resumed
        trained(work := Counting(strategy, learns=True), range(10 * n, 10 * n + 10))
        assert counted_once(work, range(10 * n + 10))
        assert not any(count.numpy()[10 * n + 10 :].any() for count in work.counts)
    strategy.close()


async def _paired(strategy):
    session = strategy.session
    deadline = session.portal.loop.time() + 60
    await session.cluster.replication.wait_whole(deadline)
