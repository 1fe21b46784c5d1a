//! The chain at one instant: layers, the map over them, and the disk's geometry.
//!
//! ```text
//!   Chain ─┬─ members   the images, top first, each with its id and the ids of its stores
//!          ├─ sources   store id ─▶ store: what a DATA word of the map names
//!          ├─ map       owner of each unit
//!          └─ geometry  size and sectors of the disk
//! ```
//!
//! A `Chain` is immutable. A disk that gets a layer or another size gets a new `Chain`, swapped as
//! a whole (`shared.rs`). A queue keeps its chain until the epoch changes. Ids of layers and stores
//! keep their meaning from chain to chain, so the map is kept if its units stay the same.
//!
//! Invariant: the current chain knows every id in a word of the map. A queue with an older chain
//! and the same map may find the id of an image that joined later. It then looks the id up in the
//! current chain.

use crate::{
    DiskError, Result,
    engine::map::{LayerId, Map, Owner, SourceId},
    engine::track::tracker::View,
};
use diskwright_image::{Image, ImageWriter};
use diskwright_store::{
    Geometry, Store,
    sync::atomic::{AtomicBool, Ordering},
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Maximum number of images in a chain, as in Windows.
pub(crate) const CHAIN_MAX: usize = 1024;

/// One image of a chain.
#[derive(Debug, Clone)]
pub struct Layer {
    /// The path of the image's first file.
    pub path: PathBuf,
    /// The open image.
    pub image: Arc<dyn Image>,
}

impl Layer {
    /// Allocated bytes of all files of the layer.
    ///
    /// # Errors
    /// The system's error for any of the files.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        self.image.stores().iter().map(|store| store.allocated_bytes()).sum()
    }

    /// Sum of the lengths of all files of the layer, in bytes.
    ///
    /// # Errors
    /// The system's error for any of the files.
    pub fn files_len_bytes(&self) -> io::Result<u64> {
        self.image.stores().iter().map(|store| store.len_bytes()).sum()
    }

    /// The path of the layer's file with this index. For the first file, and for an invalid index,
    /// the layer's path.
    pub fn file_path(&self, file: u16) -> &Path {
        match self.image.stores().get(usize::from(file)) {
            Some(store) if file > 0 => store.name(),
            _ => &self.path,
        }
    }
}

/// An image in the chain, with the disk's own state for it.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) image: Arc<dyn Image>,
    pub(crate) id: LayerId,
    first_source: SourceId,
    stores: u16,
    /// `stores`, or twice as many if blocks may be shared: the second id of a store stands for its
    /// bytes that must not be overwritten.
    sources: u16,
    pub(crate) size_bytes: u64,
    pub(crate) block_bytes: u64,
    /// Whether `begin_writing` of the image was called.
    began: Arc<AtomicBool>,
    /// Whether the image is no longer written: it was opened read-only, or it is a former top that
    /// was closed cleanly after another image joined.
    pub(crate) is_at_rest: bool,
}

impl Member {
    /// The id of the image's store with this index.
    pub(crate) fn source(&self, store: u16) -> SourceId {
        self.first_source.saturating_add(store)
    }

    /// The id of that store for bytes that must not be overwritten. Only if the image shares
    /// blocks.
    fn shared_source(&self, store: u16) -> SourceId {
        self.source(self.stores.saturating_add(store))
    }

    /// The index in the image of the store with this id.
    pub(crate) fn store_index(&self, source: SourceId) -> u16 {
        source.saturating_sub(self.first_source) % self.stores.max(1)
    }

    /// Whether the bytes that this id names belong to this image, and are overwritten in place.
    #[inline]
    pub(crate) fn overwrites(&self, source: SourceId) -> bool {
        source.wrapping_sub(self.first_source) < self.stores
    }

    /// Whether a store belongs to this image.
    #[inline]
    pub(crate) fn has_source(&self, source: SourceId) -> bool {
        source.wrapping_sub(self.first_source) < self.sources
    }

