//! Virtual disks as cases: every format and type, with random reads, writes, zeroes, discards,
//! flushes, reopens and kills.
//!
//! A run uses the disk through its block queue, as a server would. One thread does everything, so a
//! seed reproduces the run. Concurrent writes and a `kill -9` are simulated inside the syncs of a
//! flush, where the disk holds no lock.
//!
//! A state that a power cut has left is judged in these steps:
//!
//! 1. `check` finds no corruption (leaks are allowed).
//! 2. The disk opens, and every watched sector shows what was flushed, or a later write.
//! 3. If the bytes of a VHDX have changed, its identities have changed (MS-VHDX 2.2.2.1).
//! 4. Another session writes, flushes and closes, and reads back what it wrote and what it saw.
//! 5. If asked for, the power is cut during that session too.
//!
//! A disk lies on one file, several files, a store that answers late, files by qemu-img, or an
//! image of the made-up format ([`Backing`]). Some disks change while they are in use
//! (`changes.rs`, `freezing.rs`, `absorbing.rs`, `merging.rs`, `relinks.rs`,
//! `compacting_in_use.rs`).
//!
//! `case.rs` has the values; `kinds.rs` lists the kinds; `front.rs` puts a server in between;
//! `session.rs` uses one open disk; `play.rs` runs random sessions; `faults.rs` runs the short
//! session for faults; `silence.rs` runs the one for stores that never answer.

mod absorbing;
mod backing;
mod by_qemu;
mod case;
mod changes;
mod compacting_in_use;
mod faults;
mod freezing;
mod front;
mod kinds;
mod merging;
mod play;
mod relinks;
mod session;
pub mod silence;

pub use case::{Backing, ByQemu, Changed, Changes, Damage, DiskCase, DiskTruth, Front, SessionStart};
pub use kinds::{all, named};

