//! Opens the further files that an image names: the extents of a VMDK, the data file of a qcow2.
//!
//! ```text
//!   image ─▶ Driver::references ─▶ name ─▶ gate ─▶ real path ─▶ store (locked as the image is)
//!                                            a mapping file ─▶ the device that it names ─▶ gate
//! ```
//!
//! An image can lie, so such a file passes the gate of parents: it lies beneath the image's folder
//! or a folder that the user allows, is opened by exactly the path that was checked, and is a
//! regular file, or a block device if the user allows devices. Its format is never probed.
//!
//! A device lies in no folder of images, so for a block device the permission for devices takes the
//! place of that for its folder. A device is compared with what the image recorded of it (serial
//! number, world wide name, size): one that became another device is refused by name, also for
//! reading, because what it holds is not the disk.
//!
//! A file that the image names several times is opened once, because its own lock would exclude it.
//! The image itself is none of its further files.

use crate::{
    DiskError, ParentPolicy, Result,
    error::file_error,
    opening::gate::{Candidate, Gate},
};
use diskwright_image::{Reference, ReferenceKind, vmdk::mapped_device};
use diskwright_store::{DeviceId, Files, LockMode, OpenError, OpenOptions, Store};
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
};

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
    let gate = match Gate::new(files, &real, policy) {
        Ok(gate) => gate,
        Err(error) => {
            let refused = |reference| Err(bad(path, reference, &error.to_string(), "name another folder"));
            return references.iter().map(refused).collect();
        }
    };
    let mut opener = Opener { files, path, first, real, gate, policy, opened: HashMap::new() };
    let mut open = |reference: &Reference| {
        let writable =
            options.writable && references.iter().any(|other| other.is_written && other.name == reference.name);
        let is_locked = options.lock != LockMode::None;
        let lock = if options.writable && !writable && is_locked { LockMode::Shared } else { options.lock };
        opener.open(reference, &OpenOptions { writable, lock, ..*options })
    };
    references.iter().map(&mut open).collect()
}

/// Opens the further files of one image.
struct Opener<'a> {
    files: &'a Files,
    /// The image, as the user named it.
    path: &'a Path,
    first: &'a dyn Store,
    /// The image without symbolic links.
    real: PathBuf,
    gate: Gate<'a>,
    policy: &'a ParentPolicy,
    opened: HashMap<(u64, u64), Arc<dyn Store>>,
}

impl Opener<'_> {
    fn open(&mut self, reference: &Reference, options: &OpenOptions) -> Result<Arc<dyn Store>> {
        let found = self.find(reference)?;
        // Compared before the file is opened, as its lock would conflict with our own.
        let identity = self.files.facts(&found).ok().map(|facts| facts.identity);
        if identity.is_some() && identity == self.first.identity() {
            return Err(bad(self.path, reference, "it is the image itself", "put the right file in its place"));
        }
        if let Some(store) = identity.and_then(|identity| self.opened.get(&identity)) {
            return Ok(Arc::clone(store));
        }
        if reference.kind == ReferenceKind::Device && !identity.is_some_and(is_device) {
            return self.open_mapped(reference, &found, options);
        }
        let store = self.open_at(reference, &found, options)?;
        if let (true, Some((number, _))) = (store.is_block_device(), store.identity()) {
            self.check_device(reference, &*store, number)?;
        }
        if let Some(identity) = identity {
            self.opened.insert(identity, Arc::clone(&store));
        }
        Ok(store)
    }

    /// Where the file is. A device lies in no folder of an image, so the permission for devices
    /// replaces that for a folder.
    fn find(&self, reference: &Reference) -> Result<PathBuf> {
        match self.gate.place_of(&self.real, &reference.name) {
            Candidate::Allowed(found) => Ok(found),
            Candidate::Outside(file) if self.files.facts(&file).is_ok_and(|facts| is_device(facts.identity)) => {
                if self.policy.allow_devices { Ok(file) } else { Err(DiskError::ParentIsDevice { path: file }) }
            }
            Candidate::Outside(file) => {
                let what = reference.kind.to_string();
                Err(DiskError::FileOutside { image: self.path.to_owned(), file, what })
            }
            Candidate::Missing(place) => {
                Err(bad(self.path, reference, &format!("{place}: nothing is there"), "put it back"))
            }
        }
    }

    fn open_at(&self, reference: &Reference, found: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>> {
        self.files.open_canonical(found, self.policy.allow_devices, options).map_err(|error| match error {
            OpenError::NotAFile { found, .. } => {
                bad(self.path, reference, &format!("it is {found}"), "put a file there")
            }
            other => other.into(),
        })
    }

    /// Opens the device to which a mapping file leads.
    fn open_mapped(&mut self, reference: &Reference, found: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>> {
        let mapping =
            self.open_at(reference, found, &OpenOptions { writable: false, lock: LockMode::None, ..*options })?;
        let behind = mapped_device(&*mapping, reference.is_written)?;
        let device = self.find(&behind)?;
        if !self.files.facts(&device).is_ok_and(|facts| is_device(facts.identity)) {
            return Err(bad(self.path, &behind, "it is not a block device", "put the device back, or map another one"));
        }
        self.open(&behind, options)
    }

    /// Refuses a device that is not the one that the image recorded.
    fn check_device(&self, reference: &Reference, store: &dyn Store, number: u64) -> Result<()> {
        let Some(expected) = &reference.device else { return Ok(()) };
        let len = store.len_bytes().map_err(|source| file_error("get its length", store.name(), source))?;
        match expected.difference(&DeviceId::of(number, len)) {
            None => Ok(()),
            Some(difference) => Err(bad(
                self.path,
                reference,
                &format!("it is another device than the one that was mapped: {difference}"),
                "connect the right device, or map this one in a new image",
            )),
        }
    }
}

/// Whether this is the identity of a block device ([`Store::identity`]).
fn is_device((_, inode): (u64, u64)) -> bool {
    inode == 0
}

fn bad(path: &Path, reference: &Reference, what: &str, hint: &str) -> DiskError {
    let Reference { name, kind, .. } = reference;
    DiskError::BadChain { path: path.to_owned(), what: format!("its {kind} {name:?} cannot be used: {what}; {hint}") }
}
