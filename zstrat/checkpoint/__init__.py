"""Checkpoints as files: tensors in safetensors files, and the manifest of them all.

This package handles files alone; it knows nothing of jax, sockets and variables.
"""

from ._disk import absolute as absolute
from ._disk import blamed as blamed
from ._disk import digest_of as digest_of
from ._disk import local_path as local_path
from ._disk import make_folder as make_folder
from ._disk import replace_file as replace_file
from ._disk import sync_folder as sync_folder
from ._folder import CheckpointFolder as CheckpointFolder
from ._folder import FolderLock as FolderLock
from ._folder import remove as remove
from ._folder import sweep as sweep
from ._header import TensorInfo as TensorInfo
from ._manifest import MANIFEST as MANIFEST
from ._manifest import Manifest as Manifest
from ._manifest import StoredPiece as StoredPiece
from ._manifest import StoredTensor as StoredTensor
from ._reader import CheckpointFiles as CheckpointFiles
from ._reader import TensorReader as TensorReader
from ._reader import verify as verify
from ._writer import BLOCK as BLOCK
from ._writer import TensorWriter as TensorWriter
