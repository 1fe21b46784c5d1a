//! Virtual disks as a case: every format and type, under random reads, writes, zeroes, discards,
//! flushes, reopenings and kills.
//!
//! A run drives the disk through its block queue, as a server would, by one thread, so that a seed
//! repeats; what other threads would do is done inside the syncs of a flush, where the disk holds
//! no lock: writes that arrive in the middle of it, and a `kill -9`.
//!
//! Judging a state that a cut has left:
//!
//! 1. `check` finds nothing corrupt (leaks are allowed);
//! 2. it opens, and every watched sector shows what was flushed, or something that was written to
//!    it since;
//! 3. the identities of a VHDX have changed if its bytes have (MS-VHDX 2.2.2.1);
//! 4. it goes on: another session writes, flushes and closes, and finds again what it wrote and
//!    what it saw;
//! 5. where asked for, that session's power is cut too.
//!
//! What lies under a disk is a file, several, a store that answers late, or an image of no format
//! ([`Beneath`]); and some change while they are in use (`changes.rs`).
//!
//! `kinds.rs` lists what is tried; `front.rs` puts a server between; `session.rs` drives one open
//! disk; `play.rs` makes the random sessions; `faults.rs` the short one in which every operation
//! fails once.

mod beneath;
mod changes;
mod faults;
mod front;
mod kinds;
mod play;
mod session;
pub mod silence;

pub use beneath::Beneath;
pub use changes::{Changed, Changes};
pub use front::Front;
pub use kinds::{all, named};

use crate::{
    contents::Contents,
    cut::{Cutter, WAYS, points},
    dice::Dice,
    history::{self, Snapshot},
    ledger::{Ledger, PARENT, Version, Window},
    meddler::{Meddler, Meddling},
    opinion::{self, Opinion},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{CreateRequest, Disk, Layer, OpenOptions, create};
use diskwright_image::{DiskType, Format, Severity, probe};
use diskwright_store::{FileSystem, LockMode};
use session::Session;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};
use uuid::Uuid;

/// The headers of a VHDX, which change when the identities do.
const VHDX_HEADERS: std::ops::Range<u64> = 64 << 10..192 << 10;

/// By which stores answer late.
const LATE_SEED: u64 = 7;

/// Damage that is there before a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// A VHD's copy of the footer is gone.
    FooterCopy,
    /// A raw file ends within a sector.
    Ragged,
}

/// A kind of disk.
#[derive(Debug, Clone)]
pub struct DiskCase {
    /// For messages.
    pub name: &'static str,
    /// Its format.
    pub format: Format,
    /// Its type.
    pub disk_type: DiskType,
    /// Payload block, where it has some.
    pub block_bytes: Option<u32>,
    /// Logical sector.
    pub sector_bytes: u32,
    /// Virtual size.
    pub size_bytes: u64,
    /// What is written and looked at: whole blocks, best.
    pub windows: Vec<Window>,
    /// Only what libvhdi is known to read rightly: writes in eights of sectors.
    pub gentle: bool,
    /// Long sessions in which blocks are given up and used again.
    pub churns: bool,
    /// What is wrong from the start.
    pub damage: Option<Damage>,
    /// What lies under it.
    pub beneath: Beneath,
    /// How it changes while it is in use.
    pub changes: Changes,
    /// Whether all of it is discarded now and then, in several stages.
    pub sweeps: bool,
    /// Through what it is driven when it is written to.
    pub front: Front,
    /// Steps of a run.
    pub steps: u64,
    /// Rules that are broken between the disk and its image.
    pub meddling: Option<Meddling>,
}

/// What is known of a file when a session begins.
#[derive(Debug)]
pub struct SessionStart {
    /// The image that was the top: see [`DiskCase::path_of`].
    top: u32,
    file: Contents,
    file_write_id: Option<Uuid>,
    linkage_id: Option<Uuid>,
    visible: Vec<Version>,
}

