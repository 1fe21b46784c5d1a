//! `diskwright space pin`, `optimize` and `report`: which data lie on the fast members, and why.

use super::shared::{TierArg, bytes, disk_of, shown};
use crate::{
    context::Context,
    exit::{self, Outcome},
    json::{self, Document},
    printable::printable,
    sizes::{self, Human},
    table::{Align, Columns},
    timestamp::utc_from_1970,
};
use clap::Args;
use diskwright_space::{Piece, Spaces, TierMove, TierReport};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Moves that are shown as text.
const MOVES_SHOWN: usize = 10;

#[derive(Debug, Args)]
pub(super) struct OptimizeArgs {
    /// The pool.
    pool: String,
    /// Say what would move, and move nothing.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Args)]
pub(super) struct ReportArgs {
    /// The pool, or a disk of it: space://POOL/NAME. For a disk each piece is shown, with where it
    /// lies and why.
    name: PathBuf,
    /// The first byte to show of a disk.
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse, default_value = "0")]
    offset: u64,
    /// How much to show of a disk. Without it, up to its end.
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    length: Option<u64>,
}

/// What `space optimize` prints with `--json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct OptimizeReport {
    /// Name of the pool.
    pool: String,
    /// Nothing has moved.
    dry_run: bool,
    /// Bytes of slabs that moved to the fast members, or would, counted once and not for each copy.
    to_fast: u64,
    /// Bytes that moved to the slow members.
    to_slow: u64,
    /// Bytes that belong on the fast members and found no room there.
    left: u64,
    /// Share of the requests to data on fast members before, 0 to 1; `null` if none was counted.
    share_before: Option<f64>,
    /// The same for where the data lie now, or would.
    share_after: Option<f64>,
}

impl Document for OptimizeReport {
    const SCHEMA: &'static str = "diskwright.space-optimize/1";
}

/// What `space report` prints with `--json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct HeatReport {
    /// Name of the pool.
    pool: String,
    /// Bytes of copies that the fast members take, without a reserve for new writes.
    fast: u64,
    /// Bytes of copies that lie there.
    fast_used: u64,
    /// Bytes of all slabs, counted once.
    allocated: u64,
    /// Random requests that are known. Those of earlier days count less: half after a day.
    requests: u64,
    /// Share of them to data that lie on fast members, 0 to 1.
    share: Option<f64>,
    /// The same after `space optimize`.
    share_after: Option<f64>,
    /// Share that was measured since the pool was opened.
    measured: Option<f64>,
    /// Bytes of the slabs that get nine of ten requests.
    working_set: u64,
    /// What fast members of other sizes would serve.
    curve: Vec<CurvePoint>,
    /// What the fast members must hold to serve a share, as in the report of Storage Spaces.
    needed: Vec<CurvePoint>,
    /// What has moved between the tiers lately, the newest first.
    moves: Vec<MoveReport>,
    /// Pieces of the disk, if one was named.
    pieces: Option<Vec<PieceReport>>,
}

impl Document for HeatReport {
    const SCHEMA: &'static str = "diskwright.space-report/1";
}

/// A size of the fast tier.
#[derive(Debug, Serialize, JsonSchema)]
struct CurvePoint {
    /// Bytes of copies.
    fast: u64,
    /// Share of the requests, 0 to 1.
    share: f64,
}

/// A piece of a disk that has moved.
#[derive(Debug, Serialize, JsonSchema)]
struct MoveReport {
    /// When, in UTC.
    time: String,
    /// The disk.
    disk: String,
    /// Offset in the disk.
    offset: u64,
    /// Length in bytes.
    length: u64,
    /// `fast` or `slow`: where it has moved.
    tier: &'static str,
    /// Random requests that were known of it.
    requests: u64,
    /// Why it has moved.
    why: &'static str,
}

/// A piece of a disk.
#[derive(Debug, Serialize, JsonSchema)]
struct PieceReport {
    /// Offset in the disk.
    offset: u64,
    /// Length in bytes.
    length: u64,
    /// `fast` or `slow`.
    tier: &'static str,
    /// Random requests that are known.
    requests: u64,
    /// The members that have a copy.
    members: Vec<String>,
    /// Why it lies there.
    why: String,
}

