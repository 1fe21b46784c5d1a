"""Opening, reading, writing, mapping, describing and checking."""

import os
import random
import subprocess
import sys
import threading

import pytest

import diskwright

MIB = 1 << 20


def test_a_chain_is_read_through_its_child(chain):
    with diskwright.open(chain) as disk:
        assert (disk.size, disk.sector_size, disk.writable, disk.closed) == (64 * MIB, 512, False, False)
        assert [layer.disk_type for layer in disk.layers] == ["differencing", "dynamic"]
        assert disk.layers[1].path.name == "parent.vhdx"
        assert disk.read(12345, 13) == b"of the parent"
        assert disk.read(64 * MIB - 5, 100) == bytes(5)
        assert disk.read(1 << 62, 1 << 62) == b""
    assert disk.closed


def test_what_is_written_is_read_at_any_offset(disk):
    model = bytearray(disk.size)
    pick = random.Random(7)
    for _ in range(150):
        offset, length = pick.randrange(disk.size - 9000), pick.randrange(1, 9000)
        data = pick.randbytes(length)
        disk.write(offset, pick.choice([bytes, bytearray, memoryview])(data))
        model[offset : offset + length] = data
    disk.discard(MIB + 3, 2 * MIB)
    model[MIB + 3 : 3 * MIB + 3] = bytes(2 * MIB)
    disk.flush()
    assert disk.read(0, disk.size) == model
    with pytest.raises(TypeError):
        disk.write(0, 5)
    with pytest.raises((OverflowError, TypeError)):
        disk.read(-1, 1)


def test_many_threads_share_a_disk(disk):
    def work(number):
        for turn in range(50):
            disk.write(number * 100 + turn * 4096, bytes([number + 1]) * 100)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Parts of one sector by several threads: none is lost.
    expected = b"".join(bytes([number + 1]) * 100 for number in range(8))
    assert all(disk.read(turn * 4096, 800) == expected for turn in range(50))


def test_the_map_tells_who_holds_what(chain):
    with diskwright.open(chain, writable=True) as disk:
        disk.write(8 * MIB, bytes(64 << 10))
        disk.discard(9 * MIB, MIB)
        extents = disk.map()
        assert diskwright.map(disk, 8 * MIB, MIB) == disk.map(8 * MIB, MIB)
    assert diskwright.map(chain) == extents
    assert extents[0].start == 0 and sum(extent.length for extent in extents) == 64 * MIB
    assert all(one.start + one.length == two.start for one, two in zip(extents, extents[1:]))
    at = {extent.start: extent for extent in extents}
    assert (at[8 * MIB].kind, at[8 * MIB].depth, at[8 * MIB].length) == ("data", 0, 64 << 10)
    below = at[8 * MIB + (64 << 10)]
    assert (below.kind, below.depth) == ("data", 1) and below.offset > 0
    assert at[max(at)].kind == "unallocated" and at[max(at)].offset is None


def test_a_disk_grows(disk):
    disk.grow(17 * MIB)
    assert disk.size == 17 * MIB
    disk.write(17 * MIB - 1, b"x")
    with pytest.raises(diskwright.DiskError) as caught:
        disk.grow(MIB)
    assert caught.value.code == "invalid_input"


def test_info_follows_a_chain_as_far_as_it_can(chain):
    info = diskwright.info(chain)
    assert (info.size, len(info.layers), info.broken_link, info.warnings) == (64 * MIB, 2, None, [])
    assert (info.layers[0].format, info.layers[0].block_size) == ("vhdx", 2 * MIB)
    (chain.parent / "parent.vhdx").unlink()
    info = diskwright.info(str(chain))
    assert len(info.layers) == 1 and info.broken_link_code == "parent_missing"
    assert "was not found" in info.broken_link


def test_check_finds_damage(chain):
    assert diskwright.check(chain).sound
    data = bytearray(chain.read_bytes())
    data[64 << 10 : 192 << 10] = b"\xff" * (128 << 10)
    chain.write_bytes(data)
    checked = diskwright.check(chain)
    assert not checked.sound and checked.format == "vhdx"
    assert checked.findings[0].severity == "corrupt" and checked.findings[0].message


