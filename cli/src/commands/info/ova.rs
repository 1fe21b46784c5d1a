//! `diskwright info FILE.ova`: the files, disks and machines of an OVA, and its digests.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Outcome},
    json::{self, Document},
    sizes::{Exact, Human},
    style::{GREEN, RED, YELLOW},
    switches,
    table::Fields,
};
use diskwright_disk::{Digests, MemberDigest, Ova, OvaDisk, OvaMember};
use diskwright_store::Files;
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::Path};

/// What `info --json` prints of an OVA. Sizes are bytes.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The OVA.
    file: String,
    /// The files in it, in their order.
    files: Vec<FileReport>,
    /// The disks, in the order of the descriptor.
    disks: Vec<DiskReport>,
    /// The virtual machines.
    machines: Vec<MachineReport>,
    /// Whether there is a manifest with digests.
    manifest: bool,
    /// With `--verify`: whether every file has the digest of the manifest; `false` without a
    /// manifest.
    verified: Option<bool>,
    /// Files of the manifest that are not in the archive, with `--verify`.
    missing: Vec<String>,
    /// Remarks, a sentence each.
    remarks: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.info-ova/1";
}

/// A file of an OVA.
#[derive(Debug, Serialize, JsonSchema)]
pub struct FileReport {
    /// Name of the file in the archive.
    name: String,
    /// Offset of the file's bytes in the archive.
    offset: u64,
    /// Length of the file in bytes.
    size: u64,
    /// With `--verify`: `ok`, `wrong`, or `none` for a file that the manifest does not have.
    digest: Option<&'static str>,
}

/// A disk of an OVA.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DiskReport {
    /// Its number, from 1: what `--disk` takes.
    number: usize,
    /// Id of the disk in the descriptor.
    id: String,
    /// Name of the disk's file; `null` for a disk without one.
    file: Option<String>,
    /// Length of that file.
    file_size: Option<u64>,
    /// Size of the disk, as the descriptor says.
    virtual_size: Option<u64>,
    /// Format of the file, as a URI.
    format: String,
    /// Why it cannot be read; `null` if it can.
    problem: Option<String>,
}

/// A virtual machine of an OVA.
#[derive(Debug, Serialize, JsonSchema)]
pub struct MachineReport {
    /// Id of the machine in the descriptor.
    id: String,
    /// Name of the machine.
    name: Option<String>,
    /// Its operating system, as the descriptor says.
    operating_system: Option<String>,
    /// Number of processors.
    processors: Option<u64>,
    /// Memory of the machine in bytes.
    memory: Option<u64>,
}

impl From<&OvaDisk> for DiskReport {
    fn from(disk: &OvaDisk) -> Self {
        Self {
            number: disk.number,
            id: disk.ovf.id.clone(),
            file: disk.file.clone(),
            file_size: disk.file_bytes,
            virtual_size: disk.ovf.capacity_bytes,
            format: disk.ovf.format.clone(),
            problem: disk.trouble.as_ref().map(switches::with_switches),
        }
    }
}

/// Prints the description; with `verify` computes the digests first.
pub fn run(context: &mut Context, file: &Path, verify: bool) -> Outcome {
    let ova = Ova::open(file, &Files::default())?;
    let mut digests = None;
    if verify {
        let mut display = context.progress("verifying");
        digests = Some(ova.verify(&mut |done, total| display.update(done, total))?);
    }
    let report = report(&json::path(file), &ova, digests.as_ref());
    let is_wrong = report.verified == Some(false);
    if context.global.json {
        context.print_json(&report)?;
    } else {
        tell(context, &report)?;
    }
    Ok(if is_wrong { exit::RULE_BROKEN } else { exit::OK })
}

fn report(file: &str, ova: &Ova, digests: Option<&Digests>) -> Report {
    let found = |name: &str| digests.and_then(|digests| digests.members.iter().find(|member| member.name == name));
    let describe = |member: &OvaMember| FileReport {
        name: member.name.clone(),
        offset: member.offset_bytes,
        size: member.size_bytes,
        digest: found(&member.name).map(|member| match member.is_same {
            Some(true) => "ok",
            Some(false) => "wrong",
            None => "none",
        }),
    };
    let is_missing = |member: &&MemberDigest| !ova.members().iter().any(|there| there.name == member.name);
    Report {
        file: file.to_owned(),
        files: ova.members().iter().map(describe).collect(),
        disks: ova.disks().iter().map(DiskReport::from).collect(),
        machines: ova
            .systems()
            .iter()
            .map(|system| MachineReport {
                id: system.id.clone(),
                name: system.name.clone(),
                operating_system: system.operating_system.clone(),
                processors: system.processors,
                memory: system.memory_bytes,
            })
            .collect(),
        manifest: ova.has_manifest(),
        verified: digests.map(|digests| ova.has_manifest() && digests.all_same()),
        missing: digests
            .iter()
            .flat_map(|digests| digests.members.iter().filter(is_missing).map(|member| member.name.clone()))
            .collect(),
        remarks: switches::all_with_switches(ova.remarks()),
    }
}

fn tell(context: &mut Context, report: &Report) -> Outcome<()> {
    let style = context.style;
    let mut fields = Fields::default();
    fields.add("file", printable(&report.file));
    fields.add("format", "ova");
    for machine in &report.machines {
        let mut facts = vec![printable(machine.name.as_ref().unwrap_or(&machine.id))];
        facts.extend(machine.operating_system.as_ref().map(|system| printable(system)));
        facts.extend(machine.processors.map(|count| format!("{count} processors")));
        facts.extend(machine.memory.map(|bytes| format!("{} of memory", Human(bytes))));
        fields.add("machine", facts.join(", "));
    }
    for disk in &report.disks {
        let size = disk.virtual_size.map_or_else(|| "unknown size".into(), |bytes| Exact(bytes).to_string());
        let kind = disk.format.rsplit('#').next().unwrap_or_default();
        let file = printable(disk.file.as_ref().unwrap_or(&disk.id));
        let problem = disk.problem.as_ref().map(|problem| format!(": cannot be read: {}", printable(problem)));
        let facts = format!("{file}  {size}  {}{}", printable(kind), problem.unwrap_or_default());
        fields.add(&format!("disk {}", disk.number), facts);
    }
    for (index, file) in report.files.iter().enumerate() {
        let digest = match file.digest {
            Some("ok") => format!("  digest {}", style.paint(GREEN, "ok")),
            Some("wrong") => format!("  digest {}", style.paint(RED, "wrong")),
            Some(_) => format!("  {}", style.paint(YELLOW, "no digest in the manifest")),
            None => String::new(),
        };
        let label = if index == 0 { format!("{} files", report.files.len()) } else { String::new() };
        fields.add(&label, format!("{}  {}{digest}", printable(&file.name), Exact(file.size)));
    }
    for name in &report.missing {
        fields.add("", format!("{}  {}", printable(name), style.paint(RED, "missing, but in the manifest")));
    }
    if let Some(verified) = report.verified {
        let text = match (verified, report.manifest) {
            (true, _) => style.paint(GREEN, "all digests are those of the manifest"),
            (false, true) => style.paint(RED, "not all digests are those of the manifest"),
            (false, false) => style.paint(RED, "without a manifest"),
        };
        fields.add("verified", text);
    }
    for (index, remark) in report.remarks.iter().enumerate() {
        fields.add(if index == 0 { "remarks" } else { "" }, printable(remark));
    }
    fields.within(style.limit()).write(&mut context.out)?;
    context.out.flush()?;
    Ok(())
}