impl SessionStart {
    /// Where not everything that is seen is durable, a cut may leave an earlier state, of which
    /// nothing is known here.
    fn without_identities(self) -> Self {
        Self { file_write_id: None, linkage_id: None, ..self }
    }
}

/// What the user of a disk may count on.
#[derive(Debug, Clone)]
pub struct DiskTruth {
    ledger: Ledger,
    session: Arc<SessionStart>,
    changed: Changed,
}

impl DiskCase {
    /// The file of the disk, as it is made.
    pub fn path(&self) -> PathBuf {
        match self.beneath {
            Beneath::File | Beneath::Late => format!("/d/disk.{}", self.format).into(),
            Beneath::Parts(_) => "/d/disk.001".into(),
            Beneath::Packed => "/d/disk.table".into(),
        }
    }

    fn parent_path(&self) -> PathBuf {
        format!("/d/parent.{}", self.format).into()
    }

    fn is_child(&self) -> bool {
        self.disk_type == DiskType::Differencing
    }

    /// What an untouched sector shows. A parent holds something in every other 4 KiB.
    pub fn untouched(&self, sector: u64) -> Version {
        let has_parent = self.is_child() || self.beneath == Beneath::Packed;
        if has_parent && (sector / 8).is_multiple_of(2) { PARENT } else { 0 }
    }

    /// What a new disk shows.
    pub fn fresh_ledger(&self) -> Ledger {
        Ledger::new(&self.windows, |sector| self.untouched(sector))
    }

    /// How to open it on a world.
    pub fn open_options(&self, world: &World, writable: bool) -> OpenOptions {
        OpenOptions {
            writable,
            engine: self.engine(),
            format: Some(self.format),
            files: world.files(),
            ..OpenOptions::default()
        }
    }

    /// Makes the disk, its parent included.
    ///
    /// # Errors
    /// What went wrong.
    pub fn make(&self, world: &World) -> Outcome {
        if self.is_child() {
            let request = CreateRequest { disk_type: Some(DiskType::Dynamic), ..self.request(world) };
            create(self.parent_path(), &request).map_err(|error| error.to_string())?;
            let parent =
                Disk::open(self.parent_path(), &self.open_options(world, true)).map_err(|error| error.to_string())?;
            let mut session = Session::of(self, parent)?;
            for window in &self.windows {
                for sector in (window.first..window.first + window.count).step_by(16) {
                    session.write(sector, 8, PARENT, false)?;
                }
            }
            session.close()?;
        }
        self.make_again(world)
    }

    fn request(&self, world: &World) -> CreateRequest {
        CreateRequest {
            size_bytes: Some(self.size_at_first()),
            format: Some(self.format),
            disk_type: Some(self.disk_type),
            block_bytes: self.block_bytes,
            logical_sector_bytes: Some(self.sector_bytes),
            files: world.files(),
            ..CreateRequest::default()
        }
    }

    /// Makes the disk, where its parent is already.
    ///
    /// # Errors
    /// What went wrong.
    pub fn make_again(&self, world: &World) -> Outcome {
        match self.beneath {
            Beneath::File | Beneath::Late => {}
            Beneath::Parts(_) | Beneath::Packed => return self.make_beneath(world),
        }
        let parent = self.is_child().then(|| self.parent_path());
        let request = CreateRequest { parent, ..self.request(world) };
        create(self.path(), &request).map(drop).map_err(|error| error.to_string())
    }

    /// Writes versions to ranges of sectors, in a session of its own.
    ///
    /// # Errors
    /// What went wrong.
    pub fn fill(&self, world: &World, writes: &[(Version, u64, u64)]) -> Outcome {
        let mut session = self.open(world, true)?;
        for &(version, first, count) in writes {
            session.write(first, count, version, false)?;
        }
        session.close()
    }

    /// What the windows of a disk at `path` show.
    ///
    /// # Errors
    /// What went wrong.
    pub fn read_at(&self, world: &World, path: &Path) -> Outcome<Vec<Vec<u8>>> {
        Session::of(self, self.open_at(world, path)?)?.read_windows()
    }

