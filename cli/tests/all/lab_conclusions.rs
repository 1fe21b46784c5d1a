//! `lab sweep` and `lab compare`, end to end, on `null:` and in moments.

use crate::common::Workshop;

const SWEEP: &str = "lab sweep null: --vary queue-depth=1..8*2 --rounds 2 --warm-up 0 --duration 50ms --output s.json";

#[test]
fn a_sweep_is_saved_goes_on_and_refuses_to_be_another() {
    let shop = Workshop::new();
    let text = shop.ok(&format!("{SWEEP} --max-p99 10ms --copies 2 --devices 8"));
    assert!(text.contains("power") && text.contains("amplification") && text.contains("saved to s.json"), "{text}");
    let read = |shop: &Workshop| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(shop.path("s.json")).unwrap()).unwrap()
    };
    let first = read(&shop);
    assert_eq!(first["schema"], "diskwright.lab.sweep/3");
    assert_eq!(first["cells"].as_array().unwrap().len(), 4);
    // Nothing is left to do, and nothing is measured again.
    let again = shop.json(SWEEP);
    assert_eq!(again["cells"][0]["rounds"], first["cells"][0]["rounds"]);
    // A round more for each cell.
    let more = shop.json(&SWEEP.replace("--rounds 2", "--rounds 3"));
    assert_eq!(more["cells"][3]["rounds"].as_array().unwrap().len(), 3);
    assert_eq!(more["cells"][3]["rounds"][1], first["cells"][3]["rounds"][1]);
    // Another workload, or a file that is something else, is refused, and the file is as it was.
    let kept = std::fs::read(shop.path("s.json")).unwrap();
    let error = shop.fails(1, &format!("{SWEEP} -b 8K"));
    assert!(
        error.contains("the saved sweep has the workload") && error.contains("another file to begin a new sweep"),
        "{error}"
    );
    assert_eq!(std::fs::read(shop.path("s.json")).unwrap(), kept);
    std::fs::write(shop.path("s.json"), "{\"schema\": \"diskwright.lab.sweep/9\"}").unwrap();
    assert!(shop.fails(1, SWEEP).contains("newer Diskwright"));
}

#[test]
fn a_sweep_of_files_takes_the_targets_in_turn() {
    let shop = Workshop::new();
    let found = shop.json(
        "lab sweep a.raw b.raw --create-size 1M --vary files=1,2 --total-depth 4 --queue-depth 2 --rounds 1 --warm-up 0 --duration 50ms",
    );
    let cells = found["cells"].as_array().unwrap();
    let shape = |cell: &serde_json::Value| {
        [&cell["files"], &cell["threads"], &cell["queue_depth"]].map(|v| v.as_u64().unwrap())
    };
    assert_eq!(cells.iter().map(shape).collect::<Vec<_>>(), [[1, 2, 2], [2, 1, 2]]);
    assert!(found["verdict"].as_str().unwrap().contains("The best of 2 combinations"), "{found}");
}

#[test]
fn what_cannot_be_swept_is_refused_before_anything_is_made() {
    let shop = Workshop::new();
    shop.fails(2, "lab sweep x.raw --create-size 1M --vary depth=1..3");
    shop.fails(2, "lab sweep x.raw --create-size 1M");
    let error = shop.fails(1, "lab sweep x.raw --create-size 1M --vary files=1,2");
    assert!(error.contains("2 files are needed, but 1"), "{error}");
    assert!(shop.fails(2, "lab sweep x.raw --create-size 1M --vary agents=1,2").contains("those of a fleet"));
    assert!(!shop.path("x.raw").exists());
}

#[test]
fn results_are_compared_and_a_condition_decides_the_exit_code() {
    let shop = Workshop::new();
    for (name, depth) in [("slow", 1), ("fast", 256)] {
        let line = "lab sweep null: --vary read-percent=100 --rounds 6 --warm-up 0 --duration 30ms";
        shop.ok(&format!("{line} --queue-depth {depth} --output {name}.json"));
    }
    let sides = "lab compare fast.json slow.json";
    let found = shop.json(sides);
    assert_eq!(found["schema"], "diskwright.lab.compare/3");
    assert!(found["warnings"].as_array().unwrap().iter().any(|warning| warning["what"] == "workload"), "{found}");
    let text = shop.ok(sides);
    assert!(text.contains("Mann-Whitney") && text.contains("Holm’s correction"), "{text}");
    // The latency of 256 requests at once on nothing is far above that of one.
    let line = "lab compare slow.json fast.json --figures mean --fail-if 'mean worse-than 50%'";
    let ended = shop.run(line);
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(ended.stdout.starts_with("FAILED: fast"), "{ended:#?}");
    shop.ok("lab compare base:slow.json same:slow.json --fail-if 'slower-than 5%'");
    // What so few rounds cannot decide is told, and has not passed.
    let one = "lab sweep null: --vary read-percent=100 --rounds 2 --warm-up 0 --duration 30ms --output few.json";
    shop.ok(one);
    let ended = shop.run("lab compare a:few.json b:few.json --fail-if 'slower-than 5%' --quiet --json");
    assert_eq!(ended.code, Some(2), "{ended:#?}");
    assert!(ended.stderr.contains("the condition 'iops worse-than 5%' could not be judged"), "{ended:#?}");
    assert!(ended.stderr.contains("measure at least 5 rounds of each"), "{ended:#?}");
    let found: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(found["unjudged"].as_array().map(Vec::len), Some(1), "{found}");
    // Could not compare is 2, as everywhere.
    shop.fails(2, "lab compare slow.json missing.json");
    std::fs::write(shop.path("newer.json"), "{\"schema\": \"diskwright.lab.run/3\"}").unwrap();
    assert!(shop.fails(2, "lab compare slow.json newer.json").contains("written by a newer Diskwright"));
    shop.fails(2, "lab compare slow.json");
    shop.fails(2, "lab compare a b --fail-if nonsense");
}

#[test]
fn two_targets_are_measured_in_turns() {
    let shop = Workshop::new();
    let found = shop.json("lab compare --live null: null:1G --rounds 6 --warm-up 0 --duration 20ms --output c.json");
    assert_eq!(found["paired"], true);
    let sides = found["sides"].as_array().unwrap();
    assert!(sides.iter().all(|side| side["groups"][0]["rounds"].as_array().unwrap().len() == 6), "{found}");
    assert!(shop.path("c.json").exists());
}
