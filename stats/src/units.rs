//! Parses and prints sizes and times in options and job files: `8K`, `64G`; `30s`, `500ms`, `2m`,
//! `24h`.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::{borrow::Cow, fmt, str::FromStr, time::Duration};

/// A size in bytes. It is printed with the largest unit of 1024 that divides it, as in `8K`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::numbers::short_size(self.0))
    }
}

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse_size(text).map(Self)
    }
}

/// The unit letters and the powers of two that they mean.
const SHIFTS: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

/// Parses a size and returns bytes: `512`, `64k`, `1.5G`, `2T`, `1MiB`. Units are powers of 1024,
/// as in qemu-img. A fraction is accepted when the result is a whole number of bytes.
///
/// # Errors
/// A sentence that says what is wrong with `text`. An option parser prints it behind the option's
/// name.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let usage = || {
        format!(
            "{text:?} is not a size; write bytes, or a number with k, M, G or T (powers of 1024), such as 512, 64k or 40G"
        )
    };
    let digits_end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, suffix) = trimmed.split_at(digits_end);
    let suffix = suffix.trim_start();
    let shift = match suffix.strip_suffix("iB").unwrap_or(suffix) {
        "" | "B" | "b" if !suffix.ends_with("iB") => 0,
        letter if letter.len() == 1 => {
            let upper = letter.chars().next().map(|c| c.to_ascii_uppercase());
            SHIFTS.iter().find(|(unit, _)| Some(*unit) == upper).ok_or_else(usage)?.1
        }
        _ => return Err(usage()),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.contains('.') || (number.contains('.') && fraction.is_empty()) {
        return Err(usage());
    }
    let too_large = || format!("{text} is larger than any disk can be; the largest disks are 64T");
    let mut bytes = whole.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift)).ok_or_else(too_large)?;
    if !fraction.is_empty() {
        if fraction.len() > 18 {
            return Err(usage());
        }
        let scale = 10u128.pow(fraction.len() as u32);
        let scaled = fraction.parse::<u128>().map_err(|_| usage())? << shift;
        if scaled % scale != 0 {
            return Err(format!("{text} is not a whole number of bytes; write the size in a smaller unit"));
        }
        bytes = u64::try_from(scaled / scale).ok().and_then(|rest| bytes.checked_add(rest)).ok_or_else(too_large)?;
    }
    Ok(bytes)
}

/// A length of time in nanoseconds. It is printed in the largest unit that divides it, as in
/// `500ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Span(u64);

/// Units of time and their length in nanoseconds, the largest first.
const UNITS: [(&str, u64); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

impl Span {
    /// Makes a span of `nanos` nanoseconds.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Makes a span of `millis` milliseconds; saturates at 584 years.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Makes a span of `secs` seconds; saturates at 584 years.
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000_000))
    }

    /// The length in nanoseconds.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The length in seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Whether the length is 0.
    pub fn is_zero(&self) -> bool {
        self.0 == 0
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

/// A value in TOML or JSON: text with a unit, or a plain number.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(u64),
    Real(f64),
    Text(String),
}

impl schemars::JsonSchema for Bytes {
    fn schema_name() -> Cow<'static, str> {
        "Bytes".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let description = "A size: a number with K, M, G or T (powers of 1024), as in 64K.";
        schemars::json_schema!({ "type": "string", "description": description })
    }
}

impl schemars::JsonSchema for Span {
    fn schema_name() -> Cow<'static, str> {
        "Span".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        let description = "A length of time: a number with h, m, s, ms, us or ns, as in 30s.";
        schemars::json_schema!({ "type": "string", "description": description })
    }
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
    fn sizes_and_times_are_parsed_with_their_units() {
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
        fn printed_sizes_and_times_parse_to_the_same_value(bytes: u64, nanos: u64) {
            prop_assert_eq!(Bytes(bytes).to_string().parse::<Bytes>().unwrap(), Bytes(bytes));
            prop_assert_eq!(Span::from_nanos(nanos).to_string().parse::<Span>().unwrap(), Span::from_nanos(nanos));
        }
    }
}
