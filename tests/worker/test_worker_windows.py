"""Windows among the closures of a worker, on this thread: no sockets, no servers."""

from concurrent.futures import Future

import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.config import Limits
from zstrat.data import InputContext
from zstrat.errors import BusyError, from_wire
from zstrat.program import prepare, run_eager
from zstrat.variables import VariableSpec, creator, unbound
from zstrat.wire import Batch
from zstrat.worker import PushEncoding, Resources, StepRunner, work


class Creator:
    def register_optimizer(self, optimizer):
        return 7 + optimizer.name.count("/")

    def forget_optimizer(self, optimizer):
        pass


def bound(call):
    done = Future()
    done.set_result(None)
    return done


class Thread:
    """Calls a runner as the executor does, and answers its pulls."""

    def __init__(self, objects):
        self.posts = []
        self.pulls, self.pushes, self.endings = [], [], []
        resources = Resources(
            "worker", lambda code, *_: objects[code], InputContext, Limits()
        )
        for code in objects:
            if code == b"arguments":
                resources.put_arguments(1, code, ())
            else:
                resources.put_code(code, code)
        self.runner = StepRunner(
            resources,
            index=0,
            count=1,
            prepare=prepare,
            run_eager=run_eager,
            storage=None,
            bind=bound,
            carry_out=self.posts.append,
            end_lines=lambda: None,
            limits=Limits(),
            encoding=PushEncoding(lambda ps: True, {}),
        )

    def work(self):
        """Works until there is nothing to do."""
        now = self.runner.clock()
        while (
            now := work(self.runner, now, lambda call, post: call(post))
        ) is not None:
            self.runner.pipeline.validate()
        for post in self.posts:
            self.pulls += post.pulls
            self.pushes += [push for push, _ in post.pushes]
            self.endings += [*post.endings, *[ending for _, ending in post.pushes]]
        self.posts.clear()

    def answer(self, number):
        pull = self.pulls.pop(0)
        pull.rounds[7] = number
        values = [np.zeros((), np.float32) for _ in pull.reads.refs]
        self.runner.pipeline.arrived(pull, values, self.runner.clock())
        self.work()

    def dispatch(self, *steps):
        self.runner.dispatch([(Batch(b"window", 1, 1, list(steps), 0), ())], 0)
        self.work()


def make(*, draws):
    """Makes a thread with a function of windows, which draws elements or is called
    without any."""
    before = creator.set(Creator())
    try:
        optimizer = zs.LocalOptimizer(
            optax.sgd(0.1), optax.sgd(0.5), every=2, fragments=2
        )
    finally:
        creator.reset(before)
    one, two = (unbound(VariableSpec(n, f"v{n}", (), "float32", 0)) for n in (100, 101))

    def step(*iterators):
        batch = next(iterators[0]) if draws else np.float32(1)
        optimizer.apply_gradients((batch, batch), (one, two))
        return batch

    batches = zs.StepIterator(iter(np.arange(9, dtype=np.float32)), steady=True)
    args = (batches,) if draws else ()
    return Thread({b"window": optimizer.window(step), b"arguments": (args, {})})


@pytest.fixture
def thread():
    return make(draws=True)


def drawn(ending):
    return np.frombuffer(ending.data, np.float32).tolist()


def test_a_window_without_a_copy_puts_back_what_it_has_drawn_in_order(thread):
    """The window after it has drawn already, and would else run before it."""
    thread.dispatch(1, 2, 3)
    thread.answer(0)
    first = thread.endings.pop()
    assert drawn(first) == [0.0]
    residents = thread.runner.resources.residents
    residents.settle(1, failed=True)  # its contribution: the copies are lost
    thread.work()
    thread.answer(1)
    refused = thread.endings.pop(0)
    assert isinstance(from_wire(refused.completion.error), BusyError)
    thread.answer(1)
    thread.dispatch(4)
    thread.answer(2)
    assert [drawn(ending) for ending in thread.endings] == [[1.0], [2.0]]
    # Each is for the round that it has read, so it contributes.
    assert [push.contributions[0].weight for push in thread.pushes] == [1.0] * 3


def test_windows_that_draw_nothing_take_their_places_in_order_again():
    """If a window that was prepared behind one without a copy kept its place, a later
    window would have the same place, and contribute nothing."""
    thread = make(draws=False)
    thread.dispatch(1, 2, 3)
    thread.answer(0)
    thread.runner.resources.residents.settle(1, failed=True)
    thread.work()
    thread.answer(1)
    thread.dispatch(4, 5)
    while thread.pulls:
        thread.answer(len(thread.pushes))
    numbers = [ending.completion.step for ending in thread.endings]
    assert numbers == [1, 2, 3, 4, 5]
    assert [push.contributions[0].weight for push in thread.pushes] == [1.0] * 4
