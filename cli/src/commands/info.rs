//! `diskwright info FILE...`: describes disks and their chains.
//!
//! A disk whose parent is missing, changed or not allowed is described too. The chain is opened as
//! far as it can be followed, and the error of the next parent is printed below it.

pub mod ova;
pub mod rules;

use crate::{
    context::Context,
    describe::{Description, printable},
    exit::{self, Codes, Failure, Outcome},
    export::ExportReport,
    json::Document,
    logical_unit::UnitReport,
    namespace::NamespaceReport,
    options::{FormatArg, OvaArgs, ShareArgs, SnapshotArgs},
    several::{self, Between},
    style::{FAINT, GREEN, RED, YELLOW},
    switches,
    table::{Fields, TEXT_MIN, shortened},
};
use clap::Args;
use diskwright_disk::{ChainScope, DiskError, Layer, OpenOptions, Opened, Remote, is_ova, parent_timestamp_warning};
use diskwright_outline::columns_of;
use diskwright_store::Files;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    iter,
    path::{Path, PathBuf},
};

/// Arguments of `info`.
#[derive(Debug, Args)]
#[command(after_help = "\
A child whose parent is missing or changed is described too: its chain as far as it can be followed, and why \
it cannot be followed further.

--azure, --windows and --vmware (ESXi, Workstation, VirtualBox, OVF) check FILE against the rules of the place that it goes to. Each rule is ok, not ok or not applicable, with what was \
found, what is expected, and how to fix it. `convert --azure` makes a disk that fulfils those of Azure. Whether NTFS compresses or encrypts \
the file is not checked.

An OVA is described with its files, its disks and its machines, and --disk describes one of its disks. --verify compares all of its files with the digests of its manifest.

EXIT CODES  0 done, and with --azure, --windows or --vmware all rules hold, with --verify all digests; 1 failed, 2 used wrongly, 3 a rule does not hold, or a digest is wrong

EXAMPLES
  diskwright info disk.vhdx
  diskwright info *.vhdx --json
  diskwright info machine.avhdx --chain
  diskwright info disk.vhdx --json
  diskwright info machine.vhd --azure
  diskwright info machine.avhdx --windows --json
  diskwright info machine.vmdk --vmware
  diskwright info appliance.ova --verify
  diskwright info 'nbd+unix:///disk?socket=/run/disk.sock'")]
pub struct InfoArgs {
    /// The disks: files, or NBD URIs.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Draw the whole chain, from FILE down to the disk that has no parent.
    #[arg(long)]
    chain: bool,
    /// Compare the files of an OVA with the digests of its manifest.
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    rules: rules::RulesArgs,
    #[command(flatten)]
    ova: OvaArgs,
    #[command(flatten)]
    of: SnapshotArgs,
    #[command(flatten)]
    share: ShareArgs,
}

/// Deepest level of indentation of the chain's tree; deeper layers stay in that column.
const DEEPEST_INDENT: usize = 8;

/// What `info --json` prints of an image.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    #[serde(flatten)]
    top: Description,
    /// `ok`, `missing`, `changed`, `not allowed`, `in use` or `unusable`; `null` for a disk without
    /// a parent.
    parent_state: Option<&'static str>,
    /// Why the parent cannot be opened.
    parent_error: Option<String>,
    /// Why the chain cannot be followed to its end: at the parent or further down.
    chain_error: Option<String>,
    /// Images in the chain, this one included; `null` where it cannot be followed to its end.
    chain_length: Option<usize>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// With `--chain`: every image from this one down.
    #[serde(skip_serializing_if = "Option::is_none")]
    chain: Option<Vec<Link>>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.info/1";
}

/// An image of the chain.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Link {
    /// 0 for the image that was named, 1 for its parent, and so on.
    depth: usize,
    #[serde(flatten)]
    image: Description,
    /// Whether its id is the one that the layer above has recorded; `null` for the top.
    identity_ok: Option<bool>,
    /// Whether it was last changed at the time that the layer above has recorded; `null` where no
    /// time is recorded (VHD records one).
    timestamp_ok: Option<bool>,
}

