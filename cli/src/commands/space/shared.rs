//! What several actions of `space` need.

use super::report::{PoolReport, Report};
use crate::{
    context::Context,
    exit::{self, Failure, Outcome},
    printable::printable,
};
use clap::ValueEnum;
use diskwright_space::{Moved, Pool, Spaces, Tier, split};
use std::{io::Write, path::Path, sync::Arc};

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum TierArg {
    /// The fast members as long as there is room.
    Any,
    /// The fast members.
    Fast,
    /// The slow members.
    Slow,
}

impl From<TierArg> for Tier {
    fn from(tier: TierArg) -> Self {
        match tier {
            TierArg::Any => Self::Any,
            TierArg::Fast => Self::Fast,
            TierArg::Slow => Self::Slow,
        }
    }
}

/// Prints what was done and the pool as it is then.
pub(super) fn shown(context: &mut Context, pool: &Pool, done: &str) -> Outcome {
    let report = Report { pools: vec![PoolReport::new(&pool.status(), None)] };
    if context.global.json || context.global.quiet {
        return report.print(context);
    }
    pool.warnings().iter().for_each(|warning| context.warn(&exit::for_users(warning)));
    writeln!(context.text(), "{}: {done}", printable(pool.name()))?;
    Ok(exit::OK)
}

pub(super) fn bytes(slabs: u64, moved: Moved) -> u64 {
    slabs.saturating_mul(moved.slab_bytes)
}

/// The pool and the name of a disk.
pub(super) fn disk_of(name: &Path, writable: bool) -> Outcome<(Arc<Pool>, String)> {
    let (pool, disk) = split(name)?;
    let Some(disk) = disk else {
        return Err(Failure::usage(format!("{}: it names a pool; a disk is space://POOL/NAME", name.display())));
    };
    Ok((Spaces::of_user().pool(&pool, writable)?, disk))
}
