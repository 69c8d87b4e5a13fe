"""Which process has which copy: any losses, returns and answers, in any order."""

import dataclasses

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zstrat.coordinator.replication import (
    Attach,
    Copy,
    CopyPhase,
    Detach,
    Drop,
    Host,
    Lose,
    Promote,
    Serve,
    StorePlacement,
    Swap,
)

PLACES = st.integers(0, 2)
"""Processes, and stores; where there are two of them, the last one is the first."""


@dataclasses.dataclass(eq=False)
class Held:
    """A copy in the memory of a process, as a server would have it."""

    store: int
    view: int
    address: str
    is_primary: bool = False
    is_whole: bool = False
    backup: "Held | None" = None
    third: "Held | None" = None
    is_beside: bool = False
    """A third copy that does not count yet."""
    has: set = dataclasses.field(default_factory=set)


class Stores(RuleBasedStateMachine):
    """Processes that take each order as `zstrat.wire` says they do, or are away."""

    count = 3
    replicas = 1

    def __init__(self):
        super().__init__()
        homes = [f"home{n}" for n in range(self.count)]
        self.placement = StorePlacement(homes, self.replicas)
        self.up, self.lives = [True] * self.count, [0] * self.count
        self.memory = [
            {n: Held(n, 1, homes[n], is_primary=True)} for n in range(self.count)
        ]
        self.known = [True] * self.count
        """What the program believes of them."""
        self.news = [[] for _ in range(self.count)]
        self.lines = list(homes)
        self.acked = [set() for _ in range(self.count)]
        self.asked, self.strays = {}, []
        """Orders that wait for their answer, and those that nobody waits for."""
        self.lost, self.pushes = set(), 0
        for number in range(self.count):
            self.placement.joined(number, 0)
        self.take(self.placement.start())
        self.settles()

    def take(self, orders):
        for order in orders:
            match order:
                case Drop(store, view, process):
                    self.drop(store, view, process)
                case Serve(store, _, primary):
                    self.lines[store] = primary.address
                    self.lost.discard(store)
                case Lose(store):
                    self.lost.add(store)
                case _:
                    if order.store in self.asked:
                        self.strays.append(self.asked[order.store])
                    self.asked[order.store] = order, tuple(self.lives)

    def drop(self, store, view, process):
        held = self.memory[process].get(store)
        if self.up[process] and held is not None and held.view <= view:
            del self.memory[process][store]

    def at(self, address, store):
        """The copy there, and its process, if that answers."""
        for number, memory in enumerate(self.memory):
            held = memory.get(store)
            if held is not None and held.address == address and self.up[number]:
                return held
        return None

    def carry_out(self, order, lives):
        """The outcome: "done" or "refused", or None if there is no answer."""
        store, view = order.store, order.view
        match order:
            case Swap(process=process, backup=backup):
                if not self.up[process] or lives[process] != self.lives[process]:
                    return None
                return self.swap(order, self.at(backup.address, store))
            case Host(process=process):
                if not self.up[process] or lives[process] != self.lives[process]:
                    return None
                held = self.memory[process].get(store)
                if held is not None and held.view >= view:
                    return "done" if held.view == view else "refused"
                address = f"copy{process}.{store}.{view}"
                held = Held(store, view, address, is_beside=order.beside)
                self.memory[process][store] = held
                return "done"
            case Promote(backup=backup, partner=partner):
                held = self.at(backup.address, store)
                if held is None:
                    return None
                if held.is_beside:
                    return "never counted"
                if not held.is_whole or held.view > view:
                    return "refused"
                if not held.is_primary or partner is None:
                    held.backup = held.third = None
                if partner is not None and held.backup is None:
                    held.backup = self.at(partner.address, store) or Held(
                        store, 0, "gone"
                    )
                held.is_primary, held.view = True, view
                return "done"
        primary = self.at(self.lines[store], store)
        if primary is None:
            return None
        if not primary.is_primary or primary.view > view:
            return "refused"
        primary.view = view
        if isinstance(order, Detach):
            primary.backup = primary.third = None
            return "done"
        return self.attach(order, primary, self.at(order.backup.address, store))

    def attach(self, order, primary, backup):
        if backup is None or backup.is_primary:
            return "refused"
        if primary.third is not None and primary.third is not backup:
            primary.third = None
        if order.beside:
            if not self.reaches(primary, primary.backup):
                return "refused"
            primary.third = backup
        elif primary.third is backup:
            if not self.reaches(primary, primary.backup):
                return "refused"
            primary.backup, primary.third, backup.is_beside = backup, None, False
        elif primary.backup is backup:
            primary.third = None
            return "done" if self.reaches(primary, backup) else "refused"
        else:
            primary.backup = backup
        backup.is_whole, backup.has, backup.view = True, set(primary.has), order.view
        return "done"

    def reaches(self, primary, backup):
        if backup is None or backup.is_primary:
            return False
        return self.at(backup.address, primary.store) is backup

    def swap(self, order, backup):
        memory, store = self.memory[order.process], order.store
        primary = memory.get(store)
        address = f"copy{order.process}.{store}.{order.view}"
        if primary is not None and primary.address == address:
            return "done"
        if primary is None or not primary.is_primary or primary.view > order.view:
            return "refused"
        if backup is not primary.backup or not self.reaches(primary, backup):
            return "refused"
        backup.has = set(primary.has)
        memory[store] = Held(
            store, primary.view, address, is_whole=True, has=set(primary.has)
        )
        return "done"

    @rule(process=PLACES, keeps=st.booleans())
    def goes(self, process, keeps):
        """It is killed, or frozen."""
        process %= self.count
        if not keeps:
            self.memory[process].clear()
            self.lives[process] += 1
        if self.up[process]:
            self.up[process] = False
            self.news[process].append("lost")

    @rule(process=PLACES)
    def returns(self, process):
        process %= self.count
        if not self.up[process]:
            self.up[process] = True
            self.news[process].append("joined")

    @rule(process=PLACES)
    def hears(self, process):
        """The program hears the next of what happened to a process."""
        process %= self.count
        if self.news[process]:
            happened = self.news[process].pop(0)
            if happened == "lost":
                self.take(self.placement.process_lost(process, "silence"))
            elif not self.news[process]:  # else it is away again
                self.take(self.placement.joined(process, self.lives[process]))

    @rule(store=PLACES)
    def line_breaks(self, store):
        """The link to a primary is lost, while that to its process may be open."""
        store %= self.count
        reason = "cut"
        if not self.placement.has_or_wants_backup(store):
            return
        self.take(self.placement.primary_lost(store, self.lines[store], reason))

    @rule(store=PLACES)
    def complains(self, store):
        """A primary cannot reach its backup."""
        store %= self.count
        held = self.at(self.lines[store], store)
        if held is not None and held.is_primary and held.backup is not None:
            self.take(self.placement.stores[store].backup_lost(held.view, "cut"))

    @rule(store=PLACES, is_heard=st.booleans())
    def answers(self, store, is_heard):
        store %= self.count
        if store not in self.asked:
            return
        order, lives = self.asked[store]
        outcome = self.carry_out(order, lives)
        del self.asked[store]
        placement = self.placement
        if outcome is None or not is_heard:
            self.take(placement.unanswered(order, "no answer"))
        elif outcome != "done":
            never = outcome == "never counted"
            self.take(placement.refused(order, "no", never_counted=never))
        else:
            match order:
                case Host(process=process, view=view):
                    address = f"copy{process}.{store}.{view}"
                    self.take(placement.hosted(order, address, view))
                case Swap(process=process, view=view):
                    address = f"copy{process}.{store}.{view}"
                    self.take(placement.swapped(order, address, view))
                case Attach():
                    self.take(placement.attached(order))
                case Detach():
                    self.take(placement.detached(order))
                case Promote():
                    self.take(placement.promoted(order))

    @precondition(lambda self: self.strays)
    @rule(data=st.data())
    def arrives_late(self, data):
        at = data.draw(st.integers(0, len(self.strays) - 1))
        order, lives = self.strays.pop(at)
        self.carry_out(order, lives)

    @rule()
    def settles(self):
        """The program hears all that happened, and all answers."""
        for process in range(self.count):
            while self.news[process]:
                self.hears(process)
        for _ in range(16):
            for store in list(self.asked):
                self.answers(store, True)

    @rule(process=PLACES, settles=st.booleans())
    def is_lost(self, process, settles):
        """It is killed, while all others are there: their copies take its place, also
        amid a move."""
        process %= self.count
        if settles:
            self.settles()
        calm = all(self.up) and not any(self.news)
        sound = [s.number for s in self.placement.stores if calm and self.is_safe(s)]
        self.goes(process, False)
        self.settles()
        for store in sound:
            assert store not in self.lost
            serving = self.at(self.lines[store], store)
            assert serving.is_primary
            assert self.acked[store] <= serving.has

    def is_safe(self, store):
        """Whether the program knows of two whole copies, and its primary reaches its
        backup."""
        if store.phase is CopyPhase.PROMOTING:
            return store.is_third_in_sync and store.third is not None
        return store.is_paired

    @rule()
    def forgives(self):
        self.take(self.placement.retry_refused())

    @rule(store=PLACES, zombie=st.booleans())
    def push(self, store, zombie):
        """To where the program sends it, or to any that thinks that it serves."""
        store %= self.count
        primary = self.at(self.lines[store], store)
        if zombie:
            held = [memory[store] for memory in self.memory if store in memory]
            found = [copy for copy in held if copy.is_primary]
            primary = found[0] if found else None
        if primary is None or not primary.is_primary:
            return
        self.pushes += 1
        backup = primary.backup
        if backup is not None:
            if self.at(backup.address, store) is not backup or backup.is_primary:
                primary.has.add(self.pushes)  # it waits, and is not acknowledged
                return
            backup.has.add(self.pushes)
        if primary.third is not None and not self.reaches(primary, primary.third):
            primary.third = None
        elif primary.third is not None:
            primary.third.has.add(self.pushes)
        primary.has.add(self.pushes)
        if primary.address == self.lines[store]:
            assert self.acked[store] <= primary.has, "it lacks what was acknowledged"
            self.acked[store].add(self.pushes)

    @invariant()
    def one_primary_in_a_view(self):
        views = [
            (held.store, held.view)
            for memory in self.memory
            for held in memory.values()
            if held.is_primary
        ]
        assert len(views) == len(set(views))

    @invariant()
    def stores_are_valid(self):
        self.placement.validate()

    def teardown(self):
        """All are back, and stay: each store that can be is served, and has two."""
        for process in range(self.count):
            self.returns(process)
            while self.news[process]:
                self.hears(process)
        for _ in range(100):
            self.forgives()
            for store in list(self.asked):
                self.answers(store, True)
        assert not self.asked
        for store in self.placement.stores:
            number = store.number
            if store.phase is CopyPhase.EMPTY:
                assert number in self.lost
                assert not any(self._serves(number, memory) for memory in self.memory)
                continue
            wanted = CopyPhase.PAIRED if self.replicas else CopyPhase.ALONE
            assert (store.phase, store.target) == (wanted, None), store
            assert number not in self.lost
            primary = self.at(self.lines[number], number)
            assert primary.is_primary
            assert self.acked[number] <= primary.has
            if not self.replicas:
                assert primary.backup is None
                continue
            assert primary.backup.has >= self.acked[number]
            assert self.at(primary.backup.address, number) is primary.backup

    def _serves(self, store, memory):
        """A copy that has all and knows that it is the primary, as the program does."""
        held = memory.get(store)
        if held is None or held.address != self.lines[store]:
            return False
        return held.is_primary and self.acked[store] <= held.has


