//! Opens the further files that an image names: the extents of a VMDK, the data file of a qcow2.
//!
//! ```text
//!   image ─▶ Driver::references ─▶ name ─▶ gate ─▶ real path ─▶ store (locked as the image is)
//! ```
//!
//! An image can lie, so such a file passes the gate of parents: it lies beneath the image's folder
//! or a folder that the user allows, is opened by exactly the path that was checked, and is a
//! regular file, or a block device if the user allows devices. Its format is never probed.
//!
//! A file that the image names several times is opened once, because its own lock would exclude it.
//! The image itself is none of its further files.

use crate::{
    DiskError, ParentPolicy, Result,
    opening::gate::{Candidate, Gate},
};
use diskwright_image::Reference;
use diskwright_store::{Files, LockMode, OpenError, OpenOptions, Store};
use std::{collections::HashMap, path::Path, sync::Arc};

/// Opens `references` of the image at `path`, in their order. `options` are those of the image.
///
/// # Errors
/// [`DiskError::FileOutside`] for a file that the policy does not allow; [`DiskError::BadChain`]
/// for a file that is missing, is not a regular file, or is the image itself; errors of the open.
pub(crate) fn open_referred(
    files: &Files,
    (path, first): (&Path, &dyn Store),
    references: &[Reference],
    policy: &ParentPolicy,
    options: &OpenOptions,
) -> Result<Vec<Arc<dyn Store>>> {
    open_each(files, (path, first), references, policy, options).into_iter().collect()
}

/// The same for a check, which goes on when a file cannot be opened.
pub(crate) fn open_each(
    files: &Files,
    (path, first): (&Path, &dyn Store),
    references: &[Reference],
    policy: &ParentPolicy,
    options: &OpenOptions,
) -> Vec<Result<Arc<dyn Store>>> {
    if references.is_empty() {
        return Vec::new();
    }
    let real = files.canonical(path).unwrap_or_else(|_| path.to_owned());
    let mut opened: HashMap<(u64, u64), Arc<dyn Store>> = HashMap::new();
    let gate = Gate::new(files, &real, policy);
    let mut open = |reference: &Reference| {
        let gate = match &gate {
            Ok(gate) => gate,
            Err(error) => return Err(bad(path, reference, &error.to_string(), "name another folder")),
        };
        let found = match gate.place_of(&real, &reference.name) {
            Candidate::Allowed(found) => found,
            Candidate::Outside(file) => {
                let what = reference.kind.to_string();
                return Err(DiskError::FileOutside { image: path.to_owned(), file, what });
            }
            Candidate::Missing(place) => {
                return Err(bad(path, reference, &format!("{place}: nothing is there"), "put the file back"));
            }
        };
        // Compared before the file is opened, as its lock would conflict with our own.
        let identity = files.facts(&found).ok().map(|facts| facts.identity);
        if identity.is_some() && identity == first.identity() {
            return Err(bad(path, reference, "it is the image itself", "put the right file in its place"));
        }
        if let Some(store) = identity.and_then(|identity| opened.get(&identity)) {
            return Ok(Arc::clone(store));
        }
        let writable =
            options.writable && references.iter().any(|other| other.is_written && other.name == reference.name);
        let lock = if options.writable && !writable { LockMode::Shared } else { options.lock };
        let options = OpenOptions { writable, lock, ..*options };
        let store = files.open_canonical(&found, policy.allow_devices, &options).map_err(|error| match error {
            OpenError::NotAFile { found, .. } => bad(path, reference, &format!("it is {found}"), "put a file there"),
            other => other.into(),
        })?;
        if let Some(identity) = identity {
            opened.insert(identity, Arc::clone(&store));
        }
        Ok(store)
    };
    references.iter().map(&mut open).collect()
}

fn bad(path: &Path, reference: &Reference, what: &str, hint: &str) -> DiskError {
    let Reference { name, kind, .. } = reference;
    DiskError::BadChain { path: path.to_owned(), what: format!("its {kind} {name:?} cannot be used: {what}; {hint}") }
}
