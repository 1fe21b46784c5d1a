//! Virtual disks as a case: every format and type, under random reads, writes, zeroes, discards, flushes, reopenings and kills.
//!
//! A run drives the disk through its block queue, as a server would, by one thread, so that a seed repeats; what other threads would do
//! is done inside the syncs of a flush, where the disk holds no lock: writes that arrive in the middle of it, and a `kill -9`.
//!
//! Judging a state that a cut has left:
//!
//! 1. `check` finds nothing corrupt (leaks are allowed);
//! 2. it opens, and every watched sector shows what was flushed, or something that was written to it since;
//! 3. the identities of a VHDX have changed if its bytes have (MS-VHDX 2.2.2.1);
//! 4. it goes on: another session writes, flushes and closes, and finds again what it wrote and what it saw;
//! 5. where asked for, that session's power is cut too.

use crate::{
    contents::{Contents, SECTOR_BYTES},
    cut::{Cutter, WAYS, points},
    dice::Dice,
    faulty::{FaultyCase, Told},
    history::{self, Snapshot},
    ledger::{Ledger, PARENT, Version, Window, stamp},
    meddler::{Meddler, Meddling},
    mutation::Phase,
    opinion::{self, Opinion},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{CreateRequest, Disk, Layer, OpenOptions, create};
use diskwright_image::{DiskType, Format, Severity, probe};
use diskwright_store::{
    BlockDevice, BlockQueue, Completion, EngineKind, FileSystem, IoBuf, LockMode, Operation, QueueOptions, Request,
};
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};
use uuid::Uuid;

/// The headers of a VHDX, which change when the identities do.
const VHDX_HEADERS: std::ops::Range<u64> = 64 << 10..192 << 10;

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
    /// What is wrong from the start.
    pub damage: Option<Damage>,
    /// Steps of a run.
    pub steps: u64,
    /// Rules that are broken between the disk and its image.
    pub meddling: Option<Meddling>,
}

/// What is known of a file when a session begins.
#[derive(Debug)]
pub struct SessionStart {
    file: Contents,
    file_write_id: Option<Uuid>,
    linkage_id: Option<Uuid>,
    visible: Vec<Version>,
}

impl SessionStart {
    /// Where not everything that is seen is durable, a cut may leave an earlier state, of which nothing is known here.
    fn without_identities(self) -> Self {
        Self { file_write_id: None, linkage_id: None, ..self }
    }
}

/// What the user of a disk may count on.
#[derive(Debug, Clone)]
pub struct DiskTruth {
    ledger: Ledger,
    session: Arc<SessionStart>,
}

/// A disk that is driven.
struct Session<'a> {
    case: &'a DiskCase,
    disk: Arc<Disk>,
    queue: Option<Box<dyn BlockQueue>>,
    buf: Option<IoBuf>,
    done: Vec<Completion>,
    has_written: bool,
}

/// Runs one request to its end.
fn carry_out(queue: &mut dyn BlockQueue, done: &mut Vec<Completion>, request: Request) -> (Option<IoBuf>, Outcome) {
    if let Err(refused) = queue.push(request) {
        return (refused.request.buf, Err(refused.reason.to_string()));
    }
    if let Err(error) = queue.reap(1, done) {
        return (None, Err(error.to_string()));
    }
    match done.pop() {
        Some(completion) => (completion.buf, completion.result.map_err(|error| error.to_string())),
        None => (None, Err("the queue ended no request".into())),
    }
}

impl DiskCase {
    /// The file of the disk.
    pub fn path(&self) -> PathBuf {
        format!("/d/disk.{}", self.format).into()
    }

    fn parent_path(&self) -> PathBuf {
        format!("/d/parent.{}", self.format).into()
    }

    fn is_child(&self) -> bool {
        self.disk_type == DiskType::Differencing
    }

    /// What an untouched sector shows. A parent holds something in every other 4 KiB.
    fn untouched(&self, sector: u64) -> Version {
        if self.is_child() && sector / 8 % 2 == 0 { PARENT } else { 0 }
    }

    /// What a new disk shows.
    pub fn fresh_ledger(&self) -> Ledger {
        Ledger::new(&self.windows, |sector| self.untouched(sector))
    }

