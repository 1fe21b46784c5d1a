//! Sizes and times as people write them: `8K`, `64G`; `30s`, `500ms`, `2m`, `24h`.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{fmt, str::FromStr, time::Duration};

/// A number of bytes. Written with a unit of 1024 where it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::workload::short_size(self.0))
    }
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("\"{text}\" is not a size: give a number with K, M, G or T (powers of 1024), or plain bytes");
        let trimmed = text.trim();
        let (digits, shift) = match trimmed.char_indices().last() {
            Some((at, unit)) if unit.is_ascii_alphabetic() => {
                let shift = match unit.to_ascii_uppercase() {
                    'B' => 0,
                    'K' => 10,
                    'M' => 20,
                    'G' => 30,
                    'T' => 40,
                    _ => return Err(wrong()),
                };
                (&trimmed[..at], shift)
            }
            _ => (trimmed, 0),
        };
        let number: u64 = digits.trim().parse().map_err(|_| wrong())?;
        number.checked_mul(1 << shift).map(Self).ok_or_else(wrong)
    }
}

/// A length of time in nanoseconds. Written in the largest unit that divides it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Span(u64);

/// Units, the largest first.
const UNITS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

impl Span {
    /// So many nanoseconds.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// So many milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// So many seconds.
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000_000))
    }

    /// In nanoseconds.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// In seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Whether it is none.
    pub fn is_zero(&self) -> bool {
        self.0 == 0
    }

    pub(super) fn one_second() -> Self {
        Self::from_secs(1)
    }

    pub(super) fn thirty_seconds() -> Self {
        Self::from_secs(30)
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Self {
        Self::from_nanos(span.0)
    }
}

impl From<Duration> for Span {
    fn from(duration: Duration) -> Self {
        Self(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("0s");
        }
        let (unit, nanos) = UNITS.into_iter().find(|(_, nanos)| self.0.is_multiple_of(*nanos)).unwrap_or(("ns", 1));
        write!(f, "{}{unit}", self.0 / nanos)
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("\"{text}\" is not a length of time: give a number with h, m, s, ms, us (or µs) or ns, as in 30s")
        };
        let trimmed = text.trim();
        let split = trimmed.find(char::is_alphabetic).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let unit = match unit {
            "" => "s",
            "µs" | "μs" => "us",
            unit => unit,
        };
        let (_, nanos) = UNITS.into_iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
        if let Ok(whole) = number.trim().parse::<u64>() {
            return whole.checked_mul(nanos).map(Self).ok_or_else(wrong);
        }
        let number: f64 = number.trim().parse().map_err(|_| wrong())?;
        let total = number * nanos as f64;
        if total.is_finite() && (0.0..1.8e19).contains(&total) { Ok(Self(total.round() as u64)) } else { Err(wrong()) }
    }
}

/// Text or a plain number.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(u64),
    Real(f64),
    Text(String),
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Written::deserialize(deserializer)? {
            Written::Number(number) => Ok(Self(number)),
            Written::Real(number) => Err(de::Error::custom(format!("{number} is not a whole number of bytes"))),
            Written::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = match Written::deserialize(deserializer)? {
            Written::Number(number) => number.to_string(),
            Written::Real(number) => number.to_string(),
            Written::Text(text) => text,
        };
        text.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_and_times_are_read_as_people_write_them() {
        let sizes = ["8K", "64G", "512", "1 M", "2t"].map(|text| text.parse::<Bytes>().unwrap().0);
        assert_eq!(sizes, [8192, 64 << 30, 512, 1 << 20, 2 << 40]);
        let times = ["30s", "500ms", "1.5", "2m", "24h"].map(|text| text.parse::<Span>().unwrap().as_nanos());
        assert_eq!(times, [30_000_000_000, 500_000_000, 1_500_000_000, 120_000_000_000, 86_400_000_000_000]);
        assert_eq!(["250us", "250µs", "250 μs"].map(|text| text.parse::<Span>().unwrap().as_nanos()), [250_000; 3]);
        for wrong in ["", "K", "8Q", "-1", "99999999999T"] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong}");
        }
        for wrong in ["", "s", "3 weeks", "-1s", "inf"] {
            assert!(wrong.parse::<Span>().is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn both_come_back(bytes: u64, nanos: u64) {
            prop_assert_eq!(Bytes(bytes).to_string().parse::<Bytes>().unwrap(), Bytes(bytes));
            prop_assert_eq!(Span::from_nanos(nanos).to_string().parse::<Span>().unwrap(), Span::from_nanos(nanos));
        }
    }
}
