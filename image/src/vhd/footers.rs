//! The footer at the end, its copy at offset 0, and which of them is used.
//!
//! A valid copy may contradict the footer at the end: by its size (a resize was interrupted, or a
//! tool changed only one of them) or by its type. If the sizes differ, the footer at the end is
//! used, as by Windows, with a remark. If the types differ, the copy is used.
//!
//! The footer at the end is preferred, except where a guest may have written it. A power cut during
//! growth leaves guest payload at the end of the file, and the guest may store a VHD of its own
//! there. The first sector of a fixed disk belongs to the guest too, who may store the start of a
//! dynamic VHD there. So the footer at the end is preferred to a valid copy only if both have the
//! same unique id and type, or if it describes a fixed disk that ends exactly where the footer
//! begins. A fixed disk whose growth was cut short may have its old footer only (`left_behind.rs`).

use super::{damaged, left_behind};
use crate::{ImageError, Result};
use diskwright_format::vhd::{DiskKind, FOOTER_BYTES, Fault, Footer, OLD_FOOTER_BYTES, VhdError};
use diskwright_store::Store;

/// A footer with its bytes, so that reserved bytes survive a rewrite.
#[derive(Debug, Clone)]
pub(super) struct LocatedFooter {
    pub footer: Footer,
    pub bytes: [u8; FOOTER_BYTES],
    pub offset_bytes: u64,
    /// The footer is 511 bytes long instead of 512.
    pub is_old: bool,
}

/// The two footers of a file.
#[derive(Debug)]
pub(super) struct Footers {
    pub len_bytes: u64,
    pub tail: Result<LocatedFooter, VhdError>,
    pub copy: Result<LocatedFooter, VhdError>,
}

/// The footer that is used.
#[derive(Debug, Clone)]
pub(super) struct ChosenFooter {
    pub found: LocatedFooter,
    /// Offset of the footer at the end; `None` if there is no usable one.
    pub tail_offset_bytes: Option<u64>,
    /// Whether the copy at offset 0 has the same bytes. Always true for a fixed disk, which has no
    /// copy.
    pub copy_is_right: bool,
    /// [`Footers::contradiction`].
    pub contradiction: Option<String>,
    /// Further peculiarities, a sentence each.
    pub remarks: Vec<String>,
}

fn read_one(store: &dyn Store, offset_bytes: u64, len: usize) -> Result<Result<LocatedFooter, VhdError>> {
    let mut bytes = [0; FOOTER_BYTES];
    store
        .read_at(&mut bytes[..len], offset_bytes)
        .map_err(|e| ImageError::io("read the footer", store, offset_bytes, e))?;
    Ok(Footer::parse(&bytes[..len], offset_bytes).map(|footer| LocatedFooter {
        footer,
        bytes,
        offset_bytes,
        is_old: len == OLD_FOOTER_BYTES,
    }))
}

fn has_cookie(result: &Result<LocatedFooter, VhdError>) -> bool {
    !matches!(result, Err(VhdError { fault: Fault::Cookie { .. } | Fault::TooShort { .. }, .. }))
}

impl Footers {
    /// Reads both footers.
    ///
    /// # Errors
    /// `NotAnImage` if the file is too short for a footer or has none at either place; `Io`.
    pub fn read(store: &dyn Store) -> Result<Self> {
        let len_bytes = store.len_bytes().map_err(|e| ImageError::io("get the length of the file", store, 0, e))?;
        let not_an_image = |found: String| ImageError::NotAnImage {
            path: store.name().to_owned(),
            found,
            expected: "a VHD, with the footer \"conectix\" in its last 512 bytes; was the file copied completely?"
                .into(),
        };
        let Some(old_offset_bytes) = len_bytes.checked_sub(OLD_FOOTER_BYTES as u64) else {
            return Err(not_an_image(format!("the file has only {len_bytes} bytes")));
        };
        let mut copy = Err(VhdError {
            structure: "footer",
            offset_bytes: 0,
            fault: Fault::TooShort { found_bytes: OLD_FOOTER_BYTES, expected_bytes: FOOTER_BYTES },
        });
        let mut tail = copy.clone();
        if let Some(offset_bytes) = old_offset_bytes.checked_sub(1) {
            copy = read_one(store, 0, FOOTER_BYTES)?;
            tail = read_one(store, offset_bytes, FOOTER_BYTES)?;
        }
        if !has_cookie(&tail) {
            let old = read_one(store, old_offset_bytes, OLD_FOOTER_BYTES)?;
            if has_cookie(&old) {
                tail = old;
            }
        }
        if !has_cookie(&tail) && !has_cookie(&copy) {
            if let Some((footer, bytes, offset_bytes)) = left_behind::find(store, len_bytes)? {
                let tail = LocatedFooter { footer, bytes, offset_bytes, is_old: false };
                return Ok(Self { len_bytes, tail: Ok(tail), copy });
            }
            return Err(not_an_image("neither the end nor the beginning of the file is a footer".into()));
        }
        Ok(Self { len_bytes, tail, copy })
    }

