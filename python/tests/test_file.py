"""The file-like object."""

import io
import shutil

import pytest

import diskwright

MIB = 1 << 20


def test_it_is_a_raw_file(disk):
    file = disk.file()
    assert isinstance(file, io.RawIOBase)
    assert file.readable() and file.writable() and file.seekable() and file.mode == "rb+"
    assert file.write(b"hello") == 5 and file.tell() == 5
    assert file.seek(-3, io.SEEK_CUR) == 2
    assert file.read(3) == b"llo"
    buffer = bytearray(6)
    file.seek(0)
    assert file.readinto(buffer) == 6 and buffer == b"hello\0"
    assert file.seek(0, io.SEEK_END) == disk.size and file.read(10) == b"" and file.read() == b""
    with pytest.raises(ValueError):
        file.seek(-1)
    with pytest.raises(ValueError):
        file.seek(0, 9)
    with file:
        pass
    assert file.closed and not disk.closed
    with pytest.raises(ValueError):
        file.read(1)


def test_the_end_of_the_disk(disk):
    file = disk.file()
    file.seek(-10, io.SEEK_END)
    assert file.write(bytes(range(100))) == 10
    with pytest.raises(diskwright.DiskError) as caught:
        file.write(b"x")
    assert caught.value.code == "invalid_input"
    file.seek(-10, io.SEEK_END)
    assert file.readall() == bytes(range(10))


def test_a_read_only_disk(chain):
    with diskwright.open(chain) as disk, disk.file() as file:
        assert not file.writable() and file.mode == "rb"
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")
        file.seek(12345)
        assert file.read(13) == b"of the parent"


def test_buffers_and_copies_by_the_standard_library(disk, tmp_path):
    with io.BufferedRandom(disk.file()) as buffered:
        buffered.write(b"one line\nanother\n")
        buffered.seek(0)
        assert buffered.readline() == b"one line\n"
    copy = tmp_path / "copy.raw"
    with open(copy, "wb") as out:
        shutil.copyfileobj(disk.file(), out, MIB)
    assert copy.stat().st_size == disk.size
    assert copy.read_bytes() == disk.read(0, disk.size)
