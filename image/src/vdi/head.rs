//! The header of a VDI that is open for writing: ids, sizes, and the number of spaces.
//!
//! ```text
//!   begin_writing    new id of the contents ─▶ one write of the first sector ─▶ sync
//!   set_parent_link  ids of the parent ───────▶ the same
//!   prepare          number of spaces ────────▶ the same write; the next flush syncs it
//! ```
//!
//! A child names its parent by the id of the file and by that of its contents, which changes before
//! the first write of a session. All fields lie in one sector, so a power cut leaves the old header
//! or the new one.
//!
//! Invariant: the id of the contents in the file is new and durable before the first write of a
//! session is visible. A mutex guards the sector and is held while it is written; a second one is
//! held until a new id is durable, so that no write begins before. No caller may hold the state
//! mutex.

use crate::{ImageError, LinkageId, ParentLink, Result};
use diskwright_format::vdi::{HEADER_BYTES, HeaderSector, VdiHeader, VdiKind};
use diskwright_store::{
    Barrier, Store,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};
use std::sync::PoisonError;
use uuid::Uuid;

/// The header as it is in the file.
#[derive(Debug)]
pub(super) struct Head {
    /// Held while the id of the contents changes.
    turn: Mutex<()>,
    sector: Mutex<HeaderSector>,
    /// Whether the id of the contents was changed in this session. Atomic, as every write reads it.
    has_begun: AtomicBool,
}

impl Head {
    /// # Errors
    /// `Io`.
    pub fn read(store: &dyn Store) -> Result<Self> {
        let mut sector = HeaderSector([0; HEADER_BYTES]);
        store.read_at(&mut sector.0, 0).map_err(|error| ImageError::io("read the VDI header", store, 0, error))?;
        Ok(Self { turn: Mutex::new(()), sector: Mutex::new(sector), has_begun: AtomicBool::new(false) })
    }

    /// The header now; `None` never happens for an image that could be opened.
    fn header(&self) -> Option<VdiHeader> {
        VdiHeader::parse(&self.sector.lock().unwrap_or_else(PoisonError::into_inner).0).ok()
    }

    /// The identity of the contents now.
    pub fn linkage_id(&self) -> Option<LinkageId> {
        self.header().map(|header| LinkageId::Guid(header.modify_id))
    }

    /// The link to the parent now.
    pub fn parent_link(&self) -> Option<ParentLink> {
        super::layout::link_of(&self.header()?)
    }

    /// Writes the changed sector, not durably.
    ///
    /// # Errors
    /// Those of `edit`; `Io`, after which the file has the old sector or the new one.
    pub fn change(&self, store: &dyn Store, edit: impl FnOnce(&mut HeaderSector) -> Result<()>) -> Result<()> {
        let mut sector = self.sector.lock().unwrap_or_else(PoisonError::into_inner);
        let mut new = sector.clone();
        edit(&mut new)?;
        if new != *sector {
            store.write_at(&new.0, 0).map_err(|error| ImageError::io("write the VDI header", store, 0, error))?;
            *sector = new;
        }
        Ok(())
    }

    /// Gives the contents a new id, once in a session. Durable on return.
    ///
    /// # Errors
    /// `Io`, also by a sync that failed.
    pub fn begin(&self, barrier: &Barrier) -> Result<()> {
        if self.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        self.set_modify_id(barrier, Uuid::new_v4(), true)
    }

    /// Gives the contents this identity. Durable on return.
    ///
    /// # Errors
    /// `Unsupported` for a CID; `Io`.
    pub fn set_linkage(&self, barrier: &Barrier, linkage_id: LinkageId) -> Result<()> {
        let Some(id) = linkage_id.guid() else {
            return Err(ImageError::Unsupported {
                path: barrier.store().name().to_owned(),
                what: "an identity other than a GUID in a VDI".into(),
                hint: "convert the disk to a new VDI".into(),
            });
        };
        self.set_modify_id(barrier, id, false)
    }

    fn set_modify_id(&self, barrier: &Barrier, id: Uuid, only_once: bool) -> Result<()> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        if only_once && self.has_begun.load(Ordering::Acquire) {
            return Ok(());
        }
        self.change(&**barrier.store(), |sector| {
            sector.set_modify_id(id);
            Ok(())
        })?;
        barrier.sync("make the new id of the contents durable")?;
        self.has_begun.store(true, Ordering::Release);
        Ok(())
    }

    /// Replaces the link to the parent. Durable on return.
    ///
    /// # Errors
    /// `BadParentLink` if the image has no parent or cannot store the link; `Io`.
    pub fn set_parent(&self, barrier: &Barrier, link: &ParentLink) -> Result<()> {
        let store = &**barrier.store();
        let bad = |what: &str| ImageError::BadParentLink {
            path: store.name().to_owned(),
            what: what.into(),
            hint: "use a VDI as the parent of a differencing VDI".into(),
        };
        if self.header().is_none_or(|header| header.kind != VdiKind::Differencing) {
            return Err(bad("the image is not a differencing VDI"));
        }
        let ids = ids_of(link).ok_or_else(|| bad("the link does not name both ids of the parent"))?;
        self.change(store, |sector| {
            sector.set_parent(ids.id, ids.modify_id);
            if sector.set_second_parent(ids.second) {
                return Ok(());
            }
            Err(bad("its header has no space for a second id of the parent"))
        })?;
        Ok(barrier.sync("make the new link to the parent durable")?)
    }
}

/// How a child names its parent.
#[derive(Debug, Clone, Copy)]
pub(super) struct ParentIds {
    pub id: Uuid,
    pub modify_id: Uuid,
    pub second: Option<Uuid>,
}

/// The ids of a link; `None` if it does not have them.
pub(super) fn ids_of(link: &ParentLink) -> Option<ParentIds> {
    let second = match link.linkage2 {
        None => None,
        Some(second) => Some(second.guid()?),
    };
    Some(ParentIds { id: link.file_id?, modify_id: link.linkage?.guid()?, second })
}
