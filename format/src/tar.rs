//! Headers of a tar archive, as far as OVA needs them: ustar (POSIX.1-1988), with the lengths and
//! names that GNU tar and pax (POSIX.1-2001) add.
//!
//! ```text
//!   header of 512 bytes │ data, filled up to 512 │ header │ ... │ two blocks of zeros
//!      0 name   124 size   148 checksum   156 kind   257 "ustar"   345 prefix of the name
//! ```
//!
//! A member whose name or size does not fit is preceded by a member of kind `x` (pax: lines
//! `LENGTH KEY=VALUE`) or `L` (GNU: the name). Who reads an archive walks from header to header and
//! compares each end with the length of the file.

/// Length of a header, and the unit of an archive.
pub const TAR_BLOCK_BYTES: u64 = 512;
/// The longest pax header or GNU name that is read.
pub const TAR_EXTENSION_MAX_BYTES: u64 = 64 << 10;

/// A header that is no tar header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tar header: found {found}, expected {expected}")]
pub struct TarError {
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: &'static str,
}

/// What a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TarKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A pax header for the next member.
    Pax,
    /// A pax header for all members behind it.
    PaxGlobal,
    /// The name of the next member, as GNU tar writes it.
    LongName,
    /// A link, a device, a sparse file or something else.
    Other(u8),
}

/// A header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TarHeader {
    /// The name, with `/` between folders.
    pub name: String,
    /// Length of the data in bytes.
    pub size_bytes: u64,
    /// What the member is.
    pub kind: TarKind,
}

impl TarHeader {
    /// Parses a header; `None` for a block of zeros, which ends the archive.
    ///
    /// # Errors
    /// For another length, a wrong checksum, and a size that is no number.
    pub fn parse(block: &[u8]) -> Result<Option<Self>, TarError> {
        let fail = |found: String, expected| Err(TarError { found, expected });
        let Some(block) = block.get(..TAR_BLOCK_BYTES as usize) else {
            return fail(format!("{} bytes", block.len()), "512 bytes");
        };
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        if number(&block[148..156]) != Some(checksum(block)) {
            return fail("a wrong checksum".into(), "the sum of the header's bytes");
        }
        let Some(size_bytes) = number(&block[124..136]) else {
            return fail(format!("the size {:?}", String::from_utf8_lossy(&block[124..136])), "a number");
        };
        let mut name = text(&block[..100]);
        // Only POSIX has the prefix: GNU has other fields there.
        if &block[257..263] == b"ustar\0" && block[345] != 0 {
            name = text(&block[345..500]) + "/" + &name;
        }
        let kind = match block[156] {
            // 7: a contiguous file.
            0 | b'0' | b'7' => TarKind::File,
            b'5' => TarKind::Folder,
            b'x' => TarKind::Pax,
            b'g' => TarKind::PaxGlobal,
            b'L' => TarKind::LongName,
            other => TarKind::Other(other),
        };
        Ok(Some(Self { name, size_bytes, kind }))
    }

    /// The header of a regular file, in ustar; a size of 8 GiB and more as GNU tar writes it.
    ///
    /// # Errors
    /// For a name that is longer than 100 bytes or empty.
    pub fn of_file(name: &str, size_bytes: u64, modified_seconds: u64) -> Result<[u8; 512], TarError> {
        if name.is_empty() || name.len() > 100 {
            return Err(TarError { found: format!("a name of {} bytes", name.len()), expected: "1 to 100 bytes" });
        }
        let mut block = [0; 512];
        block[..name.len()].copy_from_slice(name.as_bytes());
        for (at, value) in [(100, "0000644\0"), (108, "0000000\0"), (116, "0000000\0")] {
            block[at..at + 8].copy_from_slice(value.as_bytes());
        }
        if size_bytes < 1 << 33 {
            block[124..136].copy_from_slice(format!("{size_bytes:011o}\0").as_bytes());
        } else {
            block[124] = 0x80;
            block[128..136].copy_from_slice(&size_bytes.to_be_bytes());
        }
        let seconds = modified_seconds.min((1 << 33) - 1);
        block[136..148].copy_from_slice(format!("{seconds:011o}\0").as_bytes());
        block[156] = b'0';
        block[257..265].copy_from_slice(b"ustar\x0000");
        let sum = checksum(&block);
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        Ok(block)
    }
}

/// What a pax header says of the next member.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pax {
    /// Path of the member.
    pub path: Option<String>,
    /// Length of the member in bytes.
    pub size_bytes: Option<u64>,
    /// Whether it is a sparse file of GNU tar, whose data is not the contents.
    pub is_sparse: bool,
}

