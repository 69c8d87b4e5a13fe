"""The notebook, in a real kernel: each cell as people run it, the one of the strategy
twice, and with the stop button pressed."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")

pytestmark = pytest.mark.processes

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


class Reader(nbclient.NotebookClient):
    """Runs cells by their ids, and presses the stop button when one asks for it."""

    async def run_again(self, name):
        """Outputs of a cell that is run now, again or for the first time."""
        (number,) = [n for n, cell in enumerate(self.nb.cells) if cell.id == name]
        cell = self.nb.cells[number]
        await self.async_execute_cell(cell, number)
        return cell.outputs

    def process_message(self, message, cell, cell_index):
        said = message["content"].get("text", "")
        if message["msg_type"] == "stream" and "press the stop button" in said:
            press = self.km.interrupt_kernel()
            self.pressing = asyncio.create_task(press, name="stop button")
        return super().process_message(message, cell, cell_index)


def printed(outputs):
    return "".join(each.text for each in outputs if each.output_type == "stream")


def raised(outputs):
    (error,) = [each for each in outputs if each.output_type == "error"]
    return error


async def test_the_notebook_runs_in_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    resources = {"metadata": {"path": str(tmp_path)}}
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    reader = Reader(notebook, timeout=100, resources=resources)
    async with reader.async_setup_kernel():
        await reader.run_again("cluster")
        await reader.run_again("strategy")
        told = await reader.run_again("train")
        first, last = re.fullmatch(r"(\S+) -> (\S+)\n", printed(told)).groups()
        assert float(last) < float(first) / 100
        assert told[-1].data["text/plain"].startswith("array([0., 1., 2., 3.]")

        await reader.run_again("keep")
        await reader.run_again("strategy")
        told = await reader.run_again("again")
        assert "took its cluster over; use that one" in printed(told)
        assert told[-1].data["text/plain"].startswith("array([0., 0., 0., 0.]")

        stopped = raised(await reader.run_again("interrupt"))
        await reader.pressing
        assert stopped.ename == "KeyboardInterrupt"
        assert printed(await reader.run_again("cancel")) == "True True\n"

        error = raised(await reader.run_again("error"))
        assert (error.ename, error.evalue) == ("ValueError", "-1.0 is below zero")
        assert "zstrat/" not in "\n".join(error.traceback)
        (value,) = await reader.run_again("after")
        assert value.data["text/plain"] == "np.float32(4.0)"
        mistake = raised(await reader.run_again("mistake"))
        assert "Write jnp.where(condition, a, b)" in mistake.evalue
        assert await reader.run_again("end") == []


def test_every_cell_of_the_notebook_is_run_above():
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    run = re.findall(r'run_again\("(\w+)"\)', Path(__file__).read_text())
    assert {cell.id for cell in cells if cell.cell_type == "code"} == set(run)
    assert not any(cell.get("outputs") for cell in cells)
