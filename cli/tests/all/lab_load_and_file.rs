//! The studies `queue-depth` and `raw-and-file` and their reports, as the user types them, tiny.

use crate::common::Workshop;
use std::fs;

const QUEUE_DEPTH: &str = "lab study queue-depth --quick --size 8M --threads 2 --target-depth 8 --rounds 1 --cell 0.02 --write-back --output q.json";
const RAW_AND_FILE: &str = "lab study raw-and-file --quick --size 16M --rounds 1 --cell 0.02 --output r.json";

#[test]
fn queue_depth_is_studied_saved_and_reported() {
    let shop = Workshop::new();
    let text = shop.ok(&format!("{QUEUE_DEPTH} --copies 2 --devices 8"));
    for part in
        ["Findings, as in the paper’s Table 5", "Pre-test 1", "threads x outstanding for one total", "saved to q.json"]
    {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let json: serde_json::Value = serde_json::from_slice(&fs::read(shop.path("q.json")).unwrap()).unwrap();
    assert_eq!(json["schema"], "diskwright.study.queue-depth/3");
    assert_eq!(json["stages"].as_array().unwrap().len(), 5);
    // All is measured: the same command only computes again, and may be told of another array.
    let again = shop.json(&QUEUE_DEPTH.replace("--write-back", "--write-back --copies 3 --devices 4"));
    assert_eq!(again["stages"][1]["sweep"]["cells"][0]["rounds"], json["stages"][1]["sweep"]["cells"][0]["rounds"]);
    assert!(shop.fails(1, &QUEUE_DEPTH.replace("8M", "16M")).contains("has other settings"));
    shop.ok("lab report q.json -o q.html");
    let page = fs::read_to_string(shop.path("q.html")).unwrap();
    assert!(page.contains("as in the paper’s Table 5") && page.matches("<svg").count() > 10);
    assert!(
        shop.ok("lab report q.json --as csv -o -").starts_with("result,started_utc,part,load,subject,in_flight,round,")
    );
    assert!(shop.ok("lab report q.json --as md -o -").contains("| random 8K (70 % read) |"));
}

#[test]
fn queue_depth_on_a_space_counts_what_its_members_do() {
    let shop = Workshop::new();
    shop.ok("space create vault --member a.img --member b.img --size 64M");
    shop.ok("space disk create space://vault/disk --size 8M");
    let target = "--target space://vault/disk --format raw --destroy-data --fill --copies 2 --devices 2";
    let line = QUEUE_DEPTH.replace("--size 8M", target);
    let text = shop.ok(&line).replace('\n', " ");
    let json: serde_json::Value = serde_json::from_slice(&fs::read(shop.path("q.json")).unwrap()).unwrap();
    let members = json["pre_test"]["phases"][0]["members"].as_array().unwrap();
    assert_eq!(members.len(), 2);
    for member in members {
        let of = |name: &str| member[name].as_u64().unwrap();
        assert!(of("reads") > 0 && of("writes") > 0 && of("written_bytes") >= of("writes") * 4096, "{member}");
    }
    // Cells this short do not always show a depth.
    let found = json["findings"].as_array().unwrap().iter().map(|finding| &finding["found"]);
    let found: Vec<_> = found.filter(|found| found.is_object()).collect();
    assert_eq!(text.contains("counted on the members:"), !found.is_empty(), "{text}");
    found.iter().for_each(|found| assert!(found["measured_amplification"].as_f64().unwrap() > 0.5, "{found}"));
}

#[test]
fn tiers_are_studied_saved_and_reported() {
    let shop = Workshop::new();
    let line = "lab study tiers --quick --size 16M --fast-size 4M --copies 1 --rounds 1 --cell 0.5 \
                --slow-limit iops=4000,latency=1ms --output t.json";
    let text = shop.ok(line);
    for part in ["The report of the tiers, as in the paper", "requests served", "saved to t.json"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let json: serde_json::Value = serde_json::from_slice(&fs::read(shop.path("t.json")).unwrap()).unwrap();
    assert_eq!((&json["schema"], &json["slow"]["iops"]), (&"diskwright.study.tiers/1".into(), &4000.into()));
    assert!(json["optimizations"][0]["to_fast_bytes"].as_u64() > Some(0), "{json}");
    shop.ok("lab report t.json -o t.html");
    let page = fs::read_to_string(shop.path("t.html")).unwrap();
    assert_eq!(page.matches("<svg").count(), 2);
    assert!(shop.ok("lab report t.json --as md -o -").contains("| 8K random, 70 % read, zipf |"));
    let error = shop.fails(2, "lab study tiers --quick --slow-limit fast");
    assert!(error.contains("expected iops=N, latency=TIME"), "{error}");
    let error = shop.fails(1, "lab study tiers --quick --fast-size 1G");
    assert!(error.contains("hold the whole disk") && error.contains("--fast-size"), "{error}");
}

#[test]
fn queue_depth_takes_targets_and_guards_them() {
    let shop = Workshop::new();
    fs::write(shop.path("precious"), vec![7; 1 << 20]).unwrap();
    let line = QUEUE_DEPTH.replace("--size 8M", "--target precious");
    assert!(shop.fails(1, &line).contains("--destroy-data"));
    assert_eq!(fs::read(shop.path("precious")).unwrap(), vec![7; 1 << 20]);
    let found = shop.json(&QUEUE_DEPTH.replace("--size 8M", "--target null:1G"));
    assert_eq!(found["stages"].as_array().unwrap().len(), 4);
    assert!(found["warnings"].to_string().contains("pre-test 2"), "{}", found["warnings"]);
    shop.fails(1, "lab study queue-depth --quick --threads 0");
    shop.fails(1, "lab study queue-depth --quick --target-depth 0");
    shop.fails(2, "lab study queue-depth --copies 2");
}

#[test]
fn raw_and_file_are_compared_and_reported() {
    let shop = Workshop::new();
    if !nix::unistd::geteuid().is_root() || fs::File::open("/dev/loop-control").is_err() {
        assert!(shop.fails(1, RAW_AND_FILE).contains("run it as root"));
        println!("skipped: a device and a mount: not root, or no loop devices");
        return;
    }
    let text = shop.ok(RAW_AND_FILE);
    for part in ["RDM virtual", "thick, lazy", "First writes", "64K sequential write", "saved to r.json"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    let json: serde_json::Value = serde_json::from_slice(&fs::read(shop.path("r.json")).unwrap()).unwrap();
    assert_eq!(json["schema"], "diskwright.study.raw-and-file/3");
    shop.ok("lab report r.json -o r.html");
    assert!(fs::read_to_string(shop.path("r.html")).unwrap().contains("RDM physical reaches"));
    assert!(shop.ok("lab report r.json --as csv -o -").contains("\r\nr.json,"));
    fs::write(shop.path("file"), b"").unwrap();
    assert!(shop.fails(1, "lab study raw-and-file --quick --size 16M --device file").contains("is not a block device"));
    shop.fails(2, "lab study raw-and-file --destroy-data");
}

#[test]
fn a_comparison_is_reported() {
    let shop = Workshop::new();
    let few = shop.run("lab compare --live null: null:1G --rounds 3 --warm-up 0 --duration 20ms --output c.json");
    assert!(few.stderr.contains("3 rounds cannot show a difference with 5 comparisons"), "{few:#?}");
    assert!(few.stderr.contains("use --rounds 8"), "{few:#?}");
    shop.ok("lab report c.json -o c.html");
    let page = fs::read_to_string(shop.path("c.html")).unwrap();
    assert!(page.contains("ratio to null:") && page.contains("interleaved rounds"), "{page}");
    assert!(shop.ok("lab report c.json --as csv -o -").starts_with("result,scope,base,side,measurement,figure"));
    let damaged = fs::read_to_string(shop.path("c.json")).unwrap().replace("\"side\": 1", "\"side\": 9");
    fs::write(shop.path("d.json"), damaged).unwrap();
    assert!(shop.fails(1, "lab report d.json -o d.html").contains("which does not exist"));
}