    /// The interface for writes.
    ///
    /// # Errors
    /// `ReadOnlyFilesystem` if the image was opened read-only.
    pub(crate) fn writer(&self) -> io::Result<&dyn ImageWriter> {
        self.image
            .writer()
            .ok_or_else(|| io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "the disk is open read-only"))
    }

    /// Whether [`Member::begin_writing`] has run.
    #[inline]
    pub(crate) fn has_begun_writing(&self) -> bool {
        self.began.load(Ordering::Acquire)
    }

    /// Calls `begin_writing` of the image, once. Blocks on I/O; the caller must not hold a lock.
    pub(crate) fn begin_writing(&self) -> io::Result<()> {
        if !self.has_begun_writing() {
            self.writer()?.begin_writing()?;
            self.began.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Start and end of a block on the disk, cut at `disk_bytes`.
    pub(crate) fn block_range(&self, block: u64, disk_bytes: u64) -> (u64, u64) {
        let start = block.saturating_mul(self.block_bytes).min(disk_bytes);
        (start, start.saturating_add(self.block_bytes).min(disk_bytes))
    }
}

/// The layers, the map and the geometry of a disk.
#[derive(Debug)]
pub(crate) struct Chain {
    layers: Arc<[Layer]>,
    members: Vec<Member>,
    /// Position in the chain by layer id; `None` for layers that left the chain.
    depths: Vec<Option<u16>>,
    /// By source id; `None` for stores that left the chain.
    sources: Vec<Option<Arc<dyn Store>>>,
    pub(crate) map: Arc<Map>,
    pub(crate) geometry: Geometry,
    /// Whether a flush must sync only one file.
    pub(crate) writes_one_file: bool,
    /// Whether the top's parent takes the writes where the top has no block (`absorb.rs`).
    pub(crate) absorbs: bool,
    /// Where changes are marked; `None` without a point.
    pub(crate) track: Option<Arc<View>>,
    /// Memory limit for the map, and for the tables of writable images.
    memory_bytes: u64,
}

/// The shares of the memory limit, in bytes.
pub(crate) struct MemoryShares {
    /// For the words of the map.
    pub(crate) words: u64,
    /// For the runs of units that have several owners.
    pub(crate) runs: u64,
    /// For the tables of writable images.
    pub(crate) tables: u64,
}

impl MemoryShares {
    /// Half for the words, which every disk needs; the other two share the rest.
    pub(crate) const fn of(memory_bytes: u64) -> Self {
        let quarter = memory_bytes / 4;
        Self { words: memory_bytes - 2 * quarter, runs: quarter, tables: quarter }
    }
}

impl Chain {
    /// The shares of the disk's memory limit.
    pub(crate) fn memory_shares(&self) -> MemoryShares {
        MemoryShares::of(self.memory_bytes)
    }

    /// Builds the chain of `layers`, the top first.
    ///
    /// # Errors
    /// `BadOptions` for no layers; `BadChain` for more than [`CHAIN_MAX`].
    pub(crate) fn new(layers: Vec<Layer>, memory_bytes: u64) -> Result<Self> {
        let mut members = Vec::with_capacity(layers.len());
        let mut sources = Vec::new();
        for (id, layer) in layers.iter().enumerate() {
            let member = join(layer, id, &mut sources)?;
            // The disk writes only to its top. A parent may be a former top that was closed.
            members.push(Member { is_at_rest: member.is_at_rest || id > 0, ..member });
        }
        Self::assemble(layers, members, sources, (None, false), memory_bytes)
    }

    /// This chain with another layer on top. The former top's file may have another path by then.
    ///
    /// # Errors
    /// As [`Chain::new`].
    pub(crate) fn with_top(&self, top: Layer, former_path: Option<&Path>) -> Result<Self> {
        let mut sources = self.sources.clone();
        let member = join(&top, self.depths.len(), &mut sources)?;
        let mut layers: Vec<Layer> = std::iter::once(top).chain(self.layers.iter().cloned()).collect();
        if let (Some(path), Some(former)) = (former_path, layers.get_mut(1)) {
            former.path = path.to_owned();
        }
        let members = std::iter::once(member).chain(self.members.iter().cloned()).collect();
        Self::assemble(layers, members, sources, (Some(self), true), self.memory_bytes)
    }

    /// This chain with `parent` in the place of the `count` layers from `depth` on, which are not
    /// at the top. It counts as at rest. The chain has a new map: words of the old one name the
    /// layers that left.
    ///
    /// # Errors
    /// As [`Chain::new`].
    pub(crate) fn with_parent(&self, depth: usize, count: usize, parent: Layer) -> Result<Self> {
        let (mut layers, mut members) = (self.layers.to_vec(), self.members.clone());
        let mut sources = self.sources.clone();
        let member = Member { is_at_rest: true, ..join(&parent, self.depths.len(), &mut sources)? };
        let replaced = depth.max(1).min(members.len())..(depth + count).min(members.len());
        for gone in members.splice(replaced.clone(), [member]) {
            forget_sources(&gone, &mut sources);
        }
        layers.splice(replaced, [parent]);
        Self::assemble(layers, members, sources, (Some(self), false), self.memory_bytes)
    }

    /// This chain with the current sizes of its layers.
    ///
    /// # Errors
    /// As [`Chain::new`].
    pub(crate) fn measured_anew(&self) -> Result<Self> {
        let mut members = self.members.clone();
        for member in &mut members {
            member.size_bytes = member.image.size_bytes();
        }
        Self::assemble(self.layers.to_vec(), members, self.sources.clone(), (Some(self), true), self.memory_bytes)
    }

    /// This chain, with the layer `id` marked as no longer written.
    ///
    /// # Errors
    /// As [`Chain::new`].
    pub(crate) fn with_at_rest(&self, id: LayerId) -> Result<Self> {
        let mut members = self.members.clone();
        members.iter_mut().filter(|member| member.id == id).for_each(|member| member.is_at_rest = true);
        Self::assemble(self.layers.to_vec(), members, self.sources.clone(), (Some(self), true), self.memory_bytes)
    }

    /// This chain, in which the top's parent takes writes, or no longer does. It is written either
    /// way, until [`Chain::with_at_rest`]. Has the current sizes of the layers, and a new map if
    /// one has changed.
    ///
    /// # Errors
    /// As [`Chain::new`].
    pub(crate) fn with_absorbing(&self, absorbs: bool) -> Result<Self> {
        let mut members = self.members.clone();
        let mut same_sizes = true;
        for member in &mut members {
            same_sizes &= member.size_bytes == member.image.size_bytes();
            member.size_bytes = member.image.size_bytes();
        }
        members.iter_mut().skip(1).take(1).for_each(|parent| parent.is_at_rest = false);
        // Words say where a layer ends.
        let before = (Some(self), same_sizes);
        let chain = Self::assemble(self.layers.to_vec(), members, self.sources.clone(), before, self.memory_bytes)?;
        Ok(Self { absorbs, ..chain })
    }

    /// This chain, in which changes are marked in `track`.
    ///
    /// # Errors
    /// As [`Chain::new`].
    pub(crate) fn with_track(&self, track: Option<Arc<View>>) -> Result<Self> {
        let (members, sources) = (self.members.clone(), self.sources.clone());
        let chain = Self::assemble(self.layers.to_vec(), members, sources, (Some(self), true), self.memory_bytes)?;
        Ok(Self { absorbs: self.absorbs, track, ..chain })
    }

    /// This chain without its top, whose parent has the path `path` now. The chain has a new map.
    ///
    /// # Errors
    /// As [`Chain::new`]; `BadOptions` if the top has no parent.
    pub(crate) fn without_top(&self, path: &Path) -> Result<Self> {
        let mut sources = self.sources.clone();
        forget_sources(self.top(), &mut sources);
        let (mut layers, members) = (self.layers[1..].to_vec(), self.members[1..].to_vec());
        layers.iter_mut().take(1).for_each(|layer| layer.path = path.to_owned());
        Self::assemble(layers, members, sources, (Some(self), false), self.memory_bytes)
    }

    fn assemble(
        layers: Vec<Layer>,
        members: Vec<Member>,
        sources: Vec<Option<Arc<dyn Store>>>,
        (before, keeps_map): (Option<&Self>, bool),
        memory_bytes: u64,
    ) -> Result<Self> {
        let (Some(top), Some(top_layer)) = (members.first(), layers.first()) else {
            return Err(DiskError::BadOptions {
                what: "a disk needs at least one image".into(),
                hint: "name the image to open".into(),
            });
        };
        if layers.len() > CHAIN_MAX {
            return Err(too_long(&top_layer.path));
        }
        let info = top.image.info();
        let geometry = Geometry {
            size_bytes: top.size_bytes,
            logical_sector_bytes: info.logical_sector_bytes,
            physical_sector_bytes: info.physical_sector_bytes,
            read_only: top.image.writer().is_none(),
        };
        let unit_bytes = members.iter().map(|member| member.block_bytes).min().unwrap_or(info.block_bytes);
        let same_units =
            |before: &&Self| before.geometry.size_bytes == geometry.size_bytes && before.map.unit_bytes() == unit_bytes;
        let map = match before.filter(|before| keeps_map && same_units(before)) {
            Some(before) => Arc::clone(&before.map),
            None => Arc::new(Map::new(geometry.size_bytes, unit_bytes, MemoryShares::of(memory_bytes).words)),
        };
        let ids = members.iter().map(|member| usize::from(member.id) + 1).max().unwrap_or(0);
        let mut depths = vec![None; ids.max(before.map_or(0, |before| before.depths.len()))];
        for (depth, member) in members.iter().enumerate() {
            depths[usize::from(member.id)] = Some(depth as u16);
        }
        // Images that were opened read-only keep no tables in memory. A former top keeps its
        // tables.
        let writers: Vec<_> = members.iter().filter_map(|member| member.image.writer()).collect();
        let tables_bytes = MemoryShares::of(memory_bytes).tables / writers.len().max(1) as u64;
        writers.iter().for_each(|writer| writer.limit_tables(tables_bytes));
        let written = members.iter().filter(|member| !member.is_at_rest).count();
        let writes_one_file = written <= 1 && members[0].stores == 1;
        Ok(Self {
            layers: layers.into(),
            members,
            depths,
            sources,
            map,
            geometry,
            writes_one_file,
            absorbs: false,
            track: before.and_then(|before| before.track.clone()),
            memory_bytes,
        })
    }

    /// The images with their paths, the top first.
    pub(crate) fn layers(&self) -> &Arc<[Layer]> {
        &self.layers
    }

    /// The images with their ids, the top first.
    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// The top image, which is the one that is written.
    #[inline]
    pub(crate) fn top(&self) -> &Member {
        &self.members[0]
    }

    /// The images that take writes: the top, and its parent while that absorbs the top.
    pub(crate) fn written(&self) -> &[Member] {
        &self.members[..if self.absorbs { 2 } else { 1 }]
    }

    /// Whether a layer takes writes.
    pub(crate) fn takes_writes(&self, id: LayerId) -> bool {
        self.written().iter().any(|member| member.id == id)
    }

    /// The image that takes writes and overwrites the bytes of this store id; `None` if none does.
    #[inline]
    pub(crate) fn written_with(&self, source: SourceId) -> Option<&Member> {
        match self.top().overwrites(source) {
            true => Some(self.top()),
            false if self.absorbs => self.members.get(1).filter(|parent| parent.overwrites(source)),
            false => None,
        }
    }

    /// Whether the layer is the lowest one.
    pub(crate) fn is_lowest(&self, id: LayerId) -> bool {
        self.members.last().is_some_and(|member| member.id == id)
    }

    /// Number of layers above the layer `id`; `None` if it left the chain.
    pub(crate) fn depth_of(&self, id: LayerId) -> Option<usize> {
        self.depths.get(usize::from(id)).copied().flatten().map(usize::from)
    }

    /// The layer with this id.
    pub(crate) fn member(&self, id: LayerId) -> Option<&Member> {
        self.members.get(self.depth_of(id)?)
    }

    /// The layer to which this store belongs.
    pub(crate) fn member_of_source(&self, source: SourceId) -> Option<&Member> {
        self.members.iter().find(|member| member.has_source(source))
    }

    /// The store with this id.
    pub(crate) fn source(&self, source: SourceId) -> Option<&Arc<dyn Store>> {
        self.sources.get(usize::from(source))?.as_ref()
    }

    /// The error for reading a damaged block.
    pub(crate) fn damage(&self, layer: LayerId, offset_bytes: u64) -> io::Error {
        match self.member(layer) {
            Some(member) => match member.image.damage(offset_bytes / member.block_bytes) {
                Ok(error) | Err(error) => error.into(),
            },
            None => io::Error::other("the layer with the damaged block has left the chain; try again"),
        }
    }

    /// The owner, by a block's state in `member`, of the byte `within_bytes` after the block's
    /// first byte. `None` if the layer has no data there; [`Owner::Lazy`] if a sector bitmap
    /// decides.
    pub(crate) fn owner_by(member: &Member, state: diskwright_image::BlockState, within_bytes: u64) -> Option<Owner> {
        use diskwright_image::BlockState;
        let layer = member.id;
        match state {
            BlockState::Absent => None,
            BlockState::Zero => Some(Owner::Zero { layer }),
            BlockState::Data { store, offset_bytes } => Some(match offset_bytes.checked_add(within_bytes) {
                Some(offset_bytes) if offset_bytes < crate::engine::map::OFFSET_LIMIT_BYTES => {
                    Owner::Data { source: member.source(store), offset_bytes }
                }
                _ => Owner::Damaged { layer },
            }),
            BlockState::Shared { store, offset_bytes } => {
                let place = Self::owner_by(member, BlockState::Data { store, offset_bytes }, within_bytes);
                Some(match place {
                    Some(Owner::Data { offset_bytes, .. }) => {
                        Owner::Data { source: member.shared_source(store), offset_bytes }
                    }
                    _ => Owner::Damaged { layer },
                })
            }
            BlockState::Partial { .. } => Some(Owner::Lazy { layer }),
            BlockState::Compressed => Some(Owner::Compressed { layer }),
            BlockState::Damaged => Some(Owner::Damaged { layer }),
        }
    }
}

/// The error for a chain that is too long.
pub(crate) fn too_long(top: &Path) -> DiskError {
    DiskError::BadChain {
        path: top.to_owned(),
        what: format!(
            "its chain of parents is longer than {CHAIN_MAX} disks; convert a disk further down the chain to a new image and build on that"
        ),
    }
}

/// Removes the stores of a layer that leaves the chain.
fn forget_sources(member: &Member, sources: &mut [Option<Arc<dyn Store>>]) {
    for source in (0..member.sources).map(|store| member.source(store)) {
        if let Some(store) = sources.get_mut(usize::from(source)) {
            *store = None;
        }
    }
}

/// Assigns ids to a layer and its stores.
fn join(layer: &Layer, id: usize, sources: &mut Vec<Option<Arc<dyn Store>>>) -> Result<Member> {
    let exhausted = || DiskError::BadChain {
        path: layer.path.clone(),
        what: "the disk has had more than 65,535 images and files since it was opened; close it and open it again"
            .into(),
    };
    let first_source = SourceId::try_from(sources.len()).map_err(|_| exhausted())?;
    let stores = layer.image.stores();
    let ids_of_store = if layer.image.shares_blocks() { 2 } else { 1 };
    for _ in 0..ids_of_store {
        sources.extend(stores.iter().map(|store| Some(Arc::clone(store))));
    }
    SourceId::try_from(sources.len()).map_err(|_| exhausted())?;
    Ok(Member {
        image: Arc::clone(&layer.image),
        id: LayerId::try_from(id).map_err(|_| exhausted())?,
        first_source,
        stores: stores.len() as u16,
        sources: (stores.len() * ids_of_store) as u16,
        size_bytes: layer.image.size_bytes(),
        block_bytes: layer.image.info().block_bytes,
        began: Arc::default(),
        is_at_rest: layer.image.writer().is_none(),
    })
}