    /// How to open it on a world.
    pub fn open_options(&self, world: &World, writable: bool) -> OpenOptions {
        OpenOptions {
            writable,
            engine: EngineKind::Sync,
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
            size_bytes: Some(self.size_bytes),
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
        let parent = self.is_child().then(|| self.parent_path());
        let request = CreateRequest { parent, ..self.request(world) };
        create(self.path(), &request).map_err(|error| error.to_string())
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
        let disk = Disk::open(path, &self.open_options(world, false)).map_err(|error| error.to_string())?;
        Session::of(self, disk)?.read_windows()
    }

    /// What the user of a disk may count on that has just been made.
    ///
    /// # Errors
    /// What went wrong.
    pub fn new_truth(&self, world: &World) -> Outcome<DiskTruth> {
        let ledger = self.fresh_ledger();
        let visible = ledger.judge(&self.read_at(world, &self.path())?, false)?;
        let session = Arc::new(self.session_start(world, visible)?);
        Ok(DiskTruth { ledger, session })
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
        let path = self.path();
        let opened = match self.meddling.filter(|_| writable) {
            None => Disk::open(&path, &self.open_options(world, writable)),
            Some(meddling) => self.open_meddled(world, meddling)?,
        };
        Session::of(self, opened.map_err(|error| format!("it does not open: {error}"))?)
    }

    fn open_meddled(&self, world: &World, meddling: Meddling) -> Outcome<diskwright_disk::Result<Arc<Disk>>> {
        let image = |path: &Path, writable: bool| {
            let lock = if writable { LockMode::Exclusive } else { LockMode::Shared };
            let options = diskwright_store::OpenOptions { writable, lock, ..diskwright_store::OpenOptions::default() };
            let store = world.open(path, &options).map_err(|error| error.to_string())?;
            probe::open(store, Some(self.format), writable, self.sector_bytes).map_err(|error| error.to_string())
        };
        let top = Arc::new(Meddler::new(image(&self.path(), true)?, meddling));
        let mut layers = vec![Layer { path: self.path(), image: top }];
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
        let options = diskwright_store::OpenOptions::default();
        let store = world.open(path, &options).map_err(|error| error.to_string())?;
        let (_, report) =
            probe::check(store, Some(self.format)).map_err(|error| format!("it cannot be checked: {error}"))?;
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
        let file = world.snapshot().file(&self.path()).cloned().unwrap_or_default();
        let disk = Disk::open(self.path(), &self.open_options(world, false)).map_err(|error| error.to_string())?;
        let info = disk.layers()[0].image.info();
        Ok(SessionStart { file, file_write_id: info.file_write_id, linkage_id: info.linkage_id, visible })
    }

    /// The identities of a VHDX tell of every change.
    fn judge_identities(&self, world: &World, disk: &Disk, truth: &DiskTruth, shown: &[Version]) -> Outcome {
        let info = disk.layers()[0].image.info();
        if self.format != Format::Vhdx {
            return Ok(());
        }
        let start = &truth.session;
        let snapshot = world.snapshot();
        let Some(file) = snapshot.file(&self.path()) else { return Ok(()) };
        if info.file_write_id == start.file_write_id
            && let Some(at) = start.file.first_difference(file, &[VHDX_HEADERS])
        {
            return Err(format!("byte {at} of the file changed, but its FileWriteGuid did not"));
        }
        if info.linkage_id == start.linkage_id && shown != start.visible {
            return Err("what a guest sees changed, but the DataWriteGuid did not".into());
        }
        Ok(())
    }

    /// Random steps. The truth is told before each that changes something.
    fn play(
        &self,
        stage: &Stage<DiskTruth>,
        dice: &mut Dice,
        truth: &mut DiskTruth,
        steps: u64,
        version: &mut Version,
    ) -> Outcome {
        let world = &stage.world;
        stage.tell(truth.clone());
        world.phase(Some(Phase::Open));
        let mut session = self.open(world, true)?;
        world.phase(None);
        for _ in 0..steps {
            *version += 1;
            match dice.below(100) {
                0..46 => {
                    let (first, count) = self.some_range(dice, 40);
                    self.play_write(stage, &mut session, truth, (first, count), *version, dice.percent(12))?;
                }
                46..54 if !self.gentle => {
                    let (first, count) = self.some_range(dice, 3000);
                    self.play_zero(stage, &mut session, truth, (first, count), dice.percent(50), dice.percent(12))?;
                }
                54..60 if !self.gentle => {
                    // A whole window: whole blocks, mostly.
                    let Window { first, count } = *dice.pick(&self.windows);
                    self.play_zero(stage, &mut session, truth, (first, count), dice.percent(50), false)?;
                }
                60..64 => {
                    let Window { first, count } = *dice.pick(&self.windows);
                    self.play_write(stage, &mut session, truth, (first, count), *version, false)?;
                }
                64..78 => self.play_flush(stage, &mut session, truth, dice, version)?,
                78..86 => {
                    let shown = session.read_windows()?;
                    truth.ledger.judge(&shown, false).map_err(|error| format!("without any cut, {error}"))?;
                }
                86..92 => {
                    self.play_close(stage, session, truth)?;
                    self.begin_session(stage, truth)?;
                    world.phase(Some(Phase::Open));
                    session = self.open(world, true)?;
                    world.phase(None);
                }
                92..95 => {
                    world.kill();
                    drop(session);
                    session = self.after_kill(stage, truth)?;
                }
                _ => {}
            }
        }
        let shown = session.read_windows()?;
        truth.ledger.judge(&shown, false).map_err(|error| format!("without any cut, {error}"))?;
        self.play_close(stage, session, truth)
    }

    fn begin_session(&self, stage: &Stage<DiskTruth>, truth: &mut DiskTruth) -> Outcome {
        let visible = {
            let mut reader = self.open(&stage.world, false)?;
            let shown = reader.read_windows()?;
            truth.ledger.judge(&shown, false).map_err(|error| format!("opened again, {error}"))?
        };
        let start = self.session_start(&stage.world, visible)?;
        truth.session = Arc::new(if truth.ledger.is_durable() { start } else { start.without_identities() });
        stage.tell(truth.clone());
        Ok(())
    }

    /// Opens again after a kill, and finds out what is there.
    fn after_kill<'a>(&'a self, stage: &Stage<DiskTruth>, truth: &mut DiskTruth) -> Outcome<Session<'a>> {
        let world = &stage.world;
        world.phase(None);
        let visible = {
            let mut reader = self.open(world, false)?;
            let shown = reader.read_windows()?;
            truth.ledger.judge(&shown, true).map_err(|error| format!("after a kill, {error}"))?
        };
        truth.ledger.reread(&visible);
        // What the killed session did to the file may yet be lost, its new identities included: they are judged from here on.
        truth.session = Arc::new(self.session_start(world, visible)?.without_identities());
        stage.tell(truth.clone());
        world.phase(Some(Phase::Open));
        let session = self.open(world, true)?;
        world.phase(None);
        Ok(session)
    }

    /// A range of the disk's sectors within one window.
    fn some_range(&self, dice: &mut Dice, most: u64) -> (u64, u64) {
        let unit = if self.gentle { 8 } else { u64::from(self.sector_bytes) / SECTOR_BYTES };
        let window = dice.pick(&self.windows);
        let units = window.count / unit;
        let first = dice.below(units);
        // Small, mostly.
        let most = if dice.percent(70) { (most / 8).max(1) } else { most };
        let count = (1 + dice.below(most.div_ceil(unit))).min(units - first);
        (window.first + first * unit, count * unit)
    }

    fn play_write(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
        (first, count): (u64, u64),
        version: Version,
        durable: bool,
    ) -> Outcome {
        let write = truth.ledger.announce(first, count, version);
        stage.tell(truth.clone());
        session.enter_phase(stage, durable);
        session.write(first, count, version, durable).map_err(|error| format!("a write failed: {error}"))?;
        stage.world.phase(None);
        truth.ledger.acknowledge(write, durable);
        if durable {
            stage.tell(truth.clone());
        }
        Ok(())
    }

    fn play_zero(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
        (first, count): (u64, u64),
        discard: bool,
        durable: bool,
    ) -> Outcome {
        let write = truth.ledger.announce(first, count, 0);
        stage.tell(truth.clone());
        session.enter_phase(stage, durable);
        session.zero(first, count, discard, durable).map_err(|error| format!("zeroing failed: {error}"))?;
        stage.world.phase(None);
        truth.ledger.acknowledge(write, durable);
        if durable {
            stage.tell(truth.clone());
        }
        Ok(())
    }

    /// A flush; sometimes others write in the middle of it, and sometimes the program is killed there.
    fn play_flush<'a>(
        &'a self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'a>,
        truth: &mut DiskTruth,
        dice: &mut Dice,
        version: &mut Version,
    ) -> Outcome {
        let world = &stage.world;
        let mark = truth.ledger.mark();
        let what = dice.below(10);
        let at_sync = dice.below(3);
        let killed = Arc::new(Mutex::new(false));
        let mut shared = None;
        match what {
            0 => {
                let (world_again, killed, mut syncs) = (world.clone(), Arc::clone(&killed), 0);
                world.set_hook(Some(Box::new(move || {
                    if syncs == at_sync {
                        world_again.kill();
                        *killed.lock().unwrap_or_else(PoisonError::into_inner) = true;
                    }
                    syncs += 1;
                })));
            }
            1..4 if session.has_written => {
                let ranges: Vec<(u64, u64)> = (0..3).map(|_| self.some_range(dice, 40)).collect();
                let first_version = *version + 1;
                *version += ranges.len() as Version;
                // Whether it is done or not: it may be there from now on.
                let writes: Vec<_> = (first_version..)
                    .zip(&ranges)
                    .map(|(version, &(first, count))| truth.ledger.announce(first, count, version))
                    .collect();
                stage.tell(truth.clone());
                let (disk, mut syncs) = (Arc::downgrade(&session.disk), 0);
                let results = Arc::new(Mutex::new(Vec::new()));
                shared = Some((writes, Arc::clone(&results)));
                world.set_hook(Some(Box::new(move || {
                    if syncs == at_sync
                        && let Some(disk) = disk.upgrade()
                    {
                        let result = write_by_another(&*disk, first_version, &ranges);
                        results.lock().unwrap_or_else(PoisonError::into_inner).push(result);
                    }
                    syncs += 1;
                })));
            }
            _ => {}
        }
        world.phase(Some(Phase::Flush));
        let flushed = session.flush();
        world.set_hook(None);
        world.phase(None);
        if *killed.lock().unwrap_or_else(PoisonError::into_inner) {
            if flushed.is_ok() {
                return Err("a flush succeeded whose program had been killed".into());
            }
            let fresh = self.after_kill(stage, truth)?;
            *session = fresh;
            return Ok(());
        }
        flushed.map_err(|error| format!("a flush failed: {error}"))?;
        let mut done_by_another = false;
        if let Some((writes, results)) = shared {
            for result in results.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                result.map_err(|error| format!("a write in the middle of a flush failed: {error}"))?;
                writes.iter().for_each(|&write| truth.ledger.acknowledge(write, false));
                done_by_another = true;
            }
        }
        // A write that was never made is a hole in the list that must not be taken for one that failed.
        truth.ledger.flushed(mark);
        if !done_by_another {
            truth.ledger.forget_unacknowledged();
        }
        stage.tell(truth.clone());
        Ok(())
    }

    fn play_close(&self, stage: &Stage<DiskTruth>, session: Session<'_>, truth: &mut DiskTruth) -> Outcome {
        stage.world.phase(Some(Phase::Close));
        // A session that changed nothing does nothing: what a killed one left in the page cache stays there.
        let has_written = session.has_written;
        session.close().map_err(|error| format!("it does not close: {error}"))?;
        stage.world.phase(None);
        if has_written {
            truth.ledger.flushed(truth.ledger.mark());
        }
        stage.tell(truth.clone());
        Ok(())
    }

    /// What the disk shows, and whether that may be.
    fn look(&self, world: &World, truth: &DiskTruth) -> Outcome<Vec<Version>> {
        self.check(world, &self.path())?;
        let mut session = self.open(world, false)?;
        let shown = session.read_windows()?;
        let versions = truth.ledger.judge(&shown, true)?;
        self.judge_identities(world, &session.disk, truth, &versions)?;
        Ok(versions)
    }
}

