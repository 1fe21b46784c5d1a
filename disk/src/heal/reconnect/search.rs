//! The images below some folders, with their identities.
//!
//! Every regular file is examined, whatever its name, except files whose name promises another
//! format. Nothing is locked, and symbolic links are not followed.

use super::chain_image::ChainImage;
use crate::{DiskError, Progress, Result, error::file_error};
use diskwright_store::Files;
use std::{collections::HashSet, path::PathBuf};

/// The most files that are examined.
const FILES_MAX: usize = 65_536;
/// The most folders that are entered.
const FOLDERS_MAX: usize = 65_536;

/// The images that were found.
#[derive(Debug, Default)]
pub(super) struct Index {
    pub(super) images: Vec<ChainImage>,
    examined: usize,
    unreadable: usize,
    /// Files and folders beyond the bounds.
    left_out: usize,
}

impl Index {
    /// Examines all files below `dirs`.
    pub(super) fn read(files: &Files, dirs: &[PathBuf], progress: &mut Progress<'_>) -> Result<Self> {
        let mut index = Self::default();
        let paths = index.paths(files, dirs)?;
        let total = paths.len() as u64;
        // Another name of one file is not another candidate.
        let mut seen = HashSet::new();
        for (done, path) in (0..).zip(&paths) {
            if !progress(done, total) {
                return Err(DiskError::Stopped);
            }
            let identity = files.facts(path).ok().map(|facts| facts.identity);
            if identity.is_some_and(|identity| !seen.insert(identity)) {
                continue;
            }
            index.examined += 1;
            match ChainImage::read(files, path, None) {
                Ok(found) if found.info.linkage_id.is_some() => index.images.push(found),
                Ok(_) | Err(DiskError::Image(_) | DiskError::BadChain { .. }) => {}
                Err(_) => index.unreadable += 1,
            }
        }
        progress(total, total);
        Ok(index)
    }

    fn paths(&mut self, files: &Files, dirs: &[PathBuf]) -> Result<Vec<PathBuf>> {
        let mut paths = Vec::new();
        let mut folders = Vec::new();
        for dir in dirs {
            folders.push(files.canonical(dir).map_err(|source| file_error("find the folder", dir, source))?);
        }
        let mut entered: HashSet<PathBuf> = folders.iter().cloned().collect();
        let given = folders.len();
        let mut number = 0;
        while let Some(dir) = folders.get(number).cloned() {
            let listed = files.list(&dir).and_then(|found| Ok((found, files.folders(&dir)?)));
            match listed {
                Ok((mut found, below)) => {
                    found.sort();
                    let room = FILES_MAX.saturating_sub(paths.len());
                    self.left_out += found.len().saturating_sub(room);
                    paths.extend(found.into_iter().take(room));
                    for folder in below {
                        if entered.len() >= FOLDERS_MAX {
                            self.left_out += 1;
                        } else if entered.insert(folder.clone()) {
                            folders.push(folder);
                        }
                    }
                }
                Err(source) if number < given => return Err(file_error("list the folder", &dir, source)),
                Err(_) => self.unreadable += 1,
            }
            number += 1;
        }
        Ok(paths)
    }

    /// Whether files were left out or could not be read.
    pub(super) fn is_cut(&self) -> bool {
        self.left_out > 0 || self.unreadable > 0
    }

    /// What was searched, for a message.
    pub(super) fn extent(&self) -> String {
        let mut text = format!("{} files were examined", self.examined);
        if self.unreadable > 0 {
            text.push_str(&format!(", {} files and folders could not be read", self.unreadable));
        }
        if self.left_out > 0 {
            text.push_str(&format!(", more than {} were left out: search in fewer folders", self.left_out));
        }
        text
    }
}
