"""`zs.keras.ServerCheckpoint`: saves the part of a model that is on parameter
servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from keras.callbacks import Callback

from zstrat.saving import Checkpoint, CheckpointManager

from ._private import training_of

if TYPE_CHECKING:
    import os


class ServerCheckpoint(Callback):  # type: ignore[misc]  # Keras has no types
    """A Keras callback that saves everything a model has on parameter servers, when
    `fit` begins and at the end of each epoch: variables, rows of each `zs.HashTable`,
    and the optimizer's state.

    The servers write the files themselves, so no data pass through this process. With
    ``on_ps_loss="restore"`` a server that is lost in `fit` is restored from the last
    checkpoint, and `fit` continues; updates since the last epoch are lost then, but
    remain in the metrics.

    State of this process is not saved: a learning rate that was assigned, the number of
    epochs (``initial_epoch``), and what callbacks assign to the model at the end of the
    same epoch.

    Args:
        directory: Where checkpoints are saved: a folder that all servers share, or one
            on the disk of each server.
        max_to_keep: Number of checkpoints that are kept.
        resume: Whether the first `fit` restores the last checkpoint that another
            program saved in the directory, if there is one; False: such a checkpoint is
            an error.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        max_to_keep: int = 2,
        *,
        resume: bool = False,
    ) -> None:
        super().__init__()
        self._directory: Final = directory
        self._max_to_keep: Final = max_to_keep
        self._resume: Final = resume
        self._saved = 0
        self._training: Any = None
        self._variables: Any = None
        self.manager: CheckpointManager | None = None
        """Knows the paths of the checkpoints; None before `fit`."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Saves the initial state of the model; or, with ``resume``, restores the last
        checkpoint of another program.

        Raises:
            ValueError: The model does not train on parameter servers; or another
                program has saved in the directory, and ``resume`` is False.
        """
        self._training = training_of(self.model)
        kept = self._training and self._training.on_servers()
        if kept is None:
            raise ValueError(
                f"ServerCheckpoint saves what is on parameter servers, but model "
                f"{self.model.name!r} was not compiled in the scope of a "
                "zs.ParameterServerStrategy: use keras.callbacks.ModelCheckpoint"
            )
        self._variables = self._training.variables
        is_first = self.manager is None
        manager = CheckpointManager(
            Checkpoint(**kept), self._directory, self._max_to_keep
        )
        found = manager.latest_checkpoint
        if is_first and found is not None:
            if not self._resume:
                raise ValueError(
                    f"{str(self._directory)!r} has checkpoints of another program, up "
                    f"to {found!r}, which this one would replace: continue from them "
                    "with ServerCheckpoint(..., resume=True), or give it an empty "
                    "directory"
                )
            self.manager, self._saved = manager, int(found.rpartition("-")[2])
            try:
                self.restore()
            except BaseException:  # to the caller, and the next fit is the first again
                self.manager = None
                raise
            return
        self.manager = manager
        self._save()

    def restore(self, path: str | None = None) -> str:
        """Restores the last checkpoint, or the one at ``path``, and returns its path.
        It restores the servers and the model's variables in Keras (without rows of a
        `zs.HashTable`).

        Raises:
            RuntimeError: Nothing was saved yet, or ``trainable`` of a layer has
                changed.
        """
        if self.manager is None or (saved := self.manager.latest_checkpoint) is None:
            raise RuntimeError(
                f"ServerCheckpoint of {str(self._directory)!r} has nothing to restore: "
                "it saves in fit, to which it is given as a callback"
            )
        # By identity: the list is made again whenever what is trainable changes.
        if self._training.variables is not self._variables:
            raise RuntimeError(
                f"what is trainable in model {self.model.name!r} has changed since its "
                "last fit with this ServerCheckpoint: compile the model and call fit "
                "with the callback, then restore"
            )
        saved = path or saved
        # Steps that are under way would move what is restored.
        self._training.leave_state()
        self.manager.checkpoint.restore(saved)
        self._training.restored()
        return saved

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._save()

    def on_train_end(self, logs: Any = None) -> None:
        assert self.manager is not None
        self.manager.close()

    def _save(self) -> None:
        """Saves a checkpoint under the next number; numbers continue in later calls of
        `fit`."""
        assert self.manager is not None
        self._saved += 1
        self.manager.save(self._saved)