    /// Opens the disk whose top is at `path`, for reading.
    fn open_at(&self, world: &World, path: &Path) -> Outcome<Arc<Disk>> {
        world.answer_late(None);
        if self.beneath == Beneath::Packed {
            return self.open_packed(world, false);
        }
        Disk::open(path, &self.open_options(world, false)).map_err(|error| error.to_string())
    }

    /// What the user of a disk may count on that has just been made.
    ///
    /// # Errors
    /// What went wrong.
    pub fn new_truth(&self, world: &World) -> Outcome<DiskTruth> {
        let ledger = self.fresh_ledger();
        let visible = ledger.judge(&self.read_at(world, &self.path())?, false)?;
        let session = Arc::new(self.session_start(world, visible)?);
        Ok(DiskTruth { ledger, session, changed: Changed::not_yet(self) })
    }

    fn do_damage(&self, world: &World) -> Outcome {
        let Some(damage) = self.damage else { return Ok(()) };
        let options = diskwright_store::OpenOptions { writable: true, ..diskwright_store::OpenOptions::default() };
        let store = world.open(&self.path(), &options).map_err(|error| error.to_string())?;
        let done = match damage {
            Damage::FooterCopy => store.write_at(&[0xaa; 512], 0),
            Damage::Ragged => store.set_len(self.size_bytes - 300),
        };
        done.map_err(|error| error.to_string())
    }

