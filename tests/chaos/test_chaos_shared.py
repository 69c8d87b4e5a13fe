"""Own updates of several programs that share parameter servers, over lines that are
cut: each of them is applied once."""

import threading

import numpy as np
import pytest

import zstrat as zs
from zstrat.config import Settings
from zstrat.coordinator import hold_session, join_session
from zstrat.testing import Relay
from zstrat.variables import VariableSpec
from zstrat.wire import UpdateOp

CUTS = 12
LARGE = 2**20
"""Elements of a variable whose updates are applied while they arrive."""


@pytest.mark.parametrize(
    ("elements", "each", "transport"),
    [(1, 400, "auto"), (LARGE, 40, "tcp"), (LARGE, 40, "auto")],
)
def test_updates_of_all_programs_are_applied_once_each(elements, each, transport):
    settings, one = Settings(transport=transport), np.ones(elements, np.float32)
    with zs.Server({"ps": ["127.0.0.1:0"]}) as server:
        relay = Relay(server.target.removeprefix("tcp://"))
        spec = zs.ClusterSpec({"ps": [relay.address]})
        shape = (elements,)
        specs = [VariableSpec(key, f"v{key}", shape, "float32", 0) for key in range(3)]
        holder = hold_session(spec, settings)
        made = [(spec, 0 * one) for spec in specs]
        holder.run(holder.servers.create_variables(made), "creating")
        programs = [holder]
        programs += [join_session(spec, settings, index) for index in (1, 2)]
        try:
            assert under_cuts(relay, programs, specs, each, one) == []
            for value in holder.run(holder.servers.read(specs), "reading"):
                np.testing.assert_array_equal(value, each * one)
        finally:
            for program in reversed(programs):
                program.close()
            relay.close()


def under_cuts(relay, programs, specs, each, one):
    """Each program adds ones to a variable of its own; the errors that came of it."""
    errors, half = [], threading.Barrier(len(programs) + 1)

    def add(program, spec):
        try:
            for number in range(each):
                if number == each // 4:
                    half.wait(60)
                update = program.servers.update([(spec, UpdateOp.ADD, 0, [one])])
                program.run(update, "adding")
        except Exception as error:
            errors.append(error)

    threads = [
        threading.Thread(target=add, args=pair)
        for pair in zip(programs, specs, strict=True)
    ]
    for thread in threads:
        thread.start()
    half.wait(60)
    for number in range(CUTS):
        threads[number % len(threads)].join(0.02)  # updates are under way meanwhile
        relay.reset(1 + number % 3)
    for thread in threads:
        thread.join()
    return errors
