"""What a lost program has left in two copies, and who goes on with it."""

from dataclasses import replace

import pytest
from ps_callers import SESSION, caller
from ps_copies import Copies, create, later, pull, push, turns

from zstrat.errors import BusyError, InvalidArgumentError, UnavailableError
from zstrat.wire import (
    AttachBackup,
    BackupLost,
    CloseSession,
    DetachBackup,
    Done,
    Job,
    OpenSession,
    PromoteBackup,
    Withdraw,
)

LONG = 6.0
"""Seconds: patience and reconnect, by default."""


class Left(Copies):
    """Of a session that is called "run". ``now`` is what their clocks say."""

    now = 100.0

    def __init__(self):
        super().__init__("run")
        self.session = SESSION

    def service(self, **options):
        return super().service(clock=lambda: self.now, **options)

    def opening(self, replicas=1):
        return OpenSession(self.session, 0, 1, [], name="run", replicas=replicas)

    def lose_program(self):
        self.primary.lost(self.chief, "killed")

    async def next_program(self, replicas=1):
        """It comes to the process of the primary, and to that of the backup."""
        self.session += 1
        self.chief = caller(Job.CHIEF, self.session)
        lost_at = self.primary.coordinator_lost_at
        opened = await self.ask(self.opening(replicas))
        self.backup.role.follow_new_owner(self.primary.owner, lost_at)
        return opened

    async def value(self, service):
        asked = replace(pull(), session=self.session)
        return (await self.ask(asked, service)).arrays[0]

    def is_sure(self, service):
        return service.role.copy_of_lost_program(
            0, self.primary.coordinator_lost_at
        ).is_sure


@pytest.fixture
async def left():
    rig = Left()
    await rig.ask(create(0, 1))
    await rig.attach()
    await rig.ask(push(1))
    yield rig
    await rig.close()


@pytest.mark.parametrize("seconds", [0.0, LONG / 2, LONG])
@pytest.mark.parametrize("lost", ["primary", "backup"])
async def test_who_is_left_is_sure_if_the_program_was_lost_long_before(
    left, lost, seconds
):
    assert not left.is_sure(left.primary)  # the other one is there, and decides
    left.lose_program()
    left.now += seconds
    if lost == "backup":
        left.link.cut()
        service = left.primary
    else:
        left.backup.lost(left.talkers[-1], "killed")
        service = left.backup
    assert left.is_sure(service) == (seconds >= LONG)
    # A program that came in vain, and gave no order, has changed nothing of that.
    left.now += 1.0
    await left.next_program()
    left.lose_program()
    assert left.is_sure(service) == (seconds >= LONG)


@pytest.mark.parametrize("cut", ["process", "store"])
async def test_a_program_that_lost_one_of_its_two_connections_is_there(left, cut):
    links = {"store": left.chief, "process": caller(Job.CHIEF, SESSION)}
    await left.ask(left.opening(), peer=links["process"])
    left.primary.lost(links.pop(cut), "cut")
    assert left.primary.coordinator_lost_at is None
    left.now += LONG
    left.session += 1
    with pytest.raises(BusyError):
        await left.ask(left.opening(), peer=caller(Job.CHIEF, left.session))
    left.link.cut()  # the program hears it, by the connection that it has
    (remaining,) = links.values()
    assert any(isinstance(each, BackupLost) for each in remaining.notices)
    # It may have had the backup go on alone before it was lost, too.
    left.primary.lost(remaining, "killed")
    assert not left.is_sure(left.primary)
    assert not left.primary.owner.alive


async def test_who_is_left_counts_from_the_program_that_gave_the_last_orders(left):
    left.lose_program()
    left.now += 1.0
    await left.next_program()  # it is there, and has given none
    left.now += LONG
    left.link.cut()
    assert left.is_sure(left.primary)


async def test_a_primary_that_goes_on_alone_is_sure(left):
    await left.ask(DetachBackup(left.session, 2))
    left.lose_program()
    assert left.is_sure(left.primary)


