"""Snapshots, merges, compaction, moves, rescues, tracking, and the rules of places."""

import pytest

import diskwright

MIB = 1 << 20


def contents(path):
    with diskwright.open(path) as disk:
        return disk.read(0, disk.size)


def test_a_snapshot_goes_on_in_a_child_and_back(disk):
    path = disk.path
    disk.write(MIB, b"before")
    disk.close()
    frozen = diskwright.snapshot(path, "monday")
    assert frozen.disk == path and frozen.frozen.name == "disk_monday.avhdx" and frozen.warnings == []
    with diskwright.open(path, writable=True) as child:
        assert len(child.layers) == 2
        child.write(MIB, b"after!")
    back = diskwright.revert(path, keep_as="tuesday")
    assert back.frozen.name == "disk_tuesday.avhdx" and back.parent.name == "disk_monday.avhdx"
    assert contents(path)[MIB : MIB + 6] == b"before"
    with pytest.raises(diskwright.DiskError) as caught:
        diskwright.snapshot(back.parent, "third")
    assert caught.value.code == "has_children"


def test_a_child_is_merged(chain):
    with diskwright.open(chain, writable=True) as disk:
        disk.write(3 * MIB, b"of the child")
    expected = contents(chain)
    planned = diskwright.merge(chain, dry_run=True)
    assert (planned.copied, [image.name for image in planned.merged]) == (0, ["child.vhdx"])
    told = []
    done = diskwright.merge(chain, progress=lambda *step: told.append(step))
    assert done.disk.name == "parent.vhdx" and done.size == 64 * MIB and not chain.exists()
    assert told and contents(done.disk) == expected
    with pytest.raises(diskwright.DiskError, match="'parent' or 'child'"):
        diskwright.merge(done.disk, keep_name="both")


def test_a_disk_is_compacted(disk):
    disk.write(0, b"\xab" * (8 * MIB))
    disk.write(4 * MIB, bytes(4 * MIB))
    disk.close()
    before = contents(disk.path)
    estimated = diskwright.compact(disk.path, estimate=True)
    done = diskwright.compact(disk.path)
    assert done.zeros == estimated.zeros == 4 * MIB and done.new_file_size < done.old_file_size
    assert disk.path.stat().st_size == done.new_file_size and contents(disk.path) == before


def test_a_disk_is_moved(disk, tmp_path):
    disk.write(MIB, b"contents")
    disk.close()
    before, dest = contents(disk.path), tmp_path / "moved.vhd"
    assert diskwright.move(disk.path, dest, dry_run=True).copied == 0 and not dest.exists()
    done = diskwright.move(disk.path, dest)
    assert (done.dest, done.old_is_kept, done.size) == (dest, False, 16 * MIB)
    assert contents(dest) == before and not disk.path.exists()


def test_an_exception_in_the_callback_ends_a_move(disk, tmp_path):
    disk.write(0, b"\xab" * (8 * MIB))
    disk.close()

    def stop(_done, _total):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        diskwright.move(disk.path, tmp_path / "moved.vhd", progress=stop)
    assert disk.path.exists() and not (tmp_path / "moved.vhd").exists()


def test_a_damaged_disk_is_rescued(disk, tmp_path):
    disk.write(MIB, b"contents")
    disk.close()
    expected = contents(disk.path)
    with disk.path.open("r+b") as file:
        file.seek(64 << 10)
        file.write(bytes(128 << 10))  # both headers
    with pytest.raises(diskwright.DiskError):
        contents(disk.path)
    done = diskwright.rescue(disk.path, tmp_path / "saved.vhdx")
    assert (done.size, done.lost, done.lost_bytes) == (16 * MIB, [], 0) and done.remarks
    assert contents(tmp_path / "saved.vhdx") == expected


def test_changes_are_tracked(disk):
    disk.write(0, b"before")
    disk.start_tracking("monday")
    [point] = disk.track_points()
    assert (point.name, point.changed, point.everything) == ("monday", 0, None) and point.started > 1e9
    disk.write(5 * MIB, b"after")
    disk.flush()
    [(start, length)] = disk.changed_since("monday")
    assert start <= 5 * MIB < start + length and length < 2 * MIB
    disk.stop_tracking("monday")
    assert disk.track_points() == []
    with pytest.raises(diskwright.DiskError) as caught:
        disk.changed_since("monday")
    assert caught.value.code == "invalid_input"


def test_a_disk_for_azure(disk, tmp_path):
    disk.write(MIB, b"contents")
    disk.close()
    broken = [judged.rule for judged in diskwright.judge(disk.path, "azure") if judged.verdict == "not ok"]
    assert broken == ["format", "type", "size"]
    done = diskwright.convert(disk.path, tmp_path / "machine.vhd", azure=True, verify=True)
    assert (done.size, done.dest_size, done.changed_table) == (16 * MIB, 20 * MIB, None)
    for place in ("azure", "windows"):
        verdicts = {judged.verdict for judged in diskwright.judge(tmp_path / "machine.vhd", place)}
        assert verdicts <= {"ok", "not applicable"}
    [wrong] = [judged for judged in diskwright.judge(disk.path, "azure") if judged.rule == "format"]
    assert (wrong.found, wrong.expected) == ("vhdx", "VHD") and "`azure`" in wrong.remedy
    with pytest.raises(diskwright.DiskError, match="'azure' or 'windows'"):
        diskwright.judge(disk.path, "mars")


def test_a_copy_keeps_the_identity_and_gets_another_size(disk, tmp_path):
    disk.close()
    same, larger = tmp_path / "same.vhdx", tmp_path / "larger.vhdx"
    done = diskwright.convert(disk.path, same, identity="keep")
    assert (done.kept_disk_id, done.kept_linkage_id) == (True, True)
    done = diskwright.convert(disk.path, larger, identity="keep", size=32 * MIB)
    assert (done.dest_size, done.kept_disk_id, done.kept_linkage_id) == (32 * MIB, True, False)
    ids = {diskwright.info(path).layers[0].disk_id for path in (disk.path, same, larger)}
    assert len(ids) == 1
    with pytest.raises(diskwright.DiskError, match="records no identity"):
        diskwright.convert(disk.path, tmp_path / "plain.raw", identity="keep")
