"""docs/engines.md says nothing that cannot be typed: its commands are parsed by the
programs that they start."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from zstrat.daemons import jobs_of, parser

from zstrat.cli import main
from zstrat.launch.fleet.hosts import hosts_of

PAGE = (Path(__file__).parent.parent / "docs" / "engines.md").read_text()
JOBS = {"zstrat-ps": "ps", "zstrat-worker": "worker"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """What the shell is told to start of zstrat, as words."""
    found = []
    for line in "".join(blocks("bash")).splitlines():
        line = line.rstrip("\\")
        quoted = re.findall(r"'([^']*zstrat[^']*)'", line)
        for each in quoted or [re.sub(r"^[0-9-]+ ", "", line).strip()]:
            words = shlex.split(each.removesuffix("&"), comments=True)
            if words and words[0] in ("zstrat", *JOBS):
                found.append(words)
    return found


def test_the_page_has_them():
    assert len(commands()) == 10
    assert len(blocks("py")) == 8  # the other one runs with those of all pages


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_has_the_options_that_exist(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("hosts.toml").touch()
    program, *rest = words
    if program == "zstrat":
        command = main.get_command(click.Context(main), rest[0])
        with command.make_context(rest[0], rest[1:]):
            return
    asked = ["1" if word == "$PPID" else word for word in rest]
    parsed = parser(JOBS[program], "").parse_args(asked)
    if parsed.jobs is not None:
        assert jobs_of(parsed.jobs)[JOBS[program]]


def test_the_hosts_are_a_file_of_hosts(tmp_path):
    (text,) = blocks("toml")
    file = tmp_path / "hosts.toml"
    file.write_text(text)
    tasks = hosts_of(file).tasks(None, None)
    assert [task.where for task in tasks if task.job == "ps"] == ["node1", "node2"]
    assert {task.where for task in tasks[2:]} == {"node2", "node3"}


def test_the_tasks_of_a_step_are_as_many_as_are_asked_for():
    (script,) = (block for block in blocks("bash") if "--multi-prog" in block)
    (asked,) = set(re.findall(r"--jobs (\S+)", script))
    jobs = jobs_of(asked)
    assert f"--ntasks={sum(jobs.values())} " in script
    ranks = [re.findall(r"^([0-9-]+) +(\S+)", line) for line in script.splitlines()]
    told = {program: spread for found in ranks for spread, program in found}
    assert told == {"python": "0", "zstrat-ps": "1-2", "zstrat-worker": "3-6"}
    assert list(jobs.values()) == [1, 2, 4]


def test_programs_compile():
    for program in blocks("py"):
        compile(program, "engines.md", "exec")
