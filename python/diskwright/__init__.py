"""Virtual hard disks: VHD, VHDX and raw images with their parents, and NBD exports.

>>> import diskwright
>>> with diskwright.open("machine.avhdx") as disk:      # doctest: +SKIP
...     print(disk.size, [layer.path for layer in disk.layers])
...     boot_sector = disk.read(0, 512)

Offsets and lengths are bytes and need no alignment. Every failure of a disk is a `DiskError`, whose
`code` is a stable name such as 'not_found', 'locked', 'parent_missing' or 'corrupt'.
"""

import io
import os

from . import _native
from ._native import (
    Checked,
    Compacted,
    Converted,
    DiskError,
    Extent,
    Finding,
    Info,
    Judgement,
    Layer,
    LostRange,
    Merged,
    Moved,
    Rescued,
    Snapshot,
    TrackPoint,
    check,
    compact,
    convert,
    create,
    info,
    judge,
    merge,
    move,
    rescue,
    revert,
    snapshot,
)

__all__ = [
    "Checked",
    "Compacted",
    "Converted",
    "Disk",
    "DiskError",
    "DiskFile",
    "Extent",
    "Finding",
    "Info",
    "Judgement",
    "Layer",
    "LostRange",
    "Merged",
    "Moved",
    "Rescued",
    "Snapshot",
    "TrackPoint",
    "check",
    "compact",
    "convert",
    "create",
    "info",
    "judge",
    "map",
    "merge",
    "move",
    "open",
    "rescue",
    "revert",
    "snapshot",
]


class Disk(_native.Disk):
    """A virtual disk, open. All methods may be called from any thread.

    It has a thread that carries out one request after the other; the GIL is released meanwhile.
    """

    def write(self, offset, data):
        """Write all of `data` (any object with a buffer) at `offset`."""
        super().write(offset, data if isinstance(data, bytes) else bytes(memoryview(data)))

    def file(self):
        """A file-like object over the disk, at its beginning. Closing it leaves the disk open."""
        return DiskFile(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        state = "closed" if self.closed else "writable" if self.writable else "read-only"
        return f"<diskwright.Disk {os.fspath(self.path)!r}, {self.size} bytes, {state}>"


class DiskFile(io.RawIOBase):
    """A disk as a raw binary file. `io.BufferedReader` and `io.BufferedRandom` can be put on top.

    The disk has its size: a write at its end raises `DiskError`, and `truncate` is not supported.
    """

    def __init__(self, disk):
        super().__init__()
        self._disk = disk
        self._position = 0

    @property
    def disk(self):
        """The disk beneath."""
        return self._disk

    @property
    def mode(self):
        """'rb+' where the disk can be written, else 'rb'."""
        return "rb+" if self._disk.writable else "rb"

    def readable(self):
        self._check()
        return True

    def writable(self):
        self._check()
        return self._disk.writable

    def seekable(self):
        self._check()
        return True

    def tell(self):
        self._check()
        return self._position

    def seek(self, offset, whence=io.SEEK_SET):
        self._check()
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._disk.size}
        if whence not in bases:
            raise ValueError(f"whence is {whence}, expected 0, 1 or 2")
        position = bases[whence] + offset
        if position < 0:
            raise ValueError(f"the position {position} would lie before the disk")
        self._position = position
        return position

    def readinto(self, buffer):
        self._check()
        target = memoryview(buffer).cast("B")
        data = self._disk.read(self._position, len(target))
        target[: len(data)] = data
        self._position += len(data)
        return len(data)

    def read(self, size=-1):
        self._check()
        if size is None or size < 0:
            size = max(self._disk.size - self._position, 0)
        data = self._disk.read(self._position, size)
        self._position += len(data)
        return data

    def readall(self):
        return self.read()

    def write(self, data):
        self._check()
        if not self._disk.writable:
            raise io.UnsupportedOperation("the disk is open read-only")
        view = memoryview(data).cast("B")
        # At the end nothing fits: the disk refuses all of it, and says where its end is.
        left = max(self._disk.size - self._position, 0)
        view = view[:left] if left else view
        self._disk.write(self._position, view)
        self._position += len(view)
        return len(view)

    def flush(self):
        """Make what was written durable."""
        super().flush()
        if not self._disk.closed and self._disk.writable:
            self._disk.flush()

    def _check(self):
        if self.closed:
            raise ValueError("the file is closed")


def open(path, writable=False, format=None, **options):
    """Open a disk with all its parents, or an NBD URI.

    Options (keywords): `direct` (past the page cache), `force_share` (read without a lock),
    `allow_parent_dirs` and `allow_any_parent` (where parents may lie besides the folders of the
    chain), `allow_parent_write` (write though a child depends on the image),
    `ignore_parent_timestamp`, `detect_zeroes`, `map_memory` (bytes).
    """
    return Disk(path, writable, format, **options)


def map(disk, offset=0, length=None):
    """What each range of a disk holds, as a list of `Extent`. `disk` is a `Disk` or a path."""
    if isinstance(disk, _native.Disk):
        return disk.map(offset, length)
    with open(disk) as opened:
        return opened.map(offset, length)
