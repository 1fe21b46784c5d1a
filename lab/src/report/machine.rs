//! Machine and versions, in words.

use crate::{
    machine::{Machine, Place, Versions},
    table::bytes,
};

/// What it was measured on and by which programs.
pub fn facts(machine: &Machine, versions: &Versions) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| {
        if !value.is_empty() {
            facts.push((name.to_owned(), value));
        }
    };
    add("Processor", format!("{} × {}", machine.logical_cpus, machine.cpu_model));
    add("Memory", bytes(machine.memory_bytes));
    add("System", [machine.operating_system.as_str(), machine.kernel.as_str()].join(", "));
    add("Clock", machine.clock_source.clone());
    add("Load before", format!("{:.2}", machine.load_average));
    let build = if versions.optimised { "" } else { " (debug build)" };
    add("diskwright", format!("{}{build}", versions.diskwright));
    add("qemu-img", versions.qemu.clone().unwrap_or_default());
    facts
}

/// Where files lay.
pub fn place(place: &Place) -> (String, String) {
    let scheduler = place.scheduler.as_ref().map_or_else(String::new, |name| format!(", scheduler {name}"));
    (
        "Disks lay on".into(),
        format!(
            "{} on {} ({}), {} free{scheduler}",
            place.file_system,
            place.device,
            place.mount_options,
            bytes(place.free_bytes)
        ),
    )
}
