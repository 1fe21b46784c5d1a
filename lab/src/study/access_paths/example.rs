//! A made-up result, for tests: three rounds, in the last of which the machine has half its speed.

use super::{
    AccessPathsResult, LOADS, RoundRecord, SCHEMA, Way, WayRecord,
    measure::{Cells, loads},
    verdict::verdict,
};
use crate::targets::Container;
use diskwright_load::{
    figures::Figures,
    machine::{Machine, Place, Versions},
    warning::Warning,
};

fn round(iops: f64, mean_us: f64, client_us: f64, server_us: Option<f64>) -> RoundRecord {
    RoundRecord {
        figures: Figures {
            window_ns: 1_000_000_000,
            reads: iops as u64,
            iops,
            mb_per_s: iops * 8192.0 / 1e6,
            mean_ns: mean_us * 1e3,
            p50_ns: mean_us * 900.0,
            p99_ns: mean_us * 3000.0,
            cpu_ns_per_io: client_us * 1e3,
            machine_cpu_ns_per_io: (client_us + server_us.unwrap_or(0.0)) * 1.2e3,
            ..Figures::default()
        },
        server_cpu_ns: server_us.map(|us| us * 1e3),
    }
}

/// What was measured, by ways and loads.
pub(super) fn cells() -> (Vec<Way>, Cells) {
    let ways = vec![Way::InProcess, Way::Nbd, Way::Attach];
    let one = |iops: f64, us: f64, client: f64, server: Option<f64>| -> Vec<RoundRecord> {
        [1.0, 1.0, 0.5].map(|speed| round(iops * speed, us / speed, client, server)).to_vec()
    };
    let load = vec![
        one(40_000.0, 1000.0, 10.0, None),
        one(30_000.0, 1333.0, 8.0, Some(12.0)),
        one(20_000.0, 2000.0, 9.0, Some(16.0)),
    ];
    (ways, Cells { rounds: vec![load; LOADS.len()], whole: 3, ..Cells::default() })
}

/// The whole result.
pub(crate) fn result() -> AccessPathsResult {
    let (measured, cells) = cells();
    let loads = loads(&measured, &cells).expect("there are rounds");
    let missing = "qemu-nbd is not installed (apt-get install qemu-utils)";
    let skipped = |way| (way == Way::QemuNbd || way == Way::RawFile).then(|| missing.to_owned());
    let ways: Vec<WayRecord> = Way::ALL.into_iter().map(|way| WayRecord { way, skipped: skipped(way) }).collect();
    AccessPathsResult {
        schema: SCHEMA.into(),
        verdict: verdict(&loads, &ways, None),
        started_utc: "20261121T160000Z".into(),
        took_ns: 93_000_000_000,
        stopped: false,
        machine: Machine {
            cpu_model: "Some CPU".into(),
            logical_cpus: 2,
            memory_bytes: 8 << 30,
            kernel: "Linux 6.12".into(),
            ..Machine::default()
        },
        place: Place { file_system: "ext4".into(), device: "/dev/vda".into(), ..Place::default() },
        versions: Versions { diskwright: "0.1.0".into(), optimised: true, qemu: None },
        quick: true,
        disk: Container::VhdxDynamic,
        size_bytes: 1 << 30,
        cell_ns: 1_000_000_000,
        rounds: 3,
        rounds_asked: 3,
        ways,
        loads,
        warnings: vec![Warning::LeftOut { what: Way::QemuNbd.name().into(), why: missing.into() }],
    }
}
