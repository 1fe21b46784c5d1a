//! `create` and `info`, as the user types them.

use crate::common::{Workshop, steady};

#[test]
fn each_kind_is_made_and_described() {
    let shop = Workshop::new();
    for (name, line) in [
        ("raw", "disk.raw --size 64M"),
        ("vhd_fixed", "fixed.vhd --size 64M --type fixed"),
        ("vhd_dynamic", "dynamic.vhd --size 1G --block-size 512k"),
        ("vhdx_fixed", "fixed.vhdx --size 64M --type fixed"),
        ("vhdx_dynamic", "dynamic.vhdx --size 40G"),
        ("vhdx_4k", "native.vhdx --size 64T --block-size 32M --sector-size 4096"),
    ] {
        let said = shop.ok(&format!("create {line}"));
        let file = line.split(' ').next().unwrap();
        let info = steady(&shop.ok(&format!("info {file}")));
        insta::assert_snapshot!(name, format!("{said}\n{info}"));
    }
}

#[test]
fn the_json_of_info_has_bytes() {
    let shop = Workshop::new();
    let made = shop.json("create disk.vhdx --size 40G");
    assert_eq!(made["schema"], "diskwright.create/1");
    let info = shop.json("info disk.vhdx");
    assert_eq!(info["schema"], "diskwright.info/1");
    assert_eq!(info["format"], "vhdx");
    assert_eq!(info["type"], "dynamic");
    assert_eq!(info["virtual_size"], 40u64 << 30);
    assert_eq!(info["block_size"], 2 << 20);
    assert_eq!(info["disk_id"], made["disk_id"]);
    assert_eq!(info["parent"], serde_json::Value::Null);
    assert_eq!(info["log"]["state"], "clean");
    assert!(info["size_on_disk"].as_u64().unwrap() < 16 << 20);
}

#[test]
fn a_chain_is_drawn() {
    for extension in ["vhd", "vhdx"] {
        let shop = Workshop::new();
        shop.ok(&format!("create base.{extension} --size 1G"));
        shop.ok(&format!("create middle.{extension} --parent base.{extension}"));
        shop.ok(&format!("create top.{extension} --parent middle.{extension}"));
        insta::assert_snapshot!(
            format!("chain_{extension}"),
            steady(&shop.ok(&format!("info top.{extension} --chain")))
        );
        insta::assert_snapshot!(format!("child_{extension}"), steady(&shop.ok(&format!("info top.{extension}"))));
        let json = shop.json(&format!("info top.{extension} --chain"));
        let chain = json["chain"].as_array().unwrap();
        assert_eq!(chain.iter().map(|link| link["depth"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(chain[2]["file"].as_str().unwrap().rsplit('/').next().unwrap(), format!("base.{extension}"));
        assert_eq!(chain[1]["identity_ok"], true);
        assert_eq!((json["chain_length"].as_u64(), json["parent_state"].as_str()), (Some(3), Some("ok")));
    }
}

#[test]
fn an_orphan_is_described() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 1G");
    shop.ok("create child.vhdx --parent base.vhdx");
    std::fs::rename(shop.path("base.vhdx"), shop.path("elsewhere.vhdx")).unwrap();
    insta::assert_snapshot!("orphan", steady(&shop.ok("info child.vhdx")));
    insta::assert_snapshot!("orphan_chain", steady(&shop.ok("info child.vhdx --chain")));
    let json = shop.json("info child.vhdx");
    assert_eq!(json["parent_state"], "missing");
    assert!(json["parent_error"].as_str().unwrap().contains("base.vhdx"));
    let refused = shop.fails(1, "io child.vhdx -c 'read 0 512'");
    assert!(refused.contains("parent was not found"), "{refused}");
}

#[test]
fn a_chain_is_drawn_as_far_as_it_goes() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 1G");
    shop.ok("create middle.vhdx --parent base.vhdx");
    shop.ok("create top.vhdx --parent middle.vhdx");
    std::fs::rename(shop.path("base.vhdx"), shop.path("elsewhere.vhdx")).unwrap();
    insta::assert_snapshot!("broken_chain", steady(&shop.ok("info top.vhdx --chain")));
    let json = shop.json("info top.vhdx --chain");
    assert_eq!((json["parent_state"].as_str(), json["chain_length"].as_u64()), (Some("ok"), None));
    assert!(json["chain_error"].as_str().unwrap().contains("base.vhdx") && json["parent_error"].is_null());
    assert_eq!(json["chain"].as_array().unwrap().len(), 2);
    let shown = shop.ok("info top.vhdx");
    assert!(shown.contains("parent state") && shown.contains("but the chain is broken further down"), "{shown}");
    // What is wrong with a parent that is there is found all the same.
    let mut bytes = std::fs::read(shop.path("middle.vhdx")).unwrap();
    bytes[3 << 20..][..8].copy_from_slice(&0x7000_0006u64.to_le_bytes());
    std::fs::write(shop.path("middle.vhdx"), bytes).unwrap();
    let checked = shop.run("check top.vhdx --chain");
    assert!(checked.code == Some(2) && checked.stdout.contains("middle.vhdx: corrupt"), "{checked:?}");
    assert!(checked.stdout.contains("the chain could not be followed"), "{checked:?}");
}

#[test]
fn a_changed_parent_is_told() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 1G");
    shop.ok("create child.vhdx --parent base.vhdx");
    let refused = shop.fails(1, "io base.vhdx -c 'write 0 4k'");
    assert!(refused.contains("child.vhdx") && refused.contains("--allow-parent-write"), "{refused}");
    shop.ok("io base.vhdx --allow-parent-write -c 'write 0 4k'");
    assert_eq!(shop.json("info child.vhdx")["parent_state"], "changed");
    let drawn = shop.ok("info child.vhdx --chain");
    assert!(drawn.contains("identity not ok"), "{drawn}");
}

