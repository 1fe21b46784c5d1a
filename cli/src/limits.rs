//! Limits of the rate at which disks are served, as text: `iops=500,bytes=20M`.

use crate::sizes::{self, Human};
use diskwright_store::RateLimits;
use std::fmt;

/// What `--limit` and `--client-limit` take.
pub const VALUE_NAME: &str = "iops=N,bytes=SIZE";

/// The keys, as messages list them.
const KEYS: &str = "iops, bytes, iops-burst and bytes-burst";

/// Reads limits: `none`, or keys with values.
///
/// # Errors
/// A sentence for clap.
pub fn parse(text: &str) -> Result<RateLimits, String> {
    let mut limits = RateLimits::default();
    if text == "none" {
        return Ok(limits);
    }
    let mut seen = Vec::new();
    for part in text.split(',') {
        let Some((key, value)) = part.split_once('=') else {
            return Err(format!("{part:?} is no limit; write KEY=VALUE, with commas between several, or none"));
        };
        let place = match key {
            "iops" => &mut limits.iops,
            "bytes" => &mut limits.bytes_per_second,
            "iops-burst" => &mut limits.iops_burst,
            "bytes-burst" => &mut limits.burst_bytes,
            _ => return Err(format!("{key:?} is not known; there are {KEYS}")),
        };
        if seen.contains(&key) {
            return Err(format!("{key} is given twice"));
        }
        seen.push(key);
        *place = if key.starts_with("iops") {
            value.parse().map_err(|_| format!("{key} is a number of requests per second, not {value:?}"))?
        } else {
            sizes::parse(value)?
        };
        if *place == 0 {
            return Err(format!("{key} is 0, and nothing would be served; leave it out for no limit"));
        }
    }
    if limits.iops_burst > 0 && limits.iops == 0 {
        return Err("iops-burst needs iops".into());
    }
    if limits.burst_bytes > 0 && limits.bytes_per_second == 0 {
        return Err("bytes-burst needs bytes".into());
    }
    Ok(limits)
}

/// Limits in words.
#[derive(Debug, Clone, Copy)]
pub struct InWords(pub RateLimits);

impl fmt::Display for InWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RateLimits { iops, bytes_per_second, iops_burst, burst_bytes } = self.0;
        if self.0.is_unlimited() {
            return f.write_str("no limit");
        }
        if iops > 0 {
            write!(f, "{iops} requests per second")?;
            if iops_burst > 0 {
                write!(f, " (bursts of {iops_burst})")?;
            }
        }
        if bytes_per_second > 0 {
            let between = if iops > 0 { ", " } else { "" };
            write!(f, "{between}{} per second", Human(bytes_per_second))?;
            if burst_bytes > 0 {
                write!(f, " (bursts of {})", Human(burst_bytes))?;
            }
        }
        Ok(())
    }
}

/// Limits as [`parse`] reads them.
#[derive(Debug, Clone, Copy)]
pub struct AsOption(pub RateLimits);

impl fmt::Display for AsOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RateLimits { iops, bytes_per_second, iops_burst, burst_bytes } = self.0;
        if self.0.is_unlimited() {
            return f.write_str("none");
        }
        let parts =
            [("iops", iops), ("bytes", bytes_per_second), ("iops-burst", iops_burst), ("bytes-burst", burst_bytes)];
        for (at, (key, value)) in parts.into_iter().filter(|(_, value)| *value > 0).enumerate() {
            write!(f, "{}{key}={value}", if at > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_and_printed() {
        for (text, words) in [
            ("none", "no limit"),
            ("iops=500", "500 requests per second"),
            ("bytes=20M", "20 MiB per second"),
            (
                "iops=500,iops-burst=2000,bytes=20M,bytes-burst=1G",
                "500 requests per second (bursts of 2000), 20 MiB per second (bursts of 1 GiB)",
            ),
        ] {
            let limits = parse(text).unwrap();
            assert_eq!(InWords(limits).to_string(), words);
            assert_eq!(parse(&AsOption(limits).to_string()), Ok(limits));
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("500", "write KEY=VALUE"),
            ("mbps=5", "there are iops, bytes"),
            ("iops=5,iops=6", "given twice"),
            ("iops=0", "leave it out"),
            ("iops=4k", "a number of requests"),
            ("bytes=x", "x"),
            ("iops-burst=5", "needs iops"),
            ("iops=5,bytes-burst=1M", "needs bytes"),
            ("", "write KEY=VALUE"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
