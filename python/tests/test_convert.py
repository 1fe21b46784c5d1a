"""Conversions: progress, exceptions, Ctrl-C."""

import subprocess
import sys

import pytest

import diskwright

MIB = 1 << 20


def test_a_chain_becomes_one_file(chain, tmp_path):
    told = []
    dest = tmp_path / "flat.vhd"
    done = diskwright.convert(chain, dest, verify=True, progress=lambda *step: told.append(step))
    assert (done.size, done.verified, done.lost) == (64 * MIB, 64 * MIB, [])
    assert done.copied + done.shared >= MIB and done.copied + done.shared + done.zeros >= 64 * MIB
    assert told and told[-1][1] == 64 * MIB and all(at <= total for at, total in told)
    with diskwright.open(chain) as old, diskwright.open(dest) as new:
        assert old.read(0, old.size) == new.read(0, new.size)
        assert [layer.format for layer in new.layers] == ["vhd"]


def test_an_exception_in_the_callback_ends_it(chain, tmp_path):
    def stop(_done, _total):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        diskwright.convert(chain, tmp_path / "flat.vhdx", verify=True, progress=stop)
    assert not list(tmp_path.glob("flat*"))


def test_errors(chain, tmp_path):
    with pytest.raises(diskwright.DiskError) as caught:
        diskwright.convert(chain, chain)
    assert caught.value.code == "exists"
    with pytest.raises(diskwright.DiskError) as caught:
        diskwright.convert(chain, tmp_path / "flat.xyz")
    assert caught.value.code == "invalid_input"


def test_a_signal_ends_it(tmp_path):
    """A signal comes while no Python runs: its exception ends the copy, and nothing is left behind."""
    source, dest = tmp_path / "source.vhdx", tmp_path / "flat.vhdx"
    diskwright.create(source, size=256 * MIB)
    with diskwright.open(source, writable=True) as disk:
        for offset in range(0, 192 * MIB, 8 * MIB):
            disk.write(offset, b"\x5a" * (8 * MIB))
    script = (
        "import signal, sys, diskwright\n"
        "def stop(*_):\n"
        "    raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGALRM, stop)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.02)\n"
        "try:\n"
        "    diskwright.convert(sys.argv[1], sys.argv[2], verify=True)\n"
        "    print('done')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, source, dest], capture_output=True, text=True, timeout=120)
    assert ran.stdout == "interrupted\n", ran
    assert not list(tmp_path.glob("flat*"))
