"""Messages that are nearly right: seeds of every kind, and what is done to them."""

from __future__ import annotations

import copy
import random
import types
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from zstrat.wire import MESSAGES, encode
from zstrat.wire._codec import MAX_LIST_ITEMS as ITEMS
from zstrat.wire._codec import MAX_MAP_ITEMS
from zstrat.wire._schema import BRANCHES, is_record, most_records

ODD = [
    *(0, 1, -1, 2**31, 2**53, 2**62, 2**63 - 1, 2**64 - 1, -(2**63)),
    *(0.5, float("nan"), float("inf"), -1e308, True, False, None),
    *("", "x" * 70_000, "\x1b[2J\n", "__class__", b"", b"\0" * 20_000),
    *([], {}, [[[[]]]], 3000 * [1], {"a": {"b": {}}}, [None, 1, "x"]),
]
"""Values that are in nobody's mind."""


class Seed(NamedTuple):
    """A message as it was, or might have been, sent; the second field of the header is
    its number."""

    header: list[Any]
    raws: list[bytes]

    @property
    def kind(self):
        return MESSAGES[self.header[0]]


def seed_of(header, raws):
    return Seed(msgpack.unpackb(header, strict_map_key=False), list(raws))


def made_up(chance, session):
    """A seed of every kind, from the annotations of its fields."""
    seeds = []
    for cls in MESSAGES.values():
        hints = {n: h for n, h in get_type_hints(cls).items() if n != "kind"}
        fields = {name: _value(chance, hint) for name, hint in hints.items()}
        if "session" in fields:
            fields["session"] = session
        if "arrays" in hints:
            fields["arrays"] = tuple(
                np.ones(chance.choice([(), (3,), (2, 2)]), chance.choice(["f4", "i4"]))
                for _ in range(chance.randrange(4))
            )
        header, raws = encode(cls(**fields))
        seeds.append(seed_of(header, [raw.tobytes() for raw in raws]))
    return seeds


def _value(chance, hint):
    if hint is int:
        return chance.choice([0, 1, 2, 7, 100])
    if hint in (str, bytes, bool, float):
        return {str: "name", bytes: b"code", bool: chance.random() < 0.5, float: 0.5}[
            hint
        ]
    if isinstance(hint, types.UnionType):
        return chance.choice([None, 1, "text", [1, [2]], {"a": 1}])
    if is_record(hint):
        return hint(*(_value(chance, each) for each in get_type_hints(hint).values()))
    if get_origin(hint) is list:
        return [_value(chance, get_args(hint)[0]) for _ in range(chance.randrange(3))]
    if get_origin(hint) is dict:
        return {"a": _value(chance, get_args(hint)[1])}
    return ()


def mutated(chance, seed, number):
    """The frames of a message that is wrong in some place, or in none."""
    header = msgpack.unpackb(msgpack.packb(seed.header), strict_map_key=False)
    header[1], raws = number, list(seed.raws)
    for _ in range(chance.randrange(3)):
        _replace(chance, header, 2)
    packed = bytearray(msgpack.packb(header))
    match chance.randrange(12):
        case 0:
            packed[chance.randrange(len(packed))] ^= 1 << chance.randrange(8)
        case 1:
            del packed[chance.randrange(len(packed)) :]
        case 2:
            packed += chance.randbytes(chance.randrange(50))
        case 3 if raws:
            raws.pop(chance.randrange(len(raws)))
        case 4:
            raws.append(chance.randbytes(chance.choice([0, 1, 64, 5000])))
        case 5 if raws:
            at = chance.randrange(len(raws))
            raws[at] = raws[at][: len(raws[at]) // 2]
        case 6:
            packed = bytearray(chance.randbytes(chance.randrange(200)))
        case _:
            pass
    return [bytes(packed), *raws]


def _replace(chance, tree, first):
    """Puts an odd value in the place of some leaf or branch."""
    if len(tree) <= first:
        tree.append(copy.deepcopy(chance.choice(ODD)))
        return
    at = chance.randrange(first, len(tree))
    if isinstance(tree[at], list) and tree[at] and chance.random() < 0.7:
        _replace(chance, tree[at], 0)
    elif chance.random() < 0.1:
        del tree[at]
    else:
        tree[at] = copy.deepcopy(chance.choice(ODD))


def swollen(session, most):
    """Of every kind, for each field that may be long, a message in which it is, with a
    header of up to ``most`` bytes."""
    chance, seeds = random.Random(3), []
    for cls in MESSAGES.values():
        hints = {n: h for n, h in get_type_hints(cls).items() if n != "kind"}
        for name, hint in hints.items():
            fields = {each: _value(chance, kind) for each, kind in hints.items()}
            for long in _long(chance, hint, most - 2000):
                changed = {**fields, name: long}
                if name != "session" and "session" in fields:
                    changed["session"] = session
                header, raws = encode(cls(**changed))
                seeds.append(seed_of(header, [raw.tobytes() for raw in raws]))
    return seeds


def _long(chance, hint, nbytes):
    """Values of the annotation that take about so many bytes; none if it is short."""
    if hint is str:
        return ["x" * nbytes]
    if isinstance(hint, types.UnionType):
        few = {str(n): n for n in range(min(MAX_MAP_ITEMS, nbytes // 9))}
        return [ITEMS * [1], few, 8 * [BRANCHES // 9 * [[]]]]
    if get_origin(hint) is dict:
        item = _value(chance, get_args(hint)[1])
        size = 8 + len(msgpack.packb(item))
        return [{str(n): item for n in range(min(MAX_MAP_ITEMS, nbytes // size))}]
    if get_origin(hint) is list:
        kind = get_args(hint)[0]
        item = _value(chance, kind)
        most = most_records(kind) if is_record(kind) else ITEMS
        return [min(most, nbytes // len(msgpack.packb(item))) * [item]]
    return []
