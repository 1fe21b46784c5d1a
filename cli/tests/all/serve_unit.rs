//! The unit for systemd in docs/: systemd accepts it, and its command line is one of ours.

use crate::common::Workshop;
use crate::serving::program;
use std::{fs, path::Path};

const UNIT: &str = "../docs/systemd/diskwright@.service";

#[test]
fn the_unit_is_valid_and_starts_a_server_that_reads_its_configuration() {
    let shop = Workshop::new();
    let unit = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(UNIT)).unwrap();
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("a command");
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!((words[0], words[1]), ("/usr/bin/diskwright", "serve"));
    // The configuration is asked for, and nothing else is wrong.
    let errors = shop.fails(1, &words[1..].join(" ").replace("/etc/diskwright/%i.toml", "nothing.toml"));
    assert!(errors.contains("configuration nothing.toml: cannot be read"), "{errors}");
    let ours = unit.replace("/usr/bin/diskwright", env!("CARGO_BIN_EXE_diskwright"));
    fs::write(shop.path("diskwright@.service"), ours).unwrap();
    // A manual page that is not installed is no fault of the unit.
    let args = ["verify", "--man=no", "./diskwright@.service"];
    let Some(verified) = program(&shop, "systemd-analyze", &args) else { return };
    let said = String::from_utf8_lossy(&verified.stderr).into_owned();
    let about_it: Vec<&str> = said.lines().filter(|line| line.contains("diskwright@")).collect();
    assert!(about_it.is_empty(), "{said}");
}
