//! Formats numbers for people: one rule for terminals, pages, tables and messages.
//!
//! A number has three significant digits, and a comma between groups of three digits. A time has
//! the largest unit that leaves at least one digit before the point. Sizes use powers of 1024,
//! throughput powers of 1000. Exact values are in the JSON.

/// Rounds to a whole number, with a comma between groups of three digits: `123,456`.
pub fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    if value < -0.5 { format!("-{text}") } else { text }
}

/// Three significant digits, more above 1000, fewer below 0.1: `12,345`, `123`, `12.3`, `1.23`,
/// `0.012`.
pub fn figure(value: f64) -> String {
    match value.abs() {
        size if size >= 99.95 || size == 0.0 => grouped(value),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.9995 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A time in nanoseconds, with its unit: `950 ns`, `12.3 µs`, `4.56 ms`, `1.23 s`.
pub fn duration(ns: f64) -> String {
    match ns.abs() {
        size if size >= 999.5e6 => format!("{} s", figure(ns / 1e9)),
        size if size >= 999.5e3 => format!("{} ms", figure(ns / 1e6)),
        size if size >= 999.5 => format!("{} µs", figure(ns / 1e3)),
        _ => format!("{} ns", figure(ns)),
    }
}

/// A size in bytes, with a unit of powers of 1024: `512 B`, `1.50 MiB`.
pub fn bytes(value: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let mut scaled = value as f64;
    let mut unit = "B";
    for next in units {
        if scaled < 1024.0 {
            break;
        }
        scaled /= 1024.0;
        unit = next;
    }
    if unit == "B" || scaled.fract() == 0.0 {
        format!("{scaled:.0} {unit}")
    } else {
        format!("{} {unit}", figure(scaled))
    }
}

/// A ratio with two decimals: `0.95`.
pub fn ratio(value: f64) -> String {
    format!("{value:.2}")
}

/// A share from 0 to 1 as a percentage: `0 %`, `2.1 %`, `50 %`.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent != 0.0 && percent.abs() < 9.95 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

/// A tick label of a rate, in powers of 1000: `500`, `20k`, `1.5M`.
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

/// A tick label of a time in nanoseconds: `50 µs`, `2 ms`.
pub fn short_time(ns: f64) -> String {
    let (unit, scale) = match ns.abs() {
        size if size >= 0.9999e9 => ("s", 1e9),
        size if size >= 0.9999e6 => ("ms", 1e6),
        size if size >= 0.9999e3 => ("µs", 1e3),
        _ => ("ns", 1.0),
    };
    format!("{} {unit}", short(ns / scale))
}

/// A quantile from 0 to 1 as the number of its percentile: `0`, `50`, `90`, `99.9`.
pub fn percentile(share: f64) -> String {
    let text = format!("{:.7}", share * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Turns `20261120T221749Z` into `2026-11-20 22:17:49 UTC`. Text of another form is returned
/// unchanged.
pub fn moment(compact: &str) -> String {
    let digits: Vec<char> = compact.chars().collect();
    let is_compact = digits.len() == 16 && digits[8] == 'T' && digits[15] == 'Z';
    if !is_compact || !digits.iter().enumerate().all(|(at, c)| at == 8 || at == 15 || c.is_ascii_digit()) {
        return compact.to_owned();
    }
    let part = |from: usize, to: usize| digits[from..to].iter().collect::<String>();
    format!("{}-{}-{} {}:{}:{} UTC", part(0, 4), part(4, 6), part(6, 8), part(9, 11), part(11, 13), part(13, 15))
}

/// Joins words by commas and a last "and": `a, b and c`.
pub fn list(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [one] => one.clone(),
        [rest @ .., last] => format!("{} and {last}", rest.join(", ")),
    }
}

/// A size with the unit letter of fio and qemu-img: `4K`, `1M`, `40G`. A size that is no whole
/// number of such units is written in bytes.
pub fn short_size(bytes: u64) -> String {
    for (shift, unit) in [(40, 'T'), (30, 'G'), (20, 'M'), (10, 'K')] {
        if bytes >> shift > 0 && bytes & ((1 << shift) - 1) == 0 {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_significant_digits() {
        assert_eq!(
            [1_234_567.4, 999.6, 12.345, 1.2345, 0.9996, 0.01234, 0.0, -1234.0].map(figure).join(" "),
            "1,234,567 1,000 12.3 1.23 1.00 0.012 0 -1,234"
        );
        assert_eq!([950.0, 12_340.0, 4_560_000.0, 1.5e9].map(duration).join(" "), "950 ns 12.3 µs 4.56 ms 1.50 s");
        assert_eq!([0, 1023, 1536, 1 << 30, 40 << 30].map(bytes).join(" "), "0 B 1023 B 1.50 KiB 1 GiB 40 GiB");
    }

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
