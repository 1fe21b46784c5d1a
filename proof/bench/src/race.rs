//! A conversion of ours and of qemu-img, in turns.
//!
//! Both convert the same source to a new file. *Hot* means that the source is in the page cache,
//! *cold* that it was dropped from there. The file system is synced before each conversion, so that
//! neither tool's time includes write-back that the other left behind. Speed is that of the
//! command, as a user waits for it. Speed *until durable* includes the sync of the file system
//! after it.

use crate::turns::in_turns;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, RowOutcome},
    peer::{self, Cost},
    progress::Progress,
    rounds::Window,
    scratch::settle,
};
use diskwright_load::clock;
use diskwright_store::FileStore;
use std::path::Path;

/// Converts once, and says what it cost.
pub(crate) type Conversion<'a> = &'a dyn Fn() -> Result<Cost>;

/// Two programs, one conversion.
pub(crate) struct Race<'a> {
    /// "raw file to VHDX dynamic".
    pub(crate) name: &'a str,
    pub(crate) source: &'a Path,
    /// The file that both make.
    pub(crate) dest: &'a Path,
    /// Bytes that speeds count.
    pub(crate) size_bytes: u64,
    pub(crate) rounds: usize,
    pub(crate) ours: Conversion<'a>,
    pub(crate) theirs: Conversion<'a>,
    /// Least ratio of the speeds, by the command and until durable.
    pub(crate) speed_bar: Bar,
    /// Largest ratio of the CPU times; `None` where nothing is promised.
    pub(crate) cpu_bar: Option<Bar>,
}

impl Race<'_> {
    pub(crate) fn run(&self, is_hot: bool, found: &mut RowOutcome, progress: &mut dyn Progress) -> Result<()> {
        let name = format!("{}, {}", self.name, if is_hot { "hot" } else { "cold" });
        let dir = self.dest.parent().unwrap_or(Path::new("."));
        let (mut wall, mut cpu, mut after) = ([vec![], vec![]], [vec![], vec![]], [vec![], vec![]]);
        let subjects = ["diskwright", "qemu-img"].map(|tool| format!("{name}, {tool}"));
        in_turns(
            "convert",
            &[&*subjects[0], &*subjects[1]],
            (self.rounds, 3),
            progress,
            &mut |Window { cell: who, .. }, _| {
                settle(dir)?;
                warm_or_cool(self.source, is_hot)?;
                let cost = if who == 0 { (self.ours)()? } else { (self.theirs)()? };
                wall[who].push(cost.wall_ns as f64);
                cpu[who].push(cost.cpu.total_ns() as f64);
                let (settled, settle_ns, _) = clock::timed(|| settle(dir));
                settled?;
                after[who].push(settle_ns as f64);
                std::fs::remove_file(self.dest).map_err(LabError::file("remove", self.dest))?;
                Ok(())
            },
        )?;
        // Speeds in MB/s, so that more is better.
        let speed =
            |times: &[f64]| -> Vec<f64> { times.iter().map(|ns| self.size_bytes as f64 * 1e3 / ns.max(1.0)).collect() };
        let durable = |who: usize| -> Vec<f64> {
            wall[who].iter().zip(&after[who]).map(|(wall, after): (&f64, &f64)| wall + after).collect()
        };
        let check = |what: &str, unit: &str, ours: &[f64], theirs: &[f64], bar| {
            Check::ratio(format!("{name}: {what}"), unit, ours, theirs, bar)
        };
        found.checks.push(check("speed", "MB/s", &speed(&wall[0]), &speed(&wall[1]), self.speed_bar));
        found.checks.push(check(
            "speed until durable",
            "MB/s",
            &speed(&durable(0)),
            &speed(&durable(1)),
            self.speed_bar,
        ));
        if let Some(bar) = self.cpu_bar {
            found.checks.push(check("CPU time", "ns", &cpu[0], &cpu[1], bar));
        }
        Ok(())
    }
}

/// Reads all of a file into the page cache, or drops it from there.
pub(crate) fn warm_or_cool(path: &Path, is_hot: bool) -> Result<()> {
    if is_hot {
        return peer::warm(path);
    }
    let store = FileStore::open(path, &diskwright_store::OpenOptions::default())?;
    store.drop_cache().map_err(LabError::file("drop from the page cache", path))
}
