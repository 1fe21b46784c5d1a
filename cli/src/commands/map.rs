//! `diskwright map FILE`: which layer holds which range, as a list or drawn on one screen.
//!
//! The list is printed as the extents come, so memory does not depend on their number. In JSON the
//! fields of an extent are those of `qemu-img map --output=json`
//! (`start length depth present zero data offset`) and the layer's `file`; `depth` 0 is FILE
//! itself. A damaged extent has `damaged` beside `data`.

use crate::{
    context::Context,
    describe::printable,
    draw::{self, DAMAGED, Drawing, LayerTally, SPARSE, UNALLOCATED, ZERO},
    exit::{self, Failure, Outcome},
    extents::Extents,
    json::{self, Document},
    options::{OvaArgs, ShareArgs, SnapshotArgs},
    signals::Patience,
    sizes::{Exact, Human},
    style::BOLD,
    switches,
    table::{Align, Columns, TEXT_MIN, shortened},
};
use clap::Args;
use diskwright_disk::{Layer, OpenOptions, Opened};
use diskwright_store::{BlockDevice, Extent, ExtentKind};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Arguments of `map`.
#[derive(Debug, Args)]
#[command(after_help = "\
Depth 0 is FILE, 1 its parent, and so on. `data` is stored at that offset of that file (a disk may have several files: disk.001, disk.002); `zero` is recorded as zero by a layer; \
`unallocated` is in no layer and reads as zeros; `damaged` cannot be found in the file, so that reads of it fail (`check` says why). For an export (nbd://...) the list is what the server reports, without files and offsets. With --draw every character is an equal share of the disk.

EXAMPLES
  diskwright map disk.vhdx
  diskwright map machine.avhdx --draw
  diskwright map nbd://host/disk
  diskwright map disk.vhdx --json |
      jq '[.extents[] | select(.data).length] | add'")]
pub struct MapArgs {
    /// The disk: a file, or an NBD URI.
    file: PathBuf,
    /// Draw the whole disk on one screen: which layer owns what, and how fragmented the files are.
    #[arg(long)]
    draw: bool,
    #[command(flatten)]
    ova: OvaArgs,
    #[command(flatten)]
    of: SnapshotArgs,
    #[command(flatten)]
    share: ShareArgs,
}

/// What `map --json` prints. It is written piece by piece while the extents are found.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report<'a> {
    /// The image.
    file: String,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// The extents in ascending order, without gaps.
    extents: Vec<ExtentReport<'a>>,
    /// Why the list ends early.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Document for Report<'_> {
    const SCHEMA: &'static str = "diskwright.map/1";
}

/// A range of the disk that is stored, or not stored, in one way.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ExtentReport<'a> {
    /// Offset on the disk in bytes.
    start: u64,
    /// Length in bytes.
    length: u64,
    /// 0 for the image that was named, 1 for its parent, and so on.
    depth: u32,
    /// Whether an image of the chain stores it, as data or as zeros.
    present: bool,
    /// Whether it reads as zeros.
    zero: bool,
    /// Whether it holds data.
    data: bool,
    /// Whether it cannot be read because the image is damaged; left out where it is not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schemars(default)]
    damaged: bool,
    /// Offset of the data in `file`, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    /// The file that stores it.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a str>,
}

/// What `map --draw --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DrawingReport<'a> {
    /// The image.
    file: String,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// Bytes of the disk that one character of `rows` stands for.
    cell_size: u64,
    /// Bytes that hold data.
    data_bytes: u64,
    /// Bytes that an image of the chain stores as zeros.
    zero_bytes: u64,
    /// Bytes that no image of the chain stores.
    unallocated_bytes: u64,
    /// Warnings, a sentence each.
    warnings: &'a [String],
    /// Bytes that cannot be read because an image is damaged.
    damaged_bytes: u64,
    /// The drawing, from the beginning of the disk to its end.
    rows: Vec<String>,
    /// The images of the chain.
    layers: Vec<LayerReport<'a>>,
}

impl Document for DrawingReport<'_> {
    const SCHEMA: &'static str = "diskwright.map-drawing/1";
}

/// An image of the chain in the drawing.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LayerReport<'a> {
    /// 0 for the image that was named, 1 for its parent, and so on.
    depth: usize,
    /// The image.
    file: &'a str,
    /// The character that stands for its data in `rows`.
    glyph: char,
    #[serde(flatten)]
    tally: &'a LayerTally,
    /// Where in its file the tenths of the disk lie.
    file_positions: String,
}

