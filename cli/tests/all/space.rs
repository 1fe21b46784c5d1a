//! `diskwright space`, and disks whose names begin with `space://`.

use crate::{
    common::{Running, Workshop},
    loops::Loop,
};
use serde_json::Value;
use std::{
    fs,
    os::unix::fs::FileExt,
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

fn vault() -> Workshop {
    let shop = Workshop::new();
    shop.ok("space create vault --member a.img:ssd --member b.img:hdd --size 64M");
    shop
}

fn pool(shop: &Workshop) -> Value {
    shop.json("space status vault")["pools"][0].clone()
}

#[test]
fn a_pool_is_created_shown_forgotten_and_imported() {
    let shop = vault();
    let shown = shop.ok("space status");
    let expected = "\
vault: complete; 2 copies, slabs of 1 MiB

member  class  state     size    free  journal  path
     0  ssd    active  64 MiB  59 MiB  yes      ";
    assert!(shown.starts_with(expected), "{shown}");
    let error = shop.fails(1, "space create vault --member c.img --size 64M");
    assert!(error.contains("a pool \"vault\" is known on this machine already"), "{error}");
    let error = shop.fails(1, "space create other --member a.img");
    assert!(error.contains("it is a member of the pool vault") && error.contains("--force"), "{error}");
    let error = shop.fails(1, "space create other --member nothing.img");
    assert!(error.contains("no such file or device; --size creates files"), "{error}");
    let error = shop.fails(2, "space create other --member d.img --size 64M --copies 2");
    assert!(error.contains("each on another member"), "{error}");
    let error = shop.fails(2, "space create other --member d.img --slab-size 100k");
    assert!(error.contains("a power of two from 256 KiB to 64 MiB"), "{error}");
    shop.ok("space export vault");
    let error = shop.fails(1, "info space://vault/disk");
    assert!(error.contains("no pool \"vault\" is known"), "{error}");
    let error = shop.fails(1, "space import nothing.img");
    assert!(error.contains("nothing.img"), "{error}");
    shop.ok("space import a.img b.img");
    assert_eq!(pool(&shop)["degraded"], false);
}

#[test]
fn an_image_in_a_pool_lives_like_one_in_a_folder() {
    let shop = vault();
    shop.ok("create space://vault/vm.vhdx --size 64M");
    let error = shop.fails(1, "create space://vault/vm.vhdx --size 64M");
    assert!(error.contains("space://vault/vm.vhdx"), "{error}");
    shop.ok("io space://vault/vm.vhdx -c 'write -P 7 1M 64K' -c flush");
    shop.ok("snapshot space://vault/vm.vhdx --name base");
    shop.ok("io space://vault/vm.vhdx -c 'write -P 8 2M 64K' -c flush");
    let chain = shop.json("info --chain space://vault/vm.vhdx");
    assert_eq!(chain["chain"].as_array().map(Vec::len), Some(2), "{chain}");
    shop.ok("convert space://vault/vm.vhdx space://vault/copy.qcow2 --verify");
    shop.ok("convert space://vault/copy.qcow2 out.raw");
    shop.ok("compare space://vault/vm.vhdx out.raw");
    shop.ok("check space://vault/vm.vhdx");
    shop.ok("resize space://vault/copy.qcow2 128M");
    shop.ok("move space://vault/copy.qcow2 space://vault/moved.vhdx");
    shop.ok("io space://vault/moved.vhdx -c 'read -P 7 1M 64K' -c 'read -P 8 2M 64K'");
    shop.ok("merge space://vault/vm.vhdx");
    let names = |pool: &Value| -> Vec<String> {
        pool["disks"].as_array().unwrap().iter().map(|disk| disk["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&pool(&shop)), ["moved.vhdx", "vm_base.avhdx"]);
    shop.ok("io space://vault/vm_base.avhdx -c 'read -P 7 1M 64K' -c 'read -P 8 2M 64K'");
    shop.ok("space disk create space://vault/scratch --size 10M --copies 1 --tier slow");
    shop.ok("io space://vault/scratch --format raw -c 'write -P 9 0 1M'");
    let error = shop.fails(2, "space disk create space://vault/odd --size 1000");
    assert!(error.contains("whole sectors"), "{error}");
    let error = shop.fails(1, "space disk remove space://vault/nothing");
    assert!(error.contains("the pool has no such disk"), "{error}");
    let before = pool(&shop);
    let scratch = &before["disks"][1];
    assert_eq!((&scratch["copies"], &scratch["allocated"]), (&1.into(), &(1 << 20).into()), "{before}");
    assert_eq!(before["members"][0]["free"], before["members"][1]["free"].as_u64().unwrap() + (1 << 20));
    shop.ok("space disk remove space://vault/scratch");
    assert_eq!(names(&pool(&shop)).len(), 2);
    assert_eq!(pool(&shop)["disks"][0]["dirty"], 0);
}

#[test]
fn a_lost_member_is_replaced_while_the_disk_keeps_its_contents() {
    let shop = vault();
    shop.ok("create space://vault/vm.vhdx --size 32M");
    shop.ok("io space://vault/vm.vhdx -c 'write -P 7 0 8M' -c flush");
    fs::rename(shop.path("b.img"), shop.path("away")).unwrap();
    let shown = shop.run("space status vault");
    assert!(shown.stdout.starts_with("vault: degraded") && shown.stderr.contains("b.img"), "{shown:?}");
    // Reading is allowed and records nothing. Writing is not: the other half may go on alone.
    shop.ok("io -r space://vault/vm.vhdx -c 'read -P 7 0 8M'");
    let error = shop.fails(1, "io space://vault/vm.vhdx -c 'write -P 8 0 1M'");
    assert!(error.contains("only 1 of its 2 members are there") && error.contains("--force-degraded"), "{error}");
    shop.ok("space import a.img --force-degraded");
    shop.ok("io space://vault/vm.vhdx -c 'write -P 8 0 1M' -c flush");
    let degraded = pool(&shop);
    assert_eq!((&degraded["degraded"], &degraded["members"][1]["state"]), (&true.into(), &"lost".into()));
    shop.ok("space replace vault 1 c.img:hdd --size 64M");
    let whole = pool(&shop);
    assert_eq!((&whole["degraded"], &whole["disks"][0]["degraded"]), (&false.into(), &0.into()), "{whole}");
    // What was lost comes back, and is not a member any more.
    let ended = shop.run("space import a.img away c.img");
    assert!(ended.code == Some(0) && ended.stderr.contains("away: it is not a member any more"), "{ended:?}");
    // Each of the two has everything.
    fs::remove_file(shop.path("a.img")).unwrap();
    shop.ok("io -r space://vault/vm.vhdx -c 'read -P 8 0 1M' -c 'read -P 7 1M 7M'");
}

#[test]
fn a_killed_server_loses_nothing_that_was_flushed_and_the_copies_become_equal() {
    let shop = vault();
    shop.ok("create space://vault/disk.raw --size 16M");
    let mut server = Running::start(
        shop.command(&["serve", "disk=space://vault/disk.raw", "--nbd", "./nbd.sock"]).stdout(Stdio::null()),
    );
    let started = Instant::now();
    while !shop.path("nbd.sock").exists() {
        assert!(started.elapsed() < Duration::from_secs(20), "the server does not listen");
        thread::sleep(Duration::from_millis(20));
    }
    let uri = "nbd+unix:///disk?socket=nbd.sock";
    let shown = shop.ok("space status vault");
    assert!(shown.contains("It is in use") && !shown.contains("disk.raw"), "{shown}");
    let error = shop.fails(1, "io space://vault/disk.raw -c 'read 0 4K'");
    assert!(error.contains("in use"), "{error}");
    // Right before the kill: after a few seconds the slabs would be clean.
    shop.ok(&format!("io '{uri}' -c 'write -P 5 0 4M' -c flush"));
    server.kill().unwrap();
    server.wait().unwrap();
    drop(server);
    // One copy did not get the last write.
    let member = fs::OpenOptions::new().read(true).write(true).open(shop.path("b.img")).unwrap();
    let bytes = fs::read(shop.path("b.img")).unwrap();
    let at = bytes.windows(4096).step_by(4096).position(|block| block.iter().all(|&byte| byte == 5)).unwrap() * 4096;
    member.write_all_at(&[6; 4096], at as u64).unwrap();
    drop(member);
    let ended = shop.run("io space://vault/disk.raw -c 'read -P 5 0 4M'");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let bytes = fs::read(shop.path("b.img")).unwrap();
    assert!(bytes[at..at + 4096].iter().all(|&byte| byte == 5), "the copy was made equal");
    assert_eq!(pool(&shop)["disks"][0]["dirty"], 0);
}

#[test]
fn members_join_and_leave() {
    let shop = vault();
    shop.ok("create space://vault/disk.raw --size 16M");
    shop.ok("io space://vault/disk.raw --format raw -c 'write -P 3 0 16M'");
    let error = shop.fails(2, "space remove vault a.img");
    assert!(error.contains("too few members are left; add one first"), "{error}");
    let error = shop.fails(2, "space remove vault other.img");
    assert!(error.contains("it has no member other.img"), "{error}");
    shop.ok("space add vault --member c.img --member d.img --size 64M");
    assert_eq!(pool(&shop)["members"].as_array().map(Vec::len), Some(4));
    let error = shop.fails(2, "space disk create space://vault/striped --size 4M --columns 3");
    assert!(error.contains("3 columns of 2 copies need 6 members, and the pool has 4"), "{error}");
    shop.ok("space disk create space://vault/striped --size 4M --columns 2");
    let disks = pool(&shop)["disks"].clone();
    let striped = disks.as_array().unwrap().iter().find(|disk| disk["name"] == "striped").unwrap();
    assert_eq!(striped["columns"], 2);
    shop.ok("space remove vault a.img");
    let after = pool(&shop);
    assert_eq!((after["members"].as_array().map(Vec::len), &after["degraded"]), (Some(3), &false.into()), "{after}");
    // It is a file like any other now.
    shop.ok("space create second --member a.img");
    shop.ok("io space://vault/disk.raw --format raw -c 'read -P 3 0 16M'");
}

#[test]
fn a_scrub_finds_bit_rot_mends_it_and_names_what_is_lost() {
    let shop = vault();
    shop.ok("space disk create space://vault/disk --size 4M");
    shop.ok("io space://vault/disk --format raw -c 'write -P 5 0 4M' -c 'write -P 6 64K 4K'");
    assert_eq!(pool(&shop)["disks"][0]["unsealed"], 4 << 20);
    assert_eq!(shop.ok("space scrub vault"), "vault: sound; 4 MiB checked, 4 MiB of them for the first time\n");
    assert_eq!(pool(&shop)["disks"][0]["unsealed"], 0);
    let rot = |member: &str| {
        let bytes = fs::read(shop.path(member)).unwrap();
        let at = bytes.chunks(4096).position(|block| block.iter().all(|&byte| byte == 6)).unwrap() * 4096;
        let file = fs::OpenOptions::new().write(true).open(shop.path(member)).unwrap();
        file.write_all_at(&[7], at as u64 + 9).unwrap();
    };
    rot("b.img");
    let mended = shop.run("space scrub vault");
    assert_eq!((mended.code, &*mended.stdout), (Some(0), "vault: 4 KiB were wrong and were mended; 4 MiB checked\n"));
    assert!(mended.stderr.contains("b.img had 4096 bytes that do not have their checksums"), "{mended:?}");
    rot("a.img");
    // A read mends too.
    let read = shop.run("io space://vault/disk --format raw -c 'read -P 6 64K 4K'");
    assert_eq!(read.code, Some(0), "{read:?}");
    assert_eq!(shop.ok("space scrub vault"), "vault: sound; 4 MiB checked\n");
    rot("a.img");
    rot("b.img");
    let error = shop.fails(1, "io space://vault/disk --format raw -c 'read 64K 4K'");
    assert!(error.contains("do not have their checksums on any member"), "{error}");
    shop.ok("io space://vault/disk --format raw -c 'read -P 5 68K 3M'");
    let lost = shop.run("space scrub vault");
    let expected = "vault: data are lost; 4 MiB checked\n  disk: 4 KiB at 65536 are lost\n";
    assert_eq!((lost.code, &*lost.stdout), (Some(3), expected));
    let report = shop.run("space scrub vault --json");
    let report: Value = serde_json::from_str(&report.stdout).unwrap();
    assert_eq!(report["lost"][0], serde_json::json!({"disk": "disk", "offset": 65536, "length": 4096}));
    shop.ok("io space://vault/disk --format raw -c 'write -P 6 64K 4K'");
    assert_eq!(shop.run("space scrub vault").code, Some(0));
}

#[test]
fn pinned_and_hot_data_lie_on_the_fast_member_and_the_report_says_why() {
    let shop = Workshop::new();
    shop.ok("space create vault --member a.img:ssd --member b.img:hdd --size 64M --copies 1");
    let created = shop.ok("space disk create space://vault/disk --size 8M --tier slow");
    assert!(created.contains("disk was created"), "{created}");
    shop.ok("io space://vault/disk --format raw -c 'write -P 5 0 8M'");
    let told = shop.ok("space pin space://vault/disk --tier fast");
    assert!(told.contains("`diskwright space optimize` moves what lies elsewhere"), "{told}");
    let shown = shop.ok("space report space://vault/disk --length 1M");
    assert!(shown.contains("pinned to the fast tier; `space optimize` moves it") && shown.contains("b.img"), "{shown}");
    let told = shop.ok("space optimize vault --dry-run");
    assert!(told.starts_with("vault: 8 MiB would move to the fast members, 0 bytes to the slow ones\n"), "{told}");
    let told = shop.ok("space optimize vault");
    assert!(told.starts_with("vault: 8 MiB moved to the fast members, 0 bytes to the slow ones\n"), "{told}");
    assert!(shop.ok("space optimize vault").starts_with("vault: everything lies where it belongs\n"));
    let report = shop.json("space report space://vault/disk");
    assert_eq!((&report["fast_used"], &report["pieces"][0]["tier"]), (&(8 << 20).into(), &"fast".into()), "{report}");
    let moves = report["moves"].as_array().unwrap();
    assert_eq!(
        (moves.len(), &moves[0]["length"], &moves[0]["why"]),
        (1, &(8 << 20).into(), &"pinned".into()),
        "{report}"
    );
    let shown = shop.ok("space report vault");
    assert!(shown.contains("Moved lately:") && shown.contains("disk       0   8 MiB  fast"), "{shown}");
    shop.ok("io space://vault/disk --format raw -c 'read -P 5 0 8M'");
    let error = shop.fails(1, "space report space://vault/nothing");
    assert!(error.contains("the pool has no such disk"), "{error}");
    // Random requests are counted, and outlast the program that made them.
    shop.ok("space pin space://vault/disk --tier any");
    shop.ok("diskspd --destroy-data -b4K -r -o8 -t1 -d2 -W0 -w0 -n space://vault/disk");
    let report = shop.json("space report vault");
    assert!(report["requests"].as_u64().is_some_and(|requests| requests > 1_000), "{report}");
    assert_eq!(report["share"], 1.0);
    let needed = report["needed"].as_array().unwrap();
    assert!(needed.first().unwrap()["fast"].as_u64() >= needed.last().unwrap()["fast"].as_u64(), "{report}");
    let one = shop.run("space create other --member c.img --size 64M");
    assert_eq!(one.code, Some(0));
    let error = shop.fails(2, "space optimize other");
    assert!(error.contains("its members are all of one class"), "{error}");
}

#[test]
fn members_may_be_devices_of_other_sizes_and_sectors() {
    let shop = Workshop::new();
    for (name, mib) in [("a", 100), ("b", 180), ("c.img", 150)] {
        fs::File::create(shop.path(name)).unwrap().set_len(mib << 20).unwrap();
    }
    let Some(large) = Loop::over(&shop.path("a"), 4096) else { return };
    let Some(small) = Loop::over(&shop.path("b"), 512) else { return };
    shop.ok(&format!("space create vault --member {} --member {}:hdd --member c.img", large.0, small.0));
    shop.ok("space disk create space://vault/disk --size 20M");
    let disk = "io space://vault/disk --format raw";
    shop.ok(&format!("{disk} -c 'write -P 3 0 8M' -c 'write -P 4 512 512' -c flush"));
    shop.ok("create space://vault/vm.vhd --size 20M");
    shop.ok("io space://vault/vm.vhd -c 'write -P 9 1M 3M' -c 'write -P 8 512 512' -c flush");
    assert!(shop.ok("space scrub vault").starts_with("vault: sound; "));
    shop.ok(&format!("space remove vault {}", large.0));
    assert!(shop.ok("space scrub vault").starts_with("vault: sound; "));
    shop.ok(&format!("{disk} -c 'read -P 4 512 512' -c 'read -P 3 1024 8387584'"));
    shop.ok("io space://vault/vm.vhd -c 'read -P 8 512 512' -c 'read -P 9 1M 3M'");
    shop.ok("check space://vault/vm.vhd");
    assert_eq!(pool(&shop)["members"].as_array().map(Vec::len), Some(2));
}

#[test]
fn with_a_witness_one_of_two_members_is_enough() {
    let shop = Workshop::new();
    shop.ok("space create vault --member a.img --member b.img --size 64M --witness elsewhere");
    assert_eq!(
        (&pool(&shop)["members"][2]["class"], &pool(&shop)["members"][2]["free"]),
        (&"witness".into(), &0.into())
    );
    let error = shop.fails(1, "space add vault --witness elsewhere");
    assert!(error.contains("cannot create the witness") && error.contains("exists"), "{error}");
    let error = shop.fails(2, "space disk create space://vault/three --size 1M --copies 3");
    assert!(error.contains("3 copies need as many members, and the pool has 2"), "{error}");
    shop.ok("create space://vault/vm.vhdx --size 16M");
    fs::rename(shop.path("b.img"), shop.path("away")).unwrap();
    shop.ok("io space://vault/vm.vhdx -c 'write -P 7 0 4M' -c flush");
    assert_eq!(pool(&shop)["members"][1]["state"], "lost");
    // The other one comes back alone, without the witness: it must not go on as if nothing had
    // been.
    fs::rename(shop.path("away"), shop.path("b.img")).unwrap();
    fs::rename(shop.path("a.img"), shop.path("away")).unwrap();
    let error = shop.fails(1, "io space://vault/vm.vhdx -c 'write -P 8 0 4M'");
    assert!(error.contains("--force-degraded") || error.contains("no copy"), "{error}");
    fs::rename(shop.path("away"), shop.path("a.img")).unwrap();
    shop.ok("io space://vault/vm.vhdx -c 'read -P 7 0 4M' -c 'write -P 7 4M 64K'");
    assert_eq!(pool(&shop)["degraded"], true, "some of its copies are old");
    let told = shop.ok("space scrub vault");
    assert!(told.contains("of copies were brought up to date"), "{told}");
    assert_eq!(pool(&shop)["degraded"], false);
    shop.ok("space remove vault elsewhere");
    assert_eq!(pool(&shop)["members"].as_array().map(Vec::len), Some(2));
}

#[test]
fn small_writes_wait_in_the_cache_and_outlast_a_kill() {
    let shop = Workshop::new();
    let members = "--member a.img:ssd --member b.img:ssd --member c.img:hdd --member d.img:hdd --size 64M";
    shop.ok(&format!("space create vault {members}"));
    assert_eq!(pool(&shop)["cache"]["size"], 8 << 20, "an eighth of the fast members");
    shop.ok("space disk create space://vault/disk --size 8M --tier slow");
    shop.ok("io space://vault/disk --format raw -c 'write -P 1 0 8M'");
    let on = |pattern: u8| {
        let has = |name: &&str| {
            let bytes = fs::read(shop.path(name)).unwrap();
            bytes.chunks(4096).any(|block| block.iter().all(|&byte| byte == pattern))
        };
        ["a.img", "b.img", "c.img", "d.img"].iter().filter(|name| has(name)).copied().collect::<Vec<_>>()
    };
    shop.ok("io space://vault/disk --format raw -c 'write -P 7 1M 4k' -c 'write -P 7 3M 4k'");
    assert_eq!(on(7), ["a.img", "b.img"]);
    let shown = shop.ok("space status vault");
    assert!(shown.contains("Its write-back cache has 8 MiB; 8 KiB are not on the slow members yet."), "{shown}");
    let mut server = Running::start(
        shop.command(&["serve", "disk=space://vault/disk", "--format", "raw", "--nbd", "./nbd.sock"])
            .stdout(Stdio::null()),
    );
    let started = Instant::now();
    while !shop.path("nbd.sock").exists() {
        assert!(started.elapsed() < Duration::from_secs(20), "the server does not listen");
        thread::sleep(Duration::from_millis(20));
    }
    let uri = "nbd+unix:///disk?socket=nbd.sock";
    shop.ok(&format!("io '{uri}' -c 'write -P 8 1M 4k' -c 'write -P 9 5M 512' -c flush"));
    server.kill().unwrap();
    server.wait().unwrap();
    drop(server);
    let reads = "-c 'read -P 8 1M 4k' -c 'read -P 7 3M 4k' -c 'read -P 9 5M 512' -c 'read -P 1 6M 1M'";
    shop.ok(&format!("io space://vault/disk --format raw {reads}"));
    assert_eq!(on(8), ["a.img", "b.img"]);
    let error = shop.fails(2, "space cache vault 1k");
    assert!(error.contains("it must have 1 MiB to 64 GiB"), "{error}");
    let told = shop.ok("space cache vault none");
    assert_eq!(told, "vault: it has no write-back cache any more\n");
    assert!(on(8).ends_with(&["c.img", "d.img"]) && pool(&shop)["cache"].is_null());
    shop.ok(&format!("io space://vault/disk --format raw {reads}"));
    assert!(shop.fails(2, "space cache vault none").contains("it has no write-back cache"));
    let told = shop.ok("space cache vault 4M");
    assert_eq!(told, "vault: it has a write-back cache of 4 MiB\n");
    assert_eq!(shop.json("space cache vault 2M")["pools"][0]["cache"]["size"], 2 << 20);
    shop.ok("space create other --member e.img:ssd --member f.img:ssd --size 64M");
    assert!(shop.fails(2, "space cache other 4M").contains("needs slow members"));
    assert_eq!(shop.json("space status other")["pools"][0]["cache"], Value::Null);
}

#[test]
fn a_member_is_used_no_faster_than_its_limit() {
    let shop = Workshop::new();
    shop.ok("space create vault --member a.img --size 64M");
    shop.ok("space disk create space://vault/disk --size 1M");
    shop.ok("io space://vault/disk --format raw -c 'write -P 1 0 1M'");
    let told = shop.ok("space limit vault a.img iops=100,latency=2ms");
    assert_eq!(told, "vault: a.img is used at 100 operations a second, with a latency of 2000 us\n");
    let started = Instant::now();
    let reads = "-c 'read -P 1 0 4k' ".repeat(20);
    shop.ok(&format!("io space://vault/disk --format raw {reads}"));
    assert!(started.elapsed() > Duration::from_millis(200), "{:?}", started.elapsed());
    // Members that join and leave do not change the limit.
    shop.ok("space add vault --member b.img --size 64M");
    let started = Instant::now();
    shop.ok(&format!("io space://vault/disk --format raw {reads}"));
    assert!(started.elapsed() > Duration::from_millis(200), "{:?}", started.elapsed());
    assert!(shop.ok("space limit vault a.img latency=1ms").contains("takes 1000 us more"));
    let told = shop.ok("space limit vault a.img none");
    assert_eq!(told, "vault: a.img is used at its own speed\n");
    assert!(shop.fails(2, "space limit vault c.img none").contains("it is not a member of the pool vault"));
    assert!(shop.fails(2, "space limit vault a.img iops=fast").contains("a whole number above 0"));
}
