//! The study on known figures, and a small study on a real device.

use super::*;
use crate::{
    progress::{Silent, Step},
    report::example,
};
use diskwright_load::job::Bytes;
use diskwright_store::EngineKind;

/// Rounds of a subject with `throughput` times the device's IOPS and `cost` times its CPU time. The
/// speed of the machine drifts from round to round.
fn rounds(throughput: f64, cost: f64) -> Vec<Figures> {
    let round = |drift: f64| {
        let iops = 50_000.0 * throughput * drift;
        Figures {
            window_ns: 1_000_000_000,
            reads: iops as u64,
            iops,
            mb_per_s: iops * 4096.0 / 1e6,
            mean_ns: 64.0 / iops * 1e9,
            p50_ns: 60.0 / iops * 1e9,
            p99_ns: 130.0 / iops * 1e9,
            cpu_ns_per_io: 4_000.0 * cost / drift,
            machine_cpu_ns_per_io: 10_000.0 * cost / drift,
            queue_depth: 64,
            depth_reached: 64.0,
            ..Figures::default()
        }
    };
    [1.0, 0.7, 0.9].map(round).to_vec()
}

const NAMES: [&str; 6] = ["block device", "RDM physical", "RDM virtual", "thick, eager", "thick, lazy", "thin"];

/// Every workload on subjects with these pairs of `throughput` and `cost`; see [`rounds`]. First
/// writes to a thin file have half of the throughput.
fn cells(subjects: [(f64, f64); 6]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for job in write_jobs(true, EngineKind::Auto).unwrap() {
        let load = &job.phases[0].loads[0];
        for (name, (throughput, cost)) in NAMES.iter().zip(subjects) {
            let mut cell = Cell::new(FIRST, &Workload::of(load).name(), name, load.queue_depth.into());
            let throughput = if *name == "thin" { throughput / 2.0 } else { throughput };
            for round in rounds(throughput, cost) {
                // So many writes in a longer or shorter window, and a flush of a tenth of it.
                let window_ns = (1e9 * 50_000.0 / round.iops) as u64;
                cell.rounds.push(Figures { reads: 0, writes: 50_000, window_ns, ..round });
                cell.push_more(crate::study::flushed::FLUSH_NS, Some(window_ns as f64 / 10.0));
            }
            cells.push(cell);
        }
    }
    for job in jobs(true, EngineKind::Auto).unwrap() {
        let load = &job.phases[0].loads[0];
        for (name, (throughput, cost)) in NAMES.iter().zip(subjects) {
            let cell = Cell::new("", &Workload::of(load).name(), name, load.queue_depth.into());
            cells.push(cell.with_rounds(rounds(throughput, cost)));
        }
    }
    cells
}

/// A result in which a thick file has 4 % less throughput and 6 % more CPU time than the device,
/// and a lazy one a little more of both.
pub(crate) fn result() -> RawAndFileResult {
    let example = example::run();
    let place = Place { file_system: "ext4".into(), device: "/dev/vda".into(), ..Place::default() };
    let mut result = RawAndFileResult {
        head: Head {
            schema: SCHEMA.into(),
            verdict: String::new(),
            started_utc: "20261121T120000Z".into(),
            took_ns: 100_000_000_000,
            machine: example.head.machine,
            place: Some(place),
            versions: example.head.versions,
            warnings: Vec::new(),
            end: End::Complete,
        },
        quick: true,
        size_bytes: 1 << 30,
        first_bytes: 16 << 20,
        rounds: 3,
        test_bed: TestBedRecord {
            of: "a file in the scratch folder".into(),
            halves: Halves::LoopsOverFile,
            file_system: FileSystem::Ext4,
            bare_bytes: 1 << 30,
            file_system_bytes: FileSystem::Ext4.bytes_for(3 << 30),
            loop_direct: Some(true),
        },
        subjects: NAMES.map(sweep::tests::target).to_vec(),
        tsc_hz: 2.5e9,
        idle_cpus: 0.05,
        cells: cells([(1.0, 1.0), (1.0, 1.01), (1.0, 1.02), (0.96, 1.06), (0.95, 1.08), (1.0, 1.1)]),
    };
    result.head.verdict = conclude::verdict(&result);
    result
}

#[test]
fn ratios_are_within_rounds_and_all_workloads_agree() {
    let result = result();
    let workloads = Measured::all(&result.cells);
    assert_eq!(workloads.len(), 10);
    // The drift of 30 % does not show in any ratio.
    for workload in &workloads {
        let ratio = workload.ratio(3, Figure::Throughput).unwrap();
        assert!((ratio.summary.min - 0.96).abs() < 1e-9 && (ratio.summary.max - 0.96).abs() < 1e-9, "{ratio:?}");
        assert!(workload.ratio(0, Figure::Throughput).is_none());
    }
    let all = conclude::overall(&workloads);
    let of = |subject, part, figure| *conclude::find(&all, subject, part, figure).unwrap();
    let file = of(3, Part::All, Figure::Throughput);
    assert!((file.ratio - 0.96).abs() < 1e-9 && file.differs() && file.workloads == 10, "{file:?}");
    assert!((of(5, Part::All, Figure::MachineCpu).ratio - 1.1).abs() < 1e-9);
    assert_eq!((of(1, Part::Random, Figure::Cpu).workloads, of(1, Part::Sequential, Figure::Cpu).workloads), (6, 4));
    // The parts are not tested: four workloads are too few.
    assert_eq!(of(1, Part::Sequential, Figure::Cpu).p_corrected, None);
    assert_eq!(
        result.head.verdict,
        "Relative to the bare device (1.00), throughput with CPU time: RDM physical reaches 1.00 with 1.01; RDM virtual 1.00 with 1.02; thick, eager 0.96 with 1.06; thick, lazy 0.95 with 1.08; thin 1.00 with 1.10 times the CPU time per request; significantly, thick, eager is slower; thick, lazy is slower; the paper's VMFS had 1.00 with 1.05 (random) and 1.08 (sequential). First writes, with the flush: thick, eager 0.96; thick, lazy 0.95; thin 0.50 times the device."
    );
}

