"""The keys that a daemon of a fleet receives, if it ends before it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

KEY = "the secret of a test that is to leave nothing"


def left() -> list[Path]:
    """The folders that still have the key."""
    folders = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    files = [f for each in folders for f in each.glob("zstrat-keys-*/keys/ps.secret")]
    return [file for file in files if KEY in file.read_text()]


def test_keys_do_not_outlive_a_daemon_that_cannot_begin() -> None:
    command = ["zstrat.daemons.launched", "ps", "--index", "0", "--bind", "127.0.0.1:0"]
    setup = {
        "env": {"ZSTRAT_DRAIN": "soon"},
        "keys": {"ps.secret": KEY},
        "host": {"rank": "0", "tasks": "1"},
    }
    ran = subprocess.run(
        [sys.executable, "-P", "-m", *command, "--launcher-timeout", "60"],
        input=json.dumps(setup) + "\n",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=60,
    )
    assert ran.returncode == 2, ran.stderr
    assert "ZSTRAT_DRAIN" in ran.stderr
    assert left() == []
