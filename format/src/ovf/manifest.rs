//! The manifest: a digest of each file of a package, one a line.

use super::{OVF_ITEMS_MAX, OvfError, quoted};

const STRUCTURE: &str = "OVF manifest";

/// How a digest is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DigestKind {
    /// SHA-1, of OVF 1.0.
    Sha1,
    /// SHA-256.
    Sha256,
    /// SHA-512.
    Sha512,
}

impl DigestKind {
    const ALL: [Self; 3] = [Self::Sha1, Self::Sha256, Self::Sha512];

    /// The name in a manifest.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "SHA1",
            Self::Sha256 => "SHA256",
            Self::Sha512 => "SHA512",
        }
    }

    /// Length of the digest in bytes.
    pub fn digest_bytes(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }
}

/// A line of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManifestEntry {
    /// The file.
    pub name: String,
    /// How its digest is computed.
    pub kind: DigestKind,
    /// The digest.
    pub digest: Vec<u8>,
}

/// A manifest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    /// The lines.
    pub entries: Vec<ManifestEntry>,
}

impl Manifest {
    /// Parses `ALGORITHM(NAME)= HEX` lines; blanks around the sign are optional.
    ///
    /// # Errors
    /// For text that is not UTF-8, another form, an unknown algorithm, a digest of another length,
    /// and more than 4,096 lines.
    pub fn parse(bytes: &[u8]) -> Result<Self, OvfError> {
        let fail = |line, found: String, expected: &str| OvfError {
            structure: STRUCTURE,
            line,
            found,
            expected: expected.into(),
        };
        let text = std::str::from_utf8(bytes).map_err(|_| fail(1, "bytes that are no UTF-8".into(), "a text"))?;
        let mut manifest = Self::default();
        for (line, entry) in (1..).zip(text.lines()).filter(|(_, entry)| !entry.trim().is_empty()) {
            let parts = entry.trim().split_once('(').and_then(|(kind, rest)| {
                let (name, digest) = rest.rsplit_once('=')?;
                Some((kind.trim(), name.trim().strip_suffix(')')?, digest.trim()))
            });
            let Some((kind, name, digest)) = parts else {
                return Err(fail(line, quoted(entry), "a line such as: SHA256(disk1.vmdk)= 9f86d0..."));
            };
            let Some(kind) = DigestKind::ALL.into_iter().find(|known| known.name().eq_ignore_ascii_case(kind)) else {
                return Err(fail(line, format!("the algorithm {}", quoted(kind)), "SHA1, SHA256 or SHA512"));
            };
            let digest = from_hex(digest).filter(|digest| digest.len() == kind.digest_bytes()).ok_or_else(|| {
                let expected = format!("{} hexadecimal digits", kind.digest_bytes() * 2);
                fail(line, format!("the digest {}", quoted(digest)), &expected)
            })?;
            if manifest.entries.len() == OVF_ITEMS_MAX {
                return Err(fail(line, format!("more than {OVF_ITEMS_MAX} lines"), "fewer"));
            }
            manifest.entries.push(ManifestEntry { name: name.to_owned(), kind, digest });
        }
        Ok(manifest)
    }

    /// The text.
    pub fn to_text(&self) -> String {
        let line = |entry: &ManifestEntry| {
            let hex: String = entry.digest.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("{}({})= {hex}\n", entry.kind.name(), entry.name)
        };
        self.entries.iter().map(line).collect()
    }

    /// The digest of a file.
    pub fn entry(&self, name: &str) -> Option<&ManifestEntry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_of_several_programs() {
        let hex = "0123456789abcdef".repeat(4);
        let text = format!("SHA256(a.ovf)= {hex}\r\n\nsha1 (b (1).vmdk) ={}\n", "AB".repeat(20));
        let read = Manifest::parse(text.as_bytes()).unwrap();
        assert_eq!(read.entry("a.ovf").unwrap().digest.len(), 32);
        let second = read.entry("b (1).vmdk").unwrap();
        assert_eq!((second.kind, &second.digest[..2]), (DigestKind::Sha1, &[0xab, 0xab][..]));
        assert_eq!(Manifest::parse(read.to_text().as_bytes()).unwrap(), read);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, what) in [
            ("\nnonsense", "line 2: found \"nonsense\""),
            ("MD5(a)= 00", "the algorithm \"MD5\""),
            ("SHA1(a)= 00", "40 hexadecimal digits"),
            ("SHA1(a)= zz", "the digest \"zz\""),
        ] {
            let error = Manifest::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        let many = "SHA1(a)= 00000000000000000000000000000000000000ff\n".repeat(OVF_ITEMS_MAX + 1);
        assert!(Manifest::parse(many.as_bytes()).unwrap_err().found.contains("more than"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "(SHA1|SHA256|x)?[( )=\\PC]{0,40}[0-9a-f]{0,64}") {
            let _ = Manifest::parse(text.as_bytes());
        }
    }
}
