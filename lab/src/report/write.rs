//! How figures are written in reports. Times carry their unit, because one table spans from
//! microseconds to seconds.

use crate::table::{duration, figure, grouped};

/// Requests a second: three digits that matter below a thousand, grouped above.
pub fn rate(value: f64) -> String {
    figure(value)
}

/// A whole number.
pub fn count(value: f64) -> String {
    grouped(value)
}

/// Nanoseconds with a unit.
pub fn time(ns: f64) -> String {
    duration(ns)
}

/// What a result is, when it began and how long it took: below the title of its chapter.
pub fn subtitle(what: &str, started_utc: &str, took_ns: u64) -> String {
    format!("{what}, {}, {} in all", moment(started_utc), time(took_ns as f64))
}

/// A ratio.
pub fn ratio(value: f64) -> String {
    format!("{value:.2}")
}

/// A share from 0 to 1 as a percentage.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent != 0.0 && percent.abs() < 9.95 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

/// A tick of a rate: `500`, `20k`, `1.5M`.
pub fn short(value: f64) -> String {
    let digits = |value: f64| {
        let text = format!("{value:.2}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match value.abs() {
        size if size >= 1e9 => format!("{}G", digits(value / 1e9)),
        size if size >= 1e6 => format!("{}M", digits(value / 1e6)),
        size if size >= 1e4 => format!("{}k", digits(value / 1e3)),
        _ => digits(value),
    }
}

/// A tick of a time in nanoseconds: `50 µs`, `2 ms`.
pub fn short_time(ns: f64) -> String {
    let (unit, scale) = match ns.abs() {
        size if size >= 0.9999e9 => ("s", 1e9),
        size if size >= 0.9999e6 => ("ms", 1e6),
        size if size >= 0.9999e3 => ("µs", 1e3),
        _ => ("ns", 1.0),
    };
    format!("{} {unit}", short(ns / scale))
}

/// A share of a sample as a percentile: `0`, `50`, `90`, `99.9`.
pub fn percentile(share: f64) -> String {
    let text = format!("{:.7}", share * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// When a run began, as in `2026-11-20 22:17:49 UTC`; text of another form stays as it is.
pub fn moment(compact: &str) -> String {
    let digits: Vec<char> = compact.chars().collect();
    let is_compact = digits.len() == 16 && digits[8] == 'T' && digits[15] == 'Z';
    if !is_compact || !digits.iter().enumerate().all(|(at, c)| at == 8 || at == 15 || c.is_ascii_digit()) {
        return compact.to_owned();
    }
    let part = |from: usize, to: usize| digits[from..to].iter().collect::<String>();
    format!("{}-{}-{} {}:{}:{} UTC", part(0, 4), part(4, 6), part(6, 8), part(9, 11), part(11, 13), part(13, 15))
}

/// Words joined by commas and an "and".
pub fn list(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [one] => one.clone(),
        [rest @ .., last] => format!("{} and {last}", rest.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_and_percentiles_are_short() {
        assert_eq!([0.0, 500.0, 2500.0, 20_000.0, 1_500_000.0].map(short).join(" "), "0 500 2500 20k 1.5M");
        assert_eq!([500.0, 50_000.0, 2e6, 1e9, 1e6].map(short_time).join(" "), "500 ns 50 µs 2 ms 1 s 1 ms");
        assert_eq!([0.0, 0.5, 0.9, 0.999, 0.999_999].map(percentile).join(" "), "0 50 90 99.9 99.9999");
        assert_eq!([0.021, 0.5, 1.0, 0.0].map(percent).join(", "), "2.1 %, 50 %, 100 %, 0 %");
        assert_eq!(moment("20261120T221749Z"), "2026-11-20 22:17:49 UTC");
        assert_eq!(moment("yesterday"), "yesterday");
        assert_eq!(list(&["a".into(), "b".into(), "c".into()]), "a, b and c");
    }
}
