"""Error feedback: nothing of a gradient is lost, none of it is sent twice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.codecs import GRADIENT_BLOCK, Wire, decode_gradient
from zstrat.ps import PsUpdate
from zstrat.wire import CODED, Codec, UpdateOp
from zstrat.worker import PushEncoding

SIZE = 600


def gradient(seed):
    return np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)


def total(encoding):
    """What is kept; zeros if nothing is."""
    kept = encoding.residuals.take(5)
    return np.zeros(SIZE, np.float32) if kept is None else kept


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "sent", "failed"]), st.integers(0, 99)),
        max_size=12,
    ),
    st.sampled_from(
        [Wire(push="topk", density=0.1), Wire(push="int4", error_feedback=True)]
    ),
)
def test_what_was_sent_and_what_is_kept_are_the_gradients(history, wire):
    """Pushes are under way at the same time, and end in any order."""
    encoding = PushEncoding(lambda ps: False, {"encoded_from": 0, "encoded_to": 0})
    under_way, given_sum, sent_sum = [], np.zeros(SIZE), np.zeros(SIZE)

    def end(at, *, is_sent):
        nonlocal given_sum, sent_sum
        array, update, lent = under_way.pop(at)
        codec = Codec(update.op // CODED)
        if is_sent:
            given_sum = given_sum + array
            sent_sum = sent_sum + decode_gradient(
                codec, (SIZE,), update.arrays, GRADIENT_BLOCK
            )
        encoding.residuals.settle(lent, is_sent=is_sent)

    for what, number in history:
        if what == "send":
            array = gradient(number)
            update = PsUpdate(0, 5, UpdateOp.OPTIMIZE, 1, (array,))
            (coded,), lent = encoding.encoded(number, [update], {1: wire})
            under_way.append((array, coded, lent))
        elif under_way:
            end(number % len(under_way), is_sent=what == "sent")
    while under_way:
        end(0, is_sent=False)
    assert np.allclose(sent_sum + total(encoding), given_sum, atol=1e-4)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_gradient_that_is_not_finite_spoils_one_step_only(bad):
    encoding = PushEncoding(lambda ps: False, {"encoded_from": 0, "encoded_to": 0})
    array = gradient(0)
    array[3] = bad
    update = PsUpdate(0, 5, UpdateOp.OPTIMIZE, 1, (array,))
    wire = Wire(push="int8", error_feedback=True)
    (coded,), lent = encoding.encoded(0, [update], {1: wire})
    assert not np.isfinite(
        decode_gradient(Codec.INT8, (SIZE,), coded.arrays, GRADIENT_BLOCK)[3]
    )
    encoding.residuals.settle(lent, is_sent=True)
    assert np.isfinite(total(encoding)).all()


def test_some_gradients_travel_as_they_are():
    encoding = PushEncoding(lambda ps: ps == 1, {"encoded_from": 0, "encoded_to": 0})
    array, rows = gradient(0), gradient(1).reshape(-1, 6)
    indices = np.arange(len(rows))
    updates = [
        PsUpdate(1, 5, UpdateOp.OPTIMIZE, 1, (array,)),  # through shared memory
        PsUpdate(0, 6, UpdateOp.OPTIMIZE, 1, (array[:200],)),  # small
        PsUpdate(0, 7, UpdateOp.OPTIMIZE, 1, (array.astype(np.int32),)),
        PsUpdate(0, 7, UpdateOp.OPTIMIZE, 1, (array.astype(np.complex64),)),
        PsUpdate(0, 7, UpdateOp.OPTIMIZE, 3, (array.astype(np.float16),)),  # as small
        PsUpdate(0, 8, UpdateOp.OPTIMIZE, 2, (array,)),  # of another optimizer
        PsUpdate(0, 9, UpdateOp.ADD, 0, (array,)),
        PsUpdate(0, 9, UpdateOp.OPERANDS, 1, (array,)),
    ]
    wires = {1: Wire(push="int8"), 3: Wire(push="bfloat16")}
    assert encoding.encoded(0, updates, wires) == (updates, [])
    of_rows = [PsUpdate(0, 7, UpdateOp.OPTIMIZE_ROWS, 1, (indices, rows))]
    (coded,), _ = encoding.encoded(0, of_rows, wires)
    assert coded.op == UpdateOp.OPTIMIZE_ROWS + CODED * Codec.INT8
    assert (
        np.abs(
            decode_gradient(Codec.INT8, rows.shape, coded.arrays[1:], 128) - rows
        ).max()
        < 0.05
    )
    topk = {1: Wire(push="topk", density=0.1)}
    assert encoding.encoded(0, of_rows, topk) == (of_rows, [])


def test_updates_that_cannot_be_encoded_take_no_residual():
    encoding = PushEncoding(lambda ps: False, {"encoded_from": 0, "encoded_to": 0})
    wires = {1: Wire(push="topk", density=0.1)}
    update = PsUpdate(0, 5, UpdateOp.OPTIMIZE, 1, (gradient(0),))
    _, lent = encoding.encoded(0, [update], wires)
    encoding.residuals.settle(lent, is_sent=True)
    kept = encoding.residuals.nbytes
    wrong = PsUpdate(0, 6, UpdateOp.OPTIMIZE, 1, (np.full(SIZE, "text"),))
    with pytest.raises(ValueError, match="text"):
        encoding.encoded(1, [update, wrong], wires)
    assert encoding.residuals.nbytes == kept > 0
