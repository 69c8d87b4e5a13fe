"""What compression leaves out comes back to its next call, and names nobody uses again
do not pile up."""

import numpy as np
import pytest

from zstrat.collectives import Compression, Compressor, reduction_of
from zstrat.collectives import _compression as compression_module
from zstrat.collectives._compression import Residuals

VALUES = np.linspace(-1, 1, 256, dtype="f4")  # one KiB


def sent(compressor, name, values=VALUES):
    """What the others get of one call."""
    codec = compressor.codec(name, reduction_of("SUM", values.dtype, 2))
    return codec.decode(codec.encode(0, values), len(values))


@pytest.mark.parametrize("kind", ["int8", "topk"])
def test_a_name_per_call_does_not_pile_up(kind):
    compressor = Compressor(Compression.of(kind), Residuals(10 * VALUES.nbytes))
    for step in range(100):
        sent(compressor, f"step {step}")
    assert compressor._residuals.nbytes == 10 * VALUES.nbytes


def test_more_names_than_there_is_room_for_are_all_kept_once_they_come_back():
    """Over n calls the sum of what was sent is wrong by what one call may lose, as if
    there were room from the beginning, and by what the first one had lost."""
    compressor = Compressor(Compression.of("int8"), Residuals(10 * VALUES.nbytes))
    names = [f"layer {number}" for number in range(50)]
    total = dict.fromkeys(names, 0)
    for _ in range(40):
        for name in names:
            total[name] = total[name] + sent(compressor, name)
    assert compressor._residuals.nbytes == 50 * VALUES.nbytes
    lost = 0.5 / 127  # half a scale
    for name in names:
        assert np.abs(total[name] - 40 * VALUES).max() < 3 * lost


def test_names_that_came_back_make_no_room_for_those_that_do_not():
    left = Residuals(4 * VALUES.nbytes)
    for step in range(100):
        for name in ["a", "b", f"step {step}"]:
            left.put((name, 0), VALUES)
    assert left.nbytes == 4 * VALUES.nbytes
    assert left.get(("a", 0)) is not None
    assert left.get(("step 0", 0)) is None


def test_names_of_what_is_gone_are_bounded_too(monkeypatch):
    monkeypatch.setattr(compression_module, "NAMES", 5)
    left = Residuals(0)
    for step in range(100):
        left.put((f"step {step}", 0), VALUES)
    assert (left.nbytes, len(left._gone)) == (0, 5)