/// Prints the list or the drawing.
pub fn run(context: &mut Context, args: &MapArgs) -> Outcome {
    let options = OpenOptions {
        force_share: args.share.force_share,
        ova_disk: args.ova.ova_disk.clone(),
        snapshot: args.of.snapshot.clone(),
        ..context.global.open_options(false)
    };
    let disk = context.open(&args.file, &options)?;
    let names = match &disk {
        Opened::Disk(disk) => Names(disk.layers().iter().map(file_names).collect()),
        other => Names(vec![other.uri().into_iter().collect()]),
    };
    let patience = context.signals.patient();
    match (args.draw, context.global.json) {
        (false, false) => list(context, &disk, &names, &patience)?,
        (false, true) => list_json(context, &args.file, &disk, &names, &patience)?,
        (true, as_json) => {
            let drawing = draw(context, &disk, &patience)?;
            if as_json {
                print_drawing_json(
                    context,
                    &args.file,
                    &drawing,
                    &names,
                    &switches::all_with_switches(disk.warnings()),
                )?
            } else {
                print_drawing(context, &drawing, &names)?
            }
        }
    }
    Ok(exit::OK)
}

/// Names of the files of each layer, the top first. An export has one name for all layers.
struct Names(Vec<Vec<String>>);

impl Names {
    /// The file that an extent is in.
    fn of(&self, extent: &Extent) -> Option<&String> {
        self.0.get(extent.depth as usize).or(self.0.last())?.get(usize::from(extent.file))
    }

    /// The first file of each layer.
    fn of_layers(&self) -> impl Iterator<Item = &String> {
        self.0.iter().filter_map(|files| files.first())
    }
}

fn file_names(layer: &Layer) -> Vec<String> {
    (0..).zip(layer.image.stores()).map(|(file, _)| json::path(layer.file_path(file))).collect()
}

/// Lengths of the files of each layer, as far as they are known.
fn file_lengths(disk: &Opened) -> Vec<Vec<u64>> {
    let lengths = |layer: &Layer| layer.image.stores().iter().map(|store| store.len_bytes().unwrap_or(0)).collect();
    match disk {
        Opened::Disk(disk) => disk.layers().iter().map(lengths).collect(),
        Opened::Remote(_) => vec![vec![0]],
    }
}

fn each_extent(
    disk: &dyn BlockDevice,
    patience: &Patience,
    mut with: impl FnMut(Extent) -> Outcome<()>,
) -> Outcome<()> {
    for extent in Extents::of(disk) {
        if patience.should_stop() {
            return Err(Failure::Stopped);
        }
        with(extent.map_err(|error| Failure::doing("cannot read the map of the disk", error))?)?;
    }
    Ok(())
}

fn kind_word(kind: ExtentKind) -> &'static str {
    match kind {
        ExtentKind::Data => "data",
        ExtentKind::Zero => "zero",
        ExtentKind::Unallocated => "unallocated",
        ExtentKind::Damaged => "damaged",
    }
}

fn list(context: &mut Context, disk: &Opened, names: &Names, patience: &Patience) -> Outcome<()> {
    // No number in the list has more digits than the length of the longest file or of the disk.
    let longest = file_lengths(disk).into_iter().flatten().max().unwrap_or(0);
    let digits = longest.max(disk.device().geometry().size_bytes).to_string().len().max("offset".len());
    // The columns before the name of the file, with two spaces behind each.
    let before = 3 * (digits + 2) + "depth  unallocated  ".len();
    let room = context.style.limit().map_or(usize::MAX, |limit| limit.saturating_sub(before).max(TEXT_MIN));
    writeln!(
        context.out,
        "{:>digits$}  {:>digits$}  depth  {:<11}  {:>digits$}  file",
        "start", "length", "kind", "offset"
    )?;
    each_extent(disk.device(), patience, |extent| {
        let (start, length, kind) = (extent.offset_bytes, extent.len_bytes, kind_word(extent.kind));
        match extent.kind {
            ExtentKind::Unallocated => writeln!(context.out, "{start:>digits$}  {length:>digits$}      -  {kind}")?,
            _ => {
                let offset = extent.file_offset_bytes.map_or_else(|| "-".into(), |offset| offset.to_string());
                let name = names.of(&extent).map_or("", String::as_str);
                let depth = extent.depth;
                writeln!(
                    context.out,
                    "{start:>digits$}  {length:>digits$}  {depth:>5}  {kind:<11}  {offset:>digits$}  {}",
                    shortened(&printable(name), room)
                )?;
            }
        }
        Ok(())
    })
}

