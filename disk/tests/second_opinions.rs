//! What we write, others read; what others write, we read.

mod common;

use common::{Kind, Step, Twin};
use diskwright_disk::{Disk, OpenOptions};
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

/// Runs a program; `None`, and a skip by name, where it is not installed.
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
        Format::Vhdx => "vhdx",
        Format::Raw => "raw",
    }
}

fn same_file(path: &Path, model: &[u8]) {
    let found = std::fs::read(path).unwrap();
    assert!(found.len() >= model.len(), "{} bytes, should be {}", found.len(), model.len());
    if let Some(at) = found.iter().zip(model).position(|(a, b)| a != b) {
        panic!("byte {at} is {:#04x}, should be {:#04x}", found[at], model[at]);
    }
    assert!(found[model.len()..].iter().all(|&byte| byte == 0), "what is beyond the end is zero");
}

/// The monolithic kinds, over block and sector sizes.
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
        // And back: we write into their image, they read it.
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

/// Reads a whole chain with libvhdi: the paths from the base to the top, and where to put the bytes.
const LIBVHDI: &str = include_str!("../../proving/src/chain_by_libvhdi.py");

#[test]
fn libvhdi_reads_the_chains_that_we_write() {
    for format in [Format::Vhd, Format::Vhdx] {
        for (depth, block) in [(1, 512 << 10), (1, 1 << 20), (4, 1 << 20), (9, 2 << 20)] {
            if format == Format::Vhdx && block < 1 << 20 {
                continue;
            }
            let mut twin = Twin::new(Kind::new(format, DiskType::Differencing, Some(block)), 10 * MIB);
            for level in 0..depth {
                // libvhdi calls unmapped blocks of a child the parent's, so zeros are left to our own tests and to qemu.
                let mut random = Xoshiro256PlusPlus::seed_from_u64(level * 17 + u64::from(block));
                for _ in 0..25 {
                    // In eights: libvhdi 20210425 takes the clear bits that follow set ones in a bitmap's byte for set.
                    let sector = random.next_u64() % (10 * MIB / 4096) * 8;
                    let sectors = 8 + random.next_u64() % 112 * 8;
                    twin.apply(Step::Write { sector, sectors, seed: random.next_u64() as u8 | 1, fua: false });
                }
                // The top is not left empty: libvhdi takes the file's first bytes for the bitmap of a chunk that has none.
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
