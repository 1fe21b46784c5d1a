//! `map`, as the user types it.

use crate::common::Workshop;

fn chain() -> Workshop {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 128M --block-size 1M");
    shop.ok("io base.vhdx -c 'write 0 32M'");
    shop.ok("create top.vhdx --parent base.vhdx --block-size 1M");
    shop.ok("io top.vhdx -c 'write 24M 16M' -c 'write -z 4M 4M' -c 'write 100M 1M'");
    shop
}

#[test]
fn the_list_names_layer_and_file() {
    let shop = chain();
    let list = shop.ok("map top.vhdx");
    let columns: Vec<Vec<&str>> = list.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(columns[0], ["start", "length", "depth", "kind", "offset", "file"]);
    let shown: Vec<String> = columns[1..].iter().map(|c| format!("{} {} {} {}", c[0], c[1], c[2], c[3])).collect();
    let mib = |n: u64| n << 20;
    assert_eq!(shown[0], format!("0 {} 1 data", mib(4)));
    assert_eq!(shown[1], format!("{} {} 0 zero", mib(4), mib(4)));
    assert_eq!(shown.last().unwrap(), &format!("{} {} - unallocated", mib(101), mib(27)));
    assert!(list.lines().nth(1).unwrap().ends_with("base.vhdx"), "{list}");
}

#[test]
fn the_json_is_qemu_imgs_and_covers_the_disk() {
    let shop = chain();
    let map = shop.json("map top.vhdx");
    assert_eq!(map["schema"], "diskwright.map/1");
    let mut at = 0;
    let mut data = 0;
    for extent in map["extents"].as_array().unwrap() {
        assert_eq!(extent["start"], at, "a gap in {map:#}");
        let length = extent["length"].as_u64().unwrap();
        at += length;
        assert_ne!(extent["zero"], extent["data"]);
        assert_eq!(extent["data"], extent["offset"].is_u64());
        if extent["data"] == true {
            data += length;
        }
    }
    assert_eq!((at, data), (128 << 20, (20 + 16 + 1) << 20), "{map:#}");
}

#[test]
fn the_drawing_fits_a_screen_without_colour() {
    let shop = chain();
    let drawn = shop.ok("map top.vhdx --draw");
    assert!(!drawn.contains('\x1b'), "escape sequences in a pipe");
    assert!(drawn.lines().all(|line| line.chars().count() <= 100) && drawn.lines().count() <= 40);
    insta::assert_snapshot!(
        "drawing",
        drawn.replace(&shop.path("").canonicalize().unwrap().display().to_string(), "[DIR]")
    );
    let json = shop.json("map top.vhdx --draw");
    let sum = ["data_bytes", "zero_bytes", "unallocated_bytes"]
        .iter()
        .map(|field| json[field].as_u64().unwrap())
        .sum::<u64>();
    assert_eq!(sum, 128 << 20);
    assert_eq!(json["layers"][0]["data_bytes"], 17 << 20);
    assert_eq!(json["layers"][1]["data_bytes"], 20 << 20);
}

#[test]
fn the_largest_disk_is_drawn_too() {
    let shop = Workshop::new();
    shop.ok("create huge.vhdx --size 64T --block-size 256M");
    shop.ok("io huge.vhdx -c 'write 32T 4k'");
    let drawn = shop.ok("map huge.vhdx --draw");
    assert!(drawn.contains(':'), "one block in 64 TB has vanished:\n{drawn}");
    assert!(drawn.lines().nth(1).unwrap().ends_with("·····"), "{drawn}");
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let shop = chain();
    let mut child = shop.command(&["map", "top.vhdx"]).stdout(std::process::Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_map_that_meets_damage_goes_on_to_the_end() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 1G");
    shop.ok("io disk.vhdx -c 'write 0 1M'");
    let mut bytes = std::fs::read(shop.path("disk.vhdx")).unwrap();
    bytes[3 << 20..][..8].copy_from_slice(&0x7fff_0000_0006u64.to_le_bytes());
    std::fs::write(shop.path("disk.vhdx"), bytes).unwrap();
    let document = shop.json("map disk.vhdx");
    let extents = document["extents"].as_array().unwrap();
    assert_eq!((extents.len(), &extents[0]["damaged"], &extents[0]["length"]), (2, &true.into(), &2097152.into()));
    assert!(document.get("error").is_none(), "{document:#}");
}