use crate::{
    cut::{CUT_MODES, Cutter, points},
    dice::Dice,
    history::{self, Snapshot},
    ledger::{Ledger, PARENT, Version},
    opinion::{self, Opinion},
    rule_breaker::{BrokenRule, RuleBreaker},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{CreateRequest, Disk, Layer, OpenOptions, create};
use diskwright_image::{DiskType, Format, Identities, Severity, probe};
use diskwright_store::{FileSystem, LockMode};
use session::Session;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// The headers of a VHDX, which change together with the identities.
const VHDX_HEADERS: std::ops::Range<u64> = 64 << 10..192 << 10;

/// Seed of the stores that answer late.
const LATE_SEED: u64 = 7;

impl DiskCase {
    /// The first file of the disk.
    pub fn path(&self) -> PathBuf {
        match self.backing {
            Backing::File | Backing::Late | Backing::ByQemu(_) => format!("/d/disk.{}", self.format).into(),
            Backing::Parts(_) => "/d/disk.001".into(),
            Backing::Packed => "/d/disk.table".into(),
        }
    }

    fn parent_path(&self) -> PathBuf {
        format!("/d/parent.{}", self.format).into()
    }

    fn is_child(&self) -> bool {
        self.disk_type == DiskType::Differencing
    }

    /// The version that an unwritten sector shows. A parent has data in every second 4 KiB.
    pub fn untouched(&self, sector: u64) -> Version {
        let has_parent = self.is_child() || matches!(self.backing, Backing::Packed | Backing::ByQemu(_));
        if has_parent && (sector / 8).is_multiple_of(2) { PARENT } else { 0 }
    }

    /// The ledger of a new disk.
    pub fn fresh_ledger(&self) -> Ledger {
        Ledger::new(&self.windows, |sector| self.untouched(sector))
    }

    /// Options that open the disk in a world.
    pub fn open_options(&self, world: &World, writable: bool) -> OpenOptions {
        OpenOptions {
            writable,
            engine: self.engine(),
            format: Some(self.format),
            files: world.files(),
            ..OpenOptions::default()
        }
    }

    /// Makes the disk and its parent.
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
            subformat: self.subformat.map(Into::into),
            files: world.files(),
            ..CreateRequest::default()
        }
    }

    /// Makes the disk. Its parent must exist.
    ///
    /// # Errors
    /// What went wrong.
    pub fn make_again(&self, world: &World) -> Outcome {
        match self.backing {
            Backing::File | Backing::Late => {}
            Backing::Parts(_) | Backing::Packed | Backing::ByQemu(_) => return self.make_backing(world),
        }
        let parent = self.is_child().then(|| self.parent_path());
        let request = CreateRequest { parent, ..self.request(world) };
        create(self.path(), &request).map(drop).map_err(|error| error.to_string())
    }

    /// The first half of each window, each with a version of its own.
    fn half_of_windows(&self) -> Vec<(Version, u64, u64)> {
        let windows = self.windows.iter();
        (1..).zip(windows).map(|(version, window)| (version, window.first, (window.count / 2).max(1))).collect()
    }

    /// The ledger of a new disk after [`DiskCase::fill_half`].
    pub fn half_full_ledger(&self) -> Ledger {
        let mut ledger = self.fresh_ledger();
        for (version, first, count) in self.half_of_windows() {
            let write = ledger.announce(first, count, version);
            ledger.acknowledge(write, true);
        }
        ledger
    }

    /// Writes the first half of each window, in a session of its own.
    ///
    /// # Errors
    /// What went wrong.
    pub fn fill_half(&self, world: &World) -> Outcome {
        self.fill(world, &self.half_of_windows())
    }

    /// Writes versions to ranges of sectors (version, first, count), in a session of its own.
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

    /// Writes versions (version 0: zeros) to ranges of sectors of the disk at `path`, in a session
    /// of its own.
    ///
    /// # Errors
    /// What went wrong.
    pub fn fill_at(&self, world: &World, path: &Path, writes: &[(Version, u64, u64)]) -> Outcome {
        let disk = Disk::open(path, &self.open_options(world, true)).map_err(|error| error.to_string())?;
        let mut session = Session::of(self, disk)?;
        for &(version, first, count) in writes {
            match version {
                0 => session.zero(first, count, false, false)?,
                _ => session.write(first, count, version, false)?,
            }
        }
        session.close()
    }

    /// Reads the windows of the disk at `path`.
    ///
    /// # Errors
    /// What went wrong.
    pub fn read_at(&self, world: &World, path: &Path) -> Outcome<Vec<Vec<u8>>> {
        Session::of(self, self.open_at(world, path)?)?.read_windows()
    }

    /// Opens the disk whose top is at `path` for reading.
    fn open_at(&self, world: &World, path: &Path) -> Outcome<Arc<Disk>> {
        world.answer_late(None);
        if self.backing == Backing::Packed {
            return self.open_packed(world, false);
        }
        Disk::open(path, &self.open_options(world, false)).map_err(|error| error.to_string())
    }

    /// The truth for a disk that was just made.
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
            Damage::PartialSector => store.set_len(self.size_bytes - 300),
        };
        done.map_err(|error| error.to_string())
    }

    fn open(&self, world: &World, writable: bool) -> Outcome<Session<'_>> {
        let disk = self.open_disk(world, writable)?;
        Session::through(if writable { self.front } else { Front::Queue }, self, disk)
    }

    /// Opens the disk. If it is opened for writing, the case's rule is broken.
    ///
    /// # Errors
    /// Why the disk cannot be opened.
    pub fn open_disk(&self, world: &World, writable: bool) -> Outcome<Arc<Disk>> {
        let path = self.path_of(self.top_of(world));
        world.answer_late((writable && self.backing == Backing::Late).then_some(LATE_SEED));
        if self.backing == Backing::Packed {
            return self.open_packed(world, writable).map_err(|error| format!("open failed: {error}"));
        }
        let opened = match self.broken_rule.filter(|broken_rule| writable && !broken_rule.is_in_server()) {
            None => Disk::open(&path, &self.open_options(world, writable)),
            Some(broken_rule) => self.open_broken(world, broken_rule)?,
        };
        opened.map_err(|error| format!("open failed: {error}"))
    }

    fn open_broken(&self, world: &World, broken_rule: BrokenRule) -> Outcome<diskwright_disk::Result<Arc<Disk>>> {
        let image = |path: &Path, writable: bool| {
            let lock = if writable { LockMode::Exclusive } else { LockMode::Shared };
            let options = diskwright_store::OpenOptions { writable, lock, ..diskwright_store::OpenOptions::default() };
            let store = world.open(path, &options).map_err(|error| error.to_string())?;
            probe::open(store, Some(self.format), writable, self.sector_bytes).map_err(|error| error.to_string())
        };
        let top = self.top_of(world);
        let above = Arc::new(RuleBreaker::new(image(&self.path_of(top), true)?, broken_rule));
        let mut layers = vec![Layer { path: self.path_of(top), image: above }];
        for below in (0..top).rev() {
            layers.push(Layer { path: self.path_of(below), image: image(&self.path_of(below), false)? });
        }
        if self.is_child() {
            layers.push(Layer { path: self.parent_path(), image: image(&self.parent_path(), false)? });
        }
        Ok(Disk::from_layers(layers, Vec::new()).map(Arc::new))
    }

    /// Runs our own check.
    ///
    /// # Errors
    /// The first corruption.
    pub fn check(&self, world: &World, path: &Path) -> Outcome {
        let report = match self.backing {
            // The image is checked when it is opened.
            Backing::Packed => return Ok(()),
            Backing::Parts(_) => self.check_parts(world)?,
            // A descriptor, and the file of the sectors or grains.
            Backing::File
                if self.format == Format::Vmdk && (self.disk_type == DiskType::Fixed || self.subformat.is_some()) =>
            {
                let checked = diskwright_disk::check(path, &self.open_options(world, false));
                checked.map_err(|error| format!("check failed: {error}"))?.report
            }
            Backing::File | Backing::Late | Backing::ByQemu(_) => {
                let options = diskwright_store::OpenOptions::default();
                let store = world.open(path, &options).map_err(|error| error.to_string())?;
                let checked = probe::check(store, Some(self.format));
                checked.map_err(|error| format!("check failed: {error}"))?.1
            }
        };
        // We ignore a dynamic VHD's bitmaps, but libvhdi does not.
        let is_known = |message: &str| {
            self.damage == Some(Damage::FooterCopy)
                && message.starts_with("The copy of the footer at offset 0 is damaged")
        };
        let is_bad = |severity, message: &str| {
            severity == Severity::Corrupt && !is_known(message) || message.contains("all ones")
        };
        match report.findings.iter().find(|finding| is_bad(finding.severity, &finding.message)) {
            None => Ok(()),
            Some(finding) => Err(format!("check reports at offset {}: {}", finding.offset_bytes, finding.message)),
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

    /// Judges whether the identities of a VHDX, a VMDK or a VDI have changed with its contents.
    fn judge_identities(&self, world: &World, disk: &Disk, truth: &DiskTruth, shown: &[Version]) -> Outcome {
        if self.format.driver().identities != Identities::DiskAndContents {
            return Ok(());
        }
        let start = &truth.session;
        // The top at the start of the session may have other images above it now.
        let joined = self.top_of(world).saturating_sub(start.top);
        let layers = disk.layers();
        let Some(layer) = layers.get(joined as usize) else { return Ok(()) };
        let info = layer.image.info();
        let snapshot = world.snapshot();
        let Some(file) = snapshot.file(&self.path_of(start.top)) else { return Ok(()) };
        if self.format == Format::Vhdx
            && info.file_write_id == start.file_write_id
            && let Some(at) = start.file.first_difference(file, &VHDX_HEADERS)
        {
            return Err(format!("byte {at} of the file changed, but its FileWriteGuid did not"));
        }
        if joined == 0 && info.linkage_id == start.linkage_id && shown != start.visible {
            return Err("what a guest sees changed, but the identity (DataWriteGuid, CID, uuidModify) did not".into());
        }
        Ok(())
    }

    /// Reads the disk and judges what it shows.
    fn judge_contents(&self, world: &World, truth: &DiskTruth) -> Outcome<Vec<Version>> {
        let top = self.judge_tops(world, truth)?;
        (0..=top).try_for_each(|number| self.check(world, &self.path_of(number)))?;
        self.judge_inner_snapshot(world)?;
        let mut session = self.open(world, false)?;
        self.judge_size(&session.disk, truth)?;
        self.judge_link(&session.disk, truth)?;
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
        let shown = self.judge_contents(world, truth)?;
        if !depth.resume {
            return Ok(0);
        }
        self.judge_merge(world, truth)?;
        // Another session begins here. What is visible now must not be lost.
        world.settle();
        let stage = Stage::new(world.clone());
        let mut dice = Dice::new(seed, 0x600d);
        let session = Arc::new(self.session_start(world, shown.clone())?);
        let mut next = DiskTruth { ledger: truth.ledger.settled(shown), session, changed: self.changed_now(world)? };
        // A server takes longer to start than most sessions last.
        let front = if depth.cut_again == 0 { Front::Queue } else { self.front };
        let unbroken = Self { broken_rule: None, front, ..self.clone() };
        unbroken
            .play(&stage, &mut dice, &mut next, 6, &mut 500_000)
            .map_err(|error| format!("in the session after the cut: {error}"))?;
        unbroken.judge_contents(world, &next).map_err(|error| format!("after that session was closed: {error}"))?;
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
            let mode = *dice.pick(&CUT_MODES);
            let left = cutter.state_after_cut(mode, &mut dice);
            let shallow = Depth { resume: false, cut_again: 0 };
            self.judge(&World::of(left), truth, seed, shallow).map_err(|error| {
                let tail = history::tail(&history, point);
                format!("second cut, at event {point} of the session ({mode:?}): {error}{tail}\n  first cut:")
            })?;
            again += 1;
        }
        Ok(again)
    }

    fn ask_others(&self, left: &Snapshot, truth: &DiskTruth) -> Option<Opinion> {
        // libvhdi does not replay logs and needs the tail of a VHD, so it reads the disk after we
        // have opened and closed it once.
        let world = World::of(left.clone());
        let ours = match self.judge_contents(&world, truth) {
            Ok(ours) => ours,
            Err(error) => return Some(Opinion::Disagrees(error)),
        };
        let judged = |shown: &[Vec<u8>], who: &str| match truth.ledger.judge(shown, true) {
            Ok(theirs) if theirs == ours => Opinion::Agrees,
            Ok(_) => Opinion::Disagrees(format!("{who} reads other contents than we do")),
            Err(error) => Opinion::Disagrees(format!("as {who} reads it, {error}")),
        };
        // The other programs can read one image, or a child and its parent.
        if self.top_of(&world) > 0 || self.backing == Backing::Packed || self.changes.freezes_in_use() {
            return None;
        }
        // qemu-img supports no sectors of 4096 bytes, and no VHD without the copy of its footer.
        if self.sector_bytes != 512 || self.damage.is_some() {
            return None;
        }
        // qemu-img opens only VDIs with blocks of 1 MiB.
        if self.format == Format::Vdi && self.block_bytes != Some(1 << 20) {
            return None;
        }
        if !self.is_child() && self.format != Format::Raw {
            return Some(opinion::of_qemu(left, &self.path(), self.format, &self.windows, judged));
        }
        if !self.libvhdi_safe {
            return None;
        }
        let repaired = self.open(&world, true).and_then(|mut session| {
            // Writes to the last window, so that the file is written to and its tail is repaired.
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
