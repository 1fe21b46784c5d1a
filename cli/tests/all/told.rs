//! What a new user must be told: wrong usage, a file system that is full, sizes and sectors that
//! change; and what must not be told: clients that only look, and control characters in names.

use crate::common::Workshop;
use crate::serving::Serving;
use crate::small_fs::{Small, eat_all};
use nix::sys::signal::Signal;
use std::{
    fs,
    os::unix::{fs::MetadataExt, net::UnixStream},
    path::Path,
    process::{Command, Stdio},
};

const MIB: u64 = 1 << 20;

/// The libraries name their own options; here they are the switches of the command that runs.
#[test]
fn options_are_told_as_switches() {
    let shop = Workshop::new();
    shop.ok("create good.vhdx --size 8M");
    fs::copy(shop.path("good.vhdx"), shop.path("wrong.vhd")).unwrap();
    for (code, line, told) in [
        (1, "info wrong.vhd", "say which it is with --format"),
        (1, "convert wrong.vhd copy.vhdx", "say which it is with --source-format"),
        (2, "compare good.vhdx wrong.vhd", "say which it is with --format or --second-format"),
        (2, "convert good.vhdx copy.xyz", "name the format with --format"),
        (2, "create a.vhdx --size 0", "use a larger --size"),
        (2, "create a.vhdx --size 1G --type differencing", "name it with --parent"),
        (2, "create a.raw --size 1G --type dynamic", "without --preallocate"),
    ] {
        let error = shop.fails(code, line);
        assert!(error.contains(told) && !error.contains("::"), "`diskwright {line}`: {error}");
    }
    fs::copy(shop.path("good.vhdx"), shop.path("guess.bin")).unwrap();
    let document = shop.json("map guess.bin");
    let warning = document["warnings"][0].as_str().unwrap();
    assert!(warning.contains("name the format with --format)"), "{warning}");
    assert!(shop.run("map guess.bin").stderr.contains("name the format with --format)"));
}

#[test]
fn wrong_usage_ends_with_2() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 8M");
    for line in [
        "io disk.vhdx -c 'reed 0 4k'",
        "io disk.vhdx -c 'read 0 4k' -c 'write 0'",
        "create a.vhdx --size 0",
        "create a.vhdx --size 1000",
        "create a.vhdx --size 1G --block-size 3M",
        "create a.vhd --size 1G --sector-size 4096",
        "create a.vhdx --size 1G --sector-size 1000",
        "create a.vhdx --size 1G --physical-sector-size 1000",
        "create a.vhdx --size 65T",
        "create a.xyz --size 1G",
        "create a.raw --size 1G --type dynamic",
        "create a.raw --size 1G --block-size 1M",
        "create a.vhdx --size 1G --type differencing",
        "create nbd://localhost/x --size 1G",
        "convert disk.vhdx a.vhdx --block-size 3M",
        "convert disk.vhdx a.xyz",
        "convert disk.vhdx -",
        "serve nbd://localhost/x",
        "attach nbd://localhost/x",
        "lab run disk.vhdx -o x.toml",
        "lab study containers --quick --rounds 0",
    ] {
        let ended = shop.run(line);
        assert_eq!(ended.code, Some(2), "`diskwright {line}`: {ended:?}");
    }
    assert!(!shop.path("a.vhdx").exists() && !shop.path("a.raw").exists());
    // 2 says "corrupt" and "could not compare" there.
    shop.fails(1, "check nbd://localhost/x");
    shop.fails(2, "compare nowhere.raw disk.vhdx");
    // What files decide has failed.
    for line in ["create disk.vhdx --size 8M", "create b.vhdx --parent nowhere.vhdx", "convert nowhere.raw b.raw"] {
        shop.fails(1, line);
    }
    assert!(shop.fails(1, "create disk.vhdx --size 8M").contains("file exists"));
}

