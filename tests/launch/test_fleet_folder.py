"""What a fleet does with what it finds on this machine: folders, logs, programs that do
not answer. No daemon is started."""

import subprocess
import threading
from types import SimpleNamespace

import pytest
from strikes import strikes

from zstrat.config import Settings, Timeouts
from zstrat.errors import UnavailableError
from zstrat.launch import Fleet, ssh
from zstrat.launch.fleet import FleetTask, TaskEnd, TaskLaunch


class Playing:
    """An engine whose tasks serve at once, and end when they are told to."""

    name = "play"

    def __init__(self):
        self.hear, self.env = {}, {}

    def start(self, launch, hear):
        self.env = launch.env
        self.hear[launch.task.name] = hear
        launch.log.write_text("said\n")
        hear.bound("127.0.0.1:7")

        def end():
            hear.ended(TaskEnd("ended", 0))

        return SimpleNamespace(drain=end, kill=end)

    def close(self):
        pass


def test_a_folder_of_keys_that_was_there_is_left_alone(tmp_path):
    mine = tmp_path / "keys" / "mine"
    mine.parent.mkdir()
    mine.write_text("precious")
    with pytest.raises(FileExistsError):
        Fleet(Playing(), [FleetTask("ps", 0, "here")], directory=tmp_path)
    assert mine.read_text() == "precious"


def test_a_log_is_read_after_the_end(tmp_path):
    with Fleet(Playing(), [FleetTask("ps", 0, "here")], directory=tmp_path) as fleet:
        pass
    assert fleet.log("ps:0") == "said\n"


def test_a_task_that_somebody_had_drain_is_no_failure(tmp_path, caplog):
    engine = Playing()
    with Fleet(engine, [FleetTask("ps", 0, "here")], directory=tmp_path) as fleet:
        engine.hear["ps:0"].ended(TaskEnd("ended with exit code 0", 0))
        assert fleet.wait(60)
    assert "ps:0 ended with exit code 0: it drained on request" in caplog.text
    assert fleet.failures == ()


def test_why_an_attempt_ended_is_not_read_from_the_one_before(tmp_path):
    log = tmp_path / "log"
    log.write_text("No module named zstrat\n")
    task = FleetTask("ps", 0, "here")
    launch = TaskLaunch(task, "", {}, {}, 1, 0, log, log.stat().st_size)
    with log.open("a") as file:
        file.write("license server is down\n")
    assert launch.log_tail() == "license server is down\n"


def test_an_ssh_that_does_not_answer(monkeypatch):
    def run(words, *, timeout, **options):
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr("subprocess.run", run)
    with pytest.raises(UnavailableError):
        ssh(["a"], 1, 0, program="true")


def test_a_host_at_loopback_is_not_beside_others(tmp_path):
    file = tmp_path / "hosts.toml"
    addresses = ['[hosts.a]\naddress = "127.0.0.1"', '[hosts.b]\naddress = "10.0.0.3"']
    file.write_text("\n".join(["ps = 1", "workers = 1", *addresses]))
    with pytest.raises(ValueError, match="`address`"):
        ssh(file, program="true")


def test_tasks_are_told_where_to_leave_what_they_hold(tmp_path):
    engine = Playing()
    settings = Settings(Timeouts(handover=7.0), state=tmp_path / "state")
    task = FleetTask("ps", 0, "here")
    with Fleet(engine, [task], directory=tmp_path, settings=settings):
        assert engine.env["ZSTRAT_STATE"] == str(tmp_path / "state")
        assert engine.env["ZSTRAT_HANDOVER"] == "7.0"


def test_ctrl_c_anywhere_in_a_start_or_stop_leaves_no_thread_and_no_keys(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = "fleet/_fleet.py", "zstrat/threads.py", "/threading.py", "futures/_base.py"
    more = "transport/_keys.py", "launch/_run_folder.py", "launch/_started_tasks.py"
    made = []

    def start():
        made.append(Fleet(Playing(), [FleetTask("ps", 0, "here")]))

    def threads():
        return [each for each in threading.enumerate() if "fleet" in each.name]

    for number in strikes(start, *files, *more, every=3):
        while made:  # struck behind its last line
            made.pop().stop()
        assert not threads(), number
        assert not any(tmp_path.iterdir()), number
    for number in strikes(lambda: made[0].stop(), *files):
        made[0].stop()
        assert not threads(), number
        assert not made.pop().directory.exists(), number
        start()
