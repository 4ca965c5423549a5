"""Synthetic agent traces in Weka's format: the sessions of a workload, written to a file.

Rules that hold here
- Equal shapes give equal files, bit for bit (with the same versions of numpy and of the compressor). Session n
  depends on the seed and n only.
- What the sessions are like is in `loadtest.workloads`, a module a workload.
"""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from loadtest.files import whole_file
from loadtest.workloads.agents import Agents


class GenerateError(Exception):
    """A trace that cannot be written; the text is one line."""


class Shape(Agents, frozen=True, kw_only=True):
    """The first `sessions` agents of a workload."""

    sessions: int


def sessions(shape: Shape) -> Iterator[bytes]:
    """The trace's records, one JSON text each."""
    for number in range(shape.sessions):
        yield shape.record(number)


def write_trace(path: str, shape: Shape) -> None:
    """Write a trace as .jsonl, .gz or .xz. Raises GenerateError; then nothing is written."""
    target = Path(path)
    if target.suffix not in (".jsonl", ".gz", ".xz"):
        raise GenerateError(f"{path}: must end in .jsonl, .jsonl.gz or .jsonl.xz")
    try:
        with whole_file(target) as raw, _compressed(raw, target.suffix) as file:
            for text in sessions(shape):
                file.write(text + b"\n")
    except OSError as error:
        raise GenerateError(f"{path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def _compressed(raw: BinaryIO, suffix: str) -> Iterator[BinaryIO]:
    if suffix == ".gz":
        # No name and no time in the archive, so that equal traces are equal files.
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
            yield cast(BinaryIO, file)
    elif suffix == ".xz":
        with lzma.open(raw, "wb") as file:
            yield cast(BinaryIO, file)
    else:
        yield raw
