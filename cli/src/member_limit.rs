//! The speed of a member of a pool as text: `iops=150,latency=6ms`.

use diskwright_space::MemberLimit;

/// A limit, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitArg(pub Option<MemberLimit>);

/// Reads `iops=150,latency=6ms`.
pub fn parse(text: &str) -> Result<LimitArg, String> {
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
