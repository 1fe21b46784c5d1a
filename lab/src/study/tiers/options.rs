//! Options of the study, and what follows from them.

use super::record::TierRecord;
use crate::{LabError, Result, cells::Cell, study::StudyOptions};
use diskwright_load::{
    job::{Blocks, Bytes, Distribution, Job, Load, Span},
    seeds,
};
use diskwright_store::StoreLimit;
use std::{path::PathBuf, time::Duration};

/// The paper's small random I/O: 8K, 70 % read.
const BLOCK_BYTES: u64 = 8 << 10;
const READ_PERCENT: f64 = 70.0;
const LOAD: &str = "8K random, 70 % read, zipf";
const SEED: u64 = 0x7469_6572;
const QUEUE_DEPTH: u32 = 32;
const QUICK_BYTES: u64 = 512 << 20;
const FULL_BYTES: u64 = 16 << 30;
/// Speed of the members if the user says nothing: an SSD, and an array of sixteen hard disks, as
/// the paper's space has.
const FAST: StoreLimit = StoreLimit { iops: 20_000, latency: Duration::from_micros(100) };
const SLOW: StoreLimit = StoreLimit { iops: 2_000, latency: Duration::from_millis(4) };

/// Options of the study. The default is the full study; `quick` takes less than two minutes.
#[derive(Debug, Clone)]
pub struct TiersOptions {
    /// Default: 5 rounds, 2 if quick; cells of 60 s, 12 s if quick.
    pub study: StudyOptions,
    /// Size of the disk, rounded up to MiB. Default: 16 GiB, 512 MiB if quick.
    pub size_bytes: Option<u64>,
    /// What the fast members hold of the disk. Default: a tenth.
    pub fast_bytes: Option<u64>,
    /// Copies of each slab, and members of each tier: 1 to 3.
    pub copies: u8,
    /// Exponent of the zipf distribution: above 0, not 1.
    pub theta: f64,
    /// The fast members.
    pub fast: TierOptions,
    /// The slow members.
    pub slow: TierOptions,
}

impl Default for TiersOptions {
    fn default() -> Self {
        Self {
            study: StudyOptions::default(),
            size_bytes: None,
            fast_bytes: None,
            copies: 2,
            theta: 1.2,
            fast: TierOptions::default(),
            slow: TierOptions::default(),
        }
    }
}

/// The members of a tier.
#[derive(Debug, Clone, Default)]
pub struct TierOptions {
    /// Folder of the members, on a device of this speed. Default: the scratch folder.
    pub dir: Option<PathBuf>,
    /// Speed of each member. Default: that of the device if there is a folder, else 20,000 IOPS at
    /// 100 us for fast members, and 2,000 IOPS at 4 ms for slow ones.
    pub limit: Option<StoreLimit>,
}

impl TierOptions {
    pub(super) fn record(&self, limit: Option<StoreLimit>) -> TierRecord {
        TierRecord {
            iops: limit.map(|limit| limit.iops).filter(|iops| *iops > 0),
            latency_ns: limit.map_or(0, |limit| limit.latency.as_nanos() as u64),
            dir: self.dir.as_ref().map(|dir| dir.display().to_string()),
        }
    }
}

/// What is measured.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) size_bytes: u64,
    pub(super) fast_bytes: u64,
    pub(super) copies: u8,
    pub(super) rounds: usize,
    pub(super) cell: Duration,
    pub(super) fast: Option<StoreLimit>,
    pub(super) slow: Option<StoreLimit>,
    pub(super) seed: u64,
    job: Job,
}

impl Plan {
    /// # Errors
    /// [`LabError::BadOptions`].
    pub(super) fn new(options: &TiersOptions) -> Result<Self> {
        let study = &options.study;
        let wanted_bytes = options.size_bytes.unwrap_or(study.pick(QUICK_BYTES, FULL_BYTES));
        let size_bytes = wanted_bytes.max(1).next_multiple_of(1 << 20);
        let fast_bytes = options.fast_bytes.unwrap_or(size_bytes / 10).max(1).next_multiple_of(1 << 20);
        let bad = |what: String, hint: &str| Err(LabError::BadOptions { what, hint: hint.into() });
        if fast_bytes >= size_bytes {
            let hint = "make the fast members smaller (`TiersOptions::fast_bytes`)";
            return bad("the fast members hold the whole disk, so there is nothing to choose".into(), hint);
        }
        if !(1..=3).contains(&options.copies) {
            return bad(format!("{} copies", options.copies), "use 1 to 3 (`TiersOptions::copies`)");
        }
        let theta = options.theta;
        if !(theta.is_finite() && theta > 0.0 && (theta - 1.0).abs() > 1e-9) {
            return bad(format!("a zipf exponent of {theta}"), "use one above 0 that is not 1 (`TiersOptions::theta`)");
        }
        let load = Load {
            block: Blocks::One(Bytes(BLOCK_BYTES)),
            read_percent: READ_PERCENT,
            queue_depth: QUEUE_DEPTH,
            distribution: Distribution::Zipf { theta },
            ..Load::default()
        };
        let cell = study.cell.unwrap_or(Duration::from_secs(study.pick(12, 60)));
        let mut job = Job::simple(LOAD, load, Span::default(), cell.into());
        (job.seed, job.engine) = (SEED, study.engine.into());
        let usual = |tier: &TierOptions, usual| {
            let limit = tier.limit.or_else(|| tier.dir.is_none().then_some(usual));
            limit.filter(|limit| *limit != StoreLimit::default())
        };
        Ok(Self {
            size_bytes,
            fast_bytes,
            copies: options.copies,
            rounds: study.rounds_or(study.pick(2, 5))?,
            cell,
            fast: usual(&options.fast, FAST),
            slow: usual(&options.slow, SLOW),
            seed: SEED,
            job,
        })
    }

    /// The load of a round: each has other popular blocks, the same before and after.
    pub(super) fn job(&self, round: usize) -> Job {
        Job { seed: seeds::of_window(SEED, LOAD, round), ..self.job.clone() }
    }

    pub(super) fn cell_of(&self, subject: &str) -> Cell {
        Cell::new("tiers", LOAD, subject, QUEUE_DEPTH.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_options_are_named() {
        let bad = |options: TiersOptions| Plan::new(&options).unwrap_err().to_string();
        let usual = TiersOptions::default;
        assert!(bad(TiersOptions { copies: 4, ..usual() }).contains("4 copies"));
        assert!(bad(TiersOptions { theta: 1.0, ..usual() }).contains("a zipf exponent of 1"));
        assert!(bad(TiersOptions { fast_bytes: Some(16 << 30), ..usual() }).contains("hold the whole disk"));
        let slow = TierOptions { dir: Some("/x".into()), limit: None };
        let plan = Plan::new(&TiersOptions { slow, ..usual() }).unwrap();
        assert_eq!((plan.fast, plan.slow), (Some(FAST), None), "a folder has the speed of its device");
        assert_eq!(plan.fast_bytes, (16_u64 << 30).div_ceil(10).next_multiple_of(1 << 20));
    }
}
