//! The axes of a sweep and their command-line syntax: `queue-depth=1..24`, `threads=1,2,4,8`,
//! `block-size=4K..1M*2`.
//!
//! ```text
//!   1..24      every whole number from 1 to 24
//!   2..24+2    every second number
//!   1..256*2   each number twice the one before
//!   1,2,4      a list; its items may be ranges: 1..4,8,16
//! ```

use diskwright_load::job::{Blocks, Bytes, Load};
use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

/// Largest number of values of one axis.
pub const VALUES_MAX: usize = 1024;

/// A setting of the load that a sweep can vary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Knob {
    /// Requests in flight per thread.
    QueueDepth,
    /// Threads per target.
    Threads,
    /// Bytes per request.
    BlockSize,
    /// Percentage of reads.
    ReadPercent,
    /// Percentage of random requests.
    RandomPercent,
    /// How many of the targets are used.
    Files,
    /// Length of the working set, bytes.
    WorkingSet,
    /// How many of the agents of a fleet measure.
    Agents,
}

impl Knob {
    /// All knobs, in the order of the help text.
    pub const ALL: [Self; 8] = [
        Self::QueueDepth,
        Self::Threads,
        Self::BlockSize,
        Self::ReadPercent,
        Self::RandomPercent,
        Self::Files,
        Self::WorkingSet,
        Self::Agents,
    ];

    /// The name in the command-line syntax.
    pub fn name(self) -> &'static str {
        match self {
            Self::QueueDepth => "queue-depth",
            Self::Threads => "threads",
            Self::BlockSize => "block-size",
            Self::ReadPercent => "read-percent",
            Self::RandomPercent => "random-percent",
            Self::Files => "files",
            Self::WorkingSet => "working-set",
            Self::Agents => "agents",
        }
    }

    /// Whether a larger value puts more load on the targets, so that the sweep looks for a knee
    /// along it.
    pub fn is_load(self) -> bool {
        matches!(self, Self::QueueDepth | Self::Threads | Self::Agents)
    }

    /// Whether its values are numbers of bytes.
    pub fn is_bytes(self) -> bool {
        matches!(self, Self::BlockSize | Self::WorkingSet)
    }

    /// A value as text: `4K`, `32`, `70`.
    pub fn show(self, value: u64) -> String {
        if self.is_bytes() { Bytes(value).to_string() } else { value.to_string() }
    }

    /// Sets the value in `load`. [`Knob::Files`] and [`Knob::Agents`] are not part of a load and
    /// set nothing.
    pub fn set(self, load: &mut Load, value: u64) {
        let small = u32::try_from(value).unwrap_or(u32::MAX);
        match self {
            Self::QueueDepth => load.queue_depth = small,
            Self::Threads => load.threads = small,
            Self::BlockSize => load.block = Blocks::One(Bytes(value)),
            Self::ReadPercent => load.read_percent = value as f64,
            Self::RandomPercent => load.random_percent = value as f64,
            Self::WorkingSet => load.working_set = Bytes(value),
            Self::Files | Self::Agents => {}
        }
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The value of one knob in a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Coordinate {
    /// What varies along the axis.
    pub knob: Knob,
    /// Value in the knob's unit: bytes, percent, or a count.
    pub value: u64,
}

impl fmt::Display for Coordinate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.knob, self.knob.show(self.value))
    }
}

/// A setting that the sweep varies, and its values in the given order, each once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Axis {
    /// What varies along the axis.
    pub knob: Knob,
    /// Values in the knob's unit: bytes, percent, or counts.
    pub values: Vec<u64>,
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values: Vec<String> = self.values.iter().map(|value| self.knob.show(*value)).collect();
        write!(f, "{}={}", self.knob, values.join(","))
    }
}

impl FromStr for Axis {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Knob::ALL.map(Knob::name).join(", ");
        let (name, pieces) = text.split_once('=').ok_or_else(|| {
            format!("\"{text}\" has no values: write for example queue-depth=1..24, or threads=1,2,4")
        })?;
        let knob = Knob::ALL
            .into_iter()
            .find(|knob| knob.name() == name.trim())
            .ok_or_else(|| format!("\"{name}\" is not supported; use one of: {}", names()))?;
        let mut values = Vec::new();
        for piece in pieces.split(',') {
            add_piece(knob, piece.trim(), &mut values)?;
        }
        let mut seen = std::collections::HashSet::new();
        values.retain(|value| seen.insert(*value));
        Ok(Self { knob, values })
    }
}