async def test_a_backup_that_takes_the_place_begins_its_steps_anew(left):
    left.lose_program()
    await left.next_program()
    told = left.backup.role.copy_of_lost_program(0, None)
    assert (told.is_primary, told.is_whole, told.variables) == (False, True, 2)
    assert told.origin == left.primary.owner.origin
    promote = PromoteBackup(left.session, 2)
    assert await left.ask(promote, left.backup) == Done()
    opened = await left.ask(left.opening(), left.backup)
    assert (opened.resumed, opened.origin) == (True, told.origin)
    its_own = replace(push(1), session=left.session)
    assert (await left.ask(its_own, left.backup)).applied
    assert (await left.value(left.backup)).tolist() == [2.0] * 3


async def test_two_copies_go_on_together_in_a_newer_view(left):
    copies = [left.primary, left.backup]

    def told():
        return [service.role.copy_of_lost_program(0, None) for service in copies]

    left.lose_program()
    await left.next_program()
    named = [copy.partner for copy in told()]
    assert named == [left.incarnation, told()[0].incarnation]
    assert not any(copy.is_sure for copy in told())
    attach = AttachBackup(left.session, 2, "nowhere:1", left.incarnation)
    assert await left.ask(attach) == Done()
    assert await left.ask(attach) == Done()  # asked again, it is so
    assert len(left.links) == 1  # nothing was copied
    assert [copy.view for copy in told()] == [2, 2]
    # A step of the same number is another one, on both; and so is what comes twice.
    its_own = replace(push(1), session=left.session)
    assert [(await left.ask(its_own)).applied for _ in range(2)] == [True, False]
    promote = PromoteBackup(left.session, 3)
    assert await left.ask(promote, left.backup) == Done()
    assert not (await left.ask(its_own, left.backup)).applied
    assert (await left.value(left.backup)).tolist() == [2.0] * 3
    await turns()
    assert [copy.partner for copy in told()] == [0, 0]


async def test_a_program_is_lost_again_before_both_have_heard_of_it(left):
    left.lose_program()
    await left.next_program()
    left.link.hold()
    attach = AttachBackup(left.session, 2, "nowhere:1", left.incarnation)
    asking = later(left, attach)
    await turns()
    assert not asking.done()
    views = [
        service.role.copy_of_lost_program(0, None).view
        for service in (left.primary, left.backup)
    ]
    assert views == [2, 1]
    left.lose_program()
    left.link.release()
    assert await asking == Done()
    await left.next_program()
    await left.ask(AttachBackup(left.session, 3, "nowhere:1", left.incarnation))
    assert left.backup.role.copy_of_lost_program(0, None).view == 3


async def test_a_backup_that_is_cut_off_is_not_kept(left):
    left.lose_program()
    await left.next_program()
    left.link.cut()
    attach = AttachBackup(left.session, 2, "nowhere:1", left.incarnation)
    with pytest.raises(UnavailableError):
        await left.ask(attach)


async def test_what_is_kept_of_a_program_before_is_kept_in_both_copies(left):
    left.lose_program()
    await left.next_program()
    await left.ask(DetachBackup(left.session, 2))
    left.host(view=3)
    attach = AttachBackup(left.session, 3, "nowhere:1", left.incarnation)
    assert await left.ask(attach) == Done()
    # A creation that fails elsewhere takes back what is new, and no more.
    assert await left.ask(Withdraw(left.session, [0, 1], [])) == Done()
    assert await left.ask(PromoteBackup(left.session, 4), left.backup) == Done()
    assert (await left.value(left.backup)).tolist() == [1.0] * 3


async def test_what_a_program_without_second_copies_has_left_is_there():
    rig = Copies("run")
    rig.primary.handle(caller(Job.CHIEF, SESSION), CloseSession(SESSION, False))
    for session, replicas in ((11, 0), (12, 1), (13, 1)):
        chief = caller(Job.CHIEF, session)
        opening = OpenSession(session, 0, 1, [], name="run", replicas=replicas)
        await rig.ask(opening, peer=chief)
        told = rig.primary.role.copy_of_lost_program(0, None)
        assert (told.view, told.is_primary, told.is_sure) == (0, True, True)
        rig.primary.lost(chief, "killed")
    await rig.close()


async def test_two_copies_are_not_taken_for_one(left):
    left.lose_program()
    with pytest.raises(InvalidArgumentError, match="replicas=1"):
        await left.next_program(replicas=0)
    assert (await left.next_program()).resumed
