"""The programs of `QUICK` against plain optax, in float64: in this process, and on
parameter servers that keep some variables in one piece and some in two."""

import pytest
from optax_catalogue import every_case
from optax_judged import complaints, grouped
from optax_processes import outcomes
from optax_programs import QUICK

pytestmark = [pytest.mark.thorough, pytest.mark.processes]


@pytest.mark.timeout(300)  # on busy cores it takes several times as long as alone
def test_programs_move_the_values_as_plain_optax_does(tmp_path):
    homes = ["none_in_a_step", "servers_some_cut"]
    said = outcomes(
        "float64", homes, tmp_path / "said.json", "--cases", "quick", timeout=290
    )
    assert len(said["outcomes"]) == len(QUICK) + list(QUICK.values()).count("both")
    found = complaints(every_case(), said["outcomes"])
    assert not found, grouped(found)
