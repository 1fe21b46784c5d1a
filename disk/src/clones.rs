//! Many children of one image.
//!
//! Each is a differencing disk that begins as its parent reads. From then on the parent must not be
//! written; an open for writing refuses that while a child lies in its folder.

use crate::{
    CreateRequest, DiskError, Result,
    create::{create, is_there},
};
use std::path::{Path, PathBuf};

/// Creates every one of `children` as a child of `parent`, all or none of them: when one cannot be
/// made, those made by this call are removed. Returns warnings, one sentence each. `progress` is
/// told how many are made, and stops the work by returning `false`. With `dry_run` nothing is
/// created, and only names that are taken are found. Of the request, size, type and parent are
/// ignored.
///
/// # Errors
/// As [`create`](crate::create()); [`DiskError::Usage`] for a name that stands twice;
/// [`DiskError::Stopped`].
pub fn clone_disk(
    parent: &Path,
    children: &[PathBuf],
    request: &CreateRequest,
    dry_run: bool,
    progress: &mut crate::Progress<'_>,
) -> Result<Vec<String>> {
    let mut names: Vec<&PathBuf> = children.iter().collect();
    names.sort();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(DiskError::Usage {
            what: format!("{} is named twice", twice[0].display()),
            hint: "give each clone a name of its own".into(),
        });
    }
    if let Some(taken) = children.iter().find(|child| request.files.facts(child).is_ok()) {
        return Err(is_there(taken));
    }
    let request =
        CreateRequest { parent: Some(parent.to_owned()), size_bytes: None, disk_type: None, ..request.clone() };
    let mut warnings = Vec::new();
    let mut make_all = |made: &mut usize| -> Result<()> {
        for child in children {
            if !progress(*made as u64, children.len() as u64) {
                return Err(DiskError::Stopped);
            }
            if !dry_run {
                warnings.extend(create(child, &request)?);
            }
            *made += 1;
        }
        Ok(())
    };
    let mut made = 0;
    let result = make_all(&mut made);
    if result.is_err() && !dry_run {
        // The first error is returned. These files are ours, made just now, and empty.
        for child in &children[..made] {
            let _ = request.files.remove(child);
        }
    }
    result.map(|()| warnings)
}
