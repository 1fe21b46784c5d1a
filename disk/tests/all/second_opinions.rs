//! Interoperability: other programs read what we write, and we read what they write.

use crate::common::{Kind, Step, Twin};
use diskwright_disk::{CreateRequest, Disk, MergeOptions, OpenOptions, create, merge};
use diskwright_image::{DiskType, Format};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{
    path::Path,
    process::{Command, Output},
};

const MIB: u64 = 1 << 20;

/// Runs a program; `None`, and a message, if it is not installed.
fn program(name: &str, args: &[&str]) -> Option<Output> {
    match Command::new(name).args(args).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: {name} is not installed");
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

fn must(name: &str, args: &[&str]) -> Option<()> {
    let output = program(name, args)?;
    assert!(
        output.status.success(),
        "{name} {args:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Some(())
}

fn scribble(twin: &mut Twin, seed: u64, steps: u32) {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let sectors = twin.model.len() as u64 / u64::from(twin.kind.sector_bytes);
    for _ in 0..steps {
        let sector = random.next_u64() % sectors;
        let len = 1 + random.next_u64() % if random.next_u64() % 8 == 0 { 6000 } else { 300 };
        twin.apply(match random.next_u64() % 8 {
            0 => Step::Zero { sector, sectors: len },
            1 => Step::Discard { sector, sectors: len },
            2 => Step::Flush,
            _ => Step::Write { sector, sectors: len, seed: random.next_u64() as u8 | 1, fua: false },
        });
    }
}

fn qemu_name(format: Format) -> &'static str {
    match format {
        Format::Vhd => "vpc",
        format => format.driver().name,
    }
}

fn same_file(path: &Path, model: &[u8]) {
    let found = std::fs::read(path).unwrap();
    assert!(found.len() >= model.len(), "{} bytes, should be {}", found.len(), model.len());
    if let Some(at) = found.iter().zip(model).position(|(a, b)| a != b) {
        panic!("byte {at} is {:#04x}, should be {:#04x}", found[at], model[at]);
    }
    assert!(found[model.len()..].iter().all(|&byte| byte == 0), "bytes beyond the end are zero");
}

/// Kinds without a parent, with several block and sector sizes.
fn kinds() -> Vec<Kind> {
    let mut kinds = vec![Kind::new(Format::Vhd, DiskType::Fixed, None)];
    for block in [64 << 10, 512 << 10, 2 << 20, 4 << 20] {
        kinds.push(Kind::new(Format::Vhd, DiskType::Dynamic, Some(block)));
    }
    for block in [1 << 20, 2 << 20, 32 << 20, 256 << 20] {
        kinds.push(Kind::new(Format::Vhdx, DiskType::Dynamic, Some(block)));
    }
    kinds.push(Kind::new(Format::Vhdx, DiskType::Fixed, Some(1 << 20)));
    kinds
}

#[test]
fn qemu_img_reads_what_we_write() {
    for (index, kind) in kinds().into_iter().enumerate() {
        let mut twin = Twin::new(kind, 12 * MIB);
        scribble(&mut twin, 7 + index as u64, 60);
        twin.close();
        let image = twin.chain[0].to_str().unwrap().to_owned();
        let raw = twin.dir.path().join("out.raw");
        let format = qemu_name(kind.format);
        if must("qemu-img", &["convert", "-f", format, "-O", "raw", &image, raw.to_str().unwrap()]).is_none() {
            return;
        }
        same_file(&raw, &twin.model);
        if kind.format == Format::Vhdx {
            must("qemu-img", &["check", "-f", "vhdx", &image]);
        }
    }
}

/// Children with random contents, merged one after the other.
#[test]
fn qemu_img_reads_what_was_merged() {
    for (index, (format, block_bytes)) in [(Format::Vhd, 64 << 10), (Format::Vhdx, 1 << 20)].into_iter().enumerate() {
        let mut twin = Twin::new(Kind::new(format, DiskType::Differencing, Some(block_bytes)), 12 * MIB);
        for round in 0..3 {
            scribble(&mut twin, 70 + index as u64 + 10 * round, 30);
            twin.apply(Step::Child);
        }
        twin.close();
        let base = twin.chain[0].clone();
        let into = MergeOptions { into: Some(base.clone()), ..MergeOptions::default() };
        merge(twin.chain.last().unwrap(), &into, &mut |_, _| true).unwrap();
        let (base, raw) = (base.to_str().unwrap(), twin.dir.path().join("out.raw"));
        let name = qemu_name(format);
        if must("qemu-img", &["convert", "-f", name, "-O", "raw", base, raw.to_str().unwrap()]).is_none() {
            return;
        }
        same_file(&raw, &twin.model);
        if format == Format::Vhdx {
            must("qemu-img", &["check", "-f", "vhdx", base]);
        }
    }
}

#[test]
fn we_read_and_change_what_qemu_writes() {
    let cases: &[(Format, &[&str])] = &[
        (Format::Vhd, &["-o", "subformat=dynamic,force_size=on"]),
        (Format::Vhd, &["-o", "subformat=dynamic"]),
        (Format::Vhd, &["-o", "subformat=fixed,force_size=on"]),
        (Format::Vhdx, &["-o", "subformat=dynamic,block_size=1M"]),
        (Format::Vhdx, &["-o", "subformat=dynamic,block_size=8M"]),
        (Format::Vhdx, &["-o", "subformat=fixed"]),
    ];
    for (index, (format, options)) in cases.iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join(format!("theirs.{format}"));
        let image_name = image.to_str().unwrap();
        let qemu = qemu_name(*format);
        let mut args = vec!["create", "-q", "-f", qemu];
        args.extend_from_slice(options);
        args.extend_from_slice(&[image_name, "20M"]);
        if must("qemu-img", &args).is_none() {
            return;
        }
        let mut random = Xoshiro256PlusPlus::seed_from_u64(100 + index as u64);
        let mut commands = Vec::new();
        for _ in 0..40 {
            let sector = random.next_u64() % (19 * MIB / 512);
            let len =
                512 * (1 + random.next_u64() % 2000).min(20 * MIB / 512 - 1024 - sector.min(20 * MIB / 512 - 1025));
            commands.push(format!("write -P {} {} {len}", 1 + random.next_u64() % 255, sector * 512));
        }
        let mut args = vec!["-f", qemu, image_name];
        commands.iter().for_each(|command| args.extend_from_slice(&["-c", command]));
        must("qemu-io", &args);
        let raw = dir.path().join("theirs.raw");
        must("qemu-img", &["convert", "-f", qemu, "-O", "raw", image_name, raw.to_str().unwrap()]);
        let expected = std::fs::read(&raw).unwrap();
        let mut all = vec![0xEE; expected.len()];
        {
            let disk = Disk::open(&image, &OpenOptions::default()).unwrap();
            assert_eq!(disk.geometry().size_bytes, expected.len() as u64, "{image_name} {options:?}");
            Blocking::open(&*disk, EngineKind::Auto).unwrap().read(0, &mut all).unwrap();
            assert!(all == expected, "{options:?}");
        }
        // The other direction: we write to their image, and they read it.
        {
            let disk = Disk::open(&image, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
            let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
            for _ in 0..30 {
                let sector = random.next_u64() % (19 * MIB / 512);
                let len = (512 * (1 + random.next_u64() % 1500)).min(expected.len() as u64 - sector * 512);
                let mut data = vec![0; len as usize];
                random.fill_bytes(&mut data);
                io.write(sector * 512, &data, false).unwrap();
                all[(sector * 512) as usize..][..data.len()].copy_from_slice(&data);
            }
            io.write_zeroes(4 * MIB, 5 * MIB).unwrap();
            all[4 * MIB as usize..9 * MIB as usize].fill(0);
            drop(io);
            disk.close().unwrap();
        }
        must("qemu-img", &["convert", "-f", qemu, "-O", "raw", image_name, raw.to_str().unwrap()]);
        same_file(&raw, &all);
    }
}

/// Reads an image with libvhdi: its size, then the first byte at each given offset.
const SIZE_BY_LIBVHDI: &str = "
import sys
try:
    import pyvhdi
except ImportError:
    sys.exit(77)
image = pyvhdi.file()
image.open(sys.argv[1])
print(image.get_media_size(), *(image.read_buffer_at_offset(1, int(at))[0] for at in sys.argv[2:]))
";

/// Images that grew while open, in place and with a moved table, are read by qemu, and VHDX also by
/// libvhdi.
#[test]
fn other_programs_read_grown_disks() {
    for (format, disk_type, block_bytes, sizes) in [
        (Format::Vhd, DiskType::Fixed, None, [5 * MIB, 70 * MIB]),
        (Format::Vhd, DiskType::Dynamic, Some(2 << 20), [5 * MIB, 70 * MIB]),
        (Format::Vhd, DiskType::Dynamic, Some(512 << 10), [5 * MIB, 300 << 30]),
        (Format::Vhdx, DiskType::Fixed, None, [5 * MIB, 70 * MIB]),
        (Format::Vhdx, DiskType::Dynamic, Some(2 << 20), [5 * MIB, 70 * MIB]),
        (Format::Vhdx, DiskType::Dynamic, Some(1 << 20), [5 * MIB, 300 << 30]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(format!("grown.{format}"));
        let request = CreateRequest {
            disk_type: Some(disk_type),
            size_bytes: Some(sizes[0]),
            block_bytes,
            ..CreateRequest::default()
        };
        create(&path, &request).unwrap();
        let [old_bytes, new_bytes] = sizes;
        let held = [(0, 1), (old_bytes - 4096, 2), (old_bytes, 3), (new_bytes - 4096, 4)];
        {
            let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
            let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
            held[..2].iter().for_each(|&(at, byte)| io.write(at, &[byte; 4096], false).unwrap());
            disk.grow(new_bytes).unwrap();
            held[2..].iter().for_each(|&(at, byte)| io.write(at, &[byte; 4096], false).unwrap());
            drop(io);
            disk.close().unwrap();
        }
        let (name, qemu) = (path.to_str().unwrap(), qemu_name(format));
        let what = format!("{disk_type} {format}");
        let Some(info) = program("qemu-img", &["info", "-f", qemu, "--output", "json", name]) else { return };
        let info = String::from_utf8_lossy(&info.stdout).into_owned();
        assert!(info.contains(&format!("\"virtual-size\": {new_bytes}")), "{what}: {info}");
        if format == Format::Vhdx {
            must("qemu-img", &["check", "-q", "-f", qemu, name]);
        }
        let mut args = vec!["-r".to_owned(), "-f".into(), qemu.into()];
        for (at, byte) in held.into_iter().chain([(old_bytes + 4096, 0), (new_bytes - 8192, 0)]) {
            args.extend(["-c".to_owned(), format!("read -P {byte} {at} 4096")]);
        }
        args.push(name.to_owned());
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let said = program("qemu-io", &args).unwrap();
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        assert!(said.matches("read 4096/4096").count() == 6 && !said.contains("failed"), "{what}: {said}");
        if format == Format::Vhd {
            // libvhdi 20210425 uses the original size of a VHD (original_size) as its size.
            continue;
        }
        let places = held.map(|(at, _)| at.to_string());
        let mut args = vec!["-c", SIZE_BY_LIBVHDI, name];
        args.extend(places.iter().map(String::as_str));
        let Some(output) = program("/usr/bin/python3", &args) else { return };
        if output.status.code() == Some(77) {
            println!("skipped: python3-libvhdi is not installed");
            continue;
        }
        let found = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert_eq!(found, format!("{new_bytes} 1 2 3 4"), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Reads a whole chain with libvhdi. Arguments: the paths from the base to the top, and the path of
/// the output.
const LIBVHDI: &str = include_str!("../../../proof/proving/src/chain_by_libvhdi.py");

#[test]
fn libvhdi_reads_the_chains_that_we_write() {
    for format in [Format::Vhd, Format::Vhdx] {
        for (depth, block) in [(1, 512 << 10), (1, 1 << 20), (4, 1 << 20), (9, 2 << 20)] {
            if format == Format::Vhdx && block < 1 << 20 {
                continue;
            }
            let mut twin = Twin::new(Kind::new(format, DiskType::Differencing, Some(block)), 10 * MIB);
            for level in 0..depth {
                // libvhdi reads the parent for unmapped blocks of a child, so zeros are tested only
                // by our own tests and with qemu.
                let mut random = Xoshiro256PlusPlus::seed_from_u64(level * 17 + u64::from(block));
                for _ in 0..25 {
                    // In multiples of eight: libvhdi 20210425 reads clear bits that follow set bits
                    // in a bitmap byte as set.
                    let sector = random.next_u64() % (10 * MIB / 4096) * 8;
                    let sectors = 8 + random.next_u64() % 112 * 8;
                    twin.apply(Step::Write { sector, sectors, seed: random.next_u64() as u8 | 1, fua: false });
                }
                // The top must not be empty: libvhdi reads the start of the file as the bitmap of a
                // chunk without one.
                if level + 1 < depth {
                    twin.apply(Step::Child);
                }
            }
            twin.verify();
            twin.close();
            let out = twin.dir.path().join("out.raw");
            let mut args = vec!["-c", LIBVHDI, out.to_str().unwrap()];
            args.extend(twin.chain.iter().map(|path| path.to_str().unwrap()));
            let Some(output) = program("/usr/bin/python3", &args) else { return };
            if output.status.code() == Some(77) {
                println!("skipped: python3-libvhdi is not installed");
                return;
            }
            assert!(output.status.success(), "{format} depth {depth}: {}", String::from_utf8_lossy(&output.stderr));
            println!("libvhdi reads {format}, {depth} deep, blocks of {block} bytes");
            same_file(&out, &twin.model);
        }
    }
}