/// Adds the values of one item: `4`, `1..24`, `2..24+2` or `1..256*2`.
fn add_piece(knob: Knob, piece: &str, values: &mut Vec<u64>) -> Result<(), String> {
    let mut push = |value: u64| {
        let sound = match knob {
            Knob::ReadPercent | Knob::RandomPercent => value <= 100,
            _ => value > 0,
        };
        if !sound {
            return Err(format!("{knob} cannot be {}", knob.show(value)));
        }
        if values.len() == VALUES_MAX {
            return Err(format!("{knob} has more than {VALUES_MAX} values; use larger steps, as in 1..4096*2"));
        }
        values.push(value);
        Ok(())
    };
    let Some((first, rest)) = piece.split_once("..") else {
        return push(number(knob, piece)?);
    };
    let (last, step) = match rest.find(['+', '*']) {
        Some(at) => (&rest[..at], Some((rest.as_bytes()[at], &rest[at + 1..]))),
        None => (rest, None),
    };
    let (first, last) = (number(knob, first)?, number(knob, last)?);
    if first > last {
        return Err(format!("{piece} is reversed; give the smaller value first"));
    }
    let next: Box<dyn Fn(u64) -> Option<u64>> = match step {
        Some((b'*', factor)) => {
            let factor: u64 = factor.trim().parse().map_err(|_| format!("\"{piece}\": {factor:?} is not a factor"))?;
            if factor < 2 || first == 0 {
                return Err(format!(
                    "\"{piece}\" never ends: the factor must be at least 2, and the first value above 0"
                ));
            }
            Box::new(move |value| value.checked_mul(factor))
        }
        Some((_, step)) => {
            let step = number(knob, step)?;
            if step == 0 {
                return Err(format!("\"{piece}\" never ends: the step must be above 0"));
            }
            Box::new(move |value| value.checked_add(step))
        }
        None if knob.is_bytes() => {
            return Err(format!("\"{piece}\" needs a step: write {piece}*2 to double, or {piece}+64K"));
        }
        None => Box::new(|value| value.checked_add(1)),
    };
    let mut value = Some(first);
    while let Some(now) = value.filter(|now| *now <= last) {
        push(now)?;
        value = next(now);
    }
    Ok(())
}

fn number(knob: Knob, text: &str) -> Result<u64, String> {
    let text = text.trim();
    if knob.is_bytes() {
        return text.parse::<Bytes>().map(|bytes| bytes.0);
    }
    text.parse().map_err(|_| format!("{knob} needs a whole number, not \"{text}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(text: &str) -> Vec<u64> {
        text.parse::<Axis>().unwrap_or_else(|error| panic!("{text}: {error}")).values
    }

    #[test]
    fn ranges_steps_and_lists() {
        assert_eq!(values("queue-depth=1..24"), (1..=24).collect::<Vec<_>>());
        assert_eq!(values("queue-depth=1..256*2"), [1, 2, 4, 8, 16, 32, 64, 128, 256]);
        assert_eq!(values("threads=2..8+3"), [2, 5, 8]);
        assert_eq!(values("threads= 1..3, 8 ,2"), [1, 2, 3, 8]);
        assert_eq!(values("block-size=4K..64K*4"), [4096, 16384, 65536]);
        assert_eq!(values("read-percent=0..100+50"), [0, 50, 100]);
        // The range ends at the last value that does not exceed its end, also if the next value
        // overflows.
        assert_eq!(values("queue-depth=1..10*3"), [1, 3, 9]);
        assert_eq!(values("working-set=9223372036854775808..18446744073709551615*2"), [1 << 63]);
    }

    #[test]
    fn invalid_axes_are_refused() {
        for (text, word) in [
            ("queue-depth", "has no values"),
            ("depth=1..3", "queue-depth, threads"),
            ("queue-depth=0..3", "cannot be 0"),
            ("queue-depth=5..3", "reversed"),
            ("queue-depth=1..8*1", "never ends"),
            ("read-percent=0..8*2", "never ends"),
            ("queue-depth=1..8+0", "never ends"),
            ("queue-depth=1..5000", "more than 1024"),
            ("queue-depth=x", "whole number"),
            ("queue-depth=", "whole number"),
            ("read-percent=101", "cannot be 101"),
            ("block-size=4K..1M", "needs a step"),
            ("block-size=4Q", "not a size"),
        ] {
            let error = text.parse::<Axis>().expect_err(text);
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn an_axis_is_written_as_it_is_read() {
        let axis: Axis = "block-size=4K..1M*2".parse().unwrap();
        assert_eq!(axis.to_string().parse::<Axis>().unwrap(), axis);
    }
}