fn list_json(context: &mut Context, file: &Path, disk: &Opened, names: &Names, patience: &Patience) -> Outcome<()> {
    let size_bytes = disk.device().geometry().size_bytes;
    let quoted = |text: &str| serde_json::to_string(text).map_err(|error| Failure::new(error.to_string()));
    let file = quoted(&json::path(file))?;
    let warnings = serde_json::to_string(&switches::all_with_switches(disk.warnings()))
        .map_err(|error| Failure::new(error.to_string()))?;
    write!(
        context.out,
        "{{\n  \"schema\": \"{}\",\n  \"file\": {file},\n  \"virtual_size\": {size_bytes},\n  \"warnings\": {warnings},\n  \"extents\": [",
        Report::SCHEMA
    )?;
    let mut separator = "\n    ";
    let listed = each_extent(disk.device(), patience, |extent| {
        // Damaged is not zero: a program that reads all data then meets the error.
        let is_data = !extent.kind.reads_as_zeros();
        let present = extent.kind != ExtentKind::Unallocated;
        let report = ExtentReport {
            start: extent.offset_bytes,
            length: extent.len_bytes,
            depth: extent.depth,
            present,
            zero: !is_data,
            data: is_data,
            damaged: extent.kind == ExtentKind::Damaged,
            offset: extent.file_offset_bytes,
            file: names.of(&extent).filter(|_| present).map(String::as_str),
        };
        let line = serde_json::to_string(&report).map_err(|error| Failure::new(error.to_string()))?;
        write!(context.out, "{separator}{line}")?;
        separator = ",\n    ";
        Ok(())
    });
    // Reading a table can fail after the list has begun: the JSON is closed, and the error follows.
    match &listed {
        Ok(()) => writeln!(context.out, "\n  ]\n}}")?,
        Err(Failure::Usage(why) | Failure::Sentence(why)) => {
            writeln!(context.out, "\n  ],\n  \"error\": {}\n}}", quoted(why)?)?
        }
        Err(Failure::Stopped) => writeln!(context.out, "\n  ],\n  \"error\": \"stopped\"\n}}")?,
        Err(Failure::ReaderGone) => {}
    }
    listed
}

/// Cells in a row: the columns that are left beside the offsets.
const MARGIN_COLUMNS: usize = 12;
/// Maximum number of rows, and the rows of a terminal that the legend needs.
const ROWS_MIN: usize = 16;
const ROWS_MAX: usize = 24;
const LEGEND_ROWS: usize = 12;
/// Maximum number of layers whose files are drawn; the others are in the table of totals.
const FILES_MAX: usize = 8;
/// Maximum number of layers in the table of totals; the rest of a long chain is summed up.
const TOTALS_MAX: usize = 12;

fn draw(context: &Context, disk: &Opened, patience: &Patience) -> Outcome<Drawing> {
    let columns = context.style.columns.saturating_sub(MARGIN_COLUMNS).max(8);
    let rows = context.style.rows.map_or(ROWS_MIN, |rows| rows.saturating_sub(LEGEND_ROWS).clamp(ROWS_MIN, ROWS_MAX));
    // The files of a layer are drawn one behind the other.
    let lengths = file_lengths(disk);
    let file_bytes: Vec<u64> = lengths.iter().map(|files| files.iter().sum()).collect();
    let mut drawing = Drawing::new(disk.device().geometry().size_bytes, columns, rows, &file_bytes);
    each_extent(disk.device(), patience, |mut extent| {
        // An export is drawn as one layer: only the server knows the layers behind it.
        if disk.disk().is_none() {
            extent.depth = 0;
        }
        if extent.file > 0
            && let (Some(offset_bytes), Some(files)) =
                (&mut extent.file_offset_bytes, lengths.get(extent.depth as usize))
        {
            *offset_bytes += files.iter().take(usize::from(extent.file)).sum::<u64>();
        }
        drawing.add(&extent);
        Ok(())
    })?;
    Ok(drawing)
}

fn print_drawing(context: &mut Context, drawing: &Drawing, names: &Names) -> Outcome<()> {
    let style = context.style;
    let size_bytes = drawing.data_bytes() + drawing.zero_bytes + drawing.unallocated_bytes + drawing.damaged_bytes;
    let top = names.of_layers().next().map_or("", String::as_str);
    let head = format!("{}: {}, {} a character", printable(top), Exact(size_bytes), Human(drawing.cell_bytes()));
    writeln!(context.text(), "{}", style.paint(BOLD, head))?;
    for (offset_bytes, row) in drawing.rows() {
        let offset = if offset_bytes == 0 { "0".to_owned() } else { Human(offset_bytes).to_string() };
        writeln!(context.out, "{offset:>width$}  {}", paint_row(context, &row), width = MARGIN_COLUMNS - 2)?;
    }
    writeln!(context.out)?;
    print_totals(context, drawing, names, size_bytes)?;
    let painted: Vec<(usize, &LayerTally)> =
        drawing.layers.iter().enumerate().filter(|(_, tally)| tally.data_bytes > 0).take(FILES_MAX).collect();
    if !painted.is_empty() {
        writeln!(
            context.text(),
            "\nThe files from their first to their last byte. A digit is the tenth of the disk,\n0 to 9, whose data is there."
        )?;
        for (depth, tally) in painted {
            let label = format!("layer {}", draw::layer_glyph(depth as u32));
            writeln!(context.out, "{label:>width$}  {}", tally.file_line(), width = MARGIN_COLUMNS - 2)?;
        }
    }
    Ok(())
}