def test_errors_have_codes(chain, tmp_path):
    def code(call, *args, **options):
        with pytest.raises(diskwright.DiskError) as caught:
            call(*args, **options)
        assert isinstance(caught.value, OSError) and str(caught.value)
        return caught.value.code

    parent = tmp_path / "parent.vhdx"
    assert code(diskwright.open, tmp_path / "none.vhdx") == "not_found"
    assert code(diskwright.open, parent, writable=True) == "has_children"
    assert code(diskwright.open, chain, format="qed") == "invalid_input"
    assert code(diskwright.create, chain, size=MIB) == "exists"
    assert code(diskwright.create, tmp_path / "new.vhdx") == "invalid_input"
    with diskwright.open(chain) as disk:
        assert code(diskwright.open, chain, writable=True) == "locked"
        assert code(disk.write, 0, b"x") == "read_only"
        assert code(disk.grow, 65 * MIB) != ""
    assert code(disk.read, 0, 1) == "invalid_input"
    disk.close()
    with diskwright.open(chain, writable=True) as disk:
        assert code(disk.write, disk.size - 1, b"xx") == "invalid_input"
        assert code(disk.discard, disk.size, 1 << 63) == "invalid_input"
    parent.rename(tmp_path / "away.vhdx")
    assert code(diskwright.open, chain) == "parent_missing"


def test_texts_name_keyword_arguments(chain, tmp_path):
    def told(call, *args, **options):
        with pytest.raises(diskwright.DiskError) as caught:
            call(*args, **options)
        return str(caught.value)

    parent = tmp_path / "parent.vhdx"
    assert "insist with `allow_parent_write`" in told(diskwright.open, parent, writable=True)
    assert "give it with `size`" in told(diskwright.create, tmp_path / "new.vhdx")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    needs = f"needs `allow_parent_dirs` = {tmp_path}"
    [warning] = diskwright.create(elsewhere / "child.vhdx", parent=parent)
    assert needs in warning
    refused = told(diskwright.open, elsewhere / "child.vhdx")
    assert f"allow it with `allow_parent_dirs` = {tmp_path} (or with `allow_any_parent`)" in refused
    assert "`allow_any_parent`" in diskwright.info(elsewhere / "child.vhdx").broken_link
    # The format of `convert` is that of the copy.
    wrong = tmp_path / "wrong.vhd"
    wrong.write_bytes(parent.read_bytes())
    assert "with `format`" in told(diskwright.open, wrong)
    assert "with `source_format`" in told(diskwright.convert, wrong, tmp_path / "copy.vhdx")


def test_a_disk_that_is_dropped_is_closed(tmp_path):
    path = tmp_path / "disk.vhdx"
    diskwright.create(path, size=MIB * 4)
    disk = diskwright.open(path, writable=True)
    disk.write(0, b"kept")
    del disk
    with diskwright.open(path) as disk:
        assert disk.read(0, 4) == b"kept"


def test_a_child_by_fork_is_refused(disk):
    disk.write(0, b"before")
    child = os.fork()
    if child == 0:
        try:
            disk.read(0, 6)
        except diskwright.DiskError as error:
            os._exit(0 if "fork()" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert disk.read(0, 6) == b"before"


def test_other_threads_run_while_a_disk_is_waited_for(tmp_path):
    """The GIL is released: while one thread waits for a server, this one ends the server."""
    socket = tmp_path / "mute.sock"
    # It accepts a client and never says a word.
    script = (
        "import socket, sys\n"
        "server = socket.socket(socket.AF_UNIX)\n"
        "server.bind(sys.argv[1]); server.listen()\n"
        "print('listening', flush=True)\n"
        "client = server.accept()\n"
        "print('accepted', flush=True)\n"
        "sys.stdin.read()\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", script, str(socket)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout.readline() == "listening\n"
        errors = []

        def wait():
            try:
                diskwright.open(f"nbd+unix:///?socket={socket}")
            except diskwright.DiskError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert server.stdout.readline() == "accepted\n"
        # With the GIL held by the thread that waits, this comes when the client has given up.
        server.stdin.close()
        thread.join(60)
        [error] = errors
        assert error.code == "connection" and "sent nothing" not in str(error), error
    finally:
        server.kill()
        server.wait()
