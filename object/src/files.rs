//! Names of objects as paths: a file system that can only be read.
//!
//! An object is opened once in a process, however many disks use it, so its blocks are fetched
//! once. What is secret in a URL is remembered when it is first used. All paths that this file
//! system returns, and so what a child records of its parent, are without it.

use crate::{
    BLOCK_BYTES,
    answer::Version,
    cache::{
        Cache,
        map::{Identity, OBJECT_BYTES_MAX},
    },
    error::{ObjectError, Result},
    fetcher::Fetcher,
    origin::{Donor, Donors, Origin, PushedDisk},
    repository::{Digest, MAGIC, MANIFEST_BYTES_MAX, Manifest, hex},
    runtime,
    seal::{SEAL_BYTES_MAX, Seal},
    settings::Settings,
    source::Source,
    store::{ObjectStore, numbers},
    uri::{ObjectUri, Pinned, Scheme, UrlSecrets},
    wanted::Purpose,
};
use diskwright_store::{FileFacts, FileStore, FileSystem, Files, LockMode, OpenError, OpenOptions, Store};
use std::{
    collections::{HashMap, VecDeque},
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant, SystemTime},
};

/// How long the end of a program waits for the cache.
const SETTLE: Duration = Duration::from_secs(2);

/// Ranges, each of a block, that a prefetch asks for at once.
const PREFETCHED: usize = 32;

/// How names of objects begin.
pub const SCHEMES: [&str; 3] = [Scheme::S3.prefix(), Scheme::Https.prefix(), Scheme::Http.prefix()];

/// Manifests of pushed disks that stay in memory.
const MANIFESTS_MAX: usize = 16;
/// Seals that stay in memory.
const SEALS_MAX: usize = 16;

/// An object that is there.
struct Looked {
    origin: Origin,
    identity: Identity,
    modified: Option<SystemTime>,
}

/// What is shared by all stores of a version of an object.
type Open = (Identity, Weak<Fetcher>);

#[derive(Debug, Default)]
struct Known {
    secrets: HashMap<String, UrlSecrets>,
    open: Vec<Open>,
    /// Manifests that were read, by name, server and ETag.
    manifests: HashMap<[String; 3], Arc<Manifest>>,
    /// Seals that were read, by their roots.
    seals: HashMap<Digest, Arc<Seal>>,
    cache: Option<(Settings, Option<Arc<Cache>>)>,
    donors: Arc<Donors>,
}

/// Objects as a file system; see the module documentation.
#[derive(Debug)]
pub struct ObjectFiles {
    settings: Option<Settings>,
    known: Mutex<Known>,
}

impl ObjectFiles {
    /// Objects, with the settings of the environment at each open, or with these.
    pub fn new(settings: Option<Settings>) -> Self {
        Self { settings, known: Mutex::default() }
    }

