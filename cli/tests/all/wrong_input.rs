//! What a new user gives to a command by mistake: each message names the file, what was found and
//! what to do, and nothing is changed.

use crate::common::Workshop;
use std::fs;

/// A file whose name says nothing and that has no signature is opened as a raw disk. It is not
/// enlarged unless something says that it is a disk.
#[test]
fn a_file_that_is_no_disk_is_not_resized() {
    let shop = Workshop::new();
    let text = "remember the milk\n".repeat(100);
    fs::write(shop.path("notes.txt"), &text).unwrap();
    for size in ["+1M", "512"] {
        let told = shop.fails(1, &format!("resize notes.txt {size}"));
        assert!(told.contains("notes.txt: nothing says that it is a disk") && told.contains("--format raw"), "{told}");
    }
    assert_eq!(fs::read_to_string(shop.path("notes.txt")).unwrap(), text);
    // Somebody says so: the user, the name, the contents, or that there are none.
    shop.ok("resize notes.txt +1M --format raw");
    fs::write(shop.path("disk.img"), &text).unwrap();
    shop.ok("resize disk.img +1M");
    fs::File::create(shop.path("new")).unwrap().set_len(1 << 20).unwrap();
    shop.ok("resize new +1M");
    let mut table = vec![0; 4 << 20];
    table[446..462].copy_from_slice(&[0, 0, 2, 0, 0x83, 0, 0, 0, 1, 0, 0, 0, 0, 8, 0, 0]);
    table[510..512].copy_from_slice(&[0x55, 0xaa]);
    fs::write(shop.path("disk"), table).unwrap();
    shop.ok("resize disk +1M");
}
