//! Values of DiskSpd's switches: sizes, numbers, lists of processors, distributions; and the errors
//! of a command line, which name the switch.

use super::profile::Processor;
use diskwright_load::job::{Bytes, Spot};

/// A command line that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    /// Not a DiskSpd switch.
    #[error(
        "{switch} is not a DiskSpd switch; a switch and its value are one word, as in -b8K, and upper and lower case differ"
    )]
    Unknown {
        /// The switch as given.
        switch: String,
    },
    /// A DiskSpd switch that is not supported.
    #[error("{switch} is not supported: {why}")]
    Refused {
        /// The switch as given.
        switch: String,
        /// The reason, and what to do.
        why: String,
    },
    /// A switch with a bad value.
    #[error("{switch}: {what}")]
    BadValue {
        /// The switch as given.
        switch: String,
        /// What is wrong with the value, and an example.
        what: String,
    },
    /// Switches that exclude each other, or a word that is missing.
    #[error("{0}")]
    Together(String),
}

pub(super) type Result<T, E = SwitchError> = std::result::Result<T, E>;

pub(super) fn bad(switch: &str, what: impl Into<String>) -> SwitchError {
    SwitchError::BadValue { switch: switch.to_owned(), what: what.into() }
}

pub(super) fn size(switch: &str, text: &str, block: Option<u64>) -> Result<u64> {
    let wrong = || {
        bad(
            switch,
            format!(
                "\"{text}\" is not a size; write a number with K, M, G or T{}",
                if block.is_some() { ", or b for blocks" } else { "" }
            ),
        )
    };
    if let (Some(number), Some(block)) = (text.strip_suffix('b'), block) {
        let blocks: u64 = number.parse().map_err(|_| wrong())?;
        return blocks.checked_mul(block).ok_or_else(wrong);
    }
    text.parse::<Bytes>().map(|bytes| bytes.0).map_err(|_| wrong())
}

pub(super) fn number(switch: &str, text: &str, least: u64, most: u64) -> Result<u64> {
    let value: Option<u64> = text.parse().ok();
    value
        .filter(|value| (least..=most).contains(value))
        .ok_or_else(|| bad(switch, format!("\"{text}\" is not a whole number from {least} to {most}")))
}

pub(super) fn small(switch: &str, text: &str, least: u64, most: u32) -> Result<u32> {
    number(switch, text, least, u64::from(most)).map(|value| value as u32)
}

pub(super) fn refuse<T>(switch: &str, why: &str) -> Result<T> {
    Err(SwitchError::Refused { switch: switch.to_owned(), why: why.to_owned() })
}

pub(super) fn positive(switch: &str, value: u64) -> Result<u64> {
    if value == 0 { Err(bad(switch, "the value must be above 0")) } else { Ok(value) }
}

/// Parses `-a`, `-ag`, `-a0,1`, `-ag0,0,1,g1,2`: a number after `g` is the group of the processors
/// that follow. The result is empty for all processors.
pub(super) fn affinity(switch: &str, value: &str) -> Result<Vec<Processor>> {
    let wrong = || bad(switch, "not a list of processors; write it as in -a0,1,2 or -ag0,0,1");
    // DiskSpd's own limits.
    let number = |text: &str, max: u32| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|number: &u32| digits && *number <= max).ok_or_else(wrong)
    };
    if value.is_empty() || value == "g" {
        return Ok(Vec::new());
    }
    let (mut group, mut group_is_used, mut processors) = (0, true, Vec::new());
    for part in value.split(',') {
        match part.strip_prefix('g') {
            Some(text) => (group, group_is_used) = (number(text, u32::from(u16::MAX))?, false),
            None => {
                processors.push(Processor { group, number: number(part, u32::from(u8::MAX))? });
                group_is_used = true;
            }
        }
    }
    if group_is_used { Ok(processors) } else { Err(wrong()) }
}

/// Parses `pct90/10:10/90` and `abs95/10G:5/90G`.
pub(super) fn spots(switch: &str, text: &str) -> Result<Vec<Spot>> {
    let wrong = || {
        bad(
            switch,
            "not a distribution; write shares of requests and of the target, as in -rdpct90/10:10/90, or lengths, as in -rdabs95/10G:5/100G",
        )
    };
    let (absolute, rest) = match (text.strip_prefix("pct"), text.strip_prefix("abs")) {
        (Some(rest), _) => (false, rest),
        (_, Some(rest)) => (true, rest),
        _ => return Err(wrong()),
    };
    let spot = |part: &str| {
        let (io, target) = part.split_once('/').ok_or_else(wrong)?;
        let io_percent: f64 = io.parse::<u32>().map_err(|_| wrong())?.into();
        let length = absolute.then(|| target.parse::<Bytes>().map_err(|_| wrong())).transpose()?;
        let target_percent = if absolute { 0.0 } else { f64::from(target.parse::<u32>().map_err(|_| wrong())?) };
        Ok(Spot { io_percent, target_percent, length })
    };
    let spots: Vec<Spot> = rest.split(':').map(spot).collect::<Result<_>>()?;
    let io: f64 = spots.iter().map(|spot| spot.io_percent).sum();
    let target: f64 = spots.iter().map(|spot| spot.target_percent).sum();
    if io > 100.0 || target > 100.0 {
        return Err(bad(switch, "the shares add up to more than 100"));
    }
    Ok(spots)
}