    /// The objects of this process, with the settings of its environment.
    pub fn of_process() -> &'static Arc<Self> {
        static OBJECTS: LazyLock<Arc<ObjectFiles>> = LazyLock::new(|| Arc::new(ObjectFiles::new(None)));
        &OBJECTS
    }

    /// Makes the names of objects work in all file functions of the process.
    pub fn install() {
        for scheme in SCHEMES {
            Files::add_scheme(scheme, Files::new(Self::of_process().clone()));
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settings(&self) -> Result<Settings> {
        self.settings.clone().map_or_else(Settings::of_environment, Ok)
    }

    /// The name with its secrets, if they are known.
    fn uri(&self, path: &Path) -> Result<ObjectUri> {
        let uri = ObjectUri::parse(path)?;
        let name = uri.name();
        let mut known = self.known();
        if uri.secrets().is_empty() {
            return Ok(match known.secrets.get(&name) {
                Some(secrets) => uri.with_secrets(secrets.clone()),
                None => uri,
            });
        }
        known.secrets.insert(name, uri.secrets().clone());
        Ok(uri)
    }

    /// The cache of these settings. Without one blocks are fetched and not kept.
    fn cache(&self, settings: &Settings) -> Option<Arc<Cache>> {
        let mut known = self.known();
        if let Some((of, cache)) = &known.cache
            && of == settings
        {
            return cache.clone();
        }
        let cache = Cache::open(settings).unwrap_or_else(|error| {
            tracing::warn!("{error}; what is fetched is not kept");
            None
        });
        let cache = cache.map(Arc::new);
        known.cache = Some((settings.clone(), cache.clone()));
        cache
    }

    /// An object that is there now, and its version.
    fn look(&self, path: &Path) -> Result<Looked> {
        let uri = self.uri(path)?;
        let mut looked = self.look_at(uri.clone())?;
        let Some(pinned) = uri.pinned() else { return Ok(looked) };
        let Identity { etag, size_bytes, .. } = &mut looked.identity;
        if (&pinned.etag, pinned.size_bytes) != (etag, *size_bytes) {
            let version = |etag: &str, bytes: u64| format!("ETag {etag} and {bytes} bytes");
            let (found, expected) = (version(etag, *size_bytes), version(&pinned.etag, pinned.size_bytes));
            return Err(ObjectError::OtherVersion { name: uri.name(), found, expected });
        }
        if let (Some(root), Origin::Object(source, _, seal)) = (&pinned.seal, &mut looked.origin) {
            *seal = Some(self.seal(source, root, *size_bytes)?);
            // Blocks that were fetched without a seal are proved by nothing, so these are kept
            // apart.
            etag.push_str(&format!(" seal {}", hex(root)));
        }
        Ok(looked)
    }

    /// The seal of an object, with this root.
    fn seal(&self, source: &Source, root: &Digest, size_bytes: u64) -> Result<Arc<Seal>> {
        if let Some(seal) = self.known().seals.get(root) {
            return Ok(Arc::clone(seal));
        }
        let seal = Arc::new(fetch_seal(source, size_bytes)?);
        if seal.root() != *root {
            let what = format!("its seal is {}, expected {}", hex(&seal.root()), hex(root));
            return Err(ObjectError::BrokenSeal { name: source.name().to_owned(), what });
        }
        let mut known = self.known();
        if known.seals.len() >= SEALS_MAX {
            known.seals.clear();
        }
        known.seals.insert(*root, Arc::clone(&seal));
        Ok(seal)
    }

    fn look_at(&self, uri: ObjectUri) -> Result<Looked> {
        let settings = self.settings()?;
        let source = Source::new(uri, &settings)?;
        let name = source.name().to_owned();
        let asked = async move { source.version().await.map(|found| (source, found)) };
        let failed = |source| ObjectError::local("start a thread for", Path::new(&name), source);
        let (source, (version, start)) = runtime::wait_for(asked).map_err(failed)??;
        if version.size_bytes > OBJECT_BYTES_MAX {
            let what = format!("the object has {} bytes, and more than 64 TiB are not supported", version.size_bytes);
            return Err(ObjectError::Unsuitable { name, what });
        }
        let (server, modified) = (source.server().to_owned(), version.modified);
        if start.starts_with(MAGIC) {
            let (source, manifest) = self.manifest(source, version)?;
            let etag = format!("contents:{}", hex(&manifest.contents_id()));
            let identity = Identity { name, server, etag, size_bytes: manifest.facts().size_bytes };
            let origin = Origin::Pushed(PushedDisk { source, manifest, donors: Arc::clone(&self.known().donors) });
            return Ok(Looked { origin, identity, modified });
        }
        let identity = Identity { name, server, etag: version.etag.clone(), size_bytes: version.size_bytes };
        Ok(Looked { origin: Origin::Object(source, version, None), identity, modified })
    }

    /// The manifest of a pushed disk.
    fn manifest(&self, source: Source, version: Version) -> Result<(Source, Arc<Manifest>)> {
        let name = source.name().to_owned();
        let key = [name.clone(), source.server().to_owned(), version.etag.clone()];
        if let Some(manifest) = self.known().manifests.get(&key) {
            return Ok((source, Arc::clone(manifest)));
        }
        let damaged = |what| ObjectError::Damaged { name: name.clone(), what };
        if version.size_bytes > MANIFEST_BYTES_MAX {
            return Err(damaged(format!("the manifest has {} bytes, more than any disk needs", version.size_bytes)));
        }
        let got = async move {
            let mut bytes = Vec::new();
            source.get(0..version.size_bytes, &version, &mut bytes).await.map(|()| (source, bytes))
        };
        let failed = |source| ObjectError::local("start a thread for", Path::new(&name), source);
        let (source, bytes) = runtime::wait_for(got).map_err(failed)??;
        let manifest = Arc::new(Manifest::of_bytes(&bytes).map_err(damaged)?);
        let mut known = self.known();
        if known.manifests.len() >= MANIFESTS_MAX {
            known.manifests.clear();
        }
        known.manifests.insert(key, Arc::clone(&manifest));
        Ok((source, manifest))
    }

    /// Pushed disks that are opened from now on read what these disks have at the same place from
    /// them, and do not fetch it. Every chunk is compared with its digest.
    pub fn reuse(&self, donors: Vec<Donor>) -> Arc<Donors> {
        let donors = Arc::new(Donors::new(donors));
        self.known().donors = Arc::clone(&donors);
        donors
    }

    /// Opens an object.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub fn open_object(&self, path: &Path, options: &OpenOptions) -> Result<ObjectStore> {
        if options.writable {
            return Err(ObjectError::ReadOnly { name: self.uri(path)?.name() });
        }
        let settings = self.settings()?;
        let Looked { origin, identity, .. } = self.look(path)?;
        let failed = |doing| move |source| ObjectError::local(doing, path, source);
        let runtime = runtime::handle().map_err(failed("start a thread for"))?;
        let cache = self.cache(&settings);
        let mut known = self.known();
        known.open.retain(|(_, fetcher)| fetcher.strong_count() > 0);
        let open = known.open.iter().find(|(open, _)| *open == identity).and_then(|(_, fetcher)| fetcher.upgrade());
        let fetcher = open.unwrap_or_else(|| {
            let kept = cache.and_then(|cache| match cache.entry(&identity) {
                Ok(entry) => Some((cache, entry)),
                Err(error) => {
                    let folder = cache.folder().display();
                    tracing::warn!("{folder}: the cache cannot be used, so nothing is kept: {error}");
                    None
                }
            });
            let fetcher = Fetcher::start(&runtime, origin, kept);
            known.open.push((identity.clone(), Arc::downgrade(&fetcher)));
            fetcher
        });
        drop(known);
        let data = fetcher.kept.as_ref().map(|(_, entry)| {
            let options = OpenOptions { cache: options.cache, lock: LockMode::None, ..OpenOptions::default() };
            FileStore::open(entry.data_path(), &options).map(|store| Arc::new(store) as Arc<dyn Store>)
        });
        let data = data.transpose().map_err(io::Error::other).map_err(failed("open the cache of"))?;
        ObjectStore::new(fetcher, &identity, data, runtime).map_err(failed("open"))
    }

    /// Waits, but not for long, until what was fetched is in the cache: for the end of a program.
    pub fn settle(&self) {
        let deadline = Instant::now() + SETTLE;
        let open: Vec<_> = self.known().open.iter().filter_map(|(_, fetcher)| fetcher.upgrade()).collect();
        open.iter().for_each(|fetcher| fetcher.settle(deadline));
    }

    /// Brings ranges of an object into the cache, or all of it. Of a block of which ranges are
    /// wanted, only their units of 64 KiB are fetched. Sealed images and pushed disks are fetched
    /// in whole blocks, because their digests are of blocks. `progress` gets the bytes that are
    /// done and those of all, and returns whether to go on. Returns whether it has ended by itself.
    ///
    /// # Errors
    /// As [`ObjectFiles::open_object`]; [`ObjectError::Local`] without a cache.
    pub fn prefetch(
        &self,
        path: &Path,
        ranges: Option<Vec<Range<u64>>>,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<bool> {
        let store = self.open_object(path, &OpenOptions::default())?;
        if store.placement().is_none() {
            let source = io::Error::new(io::ErrorKind::NotFound, "there is no cache that can be written");
            return Err(ObjectError::local("keep blocks of", store.name(), source));
        }
        let size_bytes = store.size_bytes();
        let purpose = if ranges.is_some() { Purpose::Units } else { Purpose::Blocks };
        let ranges = ranges.unwrap_or_else(|| std::iter::once(0..size_bytes).collect());
        let within = |range: Range<u64>| range.start.min(size_bytes)..range.end.min(size_bytes);
        let ranges: Vec<Range<u64>> = ranges.into_iter().map(within).filter(|range| !range.is_empty()).collect();
        let total_bytes = ranges.iter().map(|range| range.end - range.start).sum();
        let mut pieces = ranges.into_iter().flat_map(by_block);
        let (mut asked, mut done_bytes) = (VecDeque::new(), 0);
        loop {
            asked.extend(pieces.by_ref().take(PREFETCHED - asked.len()).map(|piece| store.request(piece, purpose)));
            let Some(first) = asked.pop_front() else { break };
            if !progress(done_bytes, total_bytes) {
                return Ok(false);
            }
            done_bytes += first.bytes()?.len() as u64;
        }
        store.wait_until_kept();
        progress(done_bytes, total_bytes);
        Ok(true)
    }
}

/// The parts of a range that lie in one block each.
fn by_block(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    (range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES)).map(move |block| {
        let at_bytes = block * BLOCK_BYTES;
        range.start.max(at_bytes)..range.end.min(at_bytes + BLOCK_BYTES)
    })
}

