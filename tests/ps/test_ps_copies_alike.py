"""Whatever happens to a primary, its backup becomes what the primary is, bit for bit:
values, slots, versions, and what it answers to repetitions."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_callers import SESSION
from ps_copies import OPTIMIZERS, Copies
from ps_rounds import close, contribute, members
from ps_trees import message, of_values
from tiers import examples

from zstrat.errors import InvalidArgumentError, ZstratError
from zstrat.wire import (
    LEASE,
    AskLeases,
    AskParts,
    CloseRound,
    Contribute,
    CreateOptimizer,
    CreateVariables,
    DeleteVariables,
    DetachBackup,
    Exchange,
    Fence,
    LoadEntry,
    LoadTensors,
    PinSnapshot,
    Pull,
    Push,
    PushPart,
    RaiseMark,
    Read,
    ReadSnapshot,
    ReleaseSnapshot,
    RoundMember,
    RoundOrder,
    StepContribution,
    StepRun,
    StoreEntry,
    StoreTensors,
    Update,
    UpdateOp,
    VariableEntry,
    Withdraw,
)

JUMP = 2**40
KEYS = range(4)
SHAPES = ((3,), (5, 2), (5, 2), ())

keys, steps = st.sampled_from(KEYS), st.integers(0, 6)
number = st.integers(-3, 3)


def value(key, filled):
    return np.full(SHAPES[key], filled, np.float32)


def update(key, op, filled):
    """An update with its operands; a scatter where the variable has rows."""
    if op is UpdateOp.SCATTER_ADD and len(SHAPES[key]) == 2:
        rows = np.array([abs(filled), 4, abs(filled)])
        return Update(key, op, 0, 2), (rows, np.full((3, 2), filled, np.float32))
    op = UpdateOp.ADD if op is UpdateOp.SCATTER_ADD else op
    return Update(key, op, 0, 1), (value(key, filled),)


operations = st.sampled_from(
    (UpdateOp.ADD, UpdateOp.ASSIGN, UpdateOp.SUB, UpdateOp.SCATTER_ADD)
)
updates = st.lists(st.builds(update, keys, operations, number), max_size=3)


def leased(*ranges):
    return b"".join(LEASE.pack(*each) for each in ranges)


leases = st.builds(
    leased,
    st.tuples(st.integers(1, 2), st.just(0), st.integers(0, 9), st.integers(0, 3)),
)


def push(step, part, low_water, made, writer=0, leases=b""):
    arrays = tuple(array for _, arrays in made for array in arrays)
    low = min(low_water, step) if writer else 0
    each = [update for update, _ in made]
    return Push(SESSION, step, part, low, each, arrays, writer, leases)


def part_of(step, part, attempt, names, made):
    plain = push(step, part, 0, made)
    return PushPart(
        SESSION, step, part, 0, attempt, list(names), plain.updates, plain.arrays
    )


def exchange(step, made, read):
    plain = push(step, 0, 0, made)
    reads = [Read(read, -1)]
    return Exchange(SESSION, step, 0, 0, plain.updates, reads, [], plain.arrays)


def create(key, filled):
    entry = VariableEntry(key, f"v{key}", True, False)
    return CreateVariables(SESSION, [entry], (value(key, filled),))


def store(key, start, filled):
    rows = np.full((2, 2), filled, np.float32) if key in (1, 2) else value(key, filled)
    at = start if key in (1, 2) else 0
    return StoreTensors(SESSION, [StoreEntry(key, 0, "", at)], (rows,))


remembered = st.one_of(
    st.builds(push, steps, st.integers(0, 1), st.just(0), updates, st.just(0), leases),
    st.builds(push, steps, st.just(0), steps, updates, st.just(SESSION)),
    st.builds(exchange, steps, updates, keys),
    st.builds(
        part_of, steps, st.integers(0, 2), st.integers(0, 2), st.text("ab"), updates
    ),
    st.builds(lambda s, a: AskParts(SESSION, s, a, 0), steps, st.integers(0, 3)),
    st.builds(
        lambda low, first: Fence(SESSION, low, [StepRun(first, first + 1)], [1, 2, 3]),
        st.integers(0, 3),
        steps,
    ),
    st.builds(lambda low: RaiseMark(SESSION, low), st.integers(0, 3)),
)
asked = st.one_of(
    remembered,
    remembered,
    st.builds(create, keys, number),
    st.builds(lambda key: DeleteVariables(SESSION, [key]), keys),
    st.builds(lambda key: Withdraw(SESSION, [key], [3]), keys),
    st.builds(lambda key: Pull(SESSION, [Read(key, -1)]), keys),
    st.builds(store, keys, st.integers(0, 3), number),
)
interruptions = st.sampled_from(("cut", "turn", "hold", "release"))


class Story:
    """What is asked of a primary, one thing before the answer to the other."""

    def __init__(self, rig):
        self.rig = rig
        self.waiting = []

    async def tell(self, events):
        for event in events:
            self.happen(event)
            await asyncio.sleep(0)

    def happen(self, event):
        links = self.rig.links
        if not isinstance(event, str):
            self.waiting.append(asyncio.ensure_future(answer_of(self.rig, event)))
        elif event == "cut" and links:
            self.rig.link.cut()
            self.rig.link.connect()
        elif event == "hold" and links:
            self.rig.link.hold()
        elif event == "release" and links:
            self.rig.link.release()

    async def end(self):
        """Until all is answered, by both."""
        if self.rig.links:
            self.rig.link.release()
        self.happen(Push(SESSION, -1, 0, 0, [], ()))
        async with asyncio.timeout(60):
            return await asyncio.gather(*self.waiting)


async def answer_of(rig, asked, service=None):
    """The answer, or what kind of an error."""
    try:
        return await rig.ask(asked, service)
    except ZstratError as error:
        return type(error)


async def all_of(rig, service, key, optimizers):
    """Version, value and slots; None if there is no such variable."""
    pulled = await answer_of(rig, Pull(SESSION, [Read(key, -1)]), service)
    if isinstance(pulled, type):
        return None
    number = 70 + key
    pinned = await rig.ask(PinSnapshot(SESSION, number, [key], optimizers), service)
    tensors = {}
    for place, entry in enumerate(pinned.tensors):
        size = int(np.prod(entry.shape)) * np.dtype(entry.dtype).itemsize
        reading = ReadSnapshot(SESSION, number, place, 0, size)
        (data,) = (await rig.ask(reading, service)).arrays
        tensors[entry.leaf] = entry.dtype, entry.shape, entry.rows, data.tobytes()
    await rig.ask(ReleaseSnapshot(SESSION, number), service)
    return pulled.versions[0], tensors


def repetitions():
    """Whatever may have been said before; which of it was, the answers tell."""
    for step in range(7):
        for part in range(3):
            yield push(step, part, 0, [])
            yield push(step, part, 0, [], SESSION)
        for attempt in range(4):
            yield AskParts(SESSION, step, attempt, 0)
            yield part_of(step, attempt, attempt, "c", [])


async def compare(rig, optimizers=()):
    """The two go apart, and are what they were together; and they take the same for
    repetitions."""
    await rig.ask(DetachBackup(SESSION, 8))
    await rig.promote(9)
    await alike(rig, list(optimizers))
    asked = AskLeases(SESSION)
    done = [await rig.ask(asked, service) for service in (rig.primary, rig.backup)]
    assert done[0].arrays[0].tobytes() == done[1].arrays[0].tobytes()
    for again in repetitions():
        answers = [
            await answer_of(rig, again, service)
            for service in (rig.primary, rig.backup)
        ]
        one, other = (
            answer if isinstance(answer, type) else told(answer) for answer in answers
        )
        assert one == other, again


def told(answer):
    """All that is not a version, which has jumped."""
    return type(answer), [
        getattr(answer, name, None)
        for name in ("applied", "parts", "push_error", "pull_error")
    ]


async def alike(rig, optimizers):
    for key in KEYS:
        one = await all_of(rig, rig.primary, key, optimizers)
        other = await all_of(rig, rig.backup, key, optimizers)
        if one is not None:
            one = one[0] + JUMP, one[1]
        assert one == other


@given(
    before=st.lists(asked, max_size=15),
    during=st.lists(asked),
    after=st.lists(asked | interruptions, max_size=25),
)
@examples(60)
def test_a_backup_becomes_what_its_primary_is(before, during, after):
    run_story(before, during, after)


@given(
    before=st.lists(remembered, max_size=10),
    after=st.lists(remembered, min_size=3, max_size=25),
)
@examples(100)
def test_a_backup_remembers_the_same(before, after):
    run_story(before, [], after)


def run_story(before, during, after):
    async def run():
        rig = Copies()
        story = Story(rig)
        for key in (0, 1, 3):
            story.happen(create(key, key))
        await story.tell(before)
        attaching = asyncio.ensure_future(rig.attach())
        await story.tell(during)
        await attaching
        await story.tell(after)
        await story.end()
        await compare(rig)
        await rig.close()

    asyncio.run(run())


def gradient(step, key, filled, rows):
    if rows:
        at, some = np.array([4, 1]), np.full((2, 2), filled, np.float32)
        each, arrays = Update(key, UpdateOp.OPTIMIZE_ROWS, 9, 2), (at, some)
    else:
        each, arrays = Update(key, UpdateOp.OPTIMIZE, 9, 1), (value(key, filled),)
    return Push(SESSION, step, 0, 0, [each], arrays)


gradients = st.lists(
    st.one_of(
        st.builds(gradient, steps, st.sampled_from((1, 2)), number, st.booleans()),
        st.builds(lambda key: Pull(SESSION, [Read(key, -1)]), keys),
        st.builds(
            lambda key: LoadTensors(SESSION, [LoadEntry(key, 9, "", "", "", 0, 0, 0)]),
            st.sampled_from((1, 2)),
        ),
        st.builds(
            lambda key, at, filled: StoreTensors(
                SESSION,
                [StoreEntry(key, 9, "[0].trace", at, True)],
                (np.full((2, 2), filled, np.float32),),
            ),
            st.sampled_from((1, 2)),
            st.integers(0, 3),
            number,
        ),
    ),
    max_size=6,
)


@given(before=gradients, during=gradients, after=gradients)
@settings(max_examples=12)
def test_slots_are_alike(before, during, after):
    async def run():
        rig = Copies()
        story = Story(rig)
        await rig.ask(CreateOptimizer(SESSION, 9, "momentum", b"momentum"))
        for key in KEYS:
            story.happen(create(key, key))
        values = {key: value(key, 0) for key in (1, 2)}
        told = of_values(OPTIMIZERS[b"momentum"](), values)
        story.happen(message(SESSION, 9, told))
        await story.tell(before)
        attaching = asyncio.ensure_future(rig.attach())
        await story.tell(during)
        await attaching
        await story.tell(after)
        await story.end()
        await compare(rig, [9])
        await rig.close()

    asyncio.run(run())


def test_who_took_the_key_of_a_variable_is_in_no_tree_of_it():
    """Of another shape: its tree would not fit, and the copy be of no use."""

    async def run():
        rig = Copies()
        await rig.ask(CreateOptimizer(SESSION, 9, "momentum", b"momentum"))
        for key in (1, 2):
            await rig.ask(create(key, key))
        values = {key: value(key, 0) for key in (1, 2)}
        await rig.ask(message(SESSION, 9, of_values(OPTIMIZERS[b"momentum"](), values)))
        await rig.ask(DeleteVariables(SESSION, [2]))
        entry = VariableEntry(2, "other", True, False)
        await rig.ask(CreateVariables(SESSION, [entry], (np.zeros(7, "f4"),)))
        await rig.attach()
        update = Update(2, UpdateOp.OPTIMIZE, 9, 1)
        stranger = Push(SESSION, 1, 0, 0, [update], (np.zeros(7, "f4"),))
        for service in (rig.primary, rig.backup):
            with pytest.raises(ZstratError, match=r"'other'.*'momentum'"):
                await rig.ask(stranger, service)
            await rig.promote()
        await rig.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_taken_over", [False, True])
def test_who_writes_a_slot_by_hand_need_not_say_that_it_has_rows(is_taken_over):
    """As `optimizer.state` is assigned, before or after a backup takes over: the next
    gradient of some rows is added to what was written, on either of the two."""

    async def run():
        rig = Copies()
        await rig.ask(CreateOptimizer(SESSION, 9, "momentum", b"momentum"))
        await rig.ask(create(1, 0))
        told = of_values(OPTIMIZERS[b"momentum"](), {1: value(1, 0)})
        await rig.ask(message(SESSION, 9, told))
        await rig.ask(gradient(1, 1, 1, rows=False))
        await rig.attach()
        entry = StoreEntry(1, 9, "[0].trace", 0)
        written = StoreTensors(SESSION, [entry], (value(1, 2),))
        if not is_taken_over:
            await rig.ask(written)
        await rig.ask(DetachBackup(SESSION, 8))
        await rig.promote(9)
        for service in (rig.primary, rig.backup):
            if is_taken_over:
                await rig.ask(written, service)
            await rig.ask(gradient(2, 1, 0, rows=True), service)
            pulled = await rig.ask(Pull(SESSION, [Read(1, -1)]), service)
            # One step of 0.1, and of the rows 1 and 4 one of 0.1 times 0.9 times 2.
            wanted = np.float32([[-0.1], [-0.28], [-0.1], [-0.1], [-0.28]])
            np.testing.assert_allclose(pulled.arrays[0], wanted * [1, 1], rtol=1e-5)
        await rig.close()

    asyncio.run(run())


def contributed(step, attempt, filled):
    given = {1: value(1, filled)} if step % 2 else {}
    given[2] = np.array([4, abs(filled)]), np.full((2, 2), filled, np.float32)
    return contribute(step, given, attempt, 9)


rounds = st.lists(
    st.one_of(
        st.builds(contributed, steps, st.integers(1, 2), number),
        st.builds(
            lambda n, named, kept, over: close(
                n, members(*sorted(named)), kept=kept, over=over, optimizer=9
            ),
            st.integers(0, 3),
            st.sets(st.integers(0, 3), max_size=2),
            st.lists(steps, max_size=2),
            steps,
        ),
        st.builds(lambda low: RaiseMark(SESSION, low), st.integers(0, 6)),
        st.builds(lambda key: DeleteVariables(SESSION, [key]), st.just(2)),
    ),
    max_size=10,
)


@given(before=rounds, during=rounds, after=rounds)
@examples(40)
def test_rounds_are_alike(before, during, after):
    """What waits, too: the next round is the same on both."""

    async def run():
        rig = Copies()
        story = Story(rig)
        for key in KEYS:
            await rig.ask(create(key, key))
        await rig.ask(CreateOptimizer(SESSION, 9, "momentum", b"momentum"))
        values = {key: value(key, 0) for key in (1, 2)}
        told = of_values(OPTIMIZERS[b"momentum"](), values)
        await rig.ask(message(SESSION, 9, told))
        await story.tell([contributed(step, 1, step) for step in range(4)])
        await story.tell(before)
        attaching = asyncio.ensure_future(rig.attach())
        await story.tell(during)
        await attaching
        await story.tell(after)
        await story.end()
        await compare(rig, [9])
        for asked in next_rounds():
            answers = [
                await answer_of(rig, asked, service)
                for service in (rig.primary, rig.backup)
            ]
            assert answers[0] == answers[1], asked
        await alike(rig, [9])
        await rig.close()

    asyncio.run(run())


def next_rounds():
    """Orders to close any round with any run of any step; the answers tell which of
    them are here."""
    for number in range(6):
        for step in range(7):
            for attempt in (1, 2):
                named = members(step, attempt=attempt)
                yield close(number, named, kept=range(7), optimizer=9)


def test_a_contribution_whose_step_is_over_is_copied():
    async def run():
        rig = Copies()
        for key in KEYS:
            await rig.ask(create(key, key))
        await rig.ask(CreateOptimizer(SESSION, 9, "momentum", b"momentum"))
        values = {key: value(key, 0) for key in (1, 2)}
        told = of_values(OPTIMIZERS[b"momentum"](), values)
        await rig.ask(message(SESSION, 9, told))
        await rig.ask(contributed(2, 1, 3))
        await rig.ask(RaiseMark(SESSION, 5))
        await rig.attach()
        for service in (rig.primary, rig.backup):
            assert service.statistics()["contributions"] == 1
        await rig.close()

    asyncio.run(run())


def test_a_backup_keeps_no_earlier_run_of_a_step_for_one_of_two_optimizers():
    """A later run is a member of a round of the first optimizer, and waits for one of
    the second, when the frozen worker of the earlier run goes on."""

    async def run():
        rig = Copies()
        await rig.attach()
        for key in KEYS:
            await rig.ask(create(key, key))
        for optimizer, key in ((9, 1), (10, 2)):
            await rig.ask(CreateOptimizer(SESSION, optimizer, "sgd", b"momentum"))
            values = {key: value(key, 0)}
            told = of_values(OPTIMIZERS[b"momentum"](), values)
            await rig.ask(message(SESSION, optimizer, told))

        def run_of(step, attempt):
            given = [StepContribution(step, attempt, n, 0, 1.0, False) for n in (9, 10)]
            updates = [Update(k, UpdateOp.OPTIMIZE, n, 1) for n, k in ((9, 1), (10, 2))]
            arrays = value(1, 1), value(2, 1)
            return Contribute(SESSION, given, updates, arrays)

        await rig.ask(run_of(2, 2))
        order = RoundOrder(9, 0, 0, [RoundMember(2, 2, 1.0)])
        await rig.ask(CloseRound(SESSION, order, [], 0, ()))
        await rig.ask(run_of(2, 1))
        await rig.promote()  # waits until it has applied all
        for service in (rig.primary, rig.backup):
            assert service.statistics()["contributions"] == 1
        await rig.close()

    asyncio.run(run())


@given(st.lists(st.tuples(*[st.integers(0, n) for n in (2, 2, 30, 5)]), max_size=30))
def test_what_is_done_of_leased_datasets_is_joined(ranges):
    """Beside a set of places; a range without examples forgets its dataset."""

    async def run():
        rig, done = Copies(), set()
        for step, (dataset, epoch, start, size) in enumerate(ranges):
            again = leased((dataset, epoch, start, size))
            if not size:
                done = {place for place in done if place[0] != dataset}
            done |= {(dataset, epoch, start + n) for n in range(size)}
            for _ in range(2):  # the second time it is a duplicate
                await rig.ask(push(step, 0, 0, [], leases=again))
        answer = await rig.ask(AskLeases(SESSION))
        found = [*LEASE.iter_unpack(answer.arrays[0].tobytes())]
        places = [(d, e, start + n) for d, e, start, size in found for n in range(size)]
        assert sorted(places) == sorted(done)
        runs = {(d, e, n) for d, e, n in done if (d, e, n - 1) not in done}
        assert len(found) == len(runs)
        with pytest.raises(InvalidArgumentError):
            await rig.ask(push(50, 0, 0, [], leases=b"1"))

    asyncio.run(run())
