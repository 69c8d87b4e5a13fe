"""Settings come from outside once; what cannot be is named with what can."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zstrat.config import (
    NAMES,
    TRANSPORTS,
    Settings,
    Timeouts,
    daemon_variables,
    read_toml,
    settings_from,
)


def test_nothing_said_is_the_default() -> None:
    assert settings_from({}) == Settings()


def test_a_program_waits_for_one_that_may_be_gone_and_not_for_one_that_lives() -> None:
    timeouts = settings_from({"ZSTRAT_LIVENESS": "30"}).timeouts
    assert timeouts.notice > timeouts.liveness
    assert timeouts.turn == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transports(transport: str) -> None:
    assert settings_from({"ZSTRAT_TRANSPORT": transport}).transport == transport


def test_everything_said() -> None:
    settings = settings_from(
        {
            "ZSTRAT_TRANSPORT": "tcp",
            "ZSTRAT_KEYS": "/etc/zstrat/keys",
            "ZSTRAT_INSECURE": "1",
            "ZSTRAT_LOG": "json",
            "ZSTRAT_TRACEBACK": "full",
            "ZSTRAT_OUTPUT": "files",
            "ZSTRAT_LIVENESS": "2.5",
            "ZSTRAT_REQUEST": "600",
            "ZSTRAT_CONNECT_TIMEOUT": "9",
            "ZSTRAT_TURN": "4.5",
            "ZSTRAT_DRAIN": "1e1",
            "ZSTRAT_HANDOVER": "30",
            "ZSTRAT_LAUNCHER_TIMEOUT": "90",
            "ZSTRAT_STATE": "/var/lib/zstrat",
            "ZSTRAT_PREFETCH": "1",
            "ZSTRAT_CHOICES": "/etc/zstrat/choices.toml",
            "UNRELATED": "x",
        }
    )
    assert settings == Settings(
        timeouts=Timeouts(
            liveness=2.5,
            request=600.0,
            connect=9.0,
            turn=4.5,
            drain=10.0,
            handover=30.0,
            launcher=90.0,
        ),
        state=Path("/var/lib/zstrat"),
        transport="tcp",
        prefetch=1,
        keys=Path("/etc/zstrat/keys"),
        insecure=True,
        log_json=True,
        traceback="full",
        output="files",
        choices=Path("/etc/zstrat/choices.toml"),
    )


def test_a_daemon_reads_what_its_program_tells() -> None:
    times = Timeouts(liveness=2.5, connect=9.0, drain=10.0, handover=30.0)
    settings = Settings(times, state=Path("/var/lib/zstrat"))
    assert settings_from(daemon_variables(settings)) == settings


@pytest.mark.parametrize("text", ["", "0"])
def test_insecure_can_be_said_not_to_be(text: str) -> None:
    assert not settings_from({"ZSTRAT_INSECURE": text}).insecure


def test_no_keys_is_no_folder() -> None:
    assert settings_from({"ZSTRAT_KEYS": ""}).keys is None


def test_unknown_transport() -> None:
    words = "ZSTRAT_TRANSPORT='udp'"
    with pytest.raises(ValueError, match=words):
        settings_from({"ZSTRAT_TRANSPORT": "udp"})


def test_unknown_traceback() -> None:
    with pytest.raises(ValueError, match="ZSTRAT_TRACEBACK='no'"):
        settings_from({"ZSTRAT_TRACEBACK": "no"})


def test_unknown_output() -> None:
    with pytest.raises(ValueError, match="ZSTRAT_OUTPUT='no'"):
        settings_from({"ZSTRAT_OUTPUT": "no"})


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("1", 1), ("12", 12)])
def test_prefetch(text: str, value: int) -> None:
    assert settings_from({"ZSTRAT_PREFETCH": text}).prefetch == value


@pytest.mark.parametrize("text", ["", "1.5", "-1", "auto", " 1", "²", "100000"])
def test_prefetch_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match=f"ZSTRAT_PREFETCH='{text}'"):
        settings_from({"ZSTRAT_PREFETCH": text})


@pytest.mark.parametrize(
    "name", ["ZSTRAT_LIVENESS", "ZSTRAT_CONNECT_TIMEOUT", "ZSTRAT_DRAIN"]
)
@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan", "inf", "86400", "1s"])
def test_seconds(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{text}': expected seconds, above 0"):
        settings_from({name: text})


def test_a_liveness_in_which_nobody_need_have_spoken_is_refused() -> None:
    assert settings_from({"ZSTRAT_LIVENESS": "1"}).timeouts.liveness == 1
    words = r"ZSTRAT_LIVENESS='0.*\b9\b.*\b1\b"
    with pytest.raises(ValueError, match=words):
        settings_from({"ZSTRAT_LIVENESS": "0.9"})


def test_toml_files(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    path.write_text("[a]\nb = 1\n")
    assert read_toml(path) == {"a": {"b": 1}}
    path.write_bytes(b"\xef\xbb\xbf[a]\r\nb = 1\r\n")  # as an editor of Windows does
    assert read_toml(path) == {"a": {"b": 1}}
    path.write_text("[a")
    with pytest.raises(ValueError, match=r"file\.toml.*TOML"):
        read_toml(path)
    path.write_bytes(b"a = '\xff'")
    with pytest.raises(ValueError, match=r"file\.toml"):
        read_toml(path)
    with pytest.raises(ValueError, match=r"cannot read .*: Is a directory"):
        read_toml(tmp_path)


def test_insecure_is_not_what_somebody_may_have_meant() -> None:
    with pytest.raises(ValueError, match=r"ZSTRAT_INSECURE='false'.*\b0\b"):
        settings_from({"ZSTRAT_INSECURE": "false"})


def test_a_slip_of_the_pen_is_told_from_names_of_others() -> None:
    with pytest.raises(ValueError, match="ZSTRAT_LIVENESS"):
        settings_from({"ZSTRAT_LIVENSES": "1"})
    others = dict.fromkeys(("ZSTRAT_PS_PORT", "ZSTRAT_KEYS_SERVICE_HOST"), "1")
    assert settings_from(others) == Settings()


def test_the_pages_name_settings_that_there_are_and_one_has_them_all() -> None:
    root = Path(__file__).resolve().parents[2]
    for page in (root / "README.md", *(root / "docs").glob("*.md")):
        named = set(re.findall(r"\bZSTRAT_[A-Z_]+\b", page.read_text()))
        assert named <= set(NAMES), page
    rows = re.findall(
        r"^\| `(ZSTRAT_\w+)", (root / "docs/trouble.md").read_text(), re.MULTILINE
    )
    assert sorted(rows) == sorted(NAMES)