    fn open(&self, world: &World, writable: bool) -> Outcome<Session<'_>> {
        let disk = self.open_disk(world, writable)?;
        Session::through(if writable { self.front } else { Front::Queue }, self, disk)
    }

    /// Opens the disk; for writing, with the rules broken that are to be.
    ///
    /// # Errors
    /// Why it does not open.
    pub fn open_disk(&self, world: &World, writable: bool) -> Outcome<Arc<Disk>> {
        let path = self.path_of(self.top_of(world));
        world.answer_late((writable && self.beneath == Beneath::Late).then_some(LATE_SEED));
        if self.beneath == Beneath::Packed {
            return self.open_packed(world, writable).map_err(|error| format!("it does not open: {error}"));
        }
        let opened = match self.meddling.filter(|meddling| writable && !meddling.is_of_server()) {
            None => Disk::open(&path, &self.open_options(world, writable)),
            Some(meddling) => self.open_meddled(world, meddling)?,
        };
        opened.map_err(|error| format!("it does not open: {error}"))
    }

    fn open_meddled(&self, world: &World, meddling: Meddling) -> Outcome<diskwright_disk::Result<Arc<Disk>>> {
        let image = |path: &Path, writable: bool| {
            let lock = if writable { LockMode::Exclusive } else { LockMode::Shared };
            let options = diskwright_store::OpenOptions { writable, lock, ..diskwright_store::OpenOptions::default() };
            let store = world.open(path, &options).map_err(|error| error.to_string())?;
            probe::open(store, Some(self.format), writable, self.sector_bytes).map_err(|error| error.to_string())
        };
        let top = self.top_of(world);
        let above = Arc::new(Meddler::new(image(&self.path_of(top), true)?, meddling));
        let mut layers = vec![Layer { path: self.path_of(top), image: above }];
        for below in (0..top).rev() {
            layers.push(Layer { path: self.path_of(below), image: image(&self.path_of(below), false)? });
        }
        if self.is_child() {
            layers.push(Layer { path: self.parent_path(), image: image(&self.parent_path(), false)? });
        }
        Ok(Disk::from_layers(layers, Vec::new()).map(Arc::new))
    }

    /// Nothing corrupt, by our own check.
    ///
    /// # Errors
    /// What it found.
    pub fn check(&self, world: &World, path: &Path) -> Outcome {
        let report = match self.beneath {
            // It is checked when it is opened.
            Beneath::Packed => return Ok(()),
            Beneath::Parts(_) => self.check_parts(world)?,
            Beneath::File | Beneath::Late => {
                let options = diskwright_store::OpenOptions::default();
                let store = world.open(path, &options).map_err(|error| error.to_string())?;
                let checked = probe::check(store, Some(self.format));
                checked.map_err(|error| format!("it cannot be checked: {error}"))?.1
            }
        };
        // A dynamic VHD's bitmap does not matter to us, but to libvhdi.
        let is_known = |message: &str| {
            self.damage == Some(Damage::FooterCopy)
                && message.starts_with("The copy of the footer at offset 0 is damaged")
        };
        let is_bad = |severity, message: &str| {
            severity == Severity::Corrupt && !is_known(message) || message.contains("all ones")
        };
        match report.findings.iter().find(|finding| is_bad(finding.severity, &finding.message)) {
            None => Ok(()),
            Some(finding) => Err(format!("check finds at {}: {}", finding.offset_bytes, finding.message)),
        }
    }

    fn session_start(&self, world: &World, visible: Vec<Version>) -> Outcome<SessionStart> {
        let top = self.top_of(world);
        let file = world.snapshot().file(&self.path_of(top)).cloned().unwrap_or_default();
        let disk = self.open_at(world, &self.path_of(top))?;
        let layers = disk.layers();
        let info = layers[0].image.info();
        Ok(SessionStart { top, file, file_write_id: info.file_write_id, linkage_id: info.linkage_id, visible })
    }

    /// The identities of a VHDX tell of every change.
    fn judge_identities(&self, world: &World, disk: &Disk, truth: &DiskTruth, shown: &[Version]) -> Outcome {
        if self.format != Format::Vhdx {
            return Ok(());
        }
        let start = &truth.session;
        // An image that has joined since is not the one that was the top.
        let joined = self.top_of(world).saturating_sub(start.top);
        let layers = disk.layers();
        let Some(layer) = layers.get(joined as usize) else { return Ok(()) };
        let info = layer.image.info();
        let snapshot = world.snapshot();
        let Some(file) = snapshot.file(&self.path_of(start.top)) else { return Ok(()) };
        if info.file_write_id == start.file_write_id
            && let Some(at) = start.file.first_difference(file, &VHDX_HEADERS)
        {
            return Err(format!("byte {at} of the file changed, but its FileWriteGuid did not"));
        }
        if joined == 0 && info.linkage_id == start.linkage_id && shown != start.visible {
            return Err("what a guest sees changed, but the DataWriteGuid did not".into());
        }
        Ok(())
    }

    /// What the disk shows, and whether that may be.
    fn look(&self, world: &World, truth: &DiskTruth) -> Outcome<Vec<Version>> {
        let top = self.judge_tops(world, truth)?;
        (0..=top).try_for_each(|number| self.check(world, &self.path_of(number)))?;
        let mut session = self.open(world, false)?;
        self.judge_size(&session.disk, truth)?;
        let shown = session.read_windows()?;
        let versions = truth.ledger.judge(&shown, true)?;
        self.judge_identities(world, &session.disk, truth, &versions)?;
        Ok(versions)
    }
}