pub(super) fn pin(context: &mut Context, name: &Path, tier: TierArg) -> Outcome {
    let (pool, disk) = disk_of(name, true)?;
    pool.pin_file(&disk, tier.into())?;
    let where_to = match tier {
        TierArg::Any => "belongs where its heat says",
        TierArg::Fast => "belongs on the fast members",
        TierArg::Slow => "belongs on the slow members",
    };
    let what = if pool.is_tiered() { "; `diskwright space optimize` moves what lies elsewhere" } else { "" };
    shown(context, &pool, &format!("{disk} {where_to}{what}"))
}

pub(super) fn optimize(context: &mut Context, args: &OptimizeArgs) -> Outcome {
    let pool = Spaces::of_user().pool(&args.pool, true)?;
    let mut display = context.progress("moving");
    let done =
        pool.optimize(args.dry_run, &mut |moved| display.update(bytes(moved.done, moved), bytes(moved.total, moved)))?;
    drop(display);
    let report = OptimizeReport {
        pool: args.pool.clone(),
        dry_run: args.dry_run,
        to_fast: done.up_bytes,
        to_slow: done.down_bytes,
        left: done.left_bytes,
        share_before: done.share_before,
        share_after: done.share_after,
    };
    if context.global.json {
        context.print_json(&report)?;
        return Ok(exit::OK);
    }
    if context.global.quiet {
        return Ok(exit::OK);
    }
    let verb = if args.dry_run { "would move" } else { "moved" };
    let (up, down) = (Human(report.to_fast), Human(report.to_slow));
    let name = printable(&report.pool);
    match (report.to_fast, report.to_slow) {
        (0, 0) => writeln!(context.out, "{name}: everything lies where it belongs")?,
        _ => writeln!(context.out, "{name}: {up} {verb} to the fast members, {down} to the slow ones")?,
    }
    if let (Some(before), Some(after)) = (report.share_before, report.share_after) {
        let (before, after) = (percent(before), percent(after));
        writeln!(context.out, "Requests to data on the fast members: {before} before, {after} after.")?;
    } else {
        writeln!(context.out, "No requests were counted yet; only pins and the reserve for new writes count.")?;
    }
    if report.left > 0 {
        writeln!(context.out, "{} found no room on the fast members.", Human(report.left))?;
    }
    context.out.flush()?;
    Ok(exit::OK)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

pub(super) fn report(context: &mut Context, args: &ReportArgs) -> Outcome {
    let text = args.name.to_string_lossy();
    let (pool, disk) = if text.starts_with(diskwright_space::SCHEME) {
        let (pool, disk) = disk_of(&args.name, false)?;
        (pool, Some(disk))
    } else {
        (Spaces::of_user().pool(&text, false)?, None)
    };
    let found = pool.tier_report()?;
    let pieces = match &disk {
        Some(disk) => {
            let end = args.length.map_or(u64::MAX, |length| args.offset.saturating_add(length));
            Some(pool.where_lies(disk, args.offset..end)?)
        }
        None => None,
    };
    let report = HeatReport::new(pool.name(), &found, &pool.moves(), pieces);
    if context.global.json {
        context.print_json(&report)?;
    } else if !context.global.quiet {
        report.write(context, disk.as_deref())?;
    }
    Ok(exit::OK)
}

impl MoveReport {
    fn new(one: &TierMove) -> Self {
        Self {
            time: utc_from_1970(u32::try_from(one.unix_s).unwrap_or(u32::MAX)),
            disk: one.disk.clone(),
            offset: one.offset_bytes,
            length: one.len_bytes,
            tier: if one.is_up { "fast" } else { "slow" },
            requests: one.heat,
            why: one.why.name(),
        }
    }
}

impl HeatReport {
    fn new(pool: &str, found: &TierReport, moves: &[TierMove], pieces: Option<Vec<Piece>>) -> Self {
        let point = |fast: u64, share: f64| CurvePoint { fast, share };
        let piece = |piece: Piece| PieceReport {
            offset: piece.offset_bytes,
            length: piece.len_bytes,
            tier: if piece.is_fast { "fast" } else { "slow" },
            requests: piece.heat,
            members: piece.members.iter().map(|member| json::path(member)).collect(),
            why: piece.why,
        };
        Self {
            pool: pool.to_owned(),
            fast: found.fast_bytes,
            fast_used: found.fast_used_bytes,
            allocated: found.mapped_bytes,
            requests: found.counted,
            share: found.share,
            share_after: found.share_after,
            measured: found.measured,
            working_set: found.working_set_bytes,
            curve: found.curve.iter().map(|&(fast, share)| point(fast, share)).collect(),
            needed: found.needed.iter().map(|&(share, fast)| point(fast, share)).collect(),
            moves: moves.iter().map(MoveReport::new).collect(),
            pieces: pieces.map(|pieces| pieces.into_iter().map(piece).collect()),
        }
    }

    fn write_moves(&self, context: &mut Context) -> Outcome<()> {
        if self.moves.is_empty() {
            return Ok(());
        }
        let more = match self.moves.len() {
            ..=MOVES_SHOWN => String::new(),
            all => format!(", {MOVES_SHOWN} of {all} (--json has all)"),
        };
        writeln!(context.out, "\nMoved lately{more}:\n")?;
        let mut table = Columns::new(&[
            ("time", Align::Left),
            ("disk", Align::Left),
            ("offset", Align::Right),
            ("length", Align::Right),
            ("to", Align::Left),
            ("requests", Align::Right),
            ("why", Align::Left),
        ]);
        for one in self.moves.iter().take(MOVES_SHOWN) {
            table.row(vec![
                one.time.clone(),
                printable(&one.disk),
                one.offset.to_string(),
                Human(one.length).to_string(),
                one.tier.into(),
                one.requests.to_string(),
                one.why.into(),
            ]);
        }
        table.within(context.style.limit()).write(&mut context.out)?;
        Ok(())
    }

    fn write(&self, context: &mut Context, disk: Option<&str>) -> Outcome<()> {
        let name = printable(&self.pool);
        match self.share {
            Some(share) => writeln!(context.out, "{name}: {} of the requests go to the fast members", percent(share))?,
            None => writeln!(context.out, "{name}: no requests were counted yet")?,
        }
        let mut facts = vec![
            ("fast members".to_owned(), format!("{}, {} used", Human(self.fast), Human(self.fast_used))),
            ("allocated".to_owned(), Human(self.allocated).to_string()),
        ];
        if self.requests > 0 {
            facts.push(("requests known".into(), format!("about {}", self.requests)));
            facts.push(("working set".into(), format!("{} get nine of ten requests", Human(self.working_set))));
        }
        facts.extend(self.share_after.map(|share| ("after optimize".into(), percent(share))));
        facts.extend(self.measured.map(|share| ("measured".into(), format!("{} since it was opened", percent(share)))));
        writeln!(context.out)?;
        for (what, fact) in facts {
            writeln!(context.out, "{what:<14}  {fact}")?;
        }
        if !self.curve.is_empty() && self.fast > 0 {
            writeln!(context.out)?;
            let mut table = Columns::new(&[("fast members of", Align::Right), ("would serve", Align::Right)]);
            for point in &self.curve {
                table.row(vec![Human(point.fast).to_string(), percent(point.share)]);
            }
            table.within(context.style.limit()).write(&mut context.out)?;
            writeln!(context.out)?;
            let mut table = Columns::new(&[("to serve", Align::Right), ("fast members need", Align::Right)]);
            for point in &self.needed {
                table.row(vec![percent(point.share), Human(point.fast).to_string()]);
            }
            table.within(context.style.limit()).write(&mut context.out)?;
        }
        self.write_moves(context)?;
        if let (Some(pieces), Some(disk)) = (&self.pieces, disk) {
            writeln!(context.out)?;
            writeln!(context.out, "{}:", printable(disk))?;
            let mut table = Columns::new(&[
                ("offset", Align::Right),
                ("length", Align::Right),
                ("tier", Align::Left),
                ("requests", Align::Right),
                ("why", Align::Left),
                ("members", Align::Left),
            ]);
            for piece in pieces {
                table.row(vec![
                    piece.offset.to_string(),
                    Human(piece.length).to_string(),
                    piece.tier.into(),
                    piece.requests.to_string(),
                    exit::for_users(&piece.why),
                    piece.members.iter().map(|member| printable(member)).collect::<Vec<_>>().join(", "),
                ]);
            }
            table.within(context.style.limit()).write(&mut context.out)?;
        }
        context.out.flush()?;
        Ok(())
    }
}
