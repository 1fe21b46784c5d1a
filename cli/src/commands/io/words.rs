//! Parses the commands of `io`.

use crate::sizes;

/// The byte that qemu-io writes when no pattern is given.
const DEFAULT_PATTERN: u8 = 0xcd;

/// One command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// `read`.
    Read {
        /// First byte of the range.
        offset_bytes: u64,
        /// Length of the range.
        len_bytes: u64,
        /// The byte that the whole range must hold.
        pattern: Option<u8>,
        /// Whether to print the bytes.
        dump: bool,
    },
    /// `write`.
    Write {
        /// First byte of the range.
        offset_bytes: u64,
        /// Length of the range.
        len_bytes: u64,
        /// Byte to write; `None` for a write of zeroes, by metadata where possible.
        pattern: Option<u8>,
        /// Whether the write is durable on return (FUA).
        fua: bool,
    },
    /// `discard`.
    Discard {
        /// First byte of the range.
        offset_bytes: u64,
        /// Length of the range.
        len_bytes: u64,
    },
    /// `flush`.
    Flush,
}

impl Command {
    /// Offset and length of the range; a flush has none.
    pub fn range(&self) -> Option<(u64, u64)> {
        match *self {
            Self::Read { offset_bytes, len_bytes, .. }
            | Self::Write { offset_bytes, len_bytes, .. }
            | Self::Discard { offset_bytes, len_bytes } => Some((offset_bytes, len_bytes)),
            Self::Flush => None,
        }
    }

    /// Parses a line.
    ///
    /// # Errors
    /// A sentence that says what was not understood.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut words = text.split_whitespace();
        let name = words.next().ok_or("an empty command; use read, write, discard or flush")?;
        let known: &[&str] = match name {
            "read" | "r" => &["-P", "-v"],
            "write" | "w" => &["-P", "-z", "-f"],
            "discard" | "d" | "flush" | "f" => &[],
            _ => return Err(format!("unknown command {name:?}; use read, write, discard or flush")),
        };
        let (mut pattern, mut switches, mut numbers) = (None, Vec::new(), Vec::new());
        while let Some(word) = words.next() {
            match word {
                "-P" if known.contains(&"-P") => {
                    pattern =
                        Some(byte(words.next().ok_or_else(|| format!("{text}: -P needs a byte, such as 0xaa"))?)?);
                }
                _ if known.contains(&word) => switches.push(word),
                _ if word.starts_with('-') => return Err(format!("{text}: {name} does not know {word}")),
                _ => numbers.push(number(word)?),
            }
        }
        let has = |switch: &str| switches.contains(&switch);
        let range = || match numbers[..] {
            [offset_bytes, len_bytes] if len_bytes > 0 => Ok((offset_bytes, len_bytes)),
            [_, _] => Err(format!("{text}: the length is 0")),
            _ => Err(format!("{text}: {name} needs an offset and a length, such as `{name} 0 64k`")),
        };
        Ok(match name {
            "read" | "r" => {
                let (offset_bytes, len_bytes) = range()?;
                Self::Read { offset_bytes, len_bytes, pattern, dump: has("-v") }
            }
            "write" | "w" => {
                if has("-z") && pattern.is_some() {
                    return Err(format!("{text}: -z writes zeros and -P a pattern; leave one out"));
                }
                let (offset_bytes, len_bytes) = range()?;
                let pattern = if has("-z") { None } else { Some(pattern.unwrap_or(DEFAULT_PATTERN)) };
                Self::Write { offset_bytes, len_bytes, pattern, fua: has("-f") }
            }
            "discard" | "d" => {
                let (offset_bytes, len_bytes) = range()?;
                Self::Discard { offset_bytes, len_bytes }
            }
            _ if numbers.is_empty() => Self::Flush,
            _ => return Err(format!("{text}: flush takes no range, it is for the whole disk")),
        })
    }

    /// Whether the disk must be open for writing.
    pub fn writes(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard { .. })
    }
}

fn number(text: &str) -> Result<u64, String> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).map_err(|_| format!("{text:?} is not a number")),
        None => sizes::parse(text),
    }
}

fn byte(text: &str) -> Result<u8, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u8::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("{text:?} is not a byte; write 0 to 255 or 0x00 to 0xff"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn understands_qemu_ios_words() {
        let read = |pattern, dump| Command::Read { offset_bytes: 4096, len_bytes: 65536, pattern, dump };
        let write = |pattern, fua| Command::Write { offset_bytes: 4096, len_bytes: 65536, pattern, fua };
        for (text, command) in [
            ("read 4k 64k", read(None, false)),
            ("r -P 0xaa 0x1000 64k", read(Some(0xaa), false)),
            ("  read   -v  -P 7 4096 65536 ", read(Some(7), true)),
            ("write 4k 64k", write(Some(0xcd), false)),
            ("write -f -P 255 4k 64k", write(Some(255), true)),
            ("w -z 4k 64k", write(None, false)),
            ("write -z -f 4k 64k", write(None, true)),
            ("discard 4k 64k", Command::Discard { offset_bytes: 4096, len_bytes: 65536 }),
            ("flush", Command::Flush),
        ] {
            assert_eq!(Command::parse(text), Ok(command), "{text}");
        }
    }

    #[test]
    fn says_what_it_does_not_understand() {
        for (text, word) in [
            ("", "empty"),
            ("reed 0 1", "reed"),
            ("read 0", "offset and a length"),
            ("read 0 0", "length is 0"),
            ("read -P 256 0 512", "256"),
            ("read -P", "-P needs"),
            ("read -z 0 512", "-z"),
            ("write -z -P 1 0 512", "leave one out"),
            ("flush 0 512", "no range"),
            ("discard -P 1 0 512", "-P"),
            ("read 0 1x", "1x"),
        ] {
            let error = Command::parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn nothing_panics(text in "(read|write|discard|flush|)?( -[PzfvX]| [0-9a-fxkMG]{1,5}){0,6}") {
            let _ = Command::parse(&text);
        }
    }
}