#[test]
fn the_warning_of_scattering_rounds_names_the_worst_cell() {
    let mut result = result();
    assert_eq!(spread(&result.cells), None);
    let spoilt = result.cells.iter_mut().find(|cell| cell.load == "64K random read" && cell.subject == NAMES[3]);
    spoilt.unwrap().rounds[1].iops /= 4.0;
    let Some(Warning::Spread { cells: 1, of: 50, worst, .. }) = spread(&result.cells) else {
        panic!("no warning");
    };
    assert_eq!(worst, "thick, eager, 64K random read");
}

#[test]
fn the_verdict_reports_no_difference_and_a_busy_machine() {
    let mut result = result();
    result.cells = cells([(1.0, 1.0); 6]);
    result.head.warnings.push(Warning::OtherLoad { cpus: 1.0 });
    let verdict = conclude::verdict(&result);
    assert!(verdict.contains("no difference in throughput is significant"), "{verdict}");
    assert!(verdict.contains("times the load generator's CPU time"), "{verdict}");
}

#[test]
fn a_workload_is_found_by_its_name() {
    for job in jobs(false, EngineKind::Auto).unwrap() {
        let workload = Workload::of(&job.phases[0].loads[0]);
        assert_eq!(Workload::from_name(&workload.name()), Some(workload));
    }
    assert!(["", "4K", "4K write", "x random read"].into_iter().all(|name| Workload::from_name(name).is_none()));
}

/// The paper's formula: 50 % of four cores of 3,000 MHz at 10,000 IOPS are 0.6 MHz per IOPS.
#[test]
fn mhz_per_iops_is_the_papers() {
    let cpu_s_per_io = 0.5 * 4.0 / 10_000.0;
    let found = labels::mhz_per_iops(cpu_s_per_io * 1e9, 3e9).unwrap();
    assert!((found - 0.5 * 3_000.0 * 4.0 / 10_000.0).abs() < 1e-12, "{found}");
    assert_eq!(labels::mhz_per_iops(1.0, 0.0), None);
}

#[test]
fn the_jobs_are_the_papers_over_one_range() {
    let all = jobs(false, EngineKind::Auto).unwrap();
    assert_eq!((all.len(), jobs(true, EngineKind::Auto).unwrap().len()), (25, 10));
    let patterns: std::collections::HashSet<String> =
        all.iter().map(|job| Pattern::of(&job.phases[0].loads[0]).name().to_owned()).collect();
    assert_eq!(patterns.len(), 5);
    let job = with_cell(all[0].clone(), Duration::from_secs(72), 20 << 30);
    let phase = &job.phases[0];
    assert_eq!((phase.warm_up.as_nanos(), phase.duration.as_nanos()), (12_000_000_000, 60_000_000_000));
    assert_eq!((phase.loads[0].working_set, phase.loads[0].start), (Bytes(20 << 30), Bytes(0)));
    job.validate().unwrap();
}

#[test]
fn a_small_study_ends_with_nothing_mounted() {
    let home = tempfile::tempdir().unwrap();
    let options = RawAndFileOptions {
        study: StudyOptions {
            quick: true,
            dir: Some(home.path().to_owned()),
            rounds: Some(1),
            cell: Some(Duration::from_millis(20)),
            output: Some(home.path().join("result.json")),
            ..StudyOptions::default()
        },
        size_bytes: Some(16 << 20),
        ..RawAndFileOptions::default()
    };
    if !nix::unistd::geteuid().is_root() || std::fs::File::open("/dev/loop-control").is_err() {
        let error = run(&options, &mut Silent).unwrap_err().to_string();
        println!("skipped: needs root and loop devices: {error}");
        return;
    }
    let leftovers = || {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let here = home.path().to_string_lossy().into_owned();
        (mounts.contains(&here), std::fs::read_dir(home.path()).unwrap().count())
    };
    // Stopped while the file on the new file system is filled.
    let mut begun = 0;
    let stopped = run(&options, &mut |step: Step<'_>| {
        begun += usize::from(step.message == "thick, lazy");
        begun == 0
    });
    assert!(matches!(stopped, Err(LabError::Stopped)), "{stopped:?}");
    assert_eq!(leftovers(), (false, 0));
    let report = run(&options, &mut Silent).unwrap();
    let result = &report.result;
    assert_eq!((result.subjects.len(), Measured::all(&result.cells).len()), (6, 10));
    let first = Measured::first(&result.cells);
    assert_eq!(first.len(), 4);
    // Counted, so none can be empty: the bytes of each window are the same.
    for load in &first {
        for cell in &load.loads.cells {
            assert_eq!(cell.rounds[0].writes * load.workload.block_bytes, result.first_bytes, "{}", cell.subject);
        }
    }
    // On a busy machine no request may complete in such a short window.
    let rounds = || result.cells.iter().map(|cell| &cell.rounds);
    assert!(rounds().all(|rounds| rounds.len() == 1) && rounds().any(|rounds| rounds[0].iops > 0.0));
    assert!(result.subjects.iter().all(|subject| subject.contents.is_some_and(|seen| seen.allocated >= 1.0)));
    assert_eq!(leftovers(), (false, 1), "only the result is left");
}
