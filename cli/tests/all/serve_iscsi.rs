//! `serve --iscsi`: what it announces, what it refuses, and the initiators of others: the
//! conformance suite of libiscsi, and QEMU. The kernel's initiator is in `guest.rs`.

use crate::common::{Workshop, hears_hangups};
use crate::guest_machine::find;
use crate::serving::{Serving, page};
use nix::sys::signal::Signal;
use std::{
    os::unix::fs::PermissionsExt,
    process::{Child, Command},
};

const TARGET: &str = "iqn.2026-11.org.example:disks";

fn have(test: &str, programs: &[&str]) -> bool {
    let missing = programs.iter().find(|program| find(program).is_none());
    missing.inspect(|program| println!("skipped: {test}: {program} is not installed")).is_none()
}

fn shop_with(names: &[&str]) -> Workshop {
    let shop = Workshop::new();
    for name in names {
        shop.ok(&format!("create {name} --size 64M"));
    }
    shop
}

#[test]
fn disks_are_logical_units_of_one_target() {
    let shop = shop_with(&["a.vhdx", "b.vhd"]);
    let line = format!("serve a.vhdx log=b.vhd --iscsi 0 --iscsi-target {TARGET} --read-only --metrics 0 --nvme 0");
    let Some(server) = Serving::start(&shop, &line) else { return };
    let exports = server.said["exports"].as_array().unwrap();
    let places: Vec<&str> = exports.iter().map(|export| export["iscsi"][0].as_str().unwrap()).collect();
    let address = places[0].trim_start_matches("iscsi://").split('/').next().unwrap().to_owned();
    assert!(address.starts_with("127.0.0.1:") && !address.ends_with(":0"), "{address}");
    assert_eq!(places[0], format!("iscsi://{address}/{TARGET}/0"));
    assert_eq!(places[1], format!("iscsi://{address}/{TARGET}/1"));
    assert!(exports[1]["nvme"][0].as_str().unwrap().ends_with("?nsid=2"), "NVMe/TCP is served too");
    if have("disks_are_logical_units_of_one_target", &["iscsi-ls"]) {
        let output = Command::new("iscsi-ls").args(["-s", &format!("iscsi://{address}/")]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains(&format!("Target:{TARGET} Portal:{address},1")), "{said}");
        assert!(said.contains("Lun:0") && said.contains("Lun:1") && said.contains("DIRECT_ACCESS"), "{said}");
    }
    let metrics = page(&format!("http://{}/metrics", server.said["metrics"].as_str().unwrap()));
    assert!(metrics.contains("diskwright_iscsi_connections "), "{metrics}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn the_default_name_of_the_target_stays() {
    let shop = shop_with(&["a.vhdx"]);
    let name = || {
        let server = Serving::start(&shop, "serve a.vhdx --iscsi localhost:0 --read-only")?;
        assert_eq!(server.said["exports"][0]["uris"], serde_json::json!([]), "NBD is served only if it is asked for");
        let place = server.said["exports"][0]["iscsi"][0].as_str().unwrap().to_owned();
        assert_eq!(server.stop(Signal::SIGTERM), Some(0));
        place.split('/').nth(3).map(str::to_owned)
    };
    let (Some(first), Some(second)) = (name(), name()) else { return };
    assert!(first.starts_with("iqn.2026-11.internal.diskwright:"), "{first}");
    assert_eq!(first, second);
}

#[test]
fn what_is_refused() {
    let shop = shop_with(&["a.vhdx"]);
    std::fs::write(shop.path("file"), "").unwrap();
    for (code, line, words) in [
        (1, "serve a.vhdx --iscsi 0", "ask for authentication (--secrets), or allow it with --insecure-writes"),
        (2, "serve a.vhdx --iscsi ./socket", "its clients do not use unix sockets"),
        (2, "serve a.vhdx --iscsi 0 --iscsi-target disks", "it must begin with 'iqn.'"),
        (2, "serve a.vhdx --iscsi 0 --iscsi-target iqn.2026-11.org.example:Disks", "lower-case letters"),
        (2, "serve a.vhdx --iscsi-target iqn.2026-11.org.example:disks", "--iscsi"),
        (2, "serve a.vhdx --reservations .", "--iscsi"),
        (2, "serve a.vhdx --iscsi 0 --tls-certificates .", "about NBD, which is not served"),
        (2, "serve a.vhdx --secrets file", "--secrets is about NVMe/TCP and iSCSI"),
        (1, "serve a.vhdx --iscsi 0 --secrets nowhere", "secrets nowhere: cannot be read"),
        (1, "serve a.vhdx --iscsi 0 --insecure-writes --reservations ./nowhere", "create it, or name another one"),
        (1, "serve a.vhdx --iscsi 0 --insecure-writes --reservations ./file", "not a directory; create it"),
    ] {
        let error = shop.fails(code, line);
        assert!(error.contains(words), "{line}: {error}");
    }
    shop.ok("check a.vhdx");
}

#[test]
fn initiators_prove_who_they_are() {
    let shop = shop_with(&["a.vhdx"]);
    let secrets = "[[client]]\nname = \"host\"\nsecret = \"the secret of host\"\n[server]\nname = \"disks\"\nsecret = \"the secret of disks\"\n";
    std::fs::write(shop.path("secrets.toml"), secrets).unwrap();
    let line = format!("serve a.vhdx --iscsi 0 --iscsi-target {TARGET} --secrets secrets.toml");
    let set_mode = |mode| std::fs::set_permissions(shop.path("secrets.toml"), PermissionsExt::from_mode(mode)).unwrap();
    set_mode(0o640);
    let error = shop.fails(1, &line);
    assert!(error.contains("secrets secrets.toml: its mode is 640") && error.contains("chmod 600"), "{error}");
    set_mode(0o600);
    let Some(server) = Serving::start(&shop, &line) else { return };
    if !have("initiators_prove_who_they_are", &["iscsi-inq"]) {
        return;
    }
    let address = server.said["exports"][0]["iscsi"][0].as_str().unwrap().trim_start_matches("iscsi://").to_owned();
    let ask = |user: &str, more: &str| {
        let output = Command::new("iscsi-inq").arg(format!("iscsi://{user}{address}{more}")).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        said.contains("Product:Virtual disk")
    };
    let both = "?target_user=disks&target_password=the+secret+of+disks";
    assert!(ask("host%the secret of host@", ""), "{}", server.log());
    assert!(ask("host%the secret of host@", &both.replace('+', " ")), "{}", server.log());
    assert!(!ask("host%the secret of hosts@", ""));
    assert!(!ask("hosts%the secret of host@", ""));
    assert!(!ask("", ""));
    server.wait_for_log("CHAP: the name \"hosts\" or its secret is wrong");
    // Our own initiator reads the same file.
    let ours = |secrets: &str| format!("info 'iscsi://host@{address}?secrets={secrets}'");
    assert!(shop.ok(&ours("secrets.toml")).contains("Virtual disk"));
    let error = shop.fails(1, &format!("info 'iscsi://{address}'"));
    assert!(error.contains("secrets=FILE"), "{error}");
    let other = secrets.replace("secret of host", "secret of hosts");
    std::fs::write(shop.path("other.toml"), other).unwrap();
    std::fs::set_permissions(shop.path("other.toml"), PermissionsExt::from_mode(0o600)).unwrap();
    let error = shop.fails(1, &ours("other.toml"));
    assert!(error.contains("it does not accept who this initiator is"), "{error}");
    // SIGHUP reads the file again. A mistake changes nothing.
    if hears_hangups() {
        std::fs::write(shop.path("secrets.toml"), "[[client]]\nname = \"host\"\nsecret = \"short\"\n").unwrap();
        server.signal(Signal::SIGHUP);
        server.wait_for_log("secrets not reloaded; the old ones stay in use");
        shop.fails(1, &ours("other.toml"));
        std::fs::copy(shop.path("other.toml"), shop.path("secrets.toml")).unwrap();
        server.signal(Signal::SIGHUP);
        server.wait_for_log("secrets reloaded");
        assert!(shop.ok(&ours("other.toml")).contains("Virtual disk"));
        assert!(!ask("host%the secret of host@", ""), "the old secret is worth nothing");
    }
    assert!(!server.log().contains("the secret of host"), "no secret is logged");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn a_logical_unit_is_a_disk_wherever_a_file_is_taken() {
    let shop = shop_with(&["a.vhdx", "b.vhdx"]);
    shop.ok("io a.vhdx -c 'write -P 7 3M 1M' -c flush");
    let line = format!("serve a.vhdx b.vhdx --iscsi 0 --iscsi-target {TARGET} --insecure-writes");
    let Some(server) = Serving::start(&shop, &line) else { return };
    let uri = |index: usize| server.said["exports"][index]["iscsi"][0].as_str().unwrap().to_owned();
    let (a, b) = (uri(0), uri(1));
    let info = shop.json(&format!("info '{a}'"));
    assert_eq!((&info["schema"], &info["lun"]), (&"diskwright.info-unit/1".into(), &0.into()));
    assert_eq!((&info["virtual_size"], &info["read_only"]), (&(64 << 20).into(), &false.into()));
    let text = shop.ok(&format!("info '{b}'"));
    assert!(text.contains("logical unit       1\n") && text.contains(TARGET), "{text}");
    shop.ok(&format!("io '{a}' -c 'read -P 7 3M 1M' -c 'write -P 9 5M 64k' -c 'discard 3M 4k' -c flush"));
    shop.ok(&format!("convert '{a}' copy.vhdx --verify"));
    shop.ok("io copy.vhdx -c 'read -P 9 5M 64k' -c 'read -P 0 3M 4k'");
    shop.ok(&format!("convert copy.vhdx '{b}?data-digest&header-digest' --verify"));
    assert!(shop.ok(&format!("compare '{a}' '{b}'")).contains("identical"));
    let map = shop.json(&format!("map '{a}'"));
    assert_eq!(map["extents"][0]["file"], a.as_str());
    // Two targets of one thread.
    let run = format!(
        "lab run '{a}' '{b}' --across-targets --random-percent 100 --count 2000 --read-percent 50 --destroy-data"
    );
    let said = shop.ok(&run);
    assert!(said.contains("iscsi unit"), "{said}");
    let whole = a.trim_end_matches("/0").to_owned();
    let error = shop.fails(1, &format!("info '{whole}'"));
    assert!(error.contains("has the logical units [0, 1]; choose one: iscsi://HOST/TARGET/LUN"), "{error}");
    let found = a.replace(&format!("{TARGET}/0"), "");
    assert!(shop.fails(1, &format!("info '{found}'")).contains("choose one"), "the target was found");
    let error = shop.fails(1, &format!("info '{whole}/7'"));
    assert!(error.contains("has no logical unit 7; it has [0, 1]"), "{error}");
    let error = shop.fails(1, &format!("info '{}'", a.replace(":disks", ":others")));
    assert!(error.contains("there is no such target"), "{error}");
    let error = shop.fails(1, &format!("check '{a}'"));
    assert!(error.contains("only a disk in a file"), "{error}");
    let error = shop.fails(1, "info 'iscsi://me%secret@127.0.0.1/'");
    assert!(error.contains("?secrets=FILE") && !error.contains("me%secret"), "{error}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    shop.ok("check a.vhdx b.vhdx");
    let error = shop.fails(1, &format!("info '{a}'"));
    assert!(error.contains("cannot connect") && error.contains("check that the target is running"), "{error}");
}

/// A program that is killed at the end of a test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// tgtd is not ours: what our initiator understands must not be what only our target says.
#[test]
fn a_target_of_others_is_a_disk() {
    const NAME: &str = "iqn.2026-11.org.example:tgt";
    if !have("a_target_of_others_is_a_disk", &["tgtd", "tgtadm"]) {
        return;
    }
    let shop = shop_with(&[]);
    std::fs::File::create(shop.path("disk")).unwrap().set_len(64 << 20).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let control = (std::process::id() % 1000 + 7000).to_string();
    let mut command = Command::new("tgtd");
    command.args(["-f", "-C", &control, "--iscsi", &format!("portal=127.0.0.1:{port}")]);
    let target = Killed(command.spawn().unwrap());
    let admin = |words: &str| {
        let status = Command::new("tgtadm").args(["-C", &control, "--lld", "iscsi"]).args(words.split(' ')).status();
        status.is_ok_and(|status| status.success())
    };
    let start = std::time::Instant::now();
    while !admin(&format!("--op new --mode target --tid 1 -T {NAME}")) {
        if start.elapsed().as_secs() > 20 {
            println!("skipped: a_target_of_others_is_a_disk: tgtd does not run here");
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let disk = shop.path("disk");
    assert!(admin(&format!("--op new --mode logicalunit --tid 1 --lun 1 -b {}", disk.display())));
    assert!(admin("--op bind --mode target --tid 1 -I ALL"));
    let uri = format!("iscsi://127.0.0.1:{port}/{NAME}/1");
    let text = shop.ok(&format!("info '{uri}'"));
    assert!(text.contains("VIRTUAL-DISK") && text.contains("64 MiB"), "{text}");
    let steps = "-c 'write -P 9 5M 2M' -c 'write -z 6M 4k' -c flush -c 'read -P 9 5M 1M' -c 'read -P 0 6M 4k'";
    shop.ok(&format!("io '{uri}' {steps}"));
    let error = shop.fails(1, &format!("info '{uri}?data-digest'"));
    assert!(error.contains("leave out") && error.contains("DataDigest=None"), "{error}");
    for name in ["HeaderDigest", "DataDigest"] {
        assert!(admin(&format!("--op update --mode target --tid 1 --name {name} --value CRC32C")));
    }
    shop.ok(&format!("io '{uri}?header-digest&data-digest' -c 'read -P 9 5M 1M' -c 'write -P 3 0 64k'"));
    shop.ok(&format!("convert '{uri}' copy.vhdx --verify"));
    shop.ok(&format!("convert copy.vhdx '{uri}' --verify"));
    drop(target);
    let bytes = std::fs::read(disk).unwrap();
    assert!(bytes[..64 << 10].iter().all(|&byte| byte == 3) && bytes[6 << 20..][..4096].iter().all(|&byte| byte == 0));
}

/// 615 tests, of which some do not apply to a disk that cannot be removed or has no further paths.
#[test]
fn the_conformance_suite_of_libiscsi_passes() {
    if !have("the_conformance_suite_of_libiscsi_passes", &["iscsi-test-cu"]) {
        return;
    }
    let shop = Workshop::new();
    // One test wants blocks of which none is a part of a physical one.
    shop.ok("create disk.vhdx --size 256M --physical-sector-size 512");
    let line = format!("serve disk.vhdx --iscsi 0 --iscsi-target {TARGET} --insecure-writes --reservations .");
    let Some(server) = Serving::start(&shop, &line) else { return };
    let uri = server.said["exports"][0]["iscsi"][0].as_str().unwrap().to_owned();
    let output = Command::new("iscsi-test-cu").args(["--dataloss", "--test=ALL", &uri]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let failed: Vec<&str> = said.lines().filter(|line| line.trim_start().contains("  - CU_")).map(str::trim).collect();
    // That test sends a block of 0xff with UNMAP and expects zeros. A block that is not zeros is
    // written (SBC-3, 4.7.3.4.4).
    let wrong_test = "test_writesame10_unmap_until_end.c";
    let failed: Vec<&str> = failed.into_iter().filter(|line| !line.contains(wrong_test)).collect();
    assert!(failed.is_empty(), "{failed:#?}");
    let ran = said.lines().find_map(|line| line.trim_start().strip_prefix("tests ")).expect("a summary");
    let ran: Vec<u32> = ran.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    println!("libiscsi: {} tests, {} passed, {} failed", ran[1], ran[2], ran[3]);
    assert!(ran[1] > 200 && ran[3] <= 1, "{ran:?}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    shop.ok("check disk.vhdx");
}

#[test]
fn qemu_reads_and_writes_a_disk_by_iscsi() {
    if !have("qemu_reads_and_writes_a_disk_by_iscsi", &["qemu-img", "qemu-io"]) {
        return;
    }
    let shop = shop_with(&["a.vhdx"]);
    let Some(server) =
        Serving::start(&shop, &format!("serve a.vhdx --iscsi 0 --iscsi-target {TARGET} --insecure-writes"))
    else {
        return;
    };
    let uri = server.said["exports"][0]["iscsi"][0].as_str().unwrap().to_owned();
    let qemu = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        (output.status.success(), said)
    };
    let (ok, said) = qemu(
        "qemu-io",
        &["-f", "raw", "-c", "write -P 7 3M 5M", "-c", "write -z 4M 64k", "-c", "discard 5M 1M", "-c", "flush", &uri],
    );
    if said.contains("Unknown protocol") || said.contains("Unknown driver") {
        println!("skipped: qemu_reads_and_writes_a_disk_by_iscsi: QEMU's iSCSI driver is not installed");
        return;
    }
    assert!(ok && !said.contains("failed"), "{said}");
    let (ok, said) =
        qemu("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, shop.path("copy.raw").to_str().unwrap()]);
    assert!(ok, "{said}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    shop.ok(
        "io a.vhdx --read-only -c 'read -P 7 3M 1M' -c 'read -P 0 4M 64k' -c 'read -P 0 5M 1M' -c 'read -P 7 6M 2M'",
    );
    assert!(shop.ok("compare a.vhdx copy.raw").contains("identical"));
    shop.ok("check a.vhdx");
}
