"""Datasets that are read from files."""

from ._files import Files as Files
from ._files import Listed as Listed
from ._files import Path as Path
from ._files import ReadFile as ReadFile
from ._files import Records as Records
from ._files import Tables as Tables
from ._files import load_npy as load_npy
from ._files import load_npz as load_npz
from ._files import matching as matching
from ._files import paths_of as paths_of
from ._files import read_lines as read_lines
from ._files import read_tfrecords as read_tfrecords
from ._files import require_tfrecords as require_tfrecords
from ._parquet import parquet_rows as parquet_rows