/// Prints the descriptions.
pub fn run(context: &mut Context, args: &InfoArgs) -> Outcome {
    // The picture of a chain does not begin with the file's name.
    let between = if args.chain { Between::Heading } else { Between::EmptyLine };
    several::each(context, &args.files, Codes::USUAL, between, |context, file| one(context, args, file))
}

fn one(context: &mut Context, args: &InfoArgs, file: &Path) -> Outcome {
    let is_archive = is_ova(file) && context.global.format != Some(FormatArg::Raw);
    if is_archive && args.ova.ova_disk.is_none() && !args.rules.any() && !args.chain {
        return ova::run(context, file, args.verify);
    }
    if args.verify {
        return Err(Failure::usage("--verify is for an OVA as a whole; `compare` and `check` are for disks"));
    }
    if args.rules.any() {
        if args.of.snapshot.is_some() {
            return Err(Failure::usage("--snapshot: the rules are about files, not about a snapshot in one"));
        }
        return rules::run(context, file, (args.share, &args.ova), args.rules);
    }
    let options = OpenOptions {
        force_share: args.share.force_share,
        ova_disk: args.ova.ova_disk.clone(),
        snapshot: args.of.snapshot.clone(),
        ..context.global.open_options(false)
    };
    let disk = match context.open(file, &OpenOptions { scope: ChainScope::Available, ..options })? {
        Opened::Disk(disk) => disk,
        Opened::Remote(Remote::Export(export)) => {
            let report = ExportReport::from(&*export);
            return describe(context, &report, |fields| report.add_to(fields));
        }
        Opened::Remote(Remote::Namespace(namespace)) => {
            let report = NamespaceReport::from(&*namespace);
            return describe(context, &report, |fields| report.add_to(fields));
        }
        Opened::Remote(Remote::Unit(unit)) => {
            let report = UnitReport::from(&*unit);
            return describe(context, &report, |fields| report.add_to(fields));
        }
    };
    let trouble = disk.broken_link();
    let descriptions: Vec<Description> = disk.layers().iter().map(Description::from).collect();
    let Some(top) = descriptions.first().cloned() else { return Ok(exit::OK) };
    let timestamps = timestamps(&disk.layers(), context.global.ignore_parent_timestamp);
    if context.global.json {
        let chain = args.chain.then(|| {
            let link = |((depth, image), timestamp_ok)| Link {
                depth,
                image,
                identity_ok: (depth > 0).then_some(true),
                timestamp_ok,
            };
            descriptions.into_iter().enumerate().zip(timestamps).map(link).collect()
        });
        let report = Report {
            parent_state: trouble
                .map(|trouble| state_above(disk.layers().len(), trouble))
                .or(top.parent.as_ref().map(|_| "ok")),
            top,
            parent_error: trouble.filter(|_| disk.layers().len() == 1).map(switches::with_switches),
            chain_error: trouble.map(switches::with_switches),
            chain_length: trouble.is_none().then(|| disk.layers().len()),
            warnings: switches::all_with_switches(disk.warnings()),
            chain,
        };
        context.print_json(&report)?;
        return Ok(exit::OK);
    }
    for warning in disk.warnings() {
        context.warn(warning);
    }
    if args.chain {
        draw_chain(context, &descriptions, &timestamps, trouble)?;
    } else {
        let state = match (trouble, disk.layers().get(1)) {
            (Some(trouble), Some(parent)) => {
                Some(format!("ok: {}, but the chain is broken further down: {trouble}", parent.path.display()))
            }
            (Some(trouble), None) => Some(format!("{}: {trouble}", state_of(trouble))),
            (None, Some(parent)) => {
                Some(format!("ok: {} (a chain of {} disks)", parent.path.display(), disk.layers().len()))
            }
            (None, None) => None,
        };
        let mut fields = Fields::default();
        top.add_to(&mut fields, state.as_deref());
        fields.within(context.style.limit()).write(&mut context.out)?;
    }
    Ok(exit::OK)
}

/// Whether each layer's modification time is the one that the layer above recorded; `None` where
/// the layer above recorded none.
fn timestamps(layers: &[Layer], ignored: bool) -> Vec<Option<bool>> {
    let of_link = |pair: &[Layer]| {
        let link = pair[0].image.info().parent.as_ref().filter(|link| !ignored && link.modified_seconds.is_some())?;
        Some(parent_timestamp_warning(&Files::default(), link, &pair[1].path).is_none())
    };
    iter::once(None).chain(layers.windows(2).map(of_link)).collect()
}

