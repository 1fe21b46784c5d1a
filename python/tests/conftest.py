"""Disks that several tests use."""

import pytest

import diskwright

MIB = 1 << 20


@pytest.fixture
def chain(tmp_path):
    """A parent with some data and a child of it; returns the child's path."""
    parent, child = tmp_path / "parent.vhdx", tmp_path / "child.vhdx"
    diskwright.create(parent, size=64 * MIB)
    with diskwright.open(parent, writable=True) as disk:
        disk.write(12345, b"of the parent")
        disk.write(8 * MIB, b"\xab" * MIB)
    diskwright.create(child, parent=parent)
    return child


@pytest.fixture
def disk(tmp_path):
    """A writable disk of 16 MiB, open."""
    path = tmp_path / "disk.vhdx"
    diskwright.create(path, size=16 * MIB)
    with diskwright.open(path, writable=True) as disk:
        yield disk