/// Writes from a queue of its own.
fn write_by_another(disk: &Disk, first_version: Version, ranges: &[(u64, u64)]) -> Outcome {
    let options = QueueOptions { depth: 1, engine: EngineKind::Sync, slab: None };
    let mut queue = disk.open_queue(&options).map_err(|error| error.to_string())?;
    for (version, &(first, count)) in (first_version..).zip(ranges) {
        let len = (count * SECTOR_BYTES) as usize;
        let mut buf = IoBuf::new(len);
        stamp(&mut buf, first, version);
        carry_out(&mut *queue, &mut Vec::new(), Request::write(first * SECTOR_BYTES, len, buf, 0)).1?;
    }
    Ok(())
}

impl<'a> Session<'a> {
    fn of(case: &'a DiskCase, disk: Arc<Disk>) -> Outcome<Self> {
        let options = QueueOptions { depth: 1, engine: EngineKind::Sync, slab: None };
        let queue = disk.open_queue(&options).map_err(|error| error.to_string())?;
        let largest = case.windows.iter().map(|window| window.count).max().unwrap_or(1) * SECTOR_BYTES;
        let buf = Some(IoBuf::new(largest as usize));
        Ok(Self { case, disk, queue: Some(queue), buf, done: Vec::new(), has_written: false })
    }