fn describe(context: &mut Context, report: &impl Document, add_to: impl FnOnce(&mut Fields)) -> Outcome {
    if context.global.json {
        context.print_json(report)?;
    } else {
        let mut fields = Fields::default();
        add_to(&mut fields);
        fields.within(context.style.limit()).write(&mut context.out)?;
    }
    Ok(exit::OK)
}

/// The state of the top's own parent, when `layers` layers could be opened.
fn state_above(layers: usize, trouble: &DiskError) -> &'static str {
    if layers == 1 { state_of(trouble) } else { "ok" }
}

fn state_of(trouble: &DiskError) -> &'static str {
    match trouble {
        DiskError::ParentMissing { .. } => "missing",
        DiskError::ParentChanged { .. } => "changed",
        DiskError::ParentOutside { .. } => "not allowed",
        DiskError::InUse { .. } => "in use",
        DiskError::ParentIsDevice { .. } => "not allowed",
        DiskError::NoParentFits { first, .. } => state_of(first),
        _ => "unusable",
    }
}

fn draw_chain(
    context: &mut Context,
    layers: &[Description],
    timestamps: &[Option<bool>],
    trouble: Option<&DiskError>,
) -> Outcome<()> {
    let style = context.style;
    let out = &mut context.out;
    match (trouble, layers.len()) {
        (Some(_), _) => writeln!(out, "a chain that cannot be followed to its end")?,
        (None, 1) => writeln!(out, "a disk without parents")?,
        (None, count) => writeln!(out, "a chain of {count} disks")?,
    }
    let number_width = layers.len().saturating_sub(1).to_string().len();
    let names: Vec<String> =
        (0..).map(branch).zip(layers).map(|(branch, layer)| branch + &printable(&layer.file)).collect();
    let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    let facts_of = |layer: &Description| format!("{:<18}  {:>9} on disk", layer.kind(), layer.size_on_disk_text());
    let facts_width = layers.iter().map(|layer| facts_of(layer).chars().count()).max().unwrap_or(0);
    // On a terminal, names are shortened so that the rest of the line fits.
    let beside_name = number_width + facts_width + "  identity ok".len() + 4;
    let room = style.limit().map_or(usize::MAX, |limit| limit.saturating_sub(beside_name).max(TEXT_MIN));
    let name_width = longest.min(room);
    for (depth, ((name, layer), timestamp_ok)) in names.iter().zip(layers).zip(timestamps).enumerate() {
        let identity = match (depth, timestamp_ok) {
            (0, _) => String::new(),
            (_, Some(false)) => format!("identity ok, {}", style.paint(YELLOW, "but changed or copied since")),
            _ => format!("identity {}", style.paint(GREEN, "ok")),
        };
        let facts = style.paint(FAINT, facts_of(layer));
        let line = format!("{depth:number_width$}  {:name_width$}  {facts}", shortened(name, name_width));
        let is_wide = style.limit().is_some_and(|limit| columns_of(&line) + 2 + columns_of(&identity) > limit);
        let gap = if is_wide { format!("\n{:number_width$}  ", "") } else { "  ".to_owned() };
        writeln!(out, "{}", format!("{line}{gap}{identity}").trim_end())?;
    }
    if let Some(trouble) = trouble {
        let what = match state_of(trouble) {
            "changed" => "identity not ok: not the disk that its child was made from".to_owned(),
            state => format!("parent {state}"),
        };
        writeln!(out, "{}  {}{}", "?".repeat(number_width), branch(layers.len()), style.paint(RED, what))?;
        writeln!(context.text(), "{}", printable(&switches::with_switches(trouble)))?;
    }
    Ok(())
}

fn branch(depth: usize) -> String {
    match depth {
        0 => String::new(),
        _ => format!("{}└─ ", "   ".repeat((depth - 1).min(DEEPEST_INDENT))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_chains_stay_on_the_screen() {
        assert_eq!(branch(0), "");
        assert_eq!(branch(2), "   └─ ");
        assert_eq!(branch(1023), branch(DEEPEST_INDENT + 1));
    }
}
