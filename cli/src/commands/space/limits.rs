//! `space limit`: a member as slow as another device.

use super::shared::shown;
use crate::{
    context::Context,
    exit::{Failure, Outcome},
    printable::printable,
};
use diskwright_space::{MemberLimit, Spaces};
use std::path::Path;

/// A limit, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LimitArg(Option<MemberLimit>);

/// Reads `iops=150,latency=6ms`.
pub(super) fn parse(text: &str) -> Result<LimitArg, String> {
    if text == "none" {
        return Ok(LimitArg(None));
    }
    let mut limit = MemberLimit { iops: 0, latency_us: 0 };
    for part in text.split(',') {
        match part.split_once('=') {
            Some(("iops", number)) => {
                limit.iops =
                    number.parse().ok().filter(|&iops| iops > 0).ok_or("iops must be a whole number above 0")?;
            }
            Some(("latency", time)) => limit.latency_us = microseconds(time)?,
            _ => return Err("expected iops=N, latency=TIME, or both with a comma between".into()),
        }
    }
    Ok(LimitArg(Some(limit)))
}

fn microseconds(text: &str) -> Result<u64, String> {
    let unit = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    let factor = match &text[unit..] {
        "us" => 1,
        "ms" => 1000,
        "s" => 1_000_000,
        _ => return Err(format!("{text}: expected a number and us, ms or s")),
    };
    let number = text[..unit].parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    number.filter(|&us| us <= 60_000_000).ok_or_else(|| format!("{text}: expected at most 60s"))
}

pub(super) fn limit(context: &mut Context, pool: &str, member: &Path, limit: LimitArg) -> Outcome {
    let spaces = Spaces::of_user();
    let mut known = spaces.registry().find(pool)?;
    let path = member.canonicalize().unwrap_or_else(|_| member.to_owned());
    if !known.members.contains(&path) {
        return Err(Failure::usage(format!("{}: it is not a member of the pool {pool}", member.display())));
    }
    match limit.0 {
        Some(limit) => known.limits.insert(path, limit),
        None => known.limits.remove(&path),
    };
    spaces.registry().remember(pool, &known, true)?;
    let shown_path = printable(&member.to_string_lossy());
    let done = match limit.0 {
        None => format!("{shown_path} is used at its own speed"),
        Some(MemberLimit { iops: 0, latency_us }) => {
            format!("{shown_path} takes {latency_us} us more for each operation")
        }
        Some(MemberLimit { iops, latency_us }) => {
            format!("{shown_path} is used at {iops} operations a second, with a latency of {latency_us} us")
        }
    };
    shown(context, &*spaces.pool(pool, false)?, &done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read() {
        let limit = |iops, latency_us| Ok(LimitArg(Some(MemberLimit { iops, latency_us })));
        assert_eq!(parse("iops=150,latency=6ms"), limit(150, 6000));
        assert_eq!(parse("latency=80us"), limit(0, 80));
        assert_eq!(parse("iops=9,latency=1s"), limit(9, 1_000_000));
        assert_eq!(parse("none"), Ok(LimitArg(None)));
        for wrong in
            ["", "150", "iops", "iops=0", "iops=-1", "iops=1.5", "latency=6", "latency=61s", "latency=ms", "x=1"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
