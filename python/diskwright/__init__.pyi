import io
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, Optional, TypedDict, Union

from typing_extensions import Buffer, Self, Unpack

_Path = Union[str, os.PathLike[str]]
_Format = Literal["raw", "vhd", "vhdx"]
_DiskType = Literal["fixed", "dynamic", "differencing"]

# Keywords of everything that opens a disk.
class _ReadOptions(TypedDict, total=False):
    force_share: bool
    allow_parent_dirs: Sequence[_Path]
    allow_any_parent: bool

# Keywords of `open` and `Disk`.
class _OpenOptions(_ReadOptions, total=False):
    direct: bool
    allow_parent_write: bool
    ignore_parent_timestamp: bool
    detect_zeroes: bool
    map_memory: Optional[int]

class DiskError(OSError):
    code: str

class Extent:
    start: int
    length: int
    kind: Literal["data", "zero", "unallocated", "damaged"]
    depth: int
    offset: Optional[int]
    file: int

class Layer:
    path: os.PathLike[str]
    format: _Format
    disk_type: _DiskType
    size: int
    block_size: Optional[int]
    sector_size: int
    allocated: Optional[int]
    creator: str
    disk_id: Optional[str]
    remarks: list[str]

class Info:
    size: int
    sector_size: int
    physical_sector_size: int
    layers: list[Layer]
    broken_link: Optional[str]
    broken_link_code: Optional[str]
    warnings: list[str]

class Finding:
    severity: Literal["note", "leak", "corrupt"]
    offset: int
    message: str
    structure: str
    found: str
    expected: str
    repair: Literal["not needed", "mends without loss", "costs data", "cannot"]
    costs: tuple[int, int] | None

class Checked:
    sound: bool
    format: _Format
    findings: list[Finding]
    allocated_blocks: int
    total_blocks: int
    leaked: int
    broken_link: Optional[str]
    broken_link_code: Optional[str]
    warnings: list[str]

class LostRange:
    start: int
    length: int
    reason: str

class Converted:
    size: int
    copied: int
    shared: int
    zeros: int
    verified: int
    lost_bytes: int
    lost: list[LostRange]
    warnings: list[str]

class Disk:
    def __init__(
        self,
        path: _Path,
        writable: bool = False,
        format: Optional[_Format] = None,
        **options: Unpack[_OpenOptions],
    ) -> None: ...
    @property
    def path(self) -> os.PathLike[str]: ...
    @property
    def size(self) -> int: ...
    @property
    def sector_size(self) -> int: ...
    @property
    def writable(self) -> bool: ...
    @property
    def warnings(self) -> list[str]: ...
    @property
    def closed(self) -> bool: ...
    @property
    def layers(self) -> list[Layer]: ...
    def read(self, offset: int, length: int) -> bytes: ...
    def write(self, offset: int, data: Buffer) -> None: ...
    def flush(self) -> None: ...
    def discard(self, offset: int, length: int) -> None: ...
    def grow(self, size: int) -> None: ...
    def map(self, offset: int = 0, length: Optional[int] = None) -> list[Extent]: ...
    def file(self) -> DiskFile: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: Optional[type[BaseException]],
        exc: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None: ...

class DiskFile(io.RawIOBase):
    def __init__(self, disk: Disk) -> None: ...
    @property
    def disk(self) -> Disk: ...
    @property
    def mode(self) -> str: ...

def open(
    path: _Path,
    writable: bool = False,
    format: Optional[_Format] = None,
    **options: Unpack[_OpenOptions],
) -> Disk: ...
def create(
    path: _Path,
    *,
    size: Optional[int] = None,
    format: Optional[_Format] = None,
    disk_type: Optional[_DiskType] = None,
    parent: Optional[_Path] = None,
    block_size: Optional[int] = None,
    sector_size: Optional[int] = None,
    preallocate: bool = False,
) -> list[str]: ...
def info(
    path: _Path,
    *,
    format: Optional[_Format] = None,
    **options: Unpack[_ReadOptions],
) -> Info: ...
def map(disk: Union[Disk, _Path], offset: int = 0, length: Optional[int] = None) -> list[Extent]: ...
def check(
    path: _Path,
    *,
    format: Optional[_Format] = None,
    **options: Unpack[_ReadOptions],
) -> Checked: ...
def convert(
    source: _Path,
    dest: _Path,
    *,
    progress: Optional[Callable[[int, int], object]] = None,
    format: Optional[_Format] = None,
    source_format: Optional[_Format] = None,
    disk_type: Optional[_DiskType] = None,
    block_size: Optional[int] = None,
    sector_size: Optional[int] = None,
    preallocate: bool = False,
    verify: bool = False,
    skip_damaged: bool = False,
    **options: Unpack[_ReadOptions],
) -> Converted: ...
