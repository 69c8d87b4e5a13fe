"""Every public name is there, once, and comes from the package that the table says."""

from __future__ import annotations

import importlib

import pytest

import zstrat
from zstrat import errors


@pytest.mark.parametrize("name", sorted(zstrat._EXPORTS))
def test_public_name(name: str) -> None:
    package = importlib.import_module(zstrat._EXPORTS[name])
    assert getattr(zstrat, name) is getattr(package, name)


@pytest.mark.parametrize("name", sorted(zstrat._MODULES))
def test_public_module(name: str) -> None:
    assert getattr(zstrat, name) is importlib.import_module(zstrat._MODULES[name])


def test_errors_are_at_the_top() -> None:
    public = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ZstratError)
    ]
    assert [name for name in public if name not in zstrat._EXPORTS] == []


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = zstrat.Nothing
    assert set(zstrat._EXPORTS) <= set(dir(zstrat))
