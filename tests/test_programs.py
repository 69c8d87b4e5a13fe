"""Programs that tests start are what `python` would run: streams, ends, settings."""

import os
import signal
import subprocess
import sys

import programs
import pytest

pytestmark = pytest.mark.usefixtures("programs")

TOLD = """
import os, sys
import __main__
print(sys.argv[1:], __name__, __main__.__file__ if "__file__" in globals() else None)
print(os.getcwd(), sys.path[0], os.environ.get("OF_THE_TEST"), sys.flags.safe_path)
print(sorted(name for name in globals() if not name.startswith("__")))
print("beside", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("how", ["script", "text"])
def test_a_program_finds_what_it_would_find_if_it_were_started(how, tmp_path):
    (tmp_path / "told.py").write_text(TOLD)
    command = [str(tmp_path / "told.py")] if how == "script" else ["-c", TOLD]
    options = {
        "cwd": "/",
        "env": {**os.environ, "OF_THE_TEST": "1"},
        "capture_output": True,
        "text": True,
    }
    wanted = subprocess.run([sys.executable, *command, "a", "b"], **options)
    forked = programs.run([*command, "a", "b"], **options)
    assert wanted.returncode == forked.returncode == 3
    assert forked.stdout == wanted.stdout
    assert forked.stderr == wanted.stderr == "beside\n"


def test_jax_has_the_settings_of_the_program_and_not_of_the_server():
    text = "import jax; print(jax.device_count(), jax.numpy.ones(1).dtype)"
    told = {"JAX_NUM_CPU_DEVICES": "3", "JAX_ENABLE_X64": "1"}
    env = {**os.environ, **told}
    assert programs.run(["-c", text], env=env, stdout=-1).stdout == b"3 float64\n"


def test_a_module_and_an_error():
    ran = programs.run(["-m", "zstrat.cli", "--help"], capture_output=True, text=True)
    assert ran.returncode == 0
    assert "usage" in ran.stdout.lower()
    with pytest.raises(subprocess.CalledProcessError):
        programs.run(["-c", "1/0"], check=True, stderr=programs.DEVNULL)


def test_it_is_talked_to_and_killed():
    text = "while True: print(input().upper(), flush=True)"
    pipes = {"stdin": programs.PIPE, "stdout": programs.PIPE, "text": True}
    with programs.Program(["-c", text], **pipes) as program:
        program.stdin.write("a line\n")
        program.stdin.flush()
        assert program.stdout.readline() == "A LINE\n"
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.01)
        program.kill()
        assert program.wait() == program.returncode == -signal.SIGKILL
