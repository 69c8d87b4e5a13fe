"""Every public transformation under every strategy, against plain optax: equal, or
refused by parameter servers with words that help. `make test-optax` runs it; it takes
minutes."""

import pytest
from optax_catalogue import every_case
from optax_judged import complaints, grouped
from optax_model import DTYPES
from optax_processes import HOMES, outcomes

pytestmark = [pytest.mark.optax, pytest.mark.processes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Plain optax's trajectories, which the first process of a dtype leaves there."""
    return tmp_path_factory.mktemp("optax")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_moves_the_values_as_plain_optax_does(dtype, home, folder):
    said = outcomes(
        dtype,
        [home],
        folder / f"{dtype}-{home}.json",
        "--plain",
        str(folder / f"{dtype}.pickle"),
        timeout=3500,
    )
    found = complaints(every_case(), said["outcomes"])
    assert not found, grouped(found)
