"""Every public name is there, and comes from where the stub of its package says."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest

import zstrat
from zstrat import errors

os.environ["KERAS_BACKEND"] = "jax"  # before keras is imported

STUBS = {
    "zstrat": zstrat,
    **{
        name: importlib.import_module(name)
        for name in (
            "zstrat.cluster",
            "zstrat.collectives",
            "zstrat.compat.v1.distribute",
            "zstrat.daemons",
            "zstrat.integrations",
            "zstrat.integrations.keras",
            "zstrat.launch",
            "zstrat.ps",
            "zstrat.ps.store",
            "zstrat.strategy",
        )
    },
}


@pytest.mark.parametrize("package", STUBS)
def test_a_name_is_what_an_import_as_the_stub_has_it_would_give(package: str) -> None:
    """Python carries the stub out here, as type checkers read it."""
    door = STUBS[package]
    stub = Path(str(door.__file__)).with_suffix(".pyi").read_text()
    given = {"__package__": package, "__name__": package}
    exec(compile(ast.parse(stub), package, "exec"), given)
    for name in door.__all__:
        assert getattr(door, name) is given[name], name


def test_every_package_with_a_stub_is_tested() -> None:
    root = Path(str(zstrat.__file__)).parent.parent
    # By name: an editable install has the daemons of one checkout, for every worktree.
    found = {
        ".".join(stub.with_suffix("").relative_to(root).parts)
        for stub in [*root.glob("zstrat/**/*.pyi"), *root.glob("daemons/*.pyi")]
    }
    expected = {f"{name}.__init__" for name in STUBS} - {"zstrat.daemons.__init__"}
    assert found == {*expected, "daemons.__init__"}


def test_errors_are_at_the_top() -> None:
    public = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ZstratError)
    ]
    assert [name for name in public if name not in zstrat.__all__] == []


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="'Nothing'"):
        _ = zstrat.Nothing  # type: ignore[attr-defined]
    assert set(zstrat.__all__) <= set(dir(zstrat))