    fn enter_phase(&mut self, stage: &Stage<DiskTruth>, durable: bool) {
        let first = !std::mem::replace(&mut self.has_written, true);
        stage.world.phase(match (first, durable) {
            (true, _) => Some(Phase::FirstWrite),
            (false, true) => Some(Phase::DurableWrite),
            (false, false) => None,
        });
    }

    fn run(&mut self, request: Request) -> Outcome {
        let queue = self.queue.as_mut().ok_or("the disk is closed")?;
        let had_buf = request.buf.is_some();
        let (buf, outcome) = carry_out(&mut **queue, &mut self.done, request);
        if had_buf {
            self.buf = buf;
        }
        outcome
    }

    fn write(&mut self, first: u64, count: u64, version: Version, fua: bool) -> Outcome {
        let len = (count * SECTOR_BYTES) as usize;
        let mut buf = self.buf.take().ok_or("the buffer was lost")?;
        stamp(&mut buf[..len], first, version);
        self.run(Request { fua, ..Request::write(first * SECTOR_BYTES, len, buf, 0) })
    }

    fn zero(&mut self, first: u64, count: u64, discard: bool, fua: bool) -> Outcome {
        let (offset_bytes, len_bytes) = (first * SECTOR_BYTES, count * SECTOR_BYTES);
        let request = Request::write_zeroes(offset_bytes, len_bytes, 0);
        let operation = if discard { Operation::Discard } else { Operation::WriteZeroes };
        self.run(Request { operation, fua, ..request })
    }

