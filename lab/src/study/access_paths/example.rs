//! An example result for tests: three rounds. In the last one the machine has half its speed.

use super::{
    AccessPath, AccessPathRecord, AccessPathsResult, CLIENTS, LOADS, NetworkRecord, SCHEMA, SERVER_CPU_NS,
    record::{self, AgentsRecord, ClientsRecord},
    verdict::verdict,
};
use crate::{
    cells::Cell,
    guest::{Accelerator, GuestRecord},
    network::NetworkSpec,
    targets::Container,
};
use diskwright_load::{
    figures::Figures,
    machine::{Machine, Place, Versions},
    record::{End, Head},
    warning::Warning,
};

fn round(iops: f64, mean_us: f64, client_us: f64, server_us: Option<f64>) -> Figures {
    Figures {
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
    }
}

/// Cells of eleven access paths at each load.
pub(super) fn cells() -> Vec<Cell> {
    let ways = [
        (AccessPath::InProcess, 40_000.0, 1000.0, 10.0, None),
        (AccessPath::Nbd, 30_000.0, 1333.0, 8.0, Some(12.0)),
        (AccessPath::NvmeTcp, 28_000.0, 1428.0, 9.0, Some(13.0)),
        (AccessPath::Iscsi, 26_000.0, 1538.0, 10.0, Some(14.0)),
        (AccessPath::NvmeNetwork, 14_000.0, 2856.0, 9.0, Some(14.0)),
        (AccessPath::Attach, 20_000.0, 2000.0, 9.0, Some(16.0)),
        (AccessPath::GuestVhostUser, 4_000.0, 10_000.0, 90.0, Some(20.0)),
        (AccessPath::GuestNvme, 3_000.0, 13_333.0, 110.0, Some(25.0)),
        (AccessPath::GuestSmb, 1_000.0, 40_000.0, 310.0, Some(80.0)),
        (AccessPath::AgentNbd, 20_000.0, 2000.0, 20.0, Some(12.0)),
        (AccessPath::AgentNvme, 21_080.0, 1897.0, 18.0, Some(13.0)),
    ];
    let mut cells = Vec::new();
    for (name, outstanding) in LOADS {
        for (way, iops, us, client_us, server_us) in ways {
            let mut cell = record::cell(name, (CLIENTS, outstanding), way);
            for speed in [1.0, 1.0, 0.5] {
                cell.rounds.push(round(iops * speed, us / speed, client_us, server_us));
                cell.push_more(SERVER_CPU_NS, server_us.map(|us| us * 1e3));
            }
            cells.push(cell);
        }
    }
    cells
}

/// A complete result in which some access paths were skipped.
pub(crate) fn result() -> AccessPathsResult {
    let cells = cells();
    let missing = "qemu-nbd is not installed (apt-get install qemu-utils)";
    let is_measured = |way: AccessPath| cells.iter().any(|cell| cell.subject == way.name());
    let skipped = |way| (!is_measured(way)).then(|| missing.to_owned());
    let ways: Vec<AccessPathRecord> =
        AccessPath::ALL.into_iter().map(|way| AccessPathRecord { way, skipped: skipped(way) }).collect();
    AccessPathsResult {
        head: Head {
            schema: SCHEMA.into(),
            verdict: verdict(&cells, &ways, None),
            started_utc: "20261121T160000Z".into(),
            took_ns: 93_000_000_000,
            machine: machine(),
            place: Some(Place { file_system: "ext4".into(), device: "/dev/vda".into(), ..Place::default() }),
            versions: Versions { diskwright: "0.1.0".into(), optimised: true, qemu: None },
            warnings: vec![Warning::LeftOut { what: AccessPath::QemuNbd.name().into(), why: missing.into() }],
            end: End::Complete,
        },
        quick: true,
        disk: Container::VhdxDynamic,
        size_bytes: 1 << 30,
        cell_ns: 1_000_000_000,
        rounds: 3,
        ways,
        network: Some(NetworkRecord { spec: NetworkSpec::default(), has_delay: false }),
        guest: Some(GuestRecord { accelerator: Accelerator::Tcg, machine: Machine::default() }),
        agents: Some(agents()),
        cells,
    }
}

fn machine() -> Machine {
    Machine {
        cpu_model: "Some CPU".into(),
        logical_cpus: 2,
        memory_bytes: 8 << 30,
        kernel: "Linux 6.12".into(),
        ..Machine::default()
    }
}

/// Three agents on two machines.
fn agents() -> AgentsRecord {
    let agent = |name: &str, clients, boot_id: &str| ClientsRecord {
        name: name.into(),
        clients,
        machine: Machine { cpu_model: "Other CPU".into(), logical_cpus: 4, ..machine() },
        boot_id: boot_id.into(),
    };
    AgentsRecord {
        server: "10.0.0.1".into(),
        agents: vec![agent("db1", 7, "a"), agent("db2", 7, "a"), agent("db3", 6, "b")],
        skew_ns: 400_000,
        clock_error_ns: 90_000,
    }
}
