"""What a process wants that is about to be ended, by numbers alone."""

from zstrat.saving import Countdown, Wish


def test_without_a_grace_period_it_leaves_at_once():
    countdown = Countdown(0.0)
    assert countdown.wish(5.0) is Wish.GO_ON
    countdown.announced(6.0)
    assert countdown.wish(6.0) is Wish.LEAVE
    assert countdown.is_due(Wish.LEAVE)


def test_it_saves_at_once_and_leaves_while_there_is_time():
    countdown = Countdown(100.0)
    countdown.ran(3.0)
    countdown.ran(2.0)
    countdown.announced(1000.0)
    countdown.announced(1050.0)  # said once more
    assert countdown.wish(1001.0) is Wish.SAVE
    assert countdown.is_due(Wish.SAVE)
    countdown.saved(7.0)
    assert not countdown.is_due(Wish.SAVE)
    assert countdown.wish(1079.0) is Wish.SAVE
    assert countdown.wish(1080.0) is Wish.LEAVE  # 2 * (3 + 7) seconds are left
    assert countdown.is_due(Wish.LEAVE)


def test_who_was_not_told_does_what_the_others_want():
    countdown = Countdown(100.0)
    assert not countdown.is_due(Wish.GO_ON)
    assert countdown.is_due(max(Wish.GO_ON, Wish.SAVE))