#[test]
fn a_parent_outside_the_folder_needs_leave() {
    let shop = Workshop::new();
    std::fs::create_dir(shop.path("golden")).unwrap();
    std::fs::create_dir(shop.path("machines")).unwrap();
    shop.ok("create golden/base.vhdx --size 1G");
    let made = shop.run("create machines/child.vhdx --parent golden/base.vhdx");
    assert!(made.code == Some(0) && made.stderr.contains("needs --allow-parent-dir [DIR]/golden"), "{made:#?}");
    let told = shop.json("create machines/other.vhdx --parent golden/base.vhdx");
    assert!(told["warnings"][0].as_str().unwrap().contains("--allow-parent-dir"), "{told}");
    assert_eq!(shop.json("create golden/child.vhdx --parent golden/base.vhdx")["warnings"], serde_json::json!([]));
    let refused = shop.fails(1, "map machines/child.vhdx");
    assert!(refused.contains("--allow-parent-dir"), "{refused}");
    let told = shop.json("info machines/child.vhdx");
    assert_eq!(told["parent_state"], "not allowed");
    assert!(told["chain_error"].as_str().unwrap().contains("(or with --allow-any-parent)"), "{told}");
    for leave in ["--allow-parent-dir golden", "--allow-any-parent"] {
        shop.ok(&format!("map machines/child.vhdx {leave}"));
    }
}

#[test]
fn what_cannot_be_made_is_refused_with_a_sentence() {
    let shop = Workshop::new();
    let error = shop.fails(2, "create disk.xyz --size 1G");
    assert!(error.contains(".xyz") && error.contains(".vhdx") && error.contains("--format"), "{error}");
    shop.fails(2, "create disk.vhdx");
    assert!(shop.fails(2, "create disk.vhdx --size 40Q").contains("powers of 1024"));
    shop.fails(2, "create disk.vhdx --size 0");
    shop.fails(2, "create disk.vhdx --size 65T");
    shop.fails(2, "create disk.vhdx --size 1G --block-size 3M");
    shop.fails(2, "create disk.raw --size 1G --type dynamic");
    shop.fails(2, "create child.vhdx --type differencing --size 1G");
    shop.fails(1, "create child.vhdx --parent nowhere.vhdx");
    assert_eq!(std::fs::read_dir(shop.path("")).unwrap().count(), 0, "something was left behind");

    shop.ok("create disk.vhdx --size 1G");
    let before = std::fs::read(shop.path("disk.vhdx")).unwrap();
    shop.fails(1, "create disk.vhdx --size 2G");
    assert_eq!(std::fs::read(shop.path("disk.vhdx")).unwrap(), before, "an existing file was touched");
    shop.ok("create disk.xyz --size 1G --format vhd");
    assert_eq!(shop.json("info disk.xyz")["format"], "vhd");
}

#[test]
fn quiet_says_nothing() {
    let shop = Workshop::new();
    for line in [
        "create --quiet disk.vhdx --size 64M",
        "-q convert disk.vhdx disk.raw --verify",
        "compare -q disk.vhdx disk.raw",
    ] {
        let ended = shop.run(line);
        assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (Some(0), "", ""), "{line}");
    }
}