class TwoProcesses(Stores):
    count = 2


class MovingStores(Stores):
    """Stores that are told to move, or to stay, meanwhile."""

    @rule(store=PLACES, process=PLACES)
    def moves(self, store, process):
        self.take(self.placement.move(store % self.count, process % self.count))

    @rule(store=PLACES, process=PLACES)
    def arrives(self, store, process):
        """Where nothing is lost meanwhile it is served there."""
        store, target = store % self.count, process % self.count
        self.settles()
        self.forgives()
        self.settles()
        place = self.placement.stores[store]
        is_served = place.phase in (CopyPhase.ALONE, CopyPhase.PAIRED)
        if not (all(self.up) and is_served):
            return
        self.moves(store, target)
        self.settles()
        assert (place.primary.process, place.target) == (target, None)
        serving = self.at(self.lines[store], store)
        assert serving.is_primary
        assert self.acked[store] <= serving.has
        assert store in self.memory[target]

    @rule(store=PLACES)
    def stays(self, store):
        self.take(self.placement.cancel_move(store % self.count, "the program says so"))

    @rule(store=PLACES)
    def evicts(self, store):
        self.take(self.placement.evict(store % self.count))


class MovingBareStores(MovingStores):
    replicas = 0


OFTEN = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestThreeProcesses, TestTwoProcesses = Stores.TestCase, TwoProcesses.TestCase
TestMoves = MovingStores.TestCase
TestMovesOfOneCopy = MovingBareStores.TestCase
TestThreeProcesses.settings = TestTwoProcesses.settings = OFTEN
TestMoves.settings = TestMovesOfOneCopy.settings = OFTEN


