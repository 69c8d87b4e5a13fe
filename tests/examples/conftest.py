"""The images of sklearn for programs that need nothing else of it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

DATASETS = """
import types
import numpy as np


def load_digits():
    data = np.loadtxt({path!r}, delimiter=",")
    images, target = data[:, :-1].reshape(-1, 8, 8), data[:, -1].astype(int)
    return types.SimpleNamespace(images=images, target=target)
"""


@pytest.fixture(scope="session")
def images_alone(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """What to add to the environment of a program, so that it reads sklearn's file of
    digits without sklearn, whose import takes a second of each process. The test of
    `digits.py` is the one with all of it."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        pytest.skip("needs sklearn: install zstrat[examples]")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    folder = tmp_path_factory.mktemp("images") / "sklearn"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "datasets.py").write_text(DATASETS.format(path=str(path)))
    paths = str(folder.parent), os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
