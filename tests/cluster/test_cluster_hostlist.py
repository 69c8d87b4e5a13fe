"""Slurm's lists, as ``scontrol show hostnames`` expands them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.cluster import expand_hostlist, expand_tasks_per_node


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9"),
        (
            "n[01-03,07]-ib[0-1],x5",
            "n01-ib0 n01-ib1 n02-ib0 n02-ib1 n03-ib0 n03-ib1 n07-ib0 n07-ib1 x5",
        ),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[5-5,7]", "n5 n7"),
        ("[1-2],[04]", "1 2 04"),
        ("rack[0-1]node[10-11].cluster", "rack0node10.cluster rack0node11.cluster "
         "rack1node10.cluster rack1node11.cluster"),
        ("b,a,b", "b a b"),
        ("", ""),
    ],
)  # fmt: skip
def test_hosts(hostlist, hosts):
    assert expand_hostlist(hostlist) == hosts.split()


@pytest.mark.parametrize(
    ("hostlist", "words"),
    [
        ("n[1-2", r"expected a comma at '\[1-2'"),
        ("[1", r"expected a host at '\[1'"),
        ("n1]", r"expected a comma at '\]'"),
        ("n[1-[2]]", r"expected a comma at '\[1-\[2\]\]'"),
        ("n[]", r"expected 3 or 3-5 in brackets, got ''"),
        ("n[1,]", r"in brackets, got ''"),
        ("n[a-b]", r"in brackets, got 'a-b'"),
        ("n[1-2-3]", r"in brackets, got '1-2-3'"),
        ("n[\u0661]", "in brackets, got"),
        ("n[3-1]", r"the range '3-1' ends before it begins"),
        ("a,,b", r"expected a host at ',b'"),
        (",a", r"expected a host at ',a'"),
        ("a,", "expected a host after the last comma"),
        ("a b", r"expected a comma at ' b'"),
        ("n[1-9999999999]", "9999999999 entries, and 65536 is the limit"),
        ("n[1-9999][1-9999]", "99980001 entries"),
        (",".join(f"{x}[1-9999]" for x in "abcdefgh"), "69993 entries"),
    ],
)
def test_what_is_no_list_of_hosts(hostlist, words):
    with pytest.raises(ValueError, match=f"^Invalid hostlist format .*: .*{words}"):
        expand_hostlist(hostlist)


@st.composite
def ranges(draw):
    """A bracket as Slurm writes it, and what it stands for."""
    texts, values = [], []
    for _ in range(draw(st.integers(1, 3))):
        first, more = draw(st.integers(0, 200)), draw(st.integers(0, 4))
        width = draw(st.sampled_from([1, 1, 3, 5]))
        begin, end = f"{first:0{width}d}", f"{first + more:0{width}d}"
        texts.append(f"{begin}-{end}" if more else begin)
        values += [f"{first + step:0{width}d}" for step in range(more + 1)]
    return f"[{','.join(texts)}]", values


WORDS = st.text("abn-.5", min_size=1, max_size=4).map(lambda word: (word, [word]))


@given(st.lists(st.lists(WORDS | ranges(), min_size=1, max_size=3), max_size=4))
def test_every_list_that_slurm_can_write(
    parts,
):
    text = ",".join("".join(piece for piece, _ in part) for part in parts)
    expected = [
        "".join(chosen)
        for part in parts
        for chosen in itertools.product(*(values for _, values in part))
    ]
    assert expand_hostlist(text) == expected


@given(st.text("n1-0[],x ", max_size=12))
def test_any_text_is_expanded_or_refused(text):
    try:
        hosts = expand_hostlist(text)
    except ValueError as error:
        refused = str(error)
        assert refused.startswith("Invalid hostlist format")
        return
    assert all(hosts)
    assert expand_hostlist(",".join(hosts)) == hosts


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("3(x2),2,1", [3, 3, 2, 1]),
        ("2(x3),1", [2, 2, 2, 1]),
        ("4", [4]),
        ("10(x1),0", [10, 0]),
    ],
)
def test_tasks_per_node(text, tasks):
    assert expand_tasks_per_node(text) == tasks


@pytest.mark.parametrize(
    "text", ["", "3(2)", "3(x2", "x", "3,", "-1", "3(x)", "\u0661"]
)
def test_what_is_no_list_of_tasks(text):
    words = r"\b3\b.*\b3\b"
    with pytest.raises(ValueError, match=words):
        expand_tasks_per_node(text)


def test_a_list_of_tasks_is_bounded():
    with pytest.raises(ValueError, match=r"\b65536\b"):
        expand_tasks_per_node("1(x65537)")