/// The seal that lies beside an object of this size.
fn fetch_seal(object: &Source, size_bytes: u64) -> Result<Seal> {
    let source = object.seal()?;
    let name = source.name().to_owned();
    let got = async move {
        let mut bytes = Vec::new();
        source.get_start(SEAL_BYTES_MAX, &mut bytes).await.map(|version| (version, bytes))
    };
    let failed = |source| ObjectError::local("start a thread for", Path::new(&name), source);
    let (version, bytes) = runtime::wait_for(got).map_err(failed)??;
    let broken = |what| ObjectError::BrokenSeal { name: name.clone(), what };
    if version.size_bytes != bytes.len() as u64 {
        return Err(broken(format!("it has {} bytes, more than any seal has", version.size_bytes)));
    }
    let seal = Seal::of_bytes(&bytes).map_err(broken)?;
    if seal.size_bytes() != size_bytes {
        return Err(broken(format!("it is of an image of {} bytes, and this one has {size_bytes}", seal.size_bytes())));
    }
    Ok(seal)
}

fn refused(path: &Path) -> io::Error {
    ObjectError::ReadOnly { name: crate::uri::shown(path) }.into()
}

impl FileSystem for ObjectFiles {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        match self.open_object(path, options) {
            Ok(store) => Ok(Arc::new(store)),
            Err(error) => {
                let name = crate::uri::shown(path);
                // The name comes first in the whole sentence.
                let said = error.to_string();
                let why = said.strip_prefix(&format!("{name}: ")).unwrap_or(&said).to_owned();
                let source = io::Error::new(error.kind(), why);
                Err(OpenError::Io { doing: "open", path: name.into(), source })
            }
        }
    }

    fn rename(&self, _from: &Path, to: &Path, _replace: bool) -> io::Result<()> {
        Err(refused(to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        Err(refused(path))
    }

    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        Err(refused(path))
    }

    fn check_names_in(&self, directory: &Path) -> io::Result<()> {
        Err(refused(directory))
    }

    /// Without asking the server: names of folders have no objects, and links do not exist.
    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        Ok(self.uri(path)?.canonical().into())
    }

    fn name_of_version(&self, path: &Path) -> io::Result<PathBuf> {
        let uri = self.uri(path)?;
        let Looked { origin, identity: Identity { etag, size_bytes, .. }, .. } = self.look(path)?;
        if uri.pinned().is_some_and(|pinned| pinned.seal.is_some()) {
            return Ok(uri.canonical().into());
        }
        let seal = match &origin {
            Origin::Object(source, ..) => match fetch_seal(source, size_bytes) {
                Ok(seal) => Some(seal.root()),
                // Amazon denies what is missing to those who may not list the bucket.
                Err(ObjectError::Missing { .. } | ObjectError::Denied { .. } | ObjectError::Unsuitable { .. }) => None,
                Err(error) => return Err(error.into()),
            },
            Origin::Pushed(_) => None,
        };
        Ok(uri.of_version(&Pinned { etag, size_bytes, seal }).into())
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        let Looked { identity, modified, .. } = self.look(path)?;
        Ok(FileFacts { identity: numbers(&identity), modified })
    }

    /// None: what else is in a bucket does not matter to an object that cannot be written.
    fn list(&self, _directory: &Path) -> io::Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }
}
