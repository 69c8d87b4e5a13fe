"""Programs that Ctrl-C strikes anywhere in a blocking call go on, and end."""

import textwrap

import pytest
from programs import run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]

STRIKES = """
    import faulthandler, itertools, signal, sys, threading, traceback
    import numpy as np
    import zstrat as zs

    faulthandler.dump_traceback_later(280, exit=True)  # if something hangs

    # Two of three calls are those of pickling, for one place in which it is called.
    # What a callback of a weak reference raises is caught by Python itself.
    ELSEWHERE = "/jax/", "pickle", "/inspect.py", "/dataclasses.py", "weakref"

    class Strikes:
        # Ctrl-C where Python looks for it for that time: a function begins, or one that
        # is not written in Python has returned.
        def __init__(self, number):
            self.left = number
        def __call__(self, frame, event, value):
            # jax catches everything where it makes a NamedTuple again (FlatTree.paths).
            code = frame.f_code
            is_tuple = (code.co_filename, code.co_name) == ("<string>", "<lambda>")
            if is_tuple or any(name in code.co_filename for name in ELSEWHERE):
                return
            self.left -= event in ("call", "c_return")
            if event in ("call", "c_return") and not self.left:
                sys.setprofile(None)
                self.where = "".join(traceback.format_stack(frame, 4))
                signal.raise_signal(signal.SIGINT)

    def is_struck(number, call):
        strikes, hook, ignored = Strikes(number), sys.unraisablehook, []
        def notes(what):
            ignored.append(what.exc_type)
            hook(what)
        sys.unraisablehook = notes
        try:
            sys.setprofile(strikes)
            call()
            sys.setprofile(None)
            is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if strikes.left <= 0 and is_default:
                if ignored:  # nobody could catch it there: it is raised again,
                    threading.Event().wait(30)
                assert "/jax" in strikes.where, strikes.where  # or jax has caught it
        except (KeyboardInterrupt, RuntimeError, KeyError):
            pass  # Thread.start and OrderedDict make others of some
        finally:
            sys.setprofile(None)
            sys.unraisablehook = hook
        return strikes.left <= 0
"""
SAVING = """
    def interrupt(number, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)  # asyncio leaves a handler that it finds
    v = zs.Variable(np.arange(3, dtype="f4"), name="v")
    manager = zs.CheckpointManager(zs.Checkpoint(v=v), sys.argv[1], 2)
    for call in (manager.save, manager.restore_or_initialize):
        call()
        number = 1
        while is_struck(number, call):
            number += 1
        assert number > 20, number
    v.assign(np.zeros(3))
    manager.restore_or_initialize()
    np.testing.assert_array_equal(v.numpy(), np.arange(3.0))
    print("goes on")
"""


def ends_well(program, *arguments):
    source = textwrap.dedent(STRIKES) + textwrap.dedent(program)
    ended = run(["-c", source, *map(str, arguments)], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n"), ended.stderr


def test_ctrl_c_anywhere_in_a_blocking_save_or_restore(tmp_path):
    ends_well(SAVING, tmp_path)


TRACING = """
    @zs.function
    def step():
        return v.value() + 1

    with zs.LocalCluster(num_ps=1, num_workers=1) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            v = zs.Variable(np.arange(3, dtype="f4"), name="v")
        coordinator = zs.ClusterCoordinator(strategy)

        def schedule():
            @zs.function
            def fresh():
                return v.value() + 1
            coordinator.schedule(fresh)

        schedule()
        for number in itertools.count(1, int(sys.argv[1])):
            struck = is_struck(number, schedule)
            assert not zs.has_strategy(), number
            try:
                coordinator.join()
            except zs.errors.CancelledError:
                pass
            if not struck:
                break
        assert number > 200, number
        coordinator.schedule(step).fetch()
        strategy.close()
    print("goes on")
"""


@pytest.mark.parametrize("every", [9, pytest.param(4, marks=pytest.mark.thorough)])
def test_ctrl_c_anywhere_in_a_trace_leaves_the_scope_of_the_strategy(every):
    """At one of so many places: a busy machine takes long for the join behind each."""
    ends_well(TRACING, every)