fn print_totals(context: &mut Context, drawing: &Drawing, names: &Names, size_bytes: u64) -> Outcome<()> {
    let percent = |bytes: u64| {
        if size_bytes == 0 { String::new() } else { format!("{:.1} %", bytes as f64 * 100.0 / size_bytes as f64) }
    };
    let mut table = Columns::new(&[
        ("", Align::Left),
        ("holds", Align::Right),
        ("of disk", Align::Right),
        ("fragments", Align::Right),
        ("mean", Align::Right),
        ("out of order", Align::Right),
        ("file", Align::Left),
    ]);
    let layers = drawing.layers.iter().zip(names.of_layers()).enumerate();
    for (depth, (tally, name)) in layers.take(TOTALS_MAX) {
        table.row(vec![
            draw::layer_glyph(depth as u32).to_string(),
            Human(tally.data_bytes).to_string(),
            percent(tally.data_bytes),
            tally.fragments.to_string(),
            tally.data_bytes.checked_div(tally.fragments).map_or_else(|| "-".into(), |mean| Human(mean).to_string()),
            tally.out_of_order.to_string(),
            printable(name),
        ]);
    }
    if let Some(rest) = drawing.layers.get(TOTALS_MAX..).filter(|rest| !rest.is_empty()) {
        let sum = |of: fn(&LayerTally) -> u64| rest.iter().map(of).sum::<u64>();
        let bytes = sum(|tally| tally.data_bytes);
        let fragments = sum(|tally| tally.fragments);
        table.row(vec![
            "…".into(),
            Human(bytes).to_string(),
            percent(bytes),
            fragments.to_string(),
            bytes.checked_div(fragments).map_or_else(|| "-".into(), |mean| Human(mean).to_string()),
            sum(|tally| tally.out_of_order).to_string(),
            format!("{} deeper layers", rest.len()),
        ]);
    }
    let damaged = (DAMAGED, drawing.damaged_bytes, "damaged (see `check`)");
    for (glyph, bytes, what) in [
        (ZERO, drawing.zero_bytes, "recorded as zeros"),
        (UNALLOCATED, drawing.unallocated_bytes, "in no layer: zeros"),
    ]
    .into_iter()
    .chain((damaged.1 > 0).then_some(damaged))
    {
        table.row(vec![
            glyph.to_string(),
            Human(bytes).to_string(),
            percent(bytes),
            String::new(),
            String::new(),
            String::new(),
            what.into(),
        ]);
    }
    if drawing.rows().iter().any(|(_, row)| row.contains(SPARSE)) {
        table.row(vec![
            SPARSE.to_string(),
            String::new(),
            String::new(),
            String::new(),
            String::new(),
            String::new(),
            "only a little data".into(),
        ]);
    }
    table.within(context.style.limit()).write(&mut context.out)?;
    Ok(())
}

// A run of one glyph gets one escape sequence: one for every cell would make the drawing ten times
// as long.
fn paint_row(context: &Context, row: &str) -> String {
    let mut painted = String::new();
    let mut rest = row;
    while let Some(glyph) = rest.chars().next() {
        let end = rest.find(|c| c != glyph).unwrap_or(rest.len());
        painted.push_str(&draw::paint(&context.style, glyph, &rest[..end]));
        rest = &rest[end..];
    }
    painted
}

fn print_drawing_json(
    context: &mut Context,
    file: &Path,
    drawing: &Drawing,
    names: &Names,
    warnings: &[String],
) -> Outcome<()> {
    let layers = drawing.layers.iter().zip(names.of_layers()).enumerate();
    let report = DrawingReport {
        file: json::path(file),
        virtual_size: drawing.data_bytes() + drawing.zero_bytes + drawing.unallocated_bytes + drawing.damaged_bytes,
        cell_size: drawing.cell_bytes(),
        data_bytes: drawing.data_bytes(),
        zero_bytes: drawing.zero_bytes,
        unallocated_bytes: drawing.unallocated_bytes,
        warnings,
        damaged_bytes: drawing.damaged_bytes,
        rows: drawing.rows().into_iter().map(|(_, row)| row).collect(),
        layers: layers
            .map(|(depth, (tally, name))| LayerReport {
                depth,
                file: name,
                glyph: draw::layer_glyph(depth as u32),
                tally,
                file_positions: tally.file_line(),
            })
            .collect(),
    };
    context.print_json(&report)
}
