//! How a merge of a disk in use ends: the parent's file gets the disk's name, or the top stays over
//! its parent.

use super::{Absorbing, parent};
use crate::{
    DiskError, Result,
    engine::{chain::Member, claims::COPY_UP},
    error::file_error,
    life::removal::{self, Removal},
    opening::gate,
};
use diskwright_image::ParentLink;

impl<'a> Absorbing<'a> {
    /// Gives the parent the disk's name. The top has no block, so the disk reads the same before
    /// and after.
    pub(super) fn rename(&self) -> Result<Removal<'a>> {
        let (files, path) = (&self.origin.options.files, &self.origin.file);
        let chain = self.shared.chain();
        parent::check_name(files, path, chain.top())?;
        parent::check_name(files, &self.done.parent, &chain.members()[1])?;
        let extents = removal::extents_of_layer(&*chain.members()[0].image, path)?;
        let removal = Removal::begin(files, path, extents)?;
        match files.rename(&self.done.parent, path, true) {
            Ok(()) => Ok(removal),
            Err(source) => {
                removal.give_up();
                Err(file_error("give the merged image its name", path, source))
            }
        }
    }

    /// Ends with the parent as the top, whose file has the disk's name.
    pub(super) fn pivot(&self, removal: Removal<'_>) -> Result<()> {
        let path = &self.origin.file;
        let chain = self.shared.chain();
        let pivoted = self.change(|mutation| {
            let chain = mutation.chain.without_top(path)?;
            mutation.left = None;
            Ok(chain)
        });
        chain.members()[1].image.store().was_renamed(path);
        pivoted?;
        let synced = self.origin.options.files.sync_directory_of(path);
        synced.map_err(|source| file_error("make its new name durable", path, source))?;
        removal.end()
    }

    /// Ends with the top over its parent, which is at rest again. What the parent took is durable
    /// then.
    pub(super) fn end(&self) -> Result<()> {
        let shared = self.shared;
        let chain = shared.chain();
        let [top, parent, ..] = chain.members() else { return Ok(()) };
        // As when an image joins on top: requests in flight may still write to the parent.
        let copy_up = (top.id, COPY_UP);
        let changed = self.change(|mutation| {
            let chain = mutation.chain.with_absorbing(false)?;
            mutation.left = None;
            mutation.claims.exclude(copy_up);
            Ok(chain)
        });
        shared.lock().claims.end_exclusion(copy_up);
        changed?;
        let closed = shared.check_poison(&chain).and_then(|()| Ok(parent.writer()?.close()?));
        if let Err(source) = closed {
            // What found no space on the file system can be written by a later flush.
            if !diskwright_store::is_full(&source) {
                shared.poison.set();
            }
            return Err(DiskError::File { doing: "make it durable", path: self.done.parent.clone(), source });
        }
        let mut mutation = shared.lock();
        let at_rest = mutation.chain.with_at_rest(parent.id)?;
        shared.publish(&mut mutation, at_rest);
        drop(mutation);
        // Otherwise the parent's identity is uncertain, and the link accepts both.
        if parent.has_begun_writing() {
            self.record_parent(top, parent);
        }
        for store in parent.image.stores() {
            // If it fails, the parent stays locked until the disk is closed.
            let _ = store.share_lock();
        }
        Ok(())
    }

    /// The link of the top names the parent as it is now. Errors are ignored: the link accepts it
    /// anyway.
    fn record_parent(&self, top: &Member, parent: &Member) {
        let (Some(writer), Some(link), Some(linkage)) =
            (top.image.writer(), top.image.parent_link(), parent.image.linkage_id())
        else {
            return;
        };
        let Ok(now) = gate::time_to_record(&self.origin.options.files, &self.done.parent, &**parent.image.store())
        else {
            return;
        };
        let modified_seconds = link.modified_seconds.map(|unknown| now.unwrap_or(unknown));
        let _ =
            writer.set_parent_link(&ParentLink { linkage: Some(linkage), linkage2: None, modified_seconds, ..link });
    }
}
