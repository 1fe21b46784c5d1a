//! Every schema in `docs/schemas/` is that of a document which a command prints.

use crate::common::{Workshop, schemas};
use std::{collections::BTreeSet, fs};

/// Commands that print a document each, in an order in which they can be run. `attach`, `detach`
/// and `serve` are looked at by the tests that start them.
const LINES: &[&str] = &[
    "create base.vhdx --size 16M",
    "io base.vhdx -c 'write -P 7 1M 64K' -c flush",
    "create child.vhdx --parent base.vhdx",
    "info child.vhdx --chain",
    "info child.vhdx --windows",
    "convert child.vhdx packed.ova",
    "info packed.ova --verify",
    "map child.vhdx",
    "map child.vhdx --draw",
    "partitions child.vhdx",
    "check child.vhdx --chain",
    "check base.vhdx child.vhdx",
    "convert child.vhdx copy.vhd --verify",
    "compare child.vhdx copy.vhd",
    "diff child.vhdx",
    "diff child.vhdx --export changes.dwdiff",
    "diff --apply changes.dwdiff --onto copy.vhd --ignore-id-mismatch",
    "snapshot child.vhdx --name one",
    "snapshot list .",
    "track start child.vhdx full",
    "track show child.vhdx full",
    "track stop child.vhdx full",
    "clone child_one.avhdx sibling.vhdx",
    "compact copy.vhd",
    "resize copy.vhd +1M",
    "merge child.vhdx --to merged.vhdx",
    "reconnect child.vhdx --search .",
    "rescue copy.vhd rescued.vhdx",
    "move merged.vhdx moved.vhdx",
    "space create vault --member a.img:ssd --member b.img:hdd --size 64M",
    "space scrub vault",
    "space optimize vault --dry-run",
    "space report vault",
    "seal moved.vhdx",
    "attached",
    "cache list",
    "serve-ctl list",
    "lab profiles",
    "lab profiles vhd-applications",
    "lab report run.json -o run.html",
];

/// Documents that other tests print: those need root, a server, or minutes.
const ELSEWHERE: &[&str] = &[
    "attach-1",
    "check.undo-1",
    "control-disk-1",
    "control-door-1",
    "control-drain-1",
    "control-limit-1",
    "control-statistics-1",
    "detach-1",
    "info-export-1",
    "info-namespace-1",
    "info-unit-1",
    "lab.acceptance-1",
    "lab.agent-1",
    "lab.compare-3",
    "lab.run-2",
    "lab.sweep-3",
    "prune-1",
    "pull-1",
    "push-1",
    "pushed-1",
    "serve-1",
    "study.access-paths-4",
    "study.containers-3",
    "study.native-and-guest-1",
    "study.queue-depth-3",
    "study.raw-and-file-3",
    "study.tiers-1",
    "study.zero-payload-3",
];

#[test]
fn every_schema_belongs_to_a_document() {
    let shop = Workshop::new();
    shop.ok("lab run null: --count 1000 --output run.json");
    let printed = LINES.iter().map(|line| schemas::validate(&shop.ok(&format!("{line} --json"))));
    let mut seen: BTreeSet<String> =
        printed.map(|name| name.trim_start_matches("diskwright.").replace('/', "-")).collect();
    seen.extend(ELSEWHERE.iter().map(|name| (*name).to_owned()));
    let folder = schemas::file_of("x/1");
    let files: BTreeSet<String> = fs::read_dir(folder.parent().unwrap())
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().into_string().unwrap().strip_suffix(".json").map(str::to_owned))
        .collect();
    assert_eq!(seen, files);
}