impl Case for DiskCase {
    type Truth = DiskTruth;

    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.make(world)?;
        self.do_damage(world)
    }

    fn run(&self, stage: &Stage<DiskTruth>, seed: u64) -> Outcome {
        let mut truth = self.new_truth(&stage.world)?;
        self.play(stage, &mut Dice::new(seed, 0x57e9), &mut truth, self.steps, &mut 0)
    }

    fn judge(&self, world: &World, truth: &DiskTruth, seed: u64, depth: Depth) -> Outcome<u64> {
        let shown = self.look(world, truth)?;
        if !depth.go_on {
            return Ok(0);
        }
        // It goes on from here, and nothing that is seen now is lost.
        world.settle();
        let stage = Stage::new(world.clone());
        let mut dice = Dice::new(seed, 0x600d);
        let session = Arc::new(self.session_start(world, shown.clone())?);
        let mut next = DiskTruth { ledger: truth.ledger.settled(shown), session, changed: self.changed_now(world)? };
        // A server takes longer to start than most sessions last.
        let front = if depth.cut_again == 0 { Front::Queue } else { self.front };
        let unmeddled = Self { meddling: None, front, ..self.clone() };
        unmeddled
            .play(&stage, &mut dice, &mut next, 6, &mut 500_000)
            .map_err(|error| format!("going on after the cut: {error}"))?;
        unmeddled.look(world, &next).map_err(|error| format!("after going on and closing: {error}"))?;
        if depth.cut_again == 0 {
            return Ok(0);
        }
        let (start, history) = world.history();
        let truths = stage.truths();
        let mut again = 0;
        let places: Vec<usize> = points(&history, &mut dice).into_iter().collect();
        let mut chosen: Vec<usize> = (0..depth.cut_again).map(|_| *dice.pick(&places)).collect();
        chosen.sort_unstable();
        let mut cutter = Cutter::new(start, &history, seed);
        for point in chosen {
            while cutter.at() < point {
                cutter.step();
            }
            let Some(truth) = cutter.truth.and_then(|number| truths.get(number)) else { continue };
            let way = *dice.pick(&WAYS);
            let left = cutter.ruin(way, &mut dice);
            let shallow = Depth { go_on: false, cut_again: 0 };
            self.judge(&World::of(left), truth, seed, shallow).map_err(|error| {
                let tail = history::tail(&history, point);
                format!("cut a second time, at event {point} ({way:?}) of going on: {error}{tail}\n  first cut:")
            })?;
            again += 1;
        }
        Ok(again)
    }

    fn ask_others(&self, left: &Snapshot, truth: &DiskTruth) -> Option<Opinion> {
        // libvhdi knows no log, and needs the tail of a VHD: so it is asked when we have opened and
        // closed the disk once.
        let world = World::of(left.clone());
        let ours = match self.look(&world, truth) {
            Ok(ours) => ours,
            Err(error) => return Some(Opinion::Disagrees(error)),
        };
        let judged = |shown: &[Vec<u8>], who: &str| match truth.ledger.judge(shown, true) {
            Ok(theirs) if theirs == ours => Opinion::Agrees,
            Ok(_) => Opinion::Disagrees(format!("{who} reads something else than we do")),
            Err(error) => Opinion::Disagrees(format!("as {who} reads it, {error}")),
        };
        // Their programs are asked about one image, and about a child and its parent.
        if self.top_of(&world) > 0 || self.beneath == Beneath::Packed {
            return None;
        }
        // qemu-img knows no sectors of 4096 bytes, and no VHD without the copy of its footer.
        if self.sector_bytes != 512 || self.damage.is_some() {
            return None;
        }
        if !self.is_child() && self.format != Format::Raw {
            return Some(opinion::of_qemu(left, &self.path(), self.format, &self.windows, judged));
        }
        if !self.gentle {
            return None;
        }
        let repaired = self.open(&world, true).and_then(|mut session| {
            // Something new in the last window, so that the file is written to and its tail put
            // right.
            let window = self.windows[self.windows.len() - 1];
            session.write(window.first, 8, 900_000, false)?;
            session.close()
        });
        if let Err(error) = repaired {
            return Some(Opinion::Disagrees(error));
        }
        let mut expected = truth.ledger.settled(ours.clone());
        let last = self.windows[self.windows.len() - 1];
        let write = expected.announce(last.first, 8, 900_000);
        expected.acknowledge(write, false);
        let judged = |shown: &[Vec<u8>], who: &str| match expected.judge(shown, false) {
            Ok(_) => Opinion::Agrees,
            Err(error) => Opinion::Disagrees(format!("as {who} reads it, {error}")),
        };
        Some(opinion::of_libvhdi(&world.snapshot(), &[self.parent_path(), self.path()], &self.windows, judged))
    }
}
