//! Whose points the file of a tracker says they are: the image, before and after it is written, and
//! the one that comes in its place.

use super::Inner;
use diskwright_format::tracks::Identity;
use diskwright_image::{Image, LinkageId};
use std::{io, sync::Arc};

impl Inner {
    /// Says in the file that the image is being written, before it is. Then begins to write it,
    /// with the GUID that the file names.
    ///
    /// # Errors
    /// The image cannot be written, or the file neither written nor removed.
    pub(crate) fn open(&mut self) -> io::Result<()> {
        if self.is_open || self.failed.is_some() {
            return Ok(());
        }
        let present = self.identity;
        let mut coming = present;
        if !present.guid.is_nil() {
            // An image that is being written already has its GUID, which its children know.
            let kept = LinkageId::from_uuid(present.guid);
            let now = self.image.linkage_id().unwrap_or(kept);
            coming.guid = if now == kept { kept.fresh() } else { now }.to_uuid();
        }
        if let Err(error) = self.write(true, Some(coming)) {
            return self.give_up(&error);
        }
        if let Some(writer) = self.image.writer().filter(|_| !present.guid.is_nil()) {
            writer.begin_writing_as(LinkageId::from_uuid(coming.guid))?;
        }
        self.identity = coming;
        self.is_open = true;
        Ok(())
    }

    /// Records that the image was closed, and how it is recognised now.
    ///
    /// # Errors
    /// The file can be neither written nor removed.
    pub(crate) fn close(&mut self, identity: Identity, size_bytes: u64) -> io::Result<()> {
        let same = !self.is_open && self.identity == identity && self.size_bytes == size_bytes;
        if self.failed.is_some() || same && self.is_current {
            return Ok(());
        }
        if self.size_bytes != size_bytes {
            self.set_size(size_bytes);
        }
        (self.identity, self.coming, self.is_open) = (identity, None, false);
        self.checkpoint()
    }

    /// Gives an image that is being written another identity, at a point. A copy of the image that
    /// was made earlier in this session has the former one, so it is known if it is put back after
    /// a crash: what has changed since the point is not what has changed since the copy.
    ///
    /// # Errors
    /// As [`Inner::close`]; the image cannot be written.
    pub(crate) fn renew_identity(&mut self) -> io::Result<()> {
        if self.failed.is_some() || self.identity.guid.is_nil() {
            return Ok(());
        }
        let coming = Identity { guid: LinkageId::from_uuid(self.identity.guid).fresh().to_uuid(), ..self.identity };
        self.name_coming(coming)?;
        if let Some(writer) = self.image.writer().filter(|_| self.failed.is_none()) {
            writer.begin_writing_as(LinkageId::from_uuid(coming.guid))?;
            self.identity = coming;
        }
        Ok(())
    }

    /// The image has this identity from now on, or `image` is written in its place.
    ///
    /// # Errors
    /// As [`Inner::close`].
    pub(crate) fn go_on_with(&mut self, image: Arc<dyn Image>, identity: Identity) -> io::Result<()> {
        (self.image, self.identity, self.coming) = (image, identity, None);
        self.checkpoint()
    }

    /// Names an image that will have the disk's contents and its name.
    ///
    /// # Errors
    /// As [`Inner::close`].
    pub(crate) fn name_coming(&mut self, coming: Identity) -> io::Result<()> {
        if self.failed.is_some() {
            return Ok(());
        }
        self.coming = Some(coming);
        self.write(self.is_open, self.coming).or_else(|error| self.give_up(&error))
    }

    /// Says that the image is being written already. Before the first checkpoint.
    pub(crate) fn was_begun(&mut self) {
        self.is_open = true;
    }
}
