//! VMDKs and qcow2 images that are made to use up memory or time: descriptors of gigabytes, grains
//! that become gigabytes, chains that are circles. Each is refused at once and by name.

use diskwright_disk::{Disk, OpenOptions, check};
use diskwright_image::{Format, Severity};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use flate2::{Compression, write::ZlibEncoder};
use std::{
    fs,
    io::Write,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};
use tempfile::TempDir;

const MIB: usize = 1 << 20;
/// Far more than any of them takes, also on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(20);

fn opened(path: &Path, format: Format) -> Result<std::sync::Arc<Disk>, String> {
    let begun = Instant::now();
    let opened = Disk::open(path, &OpenOptions { format: Some(format), ..OpenOptions::default() });
    assert!(begun.elapsed() < AT_ONCE, "{}: {:?}", path.display(), begun.elapsed());
    opened.map_err(|error| error.to_string())
}

/// Bytes that do not compress.
fn noise(bytes: &mut [u8]) {
    let mut state = 1_u64;
    for byte in bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = (state >> 56) as u8;
    }
}

/// Runs qemu-img in a folder; false if it is not installed, which is told.
fn qemu_img(dir: &Path, arguments: &[&str]) -> bool {
    match Command::new("qemu-img").args(arguments).current_dir(dir).output() {
        Ok(output) => {
            assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
            true
        }
        Err(_) => {
            println!("skipped: images of qemu-img: qemu-img is not installed");
            false
        }
    }
}

/// Blanks, or lines that each name an extent, for 8 GiB.
#[test]
fn a_descriptor_of_gigabytes_is_refused() {
    let dir = TempDir::new().unwrap();
    let head =
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"twoGbMaxExtentFlat\"\n";
    let lines = "RW 4192256 FLAT \"a-f001.vmdk\" 0\n".repeat(100_000);
    for (name, text) in [("blank.vmdk", head.to_owned()), ("lines.vmdk", format!("{head}{lines}"))] {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        fs::File::options().write(true).open(&path).unwrap().set_len(8 << 30).unwrap();
        let error = opened(&path, Format::Vmdk).unwrap_err();
        assert!(error.contains(name), "{error}");
        let begun = Instant::now();
        let checked = check(&path, &OpenOptions { format: Some(Format::Vmdk), ..OpenOptions::default() });
        let is_told = |checked: diskwright_disk::Checked| checked.report.worst() >= Some(Severity::Corrupt);
        assert!(checked.is_err() || checked.is_ok_and(is_told), "{name}");
        assert!(begun.elapsed() < AT_ONCE, "{name}: {:?}", begun.elapsed());
    }
}

/// A grain of 64 KiB whose compressed bytes become 60 MiB.
#[test]
fn a_grain_that_becomes_more_than_a_grain_is_damaged() {
    let dir = TempDir::new().unwrap();
    let mut raw = vec![0; MIB];
    noise(&mut raw[..128 << 10]);
    fs::write(dir.path().join("d.raw"), &raw).unwrap();
    let convert = ["convert", "-f", "raw", "-O", "vmdk", "-o", "subformat=streamOptimized", "d.raw", "d.vmdk"];
    if !qemu_img(dir.path(), &convert) {
        return;
    }
    let path = dir.path().join("d.vmdk");
    let mut bytes = fs::read(&path).unwrap();
    // Sectors before the first grain, in the header at offset 64.
    let marker = u64::from_le_bytes(bytes[64..72].try_into().unwrap()) as usize * 512;
    let size = u32::from_le_bytes(bytes[marker + 8..marker + 12].try_into().unwrap()) as usize;
    assert!(bytes[marker..marker + 8] == [0; 8] && size > 60_000, "the first grain does not compress: {size}");
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&vec![0; 58 * MIB]).unwrap();
    let bomb = encoder.finish().unwrap();
    assert!(bomb.len() <= size, "{} of {size} bytes", bomb.len());
    bytes[marker + 8..marker + 12].copy_from_slice(&(bomb.len() as u32).to_le_bytes());
    bytes[marker + 12..marker + 12 + bomb.len()].copy_from_slice(&bomb);
    fs::write(&path, bytes).unwrap();

    let disk = opened(&path, Format::Vmdk).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    let mut grain = vec![0; 64 << 10];
    let error = io.read(0, &mut grain).unwrap_err().to_string();
    assert!(error.contains("d.vmdk"), "{error}");
    // Its neighbour is there.
    io.read(64 << 10, &mut grain).unwrap();
    assert!(grain == raw[64 << 10..128 << 10]);
    assert_eq!(disk.geometry().size_bytes, MIB as u64);
}

/// Lets the image expect its own identity of its parent.
fn expect_itself(path: &Path) {
    /// Where qemu-img puts the descriptor, and the room for it.
    const DESCRIPTOR: std::ops::Range<usize> = 512..21 * 512;
    let mut bytes = fs::read(path).unwrap();
    let text = String::from_utf8(bytes[DESCRIPTOR].to_vec()).unwrap();
    let lines = text.trim_end_matches('\0').split('\n').map(|line| match line.split_once('=') {
        // qemu-img writes both without leading zeros.
        Some((key @ ("CID" | "parentCID"), _)) => format!("{key}=12345678"),
        _ => line.to_owned(),
    });
    let mut changed = lines.collect::<Vec<_>>().join("\n").into_bytes();
    changed.resize(DESCRIPTOR.len(), 0);
    bytes[DESCRIPTOR].copy_from_slice(&changed);
    fs::write(path, bytes).unwrap();
}

/// The second is the child of the first, which is its own.
#[test]
fn a_chain_that_is_a_circle_is_refused() {
    for (format, name) in [(Format::Vmdk, "vmdk"), (Format::Qcow2, "qcow2")] {
        let dir = TempDir::new().unwrap();
        let [a, b] = ["a", "b"].map(|image| format!("{image}.{name}"));
        if !qemu_img(dir.path(), &["create", "-q", "-f", name, &a, "16M"]) {
            return;
        }
        let child = ["create", "-q", "-f", name, "-F", name, "-b", &a, &b];
        assert!(qemu_img(dir.path(), &child));
        if format == Format::Vmdk {
            expect_itself(&dir.path().join(&b));
        }
        // The child takes the parent's place, and names it still.
        fs::copy(dir.path().join(&b), dir.path().join(&a)).unwrap();
        for image in [&a, &b] {
            let path = dir.path().join(image);
            let error = opened(&path, format).unwrap_err();
            assert!(error.contains(&format!("a.{name} is already in the chain")), "{error}");
            let checked = check(&path, &OpenOptions { format: Some(format), ..OpenOptions::default() });
            assert!(checked.is_err() || checked.is_ok_and(|checked| checked.broken_link.is_some()), "{image}");
        }
    }
}
