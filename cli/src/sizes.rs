//! Sizes as text: `40G` is read, `40 GiB` is printed.
//!
//! All factors are powers of 1024, as in qemu-img. The measuring options and job files use the same
//! parser, [`parse`]. A size is printed in the largest unit of which it is at least 1, with three
//! significant digits.

pub use diskwright_stats::units::parse_size as parse;
use std::fmt;

const UNITS: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

/// Reads a size of at most 32 bits: a block, a sector.
///
/// # Errors
/// As [`parse`].
pub fn parse_u32(text: &str) -> Result<u32, String> {
    u32::try_from(parse(text)?).map_err(|_| format!("{text} is too large; it must be less than 4G"))
}

/// A number of bytes, shown in the largest fitting unit: `40 GiB`, `1.50 MiB`, `512 bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Human(pub u64);

impl fmt::Display for Human {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((letter, shift)) = UNITS.iter().rev().find(|(_, shift)| self.0 >> shift > 0) else {
            return f.pad(&if self.0 == 1 { "1 byte".to_owned() } else { format!("{} bytes", self.0) });
        };
        let value = self.0 as f64 / (1u64 << shift) as f64;
        let digits = match value {
            _ if self.0.is_multiple_of(1 << shift) => 0,
            v if v < 9.995 => 2,
            v if v < 99.95 => 1,
            _ => 0,
        };
        f.pad(&format!("{value:.digits$} {letter}iB"))
    }
}

/// A number of bytes in both forms: `40 GiB (42949672960 bytes)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exact(pub u64);

impl fmt::Display for Exact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1024 { write!(f, "{}", Human(self.0)) } else { write!(f, "{} ({} bytes)", Human(self.0), self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn takes_what_people_write() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("64k", 64 << 10),
            ("64K", 64 << 10),
            ("2M", 2 << 20),
            ("40G", 40 << 30),
            ("64T", 64 << 40),
            ("1.5G", 3 << 29),
            ("0.5k", 512),
            ("1MiB", 1 << 20),
            ("40 G", 40 << 30),
            ("512B", 512),
            (" 1kiB ", 1 << 10),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_size() {
        for text in [
            "",
            "G",
            "-1",
            "1.",
            ".5G",
            "1..5G",
            "1.5",
            "0.3k",
            "1KB",
            "1iB",
            "40  X",
            "4x",
            "0x10",
            "1é",
            "99999999999G",
            "20000000T",
            "1.0000000000000000000000001G",
        ] {
            assert!(parse(text).is_err(), "{text} was taken as {:?}", parse(text));
        }
        assert!(parse_u32("4G").is_err());
        assert_eq!(parse_u32("2M"), Ok(2 << 20));
    }

    #[test]
    fn shows_three_figures() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1, "1 byte"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (1536, "1.50 KiB"),
            (40 << 30, "40 GiB"),
            ((40 << 30) + (300 << 20), "40.3 GiB"),
            (500 * 1024 + 1, "500 KiB"),
            (64 << 40, "64 TiB"),
        ] {
            assert_eq!(Human(bytes).to_string(), text);
        }
        assert_eq!(Exact(2 << 20).to_string(), "2 MiB (2097152 bytes)");
        assert_eq!(Exact(512).to_string(), "512 bytes");
        assert_eq!(format!("[{:>8}]", Human(1024)), "[   1 KiB]");
    }

    proptest! {
        #[test]
        fn whole_units_come_back(count in 0u64..1 << 14, unit in 0usize..4) {
            let (letter, shift) = UNITS[unit];
            prop_assert_eq!(parse(&format!("{count}{letter}")), Ok(count << shift));
            prop_assert_eq!(parse(&(count << shift).to_string()), Ok(count << shift));
        }

        #[test]
        fn nothing_panics(text in ".{0,12}") {
            let _ = parse(&text);
        }
    }
}
