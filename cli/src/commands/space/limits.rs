//! `space limit`: a member as slow as another device.

use super::shared::shown;
use crate::{
    context::Context,
    exit::{Failure, Outcome},
    member_limit::LimitArg,
    printable::printable,
};
use diskwright_space::{MemberLimit, Spaces};
use std::path::Path;

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
