use super::*;
use crate::report::example;
use std::io;

fn message(text: &str) -> String {
    parse(Path::new("r.json"), text.as_bytes()).unwrap_err().to_string()
}

#[test]
fn each_kind_comes_back_from_its_json() {
    for document in [
        Document::Run(Box::new(example::run())),
        Document::Sweep(Box::new(example::sweep())),
        Document::Containers(Box::new(example::containers())),
        Document::QueueDepth(Box::new(crate::study::queue_depth::tests::result())),
        Document::RawAndFile(Box::new(raw_and_file::tests::result())),
        Document::ZeroPayload(Box::new(example::zero_payload())),
        Document::Tiers(Box::new(example::tiers())),
        Document::Comparison(Box::new(example::comparison())),
        Document::AccessPaths(Box::new(access_paths::example::result())),
        Document::NativeAndGuest(Box::new(native_and_guest::example::result())),
    ] {
        let json = serde_json::to_vec(&document).unwrap();
        assert_eq!(parse(Path::new("r.json"), &json).unwrap(), std::slice::from_ref(&document));
        let bundle = Bundle { schema: BUNDLE_SCHEMA, results: vec![&document, &document] };
        let json = serde_json::to_vec(&bundle).unwrap();
        assert_eq!(parse(Path::new("r.json"), &json).unwrap(), [document.clone(), document]);
    }
}

#[test]
fn every_kind_of_result_has_cells_with_rounds() {
    for (name, document) in example::all() {
        let cells = document.cells();
        assert_eq!(cells.is_empty(), matches!(document, Document::Acceptance(_)), "{name}");
        for cell in cells.iter().filter(|cell| !cell.rounds.is_empty()) {
            let summary = cell.summary().unwrap();
            assert!(summary.medians.iops > 0.0 && !cell.subject.is_empty() && !cell.load.is_empty(), "{name}");
            assert!(cell.more.values().all(|values| values.len() == cell.rounds.len()), "{name}: {cell:?}");
        }
    }
}

#[test]
fn every_wrong_file_has_its_own_words() {
    assert!(message("# Report").contains("is not JSON (line 1, column 1)"));
    assert!(message("").contains("is not JSON"));
    assert!(message("{\"schema\": \"diskwright.lab.run/2\", ").contains("ends in the middle of line 1"));
    assert!(message("{\"a\": 1}").contains("it has no \"schema\""));
    assert!(message("[1, 2]").contains("not a result of the lab"));
    assert!(message("{\"schema\": 7}").contains("its \"schema\" is not a string"));
    assert!(message("{\"schema\": \"fio/3\"}").contains("its schema is \"fio/3\""));
    let newer = message("{\"schema\": \"diskwright.lab.run/3\", \"future\": true}");
    assert!(
        newer.contains("newer Diskwright: its schema is diskwright.lab.run/3") && newer.contains("run/2"),
        "{newer}"
    );
    let older = message("{\"schema\": \"diskwright.lab.sweep/1\", \"past\": true}");
    assert!(older.contains("older Diskwright: its schema is diskwright.lab.sweep/1"), "{older}");
    assert!(older.contains("reads only diskwright.lab.sweep/3; measure again"), "{older}");
    let damaged = message("{\"schema\": \"diskwright.lab.run/2\", \"took_ns\": \"soon\"}");
    assert!(damaged.contains("it is damaged") && damaged.contains("column"), "{damaged}");
    let missing = read(Path::new("/nonexistent/r.json")).unwrap_err().to_string();
    assert!(missing.starts_with("cannot read the result /nonexistent/r.json"), "{missing}");
}

/// A reader that counts the bytes read from it.
struct Counting<R>(R, u64);

impl<R: Read> Read for Counting<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(into)?;
        self.1 += read as u64;
        Ok(read)
    }
}

#[test]
fn a_disk_given_as_a_result_is_read_only_at_its_start() {
    let refused = |begins: &str, filled_with: u8| {
        let disk = begins.as_bytes().chain(io::repeat(filled_with).take(2 << 30));
        let mut counting = Counting(disk, 0);
        let error = whole(Path::new("big.raw"), &mut counting).unwrap_err().to_string();
        (error, counting.1)
    };
    // A disk of zeros, one with a boot sector, text, other JSON, and an incomplete object.
    for (begins, words) in [
        ("", "big.raw is not JSON (line 1, column 1)"),
        ("\u{eb}X", "is not JSON (line 1, column 1)"),
        ("[1, 2, 3, ", "it is not an object whose"),
        ("{\"schema\": \"fio/3\", ", "its schema is \"fio/3\""),
        ("{\"jobs\": 1}", "is not JSON (line 1, column 12)"),
        ("{\"schema\": 7, ", "it is not an object whose"),
    ] {
        let (error, read) = refused(begins, 0);
        assert!(error.contains(words) && read == 64 << 10, "{begins}: {error}, {read} bytes read");
    }
    // An object of spaces without an end.
    let (error, read) = refused("{", b' ');
    assert!(error.contains("no \"schema\" in its first 64 MiB") && read == 64 << 20, "{error}, {read} bytes read");
}

#[test]
fn a_long_result_is_read_wherever_its_schema_stands() {
    let mut run = example::run();
    let phase = run.phases[0].clone();
    run.phases.resize(400, phase);
    let document = Document::Run(Box::new(run));
    let first = serde_json::to_string(&document).unwrap();
    // Keys in alphabetical order: "schema" comes after "phases".
    let sorted = serde_json::to_value(&document).unwrap().to_string();
    for json in [first, sorted] {
        assert!(json.len() > 256 << 10, "{} bytes are no test", json.len());
        let bytes = whole(Path::new("r.json"), json.as_bytes()).unwrap();
        assert_eq!(parse(Path::new("r.json"), &bytes).unwrap(), std::slice::from_ref(&document));
    }
}

#[test]
fn figures_that_contradict_each_other_are_damage() {
    let mut cases: Vec<(&str, Run)> = Vec::new();
    let mut run = example::run();
    run.phases[0].threads[0].target = 9;
    cases.push(("target that does not exist", run));
    let mut run = example::run();
    run.phases[0].threads[0].reads.ios = u64::MAX;
    cases.push(("the sum of its counts is too large", run));
    let mut run = example::run();
    run.phases[0].threads[0].reads.service.buckets[0].1 += 1;
    cases.push(("counts differ from its number of requests", run));
    let mut run = example::run();
    run.phases[0].threads[0].reads.service.buckets.swap(0, 1);
    cases.push(("not in ascending order", run));
    for (words, run) in cases {
        let text = message(&serde_json::to_string(&run).unwrap());
        assert!(text.contains(words), "{words}: {text}");
    }
}