    fn flush(&mut self) -> Outcome {
        self.run(Request::flush(0))
    }

    fn read_windows(&mut self) -> Outcome<Vec<Vec<u8>>> {
        let mut shown = Vec::new();
        for window in self.case.windows.clone() {
            let len = (window.count * SECTOR_BYTES) as usize;
            let buf = self.buf.take().ok_or("the buffer was lost")?;
            self.run(Request::read(window.first * SECTOR_BYTES, len, buf, 0))
                .map_err(|error| format!("it does not read: {error}"))?;
            shown.push(self.buf.as_ref().map_or_else(Vec::new, |buf| buf[..len].to_vec()));
        }
        Ok(shown)
    }

    fn close(mut self) -> Outcome {
        self.queue = None;
        self.disk.close().map_err(|error| error.to_string())
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
        let mut next = DiskTruth { ledger: truth.ledger.settled(shown), session };
        let unmeddled = Self { meddling: None, ..self.clone() };
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
        // libvhdi knows no log, and needs the tail of a VHD: so it is asked when we have opened and closed the disk once.
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
            // Something new in the last window, so that the file is written to and its tail put right.
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

impl FaultyCase for DiskCase {
    fn run_on(&self, stage: &Stage<DiskTruth>, told: &mut Told) -> Outcome {
        let world = &stage.world;
        // Nothing that the user does fails yet: this looks at the disk as it is found.
        let fault = world.suspend();
        let mut truth = self.new_truth(world)?;
        stage.tell(truth.clone());
        world.resume(fault);
        world.phase(Some(Phase::Open));
        let opened = self.open(world, true);
        world.phase(None);
        let mut session = match opened {
            Ok(session) => session,
            Err(error) => {
                told.errors.push(error);
                return Ok(());
            }
        };
        let (first, last) = (self.windows[0], self.windows[self.windows.len() - 1]);
        let unit = (u64::from(self.sector_bytes) / SECTOR_BYTES).max(if self.gentle { 8 } else { 1 });
        let small = |window: Window, at: u64| (window.first + at * unit, unit);
        let whole = |window: Window| (window.first, window.count);
        let steps: Vec<FaultyStep> = vec![
            FaultyStep::Write(small(first, 1), false),
            FaultyStep::Write(small(last, 0), false),
            FaultyStep::Flush,
            FaultyStep::Write(small(first, 3), true),
            FaultyStep::Write(whole(last), false),
            FaultyStep::Read,
            FaultyStep::Flush,
            FaultyStep::Zero(whole(first), true),
            FaultyStep::Zero(small(last, 1), false),
            FaultyStep::Flush,
            FaultyStep::Write(small(first, 2), false),
            FaultyStep::Read,
            FaultyStep::Flush,
            FaultyStep::Write(small(first, 2), false),
            FaultyStep::Flush,
        ];
        for (version, step) in (1..).zip(steps) {
            if self.gentle && matches!(step, FaultyStep::Zero(..)) {
                continue;
            }
            let mark = truth.ledger.mark();
            let announced = match step {
                FaultyStep::Write((first, count), _) => Some(truth.ledger.announce(first, count, version)),
                FaultyStep::Zero((first, count), _) => Some(truth.ledger.announce(first, count, 0)),
                FaultyStep::Flush | FaultyStep::Read => None,
            };
            stage.tell(truth.clone());
            let (durable, outcome) = match step {
                FaultyStep::Write((first, count), durable) => (durable, session.write(first, count, version, durable)),
                FaultyStep::Zero((first, count), discard) => (false, session.zero(first, count, discard, false)),
                FaultyStep::Flush => (false, session.flush()),
                FaultyStep::Read => {
                    let shown = session.read_windows();
                    if let Ok(shown) = &shown {
                        truth.ledger.judge(shown, false).map_err(|error| format!("without any cut, {error}"))?;
                    }
                    (false, shown.map(drop))
                }
            };
            match (outcome, announced) {
                (Err(error), _) => told.errors.push(error),
                (Ok(()), Some(write)) => truth.ledger.acknowledge(write, durable),
                (Ok(()), None) if matches!(step, FaultyStep::Flush) => truth.ledger.flushed(mark),
                (Ok(()), None) => {}
            }
            stage.tell(truth.clone());
        }
        let mark = truth.ledger.mark();
        world.phase(Some(Phase::Close));
        match session.close() {
            Ok(()) => truth.ledger.flushed(mark),
            Err(error) => told.errors.push(error),
        }
        world.phase(None);
        stage.tell(truth);
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
enum FaultyStep {
    Write((u64, u64), bool),
    Zero((u64, u64), bool),
    Flush,
    Read,
}

/// All kinds of disks that are put through power cuts.
pub fn all() -> Vec<DiskCase> {
    let kind = |name, format, disk_type, block_bytes: u32, size_bytes: u64, blocks: &[u64]| {
        let has_blocks = block_bytes > 0;
        let unit = if has_blocks { u64::from(block_bytes) } else { 64 << 10 };
        let window = |&block: &u64| {
            let first = block * unit / SECTOR_BYTES;
            Window { first, count: (unit / SECTOR_BYTES).min(size_bytes / SECTOR_BYTES - first) }
        };
        DiskCase {
            name,
            format,
            disk_type,
            block_bytes: has_blocks.then_some(block_bytes),
            sector_bytes: 512,
            size_bytes,
            windows: blocks.iter().map(window).collect(),
            gentle: false,
            damage: None,
            steps: 24,
            meddling: None,
        }
    };
    let (kib, mib, gib) = (1_u32 << 10, 1_u32 << 20, 1_u64 << 30);
    let m = u64::from(mib);
    vec![
        kind("raw", Format::Raw, DiskType::Fixed, 0, 2 * m, &[0, 1, 17, 31]),
        DiskCase {
            damage: Some(Damage::Ragged),
            ..kind("raw, ending in a sector", Format::Raw, DiskType::Fixed, 0, 2 * m, &[0, 1, 31])
        },
        kind("vhd fixed", Format::Vhd, DiskType::Fixed, 0, 2 * m, &[0, 1, 17, 31]),
        // Entries in several sectors of the table.
        kind("vhd dynamic 16K", Format::Vhd, DiskType::Dynamic, 16 * kib, 8 * m, &[0, 1, 2, 127, 128, 300, 301, 511]),
        kind("vhd dynamic 512K", Format::Vhd, DiskType::Dynamic, 512 * kib, 64 * m + 512, &[0, 1, 3, 128]),
        kind("vhd dynamic 2M", Format::Vhd, DiskType::Dynamic, 2 * mib, 32 * m, &[0, 2, 15]),
        DiskCase {
            damage: Some(Damage::FooterCopy),
            ..kind(
                "vhd dynamic 16K, copy of footer lost",
                Format::Vhd,
                DiskType::Dynamic,
                16 * kib,
                4 * m,
                &[0, 1, 130, 255],
            )
        },
        kind(
            "vhd differencing 16K",
            Format::Vhd,
            DiskType::Differencing,
            16 * kib,
            8 * m,
            &[0, 1, 2, 127, 128, 300, 511],
        ),
        kind("vhd differencing 2M", Format::Vhd, DiskType::Differencing, 2 * mib, 16 * m, &[0, 1, 7]),
        DiskCase {
            gentle: true,
            ..kind(
                "vhd differencing 512K, for libvhdi",
                Format::Vhd,
                DiskType::Differencing,
                512 * kib,
                8 * m,
                &[0, 1, 2, 15],
            )
        },
        kind("vhdx fixed 1M", Format::Vhdx, DiskType::Fixed, mib, 4 * m, &[0, 1, 3]),
        kind("vhdx dynamic 1M", Format::Vhdx, DiskType::Dynamic, mib, 64 * m, &[0, 1, 2, 30, 63]),
        // More than a page of the table, so that pages can be torn apart.
        kind("vhdx dynamic 1M, 2 GiB", Format::Vhdx, DiskType::Dynamic, mib, 2 * gib, &[0, 1, 600, 1500, 2047]),
        DiskCase {
            sector_bytes: 4096,
            ..kind("vhdx dynamic 2M, 4K sectors", Format::Vhdx, DiskType::Dynamic, 2 * mib, 32 * m, &[0, 1, 15])
        },
        kind("vhdx dynamic 32M", Format::Vhdx, DiskType::Dynamic, 32 * mib, gib, &[]),
        // Three chunks, so that an entry and that of its bitmap are in pages far apart.
        kind("vhdx differencing 1M", Format::Vhdx, DiskType::Differencing, mib, 10 * gib, &[0, 1, 4095, 4096, 9000]),
        DiskCase {
            sector_bytes: 4096,
            ..kind(
                "vhdx differencing 2M, 4K sectors",
                Format::Vhdx,
                DiskType::Differencing,
                2 * mib,
                32 * m,
                &[0, 1, 15],
            )
        },
        DiskCase {
            gentle: true,
            ..kind("vhdx differencing 1M, for libvhdi", Format::Vhdx, DiskType::Differencing, mib, 8 * m, &[0, 1, 7])
        },
    ]
    .into_iter()
    .map(|case| {
        // Blocks so large that only their edges are watched.
        if case.windows.is_empty() {
            let windows = [0, 65_536 - 64, 65_536, 65_536 * 5].map(|first| Window { first, count: 128 });
            return DiskCase { windows: windows.into(), ..case };
        }
        case
    })
    .collect()
}

/// The kind of this name.
///
/// # Panics
/// When there is none.
pub fn named(name: &str) -> DiskCase {
    let found = all().into_iter().find(|case| case.name == name);
    found.unwrap_or_else(|| panic!("there is no kind of disk named {name}"))
}
