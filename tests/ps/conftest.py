"""A store in two processes, as fixtures have it."""

import pytest
from ps_copies import Copies, create


@pytest.fixture
async def copies():
    rig = Copies()
    await rig.ask(create(0, 1))
    yield rig
    await rig.close()
