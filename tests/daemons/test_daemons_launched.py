"""The keys that a daemon of a fleet receives, if it ends before it serves."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zstrat.transport import generate_keys


@pytest.fixture
def keys(tmp_path):
    generate_keys(tmp_path / "keys")
    return tmp_path / "keys"


def left(secret):
    """The files that still have the secret."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    pattern = f"zstrat-keys-*/keys/{secret.name}"
    files = [file for folder in folders for file in folder.glob(pattern)]
    return [file for file in files if file.read_text() == secret.read_text()]


def launched(job, keys, under=(), **env):
    """Runs a daemon that gets its keys as of a fleet, ``under`` another command."""
    command = ["zstrat.daemons.launched", job, "--index", "0", "--bind", "127.0.0.1:0"]
    files = [keys / f"{job}.secret", *keys.glob("*.public")]
    setup = {
        "env": env,
        "keys": {file.name: file.read_text() for file in files},
        "host": {"rank": "0", "tasks": "1"},
    }
    return subprocess.run(
        [*under, sys.executable, "-P", "-m", *command, "--launcher-timeout", "60"],
        input=json.dumps(setup) + "\n",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=60,
    )


def test_keys_do_not_outlive_a_daemon_that_cannot_begin(keys):
    ran = launched("ps", keys, ZSTRAT_DRAIN="soon")
    assert ran.returncode == 2, ran.stderr
    assert "ZSTRAT_DRAIN" in ran.stderr
    assert left(keys / "ps.secret") == []


def test_a_worker_that_is_killed_while_it_imports_jax_has_no_keys_yet(keys, tmp_path):
    (tmp_path / "jax.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    ran = launched("worker", keys, PYTHONPATH=str(tmp_path))
    assert ran.returncode == -9, ran.stderr
    assert left(keys / "worker.secret") == []


def test_a_parent_that_ends_while_a_worker_imports_jax_is_missed(keys, tmp_path):
    """By then another process is in its place."""
    (tmp_path / "jax.py").write_text(
        "import os, select, sys\n"
        "parent = os.getppid()\n"
        "ended = os.pidfd_open(parent)\n"
        "os.kill(parent, 9)\n"
        "select.select([ended], [], [])\n"
        f"sys.path.remove({str(tmp_path)!r})\n"
        "del sys.modules['jax']\n"
        "import jax\n"
    )
    shell = ("sh", "-c", '"$@"; exit', "sh")
    ran = launched("worker", keys, shell, PYTHONPATH=str(tmp_path))
    assert "has already ended" in ran.stderr
    assert left(keys / "worker.secret") == []
