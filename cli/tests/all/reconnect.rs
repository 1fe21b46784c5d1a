//! `diskwright reconnect`: a chain whose files were moved.

use crate::common::Workshop;
use std::fs;

fn scattered() -> Workshop {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 16M");
    shop.ok("io base.vhdx -c 'write -P 7 1M 64K' -c flush");
    shop.ok("create middle.vhdx --parent base.vhdx");
    shop.ok("create top.vhdx --parent middle.vhdx");
    fs::create_dir_all(shop.path("store/deep")).unwrap();
    fs::rename(shop.path("base.vhdx"), shop.path("store/deep/b.vhdx")).unwrap();
    fs::rename(shop.path("middle.vhdx"), shop.path("store/m.vhdx")).unwrap();
    shop
}

#[test]
fn lost_parents_are_searched_and_connected() {
    let shop = scattered();
    let error = shop.fails(1, "map top.vhdx");
    assert!(error.contains("reconnect the image to the parent's new place"), "{error}");
    let planned = shop.ok("reconnect top.vhdx --search . --dry-run");
    assert!(
        planned.contains("top.vhdx would be connected to ") && planned.ends_with("nothing was changed\n"),
        "{planned}"
    );
    let done = shop.json("reconnect top.vhdx --search .");
    assert_eq!(done["relinked"].as_array().unwrap().len(), 2, "{done}");
    assert_eq!(done["chain"].as_array().unwrap().len(), 3, "{done}");
    shop.ok("io top.vhdx -c 'read -P 7 1M 64K'");
    let again = shop.ok("reconnect top.vhdx --search .");
    assert_eq!(again, "top.vhdx: every parent is where its child names it; nothing was changed\n");
}

#[test]
fn a_named_parent_must_be_the_right_one() {
    let shop = scattered();
    shop.ok("create other.vhdx --size 16M");
    let error = shop.fails(1, "reconnect store/m.vhdx --parent other.vhdx");
    assert!(error.contains("is not the disk it was made from") && error.contains("--ignore-id-mismatch"), "{error}");
    let done = shop.ok("reconnect store/m.vhdx --parent store/deep/b.vhdx");
    assert!(done.contains("store/m.vhdx is connected to "), "{done}");
    shop.ok("reconnect top.vhdx --parent store/m.vhdx");
    shop.ok("io top.vhdx -c 'read -P 7 1M 64K'");
    // Neither switch: the usage.
    let errors = shop.fails(2, "reconnect top.vhdx");
    assert!(errors.contains("--parent"), "{errors}");
}
