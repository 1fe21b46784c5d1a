//! Parses the values of workload options: sizes and mixes, distributions, rates, bursts, contents,
//! labels.
//!
//! The error of a value is a sentence that clap prints after the option's name.

use crate::sizes;
use diskwright_load::job::{Blocks, Burst, Bytes, Contents, Distribution, Rate, SizeShare, Span, Spot};

/// Parses `8K`, or sizes with weights: `4K:60,64K:40`.
pub fn blocks(text: &str) -> Result<Blocks, String> {
    if !text.contains([':', ',']) {
        return Ok(Blocks::One(Bytes(sizes::parse(text)?)));
    }
    let share = |part: &str| {
        let (size, weight) = part
            .split_once(':')
            .ok_or_else(|| format!("{part:?} is not a size with a weight; write for example 4K:60,64K:40"))?;
        Ok(SizeShare {
            size: Bytes(sizes::parse(size)?),
            weight: number(weight, "weight")?,
            read_percent: None,
            random_percent: None,
        })
    };
    Ok(Blocks::Mix(text.split(',').map(share).collect::<Result<_, String>>()?))
}

/// Parses a size.
pub fn size(text: &str) -> Result<Bytes, String> {
    sizes::parse(text).map(Bytes)
}

/// Parses a time: `30s`, `500ms`, `2m`; seconds without a unit.
pub fn span(text: &str) -> Result<Span, String> {
    text.parse()
}

/// Parses a percentage from 0 to 100, with or without `%`.
pub fn percent(text: &str) -> Result<f64, String> {
    let value = number(text.trim_end_matches('%').trim_end(), "percentage")?;
    if (0.0..=100.0).contains(&value) { Ok(value) } else { Err(format!("{text} is not between 0 and 100")) }
}

/// Parses `uniform`, `zipf:THETA`, `pareto:H`, or shares of the requests with shares (or lengths)
/// of the working set, like DiskSpd's `-rdpct` and `-rdabs`: `90/10:5/20`, `90/4G:5/20G`.
pub fn distribution(text: &str) -> Result<Distribution, String> {
    let (law, value) = text.split_once(':').map_or((text, None), |(law, value)| (law, Some(value)));
    match law {
        "uniform" if value.is_none() => return Ok(Distribution::Uniform),
        "zipf" => return Ok(Distribution::Zipf { theta: number(value.unwrap_or("1.2"), "theta")? }),
        "pareto" => return Ok(Distribution::Pareto { h: number(value.unwrap_or("0.2"), "h")? }),
        _ => {}
    }
    let spot = |part: &str| {
        let (io, target) = part.split_once('/').ok_or_else(|| {
            format!("{text:?} is not a distribution; write uniform, zipf:1.2, pareto:0.2, or shares of requests and of the working set as in 90/10:5/20")
        })?;
        let io_percent = percent(io)?;
        let in_bytes = target.ends_with(|c: char| c.is_ascii_alphabetic());
        Ok(if in_bytes {
            Spot { io_percent, target_percent: 0.0, length: Some(size(target)?) }
        } else {
            Spot { io_percent, target_percent: percent(target)?, length: None }
        })
    };
    Ok(Distribution::Spots { spots: text.split(':').map(spot).collect::<Result<_, String>>()? })
}

/// Parses requests per second (`5000`), or bytes per second (`100M`, `100M/s`).
pub fn rate(text: &str) -> Result<Rate, String> {
    let bare = text.strip_suffix("/s").unwrap_or(text);
    let wrong = || {
        format!("{text:?} is not a rate above 0; write requests per second as in 5000, or bytes per second as in 100M")
    };
    let rate = if bare.ends_with(|c: char| c.is_ascii_alphabetic()) && !bare.ends_with("iops") {
        Rate::Throughput { per_thread: size(bare).map_err(|_| wrong())? }
    } else {
        Rate::Iops { per_thread: number(bare.trim_end_matches("iops"), "rate").map_err(|_| wrong())? }
    };
    match rate {
        Rate::Iops { per_thread } if per_thread <= 0.0 => Err(wrong()),
        Rate::Throughput { per_thread: Bytes(0) } => Err(wrong()),
        rate => Ok(rate),
    }
}