    /// How two valid footers of one disk contradict each other, as a sentence; `None` if they do
    /// not.
    pub fn contradiction(&self) -> Option<String> {
        let (Ok(tail), Ok(copy)) = (&self.tail, &self.copy) else { return None };
        // Different unique ids: one of the footers lies in payload and is the guest's.
        if tail.footer.unique_id != copy.footer.unique_id || copy.footer.kind == DiskKind::Fixed {
            return None;
        }
        let used = if is_believable(tail, copy) { "footer at the end" } else { "copy at offset 0" };
        let (here, there) = (&tail.footer, &copy.footer);
        if here.kind != there.kind {
            Some(format!(
                "The footer at the end says that the disk is {}, its copy at offset 0 that it is {}; the {used} is used.",
                here.kind, there.kind
            ))
        } else if here.size_bytes() != there.size_bytes() {
            Some(format!(
                "The footer at the end says {} bytes, its copy at offset 0 says {}; the {used} is used.",
                here.size_bytes(),
                there.size_bytes()
            ))
        } else {
            None
        }
    }

    /// Chooses the footer to use.
    ///
    /// # Errors
    /// `Corrupt` if neither is valid.
    pub fn choose(&self, store: &dyn Store) -> Result<ChosenFooter> {
        let (contradiction, mut remarks) = (self.contradiction(), Vec::new());
        // A footer of a fixed disk at offset 0 is the guest's, as fixed disks have no copy.
        let copy = self.copy.as_ref().ok().filter(|copy| copy.footer.kind != DiskKind::Fixed);
        let (found, tail_offset_bytes) = match (&self.tail, copy) {
            (Ok(tail), None) => {
                if tail.footer.kind != DiskKind::Fixed {
                    remarks
                        .push("The copy of the footer at offset 0 is damaged; the footer at the end is used.".into());
                }
                (tail, Some(tail.offset_bytes))
            }
            (Ok(tail), Some(copy)) if is_believable(tail, copy) => {
                if tail.footer.kind != DiskKind::Fixed && tail.footer != copy.footer && contradiction.is_none() {
                    remarks.push(
                        "The copy of the footer at offset 0 differs from the footer at the end, which is used.".into(),
                    );
                }
                (tail, Some(tail.offset_bytes))
            }
            (_, Some(copy)) => {
                remarks.push(
                    "The footer at the end is missing or damaged; its copy at offset 0 is used. The next write repairs it."
                        .into(),
                );
                (copy, None)
            }
            (Err(error), None) => {
                // Report the damaged footer that has a cookie.
                let told = if has_cookie(&self.tail) { error } else { self.copy.as_ref().err().unwrap_or(error) };
                return Err(damaged(store, told));
            }
        };
        let behind = self.len_bytes.saturating_sub(found.offset_bytes + FOOTER_BYTES as u64);
        if found.footer.kind == DiskKind::Fixed && behind > 0 && !found.is_old {
            remarks.push(format!(
                "{behind} bytes of zeros follow the footer: a growth was cut short. The next write cuts them off."
            ));
        }
        if found.is_old {
            remarks.push("The footer has 511 bytes, as in files by Virtual PC before 2004.".into());
        }
        let copy_is_right = found.footer.kind == DiskKind::Fixed || copy.is_some_and(|copy| copy.bytes == found.bytes);
        Ok(ChosenFooter { found: found.clone(), tail_offset_bytes, copy_is_right, contradiction, remarks })
    }
}

fn is_believable(tail: &LocatedFooter, copy: &LocatedFooter) -> bool {
    if tail.footer.kind == DiskKind::Fixed {
        tail.footer.current_size_bytes == tail.offset_bytes
    } else {
        tail.footer.unique_id == copy.footer.unique_id && tail.footer.kind == copy.footer.kind
    }
}
