"""A bar in the terminal for a pass through a leased dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console, RenderableType
    from rich.progress import Progress

    from ._book import LeaseBook


def lease_bar(
    read: Callable[[Callable[[LeaseBook], object]], None],
    console: Console | None = None,
) -> Progress:
    """Returns a bar, for ``with``: how many examples of the pass are done or skipped,
    and when it will be over. In a file or a pipe only its last state is printed.

    Args:
        read: Calls a function with the book, which does not change meanwhile.
        console: Where it is shown; None: on standard output.
    """
    # Here, as most programs show none, and importing rich takes 65 ms.
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    class LeaseProgress(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            """Looks at the pass each time that the bar is drawn."""
            if self.tasks:
                read(self.look)
            return super().get_renderables()

        def look(self, book: LeaseBook) -> None:
            if not book.size:
                return
            last = "" if book.epochs is None else f"/{book.epochs}"
            epoch = book.epoch if book.is_over else book.epoch + 1
            self.update(
                self.tasks[0].id,
                completed=book.done + book.skipped,
                total=book.total,
                description=f"epoch {epoch}{last}",
            )

    progress = LeaseProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    progress.add_task("waiting for a worker", total=None)
    return progress
