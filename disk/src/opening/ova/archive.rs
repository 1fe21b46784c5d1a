//! The members of a tar archive: a walk from header to header.
//!
//! The walk reads the headers alone. A member that ends beyond the archive, or a header that is no
//! header, ends the walk with an error. Folders are passed over. Links, devices and sparse files
//! are remarks: their data are not the contents of a file.

use crate::{DiskError, Result, error::file_error};
use diskwright_format::{
    ovf::{OVF_MAX_BYTES, is_plain_name},
    tar::{Pax, TAR_BLOCK_BYTES, TAR_EXTENSION_MAX_BYTES, TarHeader, TarKind},
};
use diskwright_image::ImageError;
use diskwright_store::Store;
use std::{collections::HashSet, path::Path, sync::Arc};

/// The most headers of an archive.
const HEADERS_MAX: usize = 10_000;
/// The most remarks about members.
const REMARKS_MAX: usize = 20;

/// A file in the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OvaMember {
    /// Its name, without a path.
    pub name: String,
    /// Where its data begin in the archive.
    pub offset_bytes: u64,
    /// Length of its data.
    pub size_bytes: u64,
}

#[derive(Debug)]
pub(super) struct Archive {
    pub(super) store: Arc<dyn Store>,
    pub(super) members: Vec<OvaMember>,
    pub(super) remarks: Vec<String>,
}

impl Archive {
    /// Reads the header of every member, without the contents.
    pub(super) fn read(store: Arc<dyn Store>, path: &Path) -> Result<Self> {
        let len_bytes = store.len_bytes().map_err(|error| file_error("measure it", path, error))?;
        let corrupt = |offset_bytes: u64, found: String, expected: &str| {
            DiskError::Image(ImageError::Corrupt {
                path: path.to_owned(),
                structure: "tar header",
                offset_bytes,
                found,
                expected: expected.into(),
            })
        };
        let read = |offset_bytes: u64, len: u64| -> Result<Vec<u8>> {
            let mut bytes = vec![0; len as usize];
            store.read_at(&mut bytes, offset_bytes).map_err(|error| file_error("read its tar headers", path, error))?;
            Ok(bytes)
        };
        let (mut members, mut remarks) = (Vec::<OvaMember>::new(), Vec::new());
        let mut names = HashSet::new();
        let (mut pax, mut long_name) = (Pax::default(), None);
        let (mut at, mut headers) = (0, 0);
        // An archive that ends without blocks of zeros is complete if it ends behind a member.
        while at < len_bytes {
            if len_bytes - at < TAR_BLOCK_BYTES {
                return Err(corrupt(at, format!("{} bytes", len_bytes - at), "512 bytes (was it copied completely?)"));
            }
            let header = TarHeader::parse(&read(at, TAR_BLOCK_BYTES)?);
            let Some(header) = header.map_err(|error| corrupt(at, error.found, error.expected))? else { break };
            headers += 1;
            if headers > HEADERS_MAX {
                return Err(corrupt(at, format!("more than {HEADERS_MAX} files"), "an OVA, which has a few"));
            }
            let is_extension = matches!(header.kind, TarKind::Pax | TarKind::PaxGlobal | TarKind::LongName);
            let size_bytes = if is_extension { header.size_bytes } else { pax.size_bytes.unwrap_or(header.size_bytes) };
            let data_bytes = at + TAR_BLOCK_BYTES;
            let end_bytes = data_bytes.checked_add(size_bytes).filter(|end| *end <= len_bytes).ok_or_else(|| {
                let found = format!("{:?} with {size_bytes} bytes", header.name);
                corrupt(at, found, "a file that ends within the archive (was it copied completely?)")
            })?;
            if is_extension && size_bytes > TAR_EXTENSION_MAX_BYTES {
                return Err(corrupt(at, format!("an extension of {size_bytes} bytes"), "at most 65536"));
            }
            match header.kind {
                TarKind::Pax => {
                    let parsed = Pax::parse(&read(data_bytes, size_bytes)?);
                    pax = parsed.map_err(|error| corrupt(at, error.found, error.expected))?;
                }
                TarKind::LongName => {
                    let bytes = read(data_bytes, size_bytes)?;
                    let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
                    long_name = Some(String::from_utf8_lossy(name).into_owned());
                }
                TarKind::PaxGlobal => {}
                kind => {
                    let extended = std::mem::take(&mut pax);
                    let name = extended.path.or(long_name.take()).unwrap_or(header.name);
                    let plain = name.strip_prefix("./").unwrap_or(&name);
                    let why = match kind {
                        TarKind::Folder => None,
                        TarKind::Other(_) => Some("it is not a regular file"),
                        _ if extended.is_sparse => Some("it is stored as a sparse file"),
                        _ if !is_plain_name(plain) => Some("its name has a path"),
                        _ if !names.insert(plain.to_owned()) => Some("another file before has the same name"),
                        _ => {
                            let name = plain.to_owned();
                            members.push(OvaMember { name, offset_bytes: data_bytes, size_bytes });
                            None
                        }
                    };
                    if let Some(why) = why.filter(|_| remarks.len() < REMARKS_MAX) {
                        remarks.push(format!("{:?} in the archive is ignored: {why}", shortened(&name)));
                    }
                }
            }
            at = end_bytes.checked_next_multiple_of(TAR_BLOCK_BYTES).unwrap_or(u64::MAX);
        }
        Ok(Self { store, members, remarks })
    }

    /// The bytes of a descriptor or a manifest.
    pub(super) fn text_of(&self, member: &OvaMember, path: &Path) -> Result<Vec<u8>> {
        if member.size_bytes > OVF_MAX_BYTES {
            return Err(DiskError::Image(ImageError::Corrupt {
                path: path.join(&member.name),
                structure: "OVF text",
                offset_bytes: member.offset_bytes,
                found: format!("{} bytes", member.size_bytes),
                expected: format!("at most {OVF_MAX_BYTES}"),
            }));
        }
        let mut bytes = vec![0; member.size_bytes as usize];
        let read = self.store.read_at(&mut bytes, member.offset_bytes);
        read.map_err(|error| file_error("read its descriptor", path, error))?;
        Ok(bytes)
    }
}

fn shortened(name: &str) -> String {
    name.chars().take(100).collect()
}
