//! An example result for tests: two disks under two workloads, three rounds, and in the last one
//! the machine has half its speed.

use super::{
    NativeAndGuestResult, SCHEMA,
    record::{self, GUEST, NATIVE, NULL, SERVER_BYTES, SERVER_CPU_NS, SERVER_REQUESTS},
    verdict::verdict,
};
use crate::{
    cells::Cell,
    guest::{Accelerator, GuestRecord},
};
use diskwright_load::{
    figures::Figures,
    machine::{Machine, Place, Versions},
    record::{End, Head},
    workload::{Direction, Pattern, Workload},
};

fn round(iops: f64, mean_us: f64, cpu_us: f64) -> Figures {
    Figures {
        window_ns: 1_000_000_000,
        reads: iops as u64,
        iops,
        mb_per_s: iops * 4096.0 / 1e6,
        mean_ns: mean_us * 1e3,
        p50_ns: mean_us * 900.0,
        p99_ns: mean_us * 3000.0,
        cpu_ns_per_io: cpu_us * 1e3,
        machine_cpu_ns_per_io: cpu_us * 1.2e3,
        ..Figures::default()
    }
}

/// Cells of the `null` disk and two others.
pub(super) fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for depth in [1, 64] {
        let workload = Workload::new(Pattern::Random, Direction::Read, 4096, depth);
        // IOPS and CPU time on the host, CPU time of the server.
        for (disk, iops, cpu_us, server_us) in
            [(NULL, 1e6, 1.0, 2.0), ("raw file", 40_000.0, 5.0, 7.0), ("VHDX dynamic", 40_000.0, 6.0, 8.0)]
        {
            for side in [NATIVE, GUEST] {
                let is_guest = side == GUEST;
                let mut cell = record::cell(disk, &workload, side);
                for speed in [1.0, 1.0, 0.5] {
                    let (iops, mean_us) = if is_guest { (iops / 2.0, 200.0) } else { (iops, 100.0) };
                    cell.rounds.push(round(iops * speed, mean_us, if is_guest { 80.0 } else { cpu_us }));
                    cell.push_more(SERVER_CPU_NS, is_guest.then_some(server_us * 1e3));
                    cell.push_more(SERVER_REQUESTS, is_guest.then_some(1.0));
                    cell.push_more(SERVER_BYTES, is_guest.then_some(1.0));
                }
                cells.push(cell);
            }
        }
    }
    cells
}

/// A complete result of an emulated guest.
pub(crate) fn result() -> NativeAndGuestResult {
    let cells = cells();
    let machine = Machine {
        cpu_model: "Some CPU".into(),
        logical_cpus: 2,
        memory_bytes: 8 << 30,
        kernel: "Linux 6.12".into(),
        ..Machine::default()
    };
    let guest = Machine { cpu_model: "QEMU TCG CPU".into(), memory_bytes: 512 << 20, ..machine.clone() };
    NativeAndGuestResult {
        head: Head {
            schema: SCHEMA.into(),
            verdict: verdict(&cells, Accelerator::Tcg, false),
            started_utc: "20261126T160000Z".into(),
            took_ns: 93_000_000_000,
            machine,
            place: Some(Place { file_system: "ext4".into(), device: "/dev/vda".into(), ..Place::default() }),
            versions: Versions { diskwright: "0.1.0".into(), optimised: true, qemu: None },
            warnings: vec![],
            end: End::Complete,
        },
        quick: true,
        size_bytes: 256 << 20,
        cell_ns: 400_000_000,
        rounds: 3,
        guest: GuestRecord { accelerator: Accelerator::Tcg, machine: guest },
        cells,
    }
}
