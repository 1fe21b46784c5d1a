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

# Keywords of everything that changes a disk as a whole.
class _ParentOptions(TypedDict, total=False):
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
    repair: Literal["not needed", "repairable without loss", "costs data", "cannot"]
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
    dest_size: int
    changed_table: Optional[Literal["MBR", "GPT"]]
    kept_disk_id: bool
    kept_linkage_id: bool
    copied: int
    shared: int
    zeros: int
    verified: int
    lost_bytes: int
    lost: list[LostRange]
    warnings: list[str]

class Snapshot:
    disk: os.PathLike[str]
    parent: os.PathLike[str]
    frozen: Optional[os.PathLike[str]]
    warnings: list[str]

class Merged:
    disk: os.PathLike[str]
    merged: list[os.PathLike[str]]
    relinked: list[os.PathLike[str]]
    data: int
    copied: int
    shared: int
    size: int
    warnings: list[str]

class Compacted:
    old_file_size: int
    new_file_size: int
    free: int
    zeros: int
    moved: int
    warnings: list[str]

class Moved:
    source: os.PathLike[str]
    dest: os.PathLike[str]
    size: int
    copied: int
    old_is_kept: bool
    relinked: list[os.PathLike[str]]
    warnings: list[str]

class Rescued:
    size: int
    whole: bool
    data: int
    zeros: int
    lost_bytes: int
    doubted_bytes: int
    lost: list[LostRange]
    placed: int
    remarks: list[str]

class TrackPoint:
    name: str
    started: float
    changed: int
    everything: Optional[str]

class Judgement:
    rule: str
    verdict: Literal["ok", "not ok", "not applicable"]
    expected: str
    found: str
    remedy: Optional[str]

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
    def start_tracking(self, name: str) -> None: ...
    def stop_tracking(self, name: str) -> None: ...
    def track_points(self) -> list[TrackPoint]: ...
    def changed_since(self, name: str) -> list[tuple[int, int]]: ...
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
    size: Optional[int] = None,
    identity: Literal["new", "keep"] = "new",
    azure: bool = False,
    preallocate: bool = False,
    verify: bool = False,
    skip_damaged: bool = False,
    **options: Unpack[_ReadOptions],
) -> Converted: ...
def snapshot(
    path: _Path,
    name: str,
    *,
    track: Optional[str] = None,
    dry_run: bool = False,
    format: Optional[_Format] = None,
    **options: Unpack[_ParentOptions],
) -> Snapshot: ...
def revert(
    path: _Path,
    *,
    to: Optional[_Path] = None,
    keep_as: Optional[str] = None,
    dry_run: bool = False,
    format: Optional[_Format] = None,
    **options: Unpack[_ParentOptions],
) -> Snapshot: ...
def merge(
    path: _Path,
    *,
    into: Optional[_Path] = None,
    keep_name: Literal["parent", "child"] = "parent",
    progress: Optional[Callable[[int, int], object]] = None,
    dry_run: bool = False,
    search_dirs: Sequence[_Path] = ...,
    format: Optional[_Format] = None,
    **options: Unpack[_ParentOptions],
) -> Merged: ...
def compact(
    path: _Path,
    *,
    progress: Optional[Callable[[int, int], object]] = None,
    estimate: bool = False,
    dry_run: bool = False,
    format: Optional[_Format] = None,
    **options: Unpack[_ParentOptions],
) -> Compacted: ...
def move(
    path: _Path,
    to: _Path,
    *,
    progress: Optional[Callable[[int, int], object]] = None,
    format: Optional[_Format] = None,
    source_format: Optional[_Format] = None,
    disk_type: Optional[_DiskType] = None,
    block_size: Optional[int] = None,
    preallocate: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    **options: Unpack[_ParentOptions],
) -> Moved: ...
def rescue(
    source: _Path,
    dest: _Path,
    *,
    progress: Optional[Callable[[int, int], object]] = None,
    size: Optional[int] = None,
    block_size: Optional[int] = None,
    parent: Optional[_Path] = None,
    no_parent: bool = False,
    trust_table: bool = False,
    leftovers: Optional[_Path] = None,
    format: Optional[_Format] = None,
    source_format: Optional[_Format] = None,
    disk_type: Optional[_DiskType] = None,
    **options: Unpack[_ParentOptions],
) -> Rescued: ...
def judge(
    path: _Path,
    place: Literal["azure", "windows"],
    *,
    format: Optional[_Format] = None,
    **options: Unpack[_ParentOptions],
) -> list[Judgement]: ...