def test_each_store_gets_its_backup_in_the_next_process():
    placement = StorePlacement(["a", "b", "c"])
    for number in range(3):
        assert placement.joined(number, 0) == []
    orders = placement.start()
    assert orders == [Host(0, 2, 1), Host(1, 2, 2), Host(2, 2, 0)]
    assert placement.without_backup == 3
    for order in orders:
        (attach,) = placement.hosted(order, f"{order.process}:7", 5)
        assert attach.backup == Copy(order.process, 0, f"{order.process}:7", 5)
        assert placement.attached(attach) == []
    assert placement.without_backup == 0


def test_a_store_is_served_whose_old_primary_is_lost_as_it_moves():
    """Its process keeps a copy, which was to be the backup of the new primary."""
    placement = StorePlacement(["a", "b", "c"])
    for number in range(3):
        placement.joined(number, 0)
    for order in placement.start():
        (attach,) = placement.hosted(order, f"{order.process}:7", 5)
        placement.attached(attach)
    (swap,) = placement.move(0, 1)
    (promote,) = placement.swapped(swap, "0:8", 6)
    assert promote.partner is not None
    orders = placement.process_lost(0, "killed")
    (again,) = [order for order in orders if isinstance(order, Promote)]
    assert (again.store, again.partner) == (0, None)
    served = placement.promoted(again)
    assert [order.primary.process for order in served if isinstance(order, Serve)] == [
        1
    ]
