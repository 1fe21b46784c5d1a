//! `[NAME=]FILE[,format=FORMAT]`: a disk on the command line of `serve`.

use crate::options::FormatArg;
use clap::ValueEnum;
use diskwright_image::Format;
use diskwright_serve::net::exports;
use diskwright_store::RateLimits;
use std::path::{Path, PathBuf};

/// Separates the file from the format of one disk.
const FORMAT: &str = ",format=";

/// A disk to be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskWord {
    /// Name of the export.
    pub name: String,
    /// The image.
    pub path: PathBuf,
    /// The format, if it was given for this disk alone.
    pub format: Option<Format>,
    /// The limits, if they were given for this disk alone.
    pub limit: Option<RateLimits>,
    /// Whether writes are refused, if that was given for this disk alone.
    pub read_only: Option<bool>,
}

impl DiskWord {
    /// Parses a word. A `=` ends the name if no slash comes before it; else the export has the
    /// file's own name.
    ///
    /// # Errors
    /// A sentence for clap: an unknown format, or a name that NBD cannot carry.
    pub fn parse(word: &str) -> Result<Self, String> {
        let (disk, format) = match word.rsplit_once(FORMAT) {
            Some((disk, format)) if !format.contains('/') => {
                let format = FormatArg::from_str(format, true)
                    .map_err(|_| format!("{format:?} is not a format; write one of {} behind {FORMAT:?}", formats()))?;
                (disk, Some(format.format()))
            }
            _ => (word, None),
        };
        let (name, path) = split_name(disk);
        Self::new(Some(name), path, format, None, None)
    }

    /// A disk with properties of its own. Without a name the export has the file's.
    ///
    /// # Errors
    /// A sentence: a name that NBD cannot carry.
    pub fn new(
        name: Option<String>,
        path: PathBuf,
        format: Option<Format>,
        limit: Option<RateLimits>,
        read_only: Option<bool>,
    ) -> Result<Self, String> {
        let name = name.unwrap_or_else(|| name_of(&path));
        exports::check_name(&name).map_err(|error| error.to_string())?;
        Ok(Self { name, path, format, limit, read_only })
    }
}

/// The names of all formats.
fn formats() -> String {
    Format::ALL.iter().map(|format| format.driver().name).collect::<Vec<_>>().join(", ")
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

fn split_name(word: &str) -> (String, PathBuf) {
    match word.split_once('=') {
        Some((name, path)) if !name.contains('/') && !path.is_empty() => (name.into(), path.into()),
        _ => {
            let path = PathBuf::from(word);
            (name_of(&path), path)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_before_their_files_and_formats_behind() {
        for (word, name, path, format) in [
            ("disk.vhdx", "disk.vhdx", "disk.vhdx", None),
            ("/a/b/disk.vhdx", "disk.vhdx", "/a/b/disk.vhdx", None),
            ("db=/a/disk.vhdx", "db", "/a/disk.vhdx", None),
            ("=disk.vhdx", "", "disk.vhdx", None),
            ("./a=b.vhdx", "a=b.vhdx", "./a=b.vhdx", None),
            ("db=a=b.vhdx", "db", "a=b.vhdx", None),
            ("disk.img,format=raw", "disk.img", "disk.img", Some(Format::Raw)),
            ("db=/a/b,format=vhdx", "db", "/a/b", Some(Format::Vhdx)),
            ("./a=b,format=VHD", "a=b", "./a=b", Some(Format::Vhd)),
            ("./a,format=raw,format=vhd", "a,format=raw", "./a,format=raw", Some(Format::Vhd)),
            ("./a,format=x/b", "b", "./a,format=x/b", None),
        ] {
            let expected = DiskWord { name: name.into(), path: path.into(), format, limit: None, read_only: None };
            assert_eq!(DiskWord::parse(word), Ok(expected), "{word}");
        }
        let error = DiskWord::parse("disk.img,format=qed").unwrap_err();
        assert!(error.contains("one of raw, vhd, vhdx"), "{error}");
    }

    #[test]
    fn what_the_protocol_cannot_carry_is_wrong_usage() {
        let (longest, longer) = ("a".repeat(4096), "a".repeat(4097));
        assert!(DiskWord::parse(&format!("{longest}=b")).is_ok());
        let error = DiskWord::parse(&format!("{longer}=b")).unwrap_err();
        assert!(error.contains("at most 4096 bytes"), "{error}");
    }
}