#[test]
fn a_disk_that_is_named_twice_is_told_so() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 8M");
    shop.ok("create child.vhdx --parent base.vhdx");
    shop.ok("create d.vhd --size 8M");
    fs::hard_link(shop.path("d.vhd"), shop.path("same.vhd")).unwrap();
    for line in ["serve d.vhd d.vhd --nbd ./s", "serve d.vhd x=./d.vhd --nbd ./s", "serve d.vhd same.vhd --nbd ./s"] {
        let told = shop.fails(2, line);
        assert!(told.contains("named twice") && !told.contains("other program"), "{line}: {told}");
    }
    let told = shop.fails(2, "serve base.vhdx child.vhdx --nbd ./s --allow-parent-write");
    assert!(told.contains("in use by this command itself, which serves base.vhdx too"), "{told}");
    let told = shop.fails(2, "serve child.vhdx base.vhdx --nbd ./s --allow-parent-write");
    assert!(told.contains("in use by this command itself, which serves child.vhdx too"), "{told}");
    if let Some(server) = Serving::start(&shop, "serve d.vhd twin=d.vhd --read-only --nbd ./s") {
        assert_eq!(server.said["exports"].as_array().unwrap().len(), 2);
        assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    }
}

fn on_disk(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn fixed_disks_have_holes_unless_they_are_preallocated() {
    let shop = Workshop::new();
    shop.ok("create source.vhdx --size 200M");
    shop.ok("io source.vhdx -c 'write -P 5 3M 12M'");
    for name in ["copy.vhd", "copy.vhdx", "copy.raw"] {
        shop.ok(&format!("convert source.vhdx {name} --type fixed --verify"));
        let taken = on_disk(&shop.path(name));
        assert!((12 * MIB..24 * MIB).contains(&taken), "{name} takes {taken}");
        assert!(fs::metadata(shop.path(name)).unwrap().len() >= 200 * MIB);
        shop.ok(&format!("check {name}"));
        // What is written later is there.
        shop.ok(&format!("io {name} -c 'write -P 9 100M 1M' -c flush -c 'read -P 9 100M 1M' -c 'read -P 0 101M 90M'"));
    }
    for name in ["full.vhd", "full.vhdx", "full.raw"] {
        shop.ok(&format!("convert source.vhdx {name} --type fixed --preallocate --verify"));
        assert!(on_disk(&shop.path(name)) >= 200 * MIB, "{name} is not preallocated");
        shop.ok(&format!("create new-{name} --size 200M --type fixed --preallocate"));
        assert!(on_disk(&shop.path(&format!("new-{name}"))) >= 200 * MIB, "new-{name} is not preallocated");
        shop.ok(&format!("create thin-{name} --size 200M --type fixed"));
        assert!(on_disk(&shop.path(&format!("thin-{name}"))) < 8 * MIB, "thin-{name} takes its space");
        shop.ok(&format!("compare thin-{name} new-{name}"));
        shop.ok(&format!("check thin-{name}"));
    }
}

#[test]
fn sectors_that_change_and_sizes_that_azure_refuses_are_told() {
    let shop = Workshop::new();
    shop.ok("create s4k.vhdx --size 8M --sector-size 4096");
    shop.ok("create odd.vhdx --size 8389120");
    for (line, word) in [
        ("convert s4k.vhdx a.vhd", "sectors of 4096 bytes became sectors of 512 (VHD knows only 512)"),
        ("convert s4k.vhdx a.raw", "sectors of 4096 bytes became sectors of 512 (a raw file records none"),
        ("convert s4k.vhdx a.vhdx --sector-size 512", "sectors of 4096 bytes became sectors of 512 (as requested)"),
        ("convert odd.vhdx b.vhd --type fixed", "Azure refuses such a VHD; for Azure create a disk of 9437184 bytes"),
    ] {
        let ended = shop.run(&format!("{line} --json"));
        assert_eq!(ended.code, Some(0), "{line}: {ended:?}");
        let json: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
        let told = json["warnings"][0].as_str().unwrap_or_default();
        assert!(told.contains(word) && ended.stderr.contains(word), "{line}: {ended:?}");
    }
    let made = shop.run("create c.vhd --type fixed --size 8389120 --json");
    assert!(made.stderr.contains("Azure") && made.stdout.contains("Azure"), "{made:?}");
    for quiet in [
        "convert s4k.vhdx d.vhdx",
        "convert odd.vhdx d.vhd",
        "create e.vhd --type fixed --size 8M",
        "create f.vhdx --type fixed --size 8389120",
        "convert odd.vhdx g.vhd --type fixed --quiet",
    ] {
        assert_eq!(shop.run(quiet).stderr, "", "{quiet}");
    }
    assert_eq!(shop.json("convert odd.vhdx h.vhdx")["warnings"], serde_json::json!([]));
}

#[test]
fn no_space_is_told_with_numbers() {
    let small = match Small::new("ext4", 64 * MIB) {
        Ok(small) => small,
        Err(reason) => return println!("skipped: a full file system: {reason}"),
    };
    let shop = Workshop::new();
    let place = small.mount.to_str().unwrap();
    fs::write(shop.path("source.raw"), vec![5; 100 << 20]).unwrap();
    let (on, free) = (format!(" are free on {place}"), " MiB are free");
    for format in ["vhdx", "vhd", "raw"] {
        for line in [
            format!("create {place}/new.{format} --size 200M --preallocate"),
            format!("convert source.raw {place}/new.{format} --preallocate"),
        ] {
            let told = shop.fails(1, &line);
            assert!(told.contains("needs about ") && told.contains(free) && told.contains(&on), "{line}: {told}");
            assert!(told.contains("No space left"), "{line}: {told}");
        }
        // Out of space in the middle: what is left to copy, and the little that is free.
        let told = shop.fails(1, &format!("convert source.raw {place}/new.{format}"));
        assert!(told.contains("No space left") && told.contains(" free on ") && told.contains(place), "{told}");
        assert!(told.contains("needs about"), "{told}");
        assert!(!Path::new(&format!("{place}/new.{format}")).exists());
    }
    // All that is needed, and not the step that failed.
    shop.ok("convert source.raw damaged.vhdx");
    let told = shop.fails(1, &format!("rescue damaged.vhdx {place}/saved.vhdx"));
    assert!(told.contains("needs about 100 MiB") && told.contains(&on), "{told}");
    assert!(!Path::new(&format!("{place}/saved.vhdx")).exists());
    shop.ok(&format!("create {place}/golden.vhd --size 500G"));
    let many: Vec<String> = (0..70).map(|number| format!("{place}/clone{number}.vhd")).collect();
    let told = shop.fails(1, &format!("clone {place}/golden.vhd {}", many.join(" ")));
    let needed = told.split("needs about ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap_or_default();
    assert!(
        needed.parse::<f64>().is_ok_and(|mib| mib > 64.0) && told.contains(" MiB, ") && told.contains(&on),
        "{told}"
    );
    assert!(many.iter().all(|clone| !Path::new(clone).exists()));
    let told = shop.fails(1, &format!("create {place}/new.vhdx --size 200M --type dynamic --preallocate"));
    assert!(told.contains("needs about 20"), "{told}");
    fs::remove_file(format!("{place}/golden.vhd")).unwrap();
    shop.ok(&format!("create {place}/grows.vhdx --size 200M"));
    let told = shop.fails(1, &format!("io {place}/grows.vhdx -c 'write 0 190M'"));
    assert!(told.contains("free on"), "{told}");
    eat_all(&small.mount.join("filler"));
    let told = shop.fails(1, &format!("create {place}/late.vhdx --size 1G"));
    assert!(told.contains("No space left") && told.contains(&on), "{told}");
}

/// Runs a command that may write files of at most `limit_bytes`.
fn limited(shop: &Workshop, limit_bytes: u64, line: &[&str]) -> Option<Command> {
    if Command::new("prlimit").arg("--version").output().is_err() {
        println!("skipped: SIGXFSZ: prlimit is not installed");
        return None;
    }
    let mut command = Command::new("prlimit");
    command.arg(format!("--fsize={limit_bytes}")).arg(env!("CARGO_BIN_EXE_diskwright")).args(line);
    command.current_dir(shop.path(""));
    Some(command)
}

#[test]
fn a_file_size_limit_is_an_error_and_not_the_end_of_the_program() {
    let shop = Workshop::new();
    fs::write(shop.path("source.raw"), vec![5; 24 << 20]).unwrap();
    for line in [
        &["create", "a.raw", "--size", "64M"][..],
        &["create", "a.vhdx", "--size", "64M", "--preallocate"],
        &["convert", "source.raw", "b.vhdx"],
        &["convert", "source.raw", "b.vhdx", "--cache", "page"],
        &["convert", "source.raw", "b.vhdx", "--io-engine", "pread"],
    ] {
        let Some(mut command) = limited(&shop, 16 * MIB, line) else { return };
        let ended = command.output().unwrap();
        let told = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{line:?}: {:?} {told}", ended.status);
        assert!(told.contains("File too large") && told.contains("ulimit -f"), "{line:?}: {told}");
    }
}

#[test]
fn a_server_under_a_file_size_limit_goes_on() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 64M");
    shop.ok("io disk.vhdx -c 'write -P 7 0 4M'");
    let Some(command) = limited(&shop, 16 * MIB, &["serve", "disk.vhdx", "--nbd", "./s"]) else { return };
    let Some(mut server) = Serving::started(&shop, command) else { return };
    let uri = server.uri("disk.vhdx");
    for _ in 0..2 {
        let told = shop.fails(1, &format!("io '{uri}' -c 'write -P 9 8M 32M'"));
        assert!(told.to_lowercase().contains("space"), "{told}");
        shop.ok(&format!("io '{uri}' -c 'read -P 7 0 4M'"));
    }
    assert!(server.is_running());
    server.stop(Signal::SIGTERM);
}

#[test]
fn clients_that_only_look_are_no_warning() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 8M");
    let Some(server) = Serving::start(&shop, "serve disk.vhdx --nbd ./s --log-level debug") else { return };
    let socket = shop.path("s");
    for _ in 0..3 {
        drop(UnixStream::connect(&socket).unwrap());
        // Longer than the server needs to greet: it then meets a client that has gone.
        let stream = UnixStream::connect(&socket).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(30));
        drop(stream);
    }
    for program in ["nbdinfo", "qemu-nbd"] {
        let uri = format!("nbd+unix:///?socket={}", socket.display());
        let list = match program {
            "nbdinfo" => {
                Command::new(program).args(["--list", &uri]).stdout(Stdio::null()).stderr(Stdio::null()).status()
            }
            _ => Command::new(program).args(["-L", "-k"]).arg(&socket).stdout(Stdio::null()).status(),
        };
        match list {
            Ok(status) => assert!(status.success(), "{program}: {status}"),
            Err(_) => println!("skipped: {program} is not installed"),
        }
    }
    server.wait_for_log("disconnected during the handshake");
    // Somebody who talks nonsense is still told.
    let mut stream = UnixStream::connect(&socket).unwrap();
    let before = server.log();
    assert!(!before.contains("WARN"), "{before}");
    std::io::Write::write_all(&mut stream, &[0xff; 64]).unwrap();
    server.wait_for_log("WARN");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn names_cannot_drive_the_terminal() {
    let shop = Workshop::new();
    let name = "a\x1b[2Jb\rc.raw";
    let run = |words: &[&str]| {
        let output = shop.command(words).output().unwrap();
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat()
    };
    let short = ["--duration", "0.3s", "--warm-up", "0", "--threads", "1", "--queue-depth", "1"];
    let lab = |words: &[&str]| run(&[words, &short].concat());
    for said in [
        run(&["create", name, "--size", "8M"]),
        run(&["create", name, "--size", "8M"]),
        run(&["info", name]),
        run(&["map", name]),
        run(&["check", name]),
        run(&["check", name, "--chain"]),
        run(&["io", name, "-c", "read \x1b[2J"]),
        run(&["convert", name, "x\x1by.raw"]),
        run(&["compare", name, "nowhere\x1b.raw"]),
        lab(&["lab", "run", name, "--read-percent", "100", "-o", "r\x1b.json"]),
        lab(&["lab", "compare", "--live", name, "x\x1by.raw", "--rounds", "1"]),
    ] {
        assert!(said.contains("\\u{1b}"), "nothing was told of the name: {said:?}");
        let driven = said.contains(|c: char| c.is_control() && c != '\n');
        assert!(!driven, "{said:?}");
    }
}