/// Parses `32:100ms`: a number of requests, then a pause.
pub fn burst(text: &str) -> Result<Burst, String> {
    let wrong = || format!("{text:?} is not a burst; write requests and a pause, as in 32:100ms");
    let (requests, pause) = text.split_once(':').ok_or_else(wrong)?;
    let requests = requests.parse().ok().filter(|count| *count > 0).ok_or_else(wrong)?;
    Ok(Burst { requests, pause: span(pause)? })
}

/// Parses `incompressible`, `zero`, `verified`, or percentages: `compressible=50,duplicate=20`.
pub fn contents(text: &str) -> Result<Contents, String> {
    match text {
        "incompressible" | "random" => return Ok(Contents::Incompressible),
        "zero" | "zeros" => return Ok(Contents::Zero),
        "verified" => return Ok(Contents::Verified),
        _ => {}
    }
    let (mut compressible_percent, mut duplicate_percent) = (0.0, 0.0);
    for part in text.split(',') {
        match part.split_once('=') {
            Some(("compressible", share)) => compressible_percent = percent(share)?,
            Some(("duplicate", share)) => duplicate_percent = percent(share)?,
            _ => {
                return Err(format!(
                    "{text:?} is not supported; use incompressible, zero, verified, or percentages as in compressible=50,duplicate=20"
                ));
            }
        }
    }
    Ok(Contents::Mixed { compressible_percent, duplicate_percent })
}

/// Parses `key=value`.
pub fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not a label; write for example firmware=1.2")),
    }
}

fn number(text: &str, what: &str) -> Result<f64, String> {
    text.trim().parse().ok().filter(|value: &f64| value.is_finite()).ok_or_else(|| format!("{text:?} is not a {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_one_or_a_mix() {
        assert_eq!(blocks("8k"), Ok(Blocks::One(Bytes(8192))));
        let Ok(Blocks::Mix(mix)) = blocks("4K:60,64K:40") else { panic!("no mix") };
        assert_eq!(
            mix.iter().map(|share| (share.size.0, share.weight)).collect::<Vec<_>>(),
            [(4096, 60.0), (65536, 40.0)]
        );
        for wrong in ["", "8Q", "4K,8K", "4K:", "4K:x", "4K:1,"] {
            assert!(blocks(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn distributions_are_laws_or_spots() {
        assert_eq!(distribution("uniform"), Ok(Distribution::Uniform));
        assert_eq!(distribution("zipf"), Ok(Distribution::Zipf { theta: 1.2 }));
        assert_eq!(distribution("pareto:0.1"), Ok(Distribution::Pareto { h: 0.1 }));
        let spot = |io_percent, target_percent, length| Spot { io_percent, target_percent, length };
        let pct = Distribution::Spots { spots: vec![spot(90.0, 10.0, None), spot(5.0, 20.0, None)] };
        assert_eq!(distribution("90/10:5/20"), Ok(pct));
        assert_eq!(
            distribution("90/4G"),
            Ok(Distribution::Spots { spots: vec![spot(90.0, 0.0, Some(Bytes(4 << 30)))] })
        );
        for wrong in ["", "normal", "zipf:x", "90", "90/", "101/10", "90/10:"] {
            assert!(distribution(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn rates_are_requests_or_bytes() {
        assert_eq!(rate("5000"), Ok(Rate::Iops { per_thread: 5000.0 }));
        assert_eq!(rate("0.5iops"), Ok(Rate::Iops { per_thread: 0.5 }));
        for text in ["100M", "100M/s", "100m/s"] {
            assert_eq!(rate(text), Ok(Rate::Throughput { per_thread: Bytes(100 << 20) }));
        }
        for wrong in ["0", "-1", "x", "0M", "fast", ""] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn bursts_contents_shares_and_labels() {
        assert_eq!(burst("32:100ms"), Ok(Burst { requests: 32, pause: Span::from_millis(100) }));
        assert!(burst("0:1s").is_err() && burst("32").is_err() && burst("1:x").is_err());
        assert_eq!(contents("zero"), Ok(Contents::Zero));
        let mixed = Contents::Mixed { compressible_percent: 50.0, duplicate_percent: 20.0 };
        assert_eq!(contents("compressible=50,duplicate=20%"), Ok(mixed));
        assert!(contents("ones").is_err() && contents("compressible=101").is_err());
        assert_eq!(percent("70 %"), Ok(70.0));
        assert!(percent("101").is_err() && percent("nan").is_err());
        assert_eq!(label("a=b=c"), Ok(("a".into(), "b=c".into())));
        assert!(label("a").is_err() && label("=b").is_err());
    }
}
