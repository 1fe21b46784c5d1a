//! `diskwright info FILE`: what a disk is, and its chain.
//!
//! A disk whose parent is missing, changed or out of bounds is described all the same: the chain is
//! opened as far as it can be followed, and what is wrong with the next parent is told beneath it.

use crate::{
    context::Context,
    describe::{Description, printable},
    exit::{self, Outcome},
    export::ExportReport,
    options::ShareArgs,
    style::{FAINT, GREEN, RED, YELLOW},
    switches,
    table::Fields,
};
use clap::Args;
use diskwright_disk::{DiskError, Layer, OpenOptions, Opened, Reach, parent_timestamp_warning};
use diskwright_store::Files;
use serde::Serialize;
use std::{io::Write, iter, path::PathBuf};

/// Arguments of `info`.
#[derive(Debug, Args)]
#[command(after_help = "\
A child whose parent is missing or changed is described too, and its chain as far as it can be followed;
what is wrong is told.

EXAMPLES
  diskwright info disk.vhdx
  diskwright info machine.avhdx --chain
  diskwright info disk.vhdx --json
  diskwright info 'nbd+unix:///disk?socket=/run/disk.sock'")]
pub struct InfoArgs {
    /// The disk: a file, or an NBD URI.
    file: PathBuf,
    /// Draw the whole chain, from FILE down to the disk that has no parent.
    #[arg(long)]
    chain: bool,
    #[command(flatten)]
    share: ShareArgs,
}

/// How far the tree of a chain is indented; what is deeper stays in that column.
const DEEPEST_INDENT: usize = 8;

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    top: Description,
    parent_state: Option<&'static str>,
    parent_error: Option<String>,
    /// Why the chain cannot be followed to its end, be it at the parent or further down.
    chain_error: Option<String>,
    chain_length: Option<usize>,
    warnings: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chain: Option<Vec<Link>>,
}

#[derive(Debug, Serialize)]
struct Link {
    depth: usize,
    #[serde(flatten)]
    image: Description,
    // Of the link to the layer above; the top has none.
    identity_ok: Option<bool>,
    // Whether it was last changed when the layer above says, where that is recorded (VHD).
    timestamp_ok: Option<bool>,
}

/// Describes.
pub fn run(context: &mut Context, args: &InfoArgs) -> Outcome {
    let options = OpenOptions { force_share: args.share.force_share, ..context.global.open_options(false) };
    let disk = match context.open(&args.file, &OpenOptions { reach: Reach::Available, ..options })? {
        Opened::Disk(disk) => disk,
        Opened::Export(export) => return describe_export(context, &ExportReport::from(&*export)),
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
            parent_error: trouble.filter(|_| disk.layers().len() == 1).map(switches::told),
            chain_error: trouble.map(switches::told),
            chain_length: trouble.is_none().then(|| disk.layers().len()),
            warnings: switches::all_told(disk.warnings()),
            chain,
        };
        context.print_json("diskwright.info/1", report)?;
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
        fields.write(&mut context.out)?;
    }
    Ok(exit::OK)
}

/// For each layer whether its time stamp is the one that the layer above recorded; `None` where
/// nothing is recorded.
fn timestamps(layers: &[Layer], ignored: bool) -> Vec<Option<bool>> {
    let of_link = |pair: &[Layer]| {
        let link = pair[0].image.info().parent.as_ref().filter(|link| !ignored && link.modified_seconds.is_some())?;
        Some(parent_timestamp_warning(&Files::default(), link, &pair[1].path).is_none())
    };
    iter::once(None).chain(layers.windows(2).map(of_link)).collect()
}

fn describe_export(context: &mut Context, report: &ExportReport) -> Outcome {
    if context.global.json {
        context.print_json("diskwright.info-export/1", report)?;
    } else {
        let mut fields = Fields::default();
        report.add_to(&mut fields);
        fields.write(&mut context.out)?;
    }
    Ok(exit::OK)
}

/// The state of the top's own parent, where so many layers could be opened.
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
    let name_width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
    for (depth, ((name, layer), timestamp_ok)) in names.iter().zip(layers).zip(timestamps).enumerate() {
        let identity = match (depth, timestamp_ok) {
            (0, _) => String::new(),
            (_, Some(false)) => format!("  identity ok, {}", style.paint(YELLOW, "but changed or copied since")),
            _ => format!("  identity {}", style.paint(GREEN, "ok")),
        };
        let facts = format!("{:<18}  {:>9} on disk", layer.kind(), layer.size_on_disk_text());
        writeln!(out, "{depth:number_width$}  {name:name_width$}  {}{identity}", style.paint(FAINT, facts))?;
    }
    if let Some(trouble) = trouble {
        let what = match state_of(trouble) {
            "changed" => "identity not ok: not the disk that its child was made from".to_owned(),
            state => format!("parent {state}"),
        };
        writeln!(out, "{}  {}{}", "?".repeat(number_width), branch(layers.len()), style.paint(RED, what))?;
        writeln!(out, "{}", printable(&switches::told(trouble)))?;
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
