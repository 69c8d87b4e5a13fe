"""`LeaseProgress`: a bar in the terminal for a pass through a leased dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.console import Console, RenderableType

    from ._book import LeaseBook


@final
class LeaseProgress(Progress):
    """Shows how many examples of the pass are done or skipped, and when it will be
    over. In a file or a pipe only its last state is printed. For ``with``.

    Args:
        read: Calls a function with the book, while nobody changes that.
        console: Where it is shown; None: on standard output.
    """

    def __init__(
        self,
        read: Callable[[Callable[[LeaseBook], object]], None],
        console: Console | None = None,
    ) -> None:
        self._read: Final = read
        self._shown: TaskID | None = None
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._shown = self.add_task("waiting for a worker", total=None)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Looks at the pass each time that the bar is drawn."""
        self._read(self._look)
        return super().get_renderables()

    def _look(self, book: LeaseBook) -> None:
        if self._shown is None or not book.size:
            return
        last = "" if book.epochs is None else f"/{book.epochs}"
        epoch = book.epoch if book.is_over else book.epoch + 1
        self.update(
            self._shown,
            completed=book.done + book.skipped,
            total=book.total,
            description=f"epoch {epoch}{last}",
        )