impl Pax {
    /// Parses the data of a pax header.
    ///
    /// # Errors
    /// For data that are not lines `LENGTH KEY=VALUE`.
    pub fn parse(mut bytes: &[u8]) -> Result<Self, TarError> {
        let fail = || TarError { found: "a damaged pax header".into(), expected: "lines LENGTH KEY=VALUE" };
        let mut pax = Self::default();
        while !bytes.is_empty() && bytes[0] != 0 {
            let blank = bytes.iter().take(20).position(|byte| *byte == b' ').ok_or_else(fail)?;
            let len = std::str::from_utf8(&bytes[..blank]).ok().and_then(|text| text.parse::<usize>().ok());
            let len = len.filter(|len| (blank + 2..=bytes.len()).contains(len)).ok_or_else(fail)?;
            let line = bytes[blank + 1..len].strip_suffix(b"\n").ok_or_else(fail)?;
            let equals = line.iter().position(|byte| *byte == b'=').ok_or_else(fail)?;
            let value = String::from_utf8_lossy(&line[equals + 1..]).into_owned();
            match &line[..equals] {
                b"path" => pax.path = Some(value),
                b"size" => pax.size_bytes = Some(value.parse().map_err(|_| fail())?),
                key if key.starts_with(b"GNU.sparse.") => pax.is_sparse = true,
                _ => {}
            }
            bytes = &bytes[len..];
        }
        Ok(pax)
    }
}

/// The sum of the bytes, with blanks in the place of the checksum.
fn checksum(block: &[u8]) -> u64 {
    let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
    let own: u64 = block[148..156].iter().map(|byte| u64::from(*byte)).sum();
    sum - own + 8 * u64::from(b' ')
}

/// An octal number with blanks around it, or one of base 256 if its first bit is set.
fn number(field: &[u8]) -> Option<u64> {
    if field[0] & 0x80 != 0 {
        let first = u64::from(field[0] & 0x7f);
        return field[1..].iter().try_fold(first, |value, byte| Some(value.checked_mul(256)? + u64::from(*byte)));
    }
    let text = std::str::from_utf8(field).ok()?.trim_matches(['\0', ' ']);
    if text.is_empty() { Some(0) } else { u64::from_str_radix(text, 8).ok() }
}

/// The bytes up to the first 0.
fn text(field: &[u8]) -> String {
    let bytes = field.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_header_of_gnu_tar() {
        // The first 512 bytes of `tar --format=gnu --owner=0 --group=0 --mtime=@0 -cf - a.ovf`.
        let mut block = [0; 512];
        block[..5].copy_from_slice(b"a.ovf");
        block[100..156].copy_from_slice(b"0000644\x000000000\x000000000\x0000000000005\x0000000000000\x00006561\x00 ");
        block[156] = b'0';
        block[257..265].copy_from_slice(b"ustar  \0");
        let sum = checksum(&block);
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let header = TarHeader::parse(&block).unwrap().unwrap();
        assert_eq!(header, TarHeader { name: "a.ovf".into(), size_bytes: 5, kind: TarKind::File });
        block[0] = b'b';
        assert!(TarHeader::parse(&block).unwrap_err().found.contains("checksum"));
        assert_eq!(TarHeader::parse(&[0; 512]).unwrap(), None);
        assert!(TarHeader::parse(&[0; 511]).is_err());
    }

    #[test]
    fn pax_headers() {
        let pax = Pax::parse(b"20 path=long/name.x\n19 size=9000000000\n30 mtime=1700000000.123456789\n").unwrap();
        assert_eq!(
            (pax.path.as_deref(), pax.size_bytes, pax.is_sparse),
            (Some("long/name.x"), Some(9_000_000_000), false)
        );
        assert!(Pax::parse(b"22 GNU.sparse.major=1\n").unwrap().is_sparse);
        for wrong in [&b"5 a=b"[..], b"99 a=b\n", b"x a=b\n", b"6 a=b\n6", b"1 \n", b"12 size=abc\n"] {
            assert!(Pax::parse(wrong).is_err(), "{}", wrong.escape_ascii());
        }
    }

    #[test]
    fn names_that_do_not_fit_are_refused() {
        assert!(TarHeader::of_file("", 0, 0).is_err());
        assert!(TarHeader::of_file(&"x".repeat(101), 0, 0).is_err());
    }

    proptest! {
        #[test]
        fn a_header_is_read_as_it_was_written(name in "[a-zA-Z0-9 ._-]{1,100}", size_bytes: u64, seconds: u64) {
            let block = TarHeader::of_file(&name, size_bytes, seconds).unwrap();
            let read = TarHeader::parse(&block).unwrap().unwrap();
            prop_assert_eq!(read, TarHeader { name, size_bytes, kind: TarKind::File });
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = Pax::parse(&bytes);
            let mut block = bytes;
            block.resize(512, 0);
            let sum = checksum(&block);
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            let _ = TarHeader::parse(&block);
        }
    }
}
