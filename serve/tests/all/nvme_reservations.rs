//! Reservations of namespaces, with hosts of our own over a unix socket.

use crate::{
    common::{
        Served, eventually, memory,
        nvme_host::{Host, SUBSYSTEM, Said, Ways, in_capsule_of, plain, with_room},
    },
    vhost_user::Slow,
};
use diskwright_nbd::{NbdDevice, NbdUri};
use diskwright_nvme::wire::{
    Command, Status, admin,
    command::feature,
    identify, log, nvm,
    reservation::{self, Action, Lasting, Registrant, Report, Reserve},
};
use diskwright_serve::{
    ThreadError, nbd,
    net::{Address, Export, Listener, ServeError, ServerOptions},
    nvme,
    reservations::ReservationTable,
};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

fn serve(disk: &Arc<dyn BlockDevice>, reservations: Arc<ReservationTable>) -> Option<Served> {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&Address::Unix(dir.path().join("socket"))).unwrap();
    let export = Export { name: "disk".into(), description: String::new(), device: Arc::clone(disk) };
    let options = ServerOptions { reservations, ..ServerOptions::default() };
    match nvme::start(SUBSYSTEM, vec![export], vec![listener], options) {
        Ok(server) => Some(Served { server: Some(server), dir }),
        Err(ServeError::Thread(ThreadError::Ring { source })) => {
            eprintln!("skipped: no io_uring: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn served() -> Option<Served> {
    serve(&memory(1 << 20, true), Arc::default())
}

/// A host with this id: its admin queue and an I/O queue.
fn host(served: &Served, id: u8) -> (Host, Host) {
    let ways = Ways { host_id: [id; 16], ..Ways::default() };
    let (admin, controller) = Host::admin(&served.socket(), ways);
    (admin, Host::io(&served.socket(), controller, 1, ways))
}

/// A reservation command that asks for what lasts, as Linux does.
pub fn command(action: Action, kind: u8) -> Reserve {
    let registers = matches!(action, Action::Register | Action::Unregister | Action::Replace);
    let lasting = if registers { Lasting::Yes } else { Lasting::Unchanged };
    Reserve { action, ignores_key: false, kind: if registers { 0 } else { kind }, lasting }
}

fn send(command: Reserve, keys: (u64, u64), in_capsule: bool) -> (Command, [u8; 16]) {
    let (opcode, dword_10) = command.encode();
    let mut data = [0; 16];
    data[..8].copy_from_slice(&keys.0.to_le_bytes());
    data[8..].copy_from_slice(&keys.1.to_le_bytes());
    let sgl = if in_capsule { in_capsule_of(16) } else { with_room(16).sgl };
    (Command { opcode, nsid: 1, sgl, cdw: [dword_10, 0, 0, 0, 0, 0], ..plain() }, data)
}

pub fn ask(io: &mut Host, command: Reserve, keys: (u64, u64)) -> Status {
    // Both ways of sending the keys are used, by their lowest bits.
    let (command, data) = send(command, keys, keys.0.is_multiple_of(2));
    io.ask(command, &data).0.status
}

pub fn report(io: &mut Host, bytes: u32) -> Report {
    let cdw = [bytes / 4 - 1, reservation::EXTENDED, 0, 0, 0, 0];
    let (done, page) = io.ask(Command { opcode: reservation::REPORT, nsid: 1, cdw, ..with_room(bytes) }, &[]);
    assert!(done.status.is_success() && page.len() == bytes as usize, "{:?}", done.status);
    Report::decode(&page)
}

/// Whether the host may read, and write in all ways.
fn may(io: &mut Host) -> (bool, bool) {
    let reads = [io.read(1, 0, 1).map(drop), io.plain_status(nvm::VERIFY), io.plain_status(nvm::READ)];
    let writes = [
        io.write(1, 0, &[1; 512], true, 0),
        io.write(1, 0, &[1; 512], false, 0),
        io.plain(nvm::WRITE_ZEROES, 1, 8, 1, 0),
    ];
    let all = |found: Vec<bool>| {
        assert!(found.iter().all(|one| *one == found[0]), "{found:?}");
        found[0]
    };
    let is_allowed = |status: Status| {
        assert!(status.is_success() || status == Status::RESERVATION_CONFLICT, "{status:?}");
        status.is_success()
    };
    assert_eq!(io.plain(nvm::FLUSH, 1, 0, 1, 0), Status::SUCCESS, "a flush is always allowed");
    let reads = reads.into_iter().map(|one| is_allowed(one.err().unwrap_or(Status::SUCCESS))).collect();
    (all(reads), all(writes.into_iter().map(is_allowed).collect()))
}

trait PlainStatus {
    fn plain_status(&mut self, opcode: u8) -> Result<(), Status>;
}

impl PlainStatus for Host {
    /// A read or verify of the first block.
    fn plain_status(&mut self, opcode: u8) -> Result<(), Status> {
        if opcode == nvm::READ {
            return self.read(1, 0, 1).map(drop);
        }
        match self.plain(opcode, 1, 0, 1, 0) {
            Status::SUCCESS => Ok(()),
            status => Err(status),
        }
    }
}

#[test]
fn reservations_and_access_states_are_told() {
    let Some(served) = served() else { return };
    let (mut admin, mut io) = host(&served, 1);
    let controller = identify::Controller::decode(&admin.identify(identify::CONTROLLER, 0));
    assert!(controller.optional_commands & 1 << 5 != 0);
    let page = admin.identify(identify::CONTROLLER, 0);
    assert_eq!((page[76], page[342], page[343], page[344], page[348]), (0b1010, 10, 1, 1, 1));
    let page = admin.identify(identify::NAMESPACE, 1);
    assert_eq!((page[31], page[92]), (0xfe, 1));
    let (status, states) = admin.log_page(log::ACCESS_STATES, 52, 0);
    assert_eq!((status, states[8], states[16], states[20], states[32], states[48]), (Status::SUCCESS, 1, 1, 1, 1, 1));
    assert_eq!(report(&mut io, 64), Report::default());
    let refused = |io: &mut Host, command| io.ask(command, &[]).0.status;
    let short = Command { opcode: reservation::REPORT, nsid: 1, cdw: [15, 0, 0, 0, 0, 0], ..with_room(64) };
    assert_eq!(refused(&mut io, short), Status::HOST_ID_FORMAT);
    let extended = [1 << 20, reservation::EXTENDED, 0, 0, 0, 0];
    let long = Command { opcode: reservation::REPORT, nsid: 1, cdw: extended, ..with_room(4 << 20) };
    assert_eq!(refused(&mut io, long), Status::INVALID_FIELD);
    let (nowhere, data) = send(command(Action::Register, 0), (0, 1), true);
    assert_eq!(io.ask(Command { nsid: 2, ..nowhere }, &data).0.status, Status::INVALID_NAMESPACE);
    for bytes in [0, 4, 20, 64] {
        let (command, _) = send(command(Action::Register, 0), (0, 1), false);
        let command = Command { sgl: with_room(bytes).sgl, ..command };
        assert_eq!(io.ask(command, &[0; 64]).0.status, Status::SGL_LENGTH, "{bytes}");
    }
    assert_eq!(report(&mut io, 64), Report::default());
}

#[test]
fn each_kind_lets_in_whom_the_specification_says() {
    let Some(served) = served() else { return };
    let ((_a, mut a), (_b, mut b), (_c, mut c)) = (host(&served, 1), host(&served, 2), host(&served, 3));
    assert_eq!(ask(&mut a, command(Action::Register, 0), (0, 11)), Status::SUCCESS);
    assert_eq!(ask(&mut b, command(Action::Register, 0), (0, 22)), Status::SUCCESS);
    let (all, reads, none) = ((true, true), (true, false), (false, false));
    let expected = [(reads, reads), (none, none), (all, reads), (all, none), (all, reads), (all, none)];
    for (kind, (of_b, of_c)) in (1..).zip(expected) {
        assert_eq!(ask(&mut a, command(Action::Acquire, kind), (11, 0)), Status::SUCCESS);
        assert_eq!((may(&mut a), may(&mut b), may(&mut c)), (all, of_b, of_c), "kind {kind}");
        let there = report(&mut c, 4096);
        let holds = |one: &Registrant| one.key == 11 || kind >= 5;
        assert!(there.kind == kind && there.registrants.iter().all(|one| one.holds == holds(one)), "{there:?}");
        // Again, of another kind, by another host, and by one that is not registered.
        assert_eq!(ask(&mut a, command(Action::Acquire, kind), (11, 0)), Status::SUCCESS);
        assert_eq!(ask(&mut a, command(Action::Acquire, kind % 6 + 1), (11, 0)), Status::RESERVATION_CONFLICT);
        if kind < 5 {
            assert_eq!(ask(&mut b, command(Action::Acquire, kind), (22, 0)), Status::RESERVATION_CONFLICT);
        }
        assert_eq!(ask(&mut c, command(Action::Acquire, kind), (0, 0)), Status::RESERVATION_CONFLICT);
        assert_eq!(ask(&mut a, command(Action::Release, kind % 6 + 1), (11, 0)), Status::INVALID_FIELD);
        assert_eq!(ask(&mut a, command(Action::Release, kind), (12, 0)), Status::RESERVATION_CONFLICT);
        assert_eq!(ask(&mut a, command(Action::Release, kind), (11, 0)), Status::SUCCESS);
        assert_eq!(may(&mut c), all);
    }
    for kind in [0, 7, 255] {
        assert_eq!(ask(&mut a, command(Action::Acquire, kind), (11, 0)), Status::INVALID_FIELD);
    }
    // The key may be ignored by those commands alone that register.
    let ignoring = |action| Reserve { ignores_key: true, ..command(action, 1) };
    assert_eq!(ask(&mut a, ignoring(Action::Acquire), (11, 0)), Status::INVALID_FIELD);
    assert_eq!(ask(&mut a, ignoring(Action::Clear), (11, 0)), Status::INVALID_FIELD);
    assert_eq!(ask(&mut c, ignoring(Action::Replace), (0, 33)), Status::RESERVATION_CONFLICT, "not registered");
    assert_eq!(ask(&mut b, ignoring(Action::Replace), (0, 33)), Status::SUCCESS);
    assert_eq!(ask(&mut b, command(Action::Replace, 0), (22, 44)), Status::RESERVATION_CONFLICT);
    assert_eq!(ask(&mut b, command(Action::Replace, 0), (33, 0)), Status::INVALID_FIELD);
    assert_eq!(ask(&mut b, command(Action::Replace, 0), (33, 44)), Status::SUCCESS);
    assert_eq!(ask(&mut b, command(Action::Register, 0), (0, 44)), Status::SUCCESS, "as it is");
    assert_eq!(ask(&mut b, command(Action::Register, 0), (0, 45)), Status::RESERVATION_CONFLICT);
    assert_eq!(ask(&mut c, command(Action::Register, 0), (0, 0)), Status::INVALID_FIELD);
    assert_eq!(ask(&mut c, command(Action::Unregister, 0), (0, 0)), Status::RESERVATION_CONFLICT);
    assert_eq!(ask(&mut b, command(Action::Unregister, 0), (44, 0)), Status::SUCCESS);
    assert_eq!(report(&mut a, 64).registrants.len(), 0, "there is room for none");
    assert_eq!(report(&mut a, 128).registrants, [Registrant { key: 11, host: [1; 16], holds: false }]);
}

#[test]
fn a_host_is_told_what_others_do() {
    let Some(served) = served() else { return };
    let ((_a, mut a), (mut admin, mut b)) = (host(&served, 1), host(&served, 2));
    let (mut other_admin, _other) = host(&served, 2);
    assert_eq!(ask(&mut a, command(Action::Register, 0), (0, 11)), Status::SUCCESS);
    let register = |b: &mut Host| assert_eq!(ask(b, command(Action::Register, 0), (0, 22)), Status::SUCCESS);
    register(&mut b);
    let notice = |admin: &mut Host| {
        let cid = admin.send(Command { opcode: admin::ASYNC_EVENT, ..plain() }, &[]);
        match admin.hear() {
            Said::Done(done) if done.cid == cid => assert_eq!(done.result, 6 | 0x80 << 16),
            other => panic!("{other:?}"),
        }
        // It stays if it is retained.
        let cdw = [u32::from(log::RESERVATIONS) | 1 << 15 | 15 << 16, 0, 0, 0, 0, 0];
        let kept = admin.ask(Command { opcode: admin::GET_LOG_PAGE, cdw, ..with_room(64) }, &[]).1;
        let (status, page) = admin.log_page(log::RESERVATIONS, 64, 0);
        assert!(status.is_success() && kept == page);
        (page[0], page[8], page[9], page[12])
    };
    // The count, the kind, how many wait behind it, and the namespace.
    assert_eq!(ask(&mut a, command(Action::Acquire, 3), (11, 0)), Status::SUCCESS);
    assert_eq!(ask(&mut a, command(Action::Release, 3), (11, 0)), Status::SUCCESS);
    assert_eq!(notice(&mut admin), (1, 2, 0, 1), "released");
    assert_eq!(notice(&mut other_admin), (1, 2, 0, 1), "each controller of the host tells it");
    assert_eq!(ask(&mut a, command(Action::Preempt, 1), (11, 22)), Status::SUCCESS);
    assert_eq!(notice(&mut admin), (2, 1, 0, 1), "the registration was preempted");
    assert_eq!(ask(&mut b, command(Action::Acquire, 1), (22, 0)), Status::RESERVATION_CONFLICT);
    register(&mut b);
    assert_eq!(ask(&mut a, command(Action::Clear, 0), (11, 0)), Status::SUCCESS);
    assert_eq!(notice(&mut admin), (3, 3, 0, 1), "cleared");
    let empty = admin.log_page(log::RESERVATIONS, 64, 0);
    assert_eq!(empty, (Status::SUCCESS, vec![0; 64]));
    // What is masked is not told.
    let mut feature = |opcode, nsid, value| {
        let cdw = [feature::RESERVATION_NOTICES.into(), value, 0, 0, 0, 0];
        let done = admin.ask(Command { opcode, nsid, cdw, ..plain() }, &[]).0;
        (done.status, done.result)
    };
    assert_eq!(feature(admin::SET_FEATURES, 1, 1), (Status::INVALID_FIELD, 0));
    assert_eq!(feature(admin::SET_FEATURES, 7, 2), (Status::INVALID_NAMESPACE, 0));
    assert_eq!(feature(admin::SET_FEATURES, u32::MAX, 0b1110), (Status::SUCCESS, 0));
    assert_eq!(feature(admin::GET_FEATURES, 1, 0), (Status::SUCCESS, 0b1110));
    assert_eq!(ask(&mut a, command(Action::Register, 0), (0, 11)), Status::SUCCESS);
    register(&mut b);
    assert_eq!(ask(&mut a, command(Action::Preempt, 1), (11, 22)), Status::SUCCESS);
    thread::sleep(Duration::from_millis(700));
    assert_eq!(admin.log_page(log::RESERVATIONS, 64, 0).1, vec![0; 64]);
}

#[test]
fn a_preemption_that_aborts_waits_for_writes_in_flight() {
    let disk = Slow::over(memory(1 << 20, true));
    let as_device: Arc<dyn BlockDevice> = disk.clone();
    let Some(served) = serve(&as_device, Arc::default()) else { return };
    let ((_a, mut a), (_b, mut b)) = (host(&served, 1), host(&served, 2));
    assert_eq!(ask(&mut a, command(Action::Register, 0), (0, 11)), Status::SUCCESS);
    assert_eq!(ask(&mut b, command(Action::Register, 0), (0, 22)), Status::SUCCESS);
    assert_eq!(ask(&mut a, command(Action::Acquire, 1), (11, 0)), Status::SUCCESS);
    disk.held.store(true, Ordering::SeqCst);
    let cdw = [0, 0, 0, 0, 0, 0];
    let write = Command { opcode: nvm::WRITE, nsid: 1, sgl: in_capsule_of(512), cdw, ..plain() };
    let cid = a.send(write, &[7; 512]);
    // A write whose data have not come is not waited for, and refused when they come.
    let late = a.send(Command { sgl: with_room(512).sgl, ..write }, &[]);
    let Said::ReadyToTransfer(wanted) = a.hear() else { panic!("no R2T") };
    eventually("the write is in flight", || served.server().metrics().totals().in_flight > 0);
    thread::scope(|scope| {
        let preempting = scope.spawn(|| ask(&mut b, command(Action::PreemptAndAbort, 1), (22, 11)));
        thread::sleep(Duration::from_millis(700));
        let is_early = preempting.is_finished();
        disk.held.store(false, Ordering::SeqCst);
        assert!(!is_early, "a write of the other one is in flight");
        assert_eq!(preempting.join().unwrap(), Status::SUCCESS);
    });
    a.give(wanted, &[8; 512]);
    let mut ended = [a.hear(), a.hear()].map(|said| match said {
        Said::Done(done) => (done.cid, done.status),
        other => panic!("{other:?}"),
    });
    ended.sort_by_key(|(of, _)| *of != cid);
    assert_eq!(ended, [(cid, Status::SUCCESS), (late, Status::RESERVATION_CONFLICT)]);
    assert_eq!(b.read(1, 0, 1).unwrap(), [7; 512]);
}

/// NBD clients cannot register. A node that writes by NBD is waited for all the same.
#[test]
fn a_preemption_waits_for_writes_by_nbd_and_its_host_may_vanish_meanwhile() {
    let disk = Slow::over(memory(1 << 20, true));
    let as_device: Arc<dyn BlockDevice> = disk.clone();
    let table = Arc::new(ReservationTable::default());
    let Some(served) = serve(&as_device, Arc::clone(&table)) else { return };
    let socket = served.dir.path().join("nbd");
    let listener = Listener::bind(&Address::Unix(socket.clone())).unwrap();
    let export = Export { name: "disk".into(), description: String::new(), device: as_device };
    let options = ServerOptions { reservations: table, ..ServerOptions::default() };
    let _nbd = nbd::start(vec![export], vec![listener], options).unwrap();
    let ((_a, mut a), (admin, mut b)) = (host(&served, 1), host(&served, 2));
    assert_eq!(ask(&mut a, command(Action::Register, 0), (0, 11)), Status::SUCCESS);
    assert_eq!(ask(&mut b, command(Action::Register, 0), (0, 22)), Status::SUCCESS);
    let device = NbdDevice::open(&NbdUri::unix(socket, "disk"), true).unwrap();
    disk.held.store(true, Ordering::SeqCst);
    thread::scope(|scope| {
        let writing = scope.spawn(|| Blocking::open(&device, EngineKind::Auto).unwrap().write(0, &[7; 512], false));
        eventually("the write reaches the disk", || disk.durable.lock().unwrap().len() == 1);
        // The disk is reserved by a, and then by b.
        assert_eq!(ask(&mut a, command(Action::Acquire, 1), (11, 0)), Status::SUCCESS);
        let preempting = scope.spawn(|| ask(&mut a, command(Action::PreemptAndAbort, 1), (11, 22)));
        thread::sleep(Duration::from_millis(700));
        let is_early = preempting.is_finished();
        // Another preemption waits, and its host vanishes.
        let (again, data) = send(command(Action::Register, 0), (0, 22), true);
        let registered = b.ask(again, &data).0.status;
        let (preempt, data) = send(command(Action::PreemptAndAbort, 1), (22, 11), true);
        b.send(preempt, &data);
        thread::sleep(Duration::from_millis(100));
        drop((admin, b));
        thread::sleep(Duration::from_millis(600));
        disk.held.store(false, Ordering::SeqCst);
        assert!(!is_early && registered.is_success(), "a write by NBD is in flight");
        assert_eq!(preempting.join().unwrap(), Status::SUCCESS);
        writing.join().unwrap().unwrap();
    });
    eventually("the connections of the host have ended", || served.server().metrics().totals().connections == 2);
}

#[test]
fn what_shall_last_is_there_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let disk = memory(1 << 20, true);
    let start = || {
        let table = ReservationTable::kept_in(dir.path());
        table.load("disk").unwrap();
        serve(&disk, Arc::new(table))
    };
    let persistence = |admin: &mut Host, value: Option<u32>| {
        let opcode = if value.is_some() { admin::SET_FEATURES } else { admin::GET_FEATURES };
        let cdw = [feature::RESERVATION_PERSISTENCE.into(), value.unwrap_or(0), 0, 0, 0, 0];
        admin.ask(Command { opcode, nsid: 1, cdw, ..plain() }, &[]).0
    };
    let Some(served) = start() else { return };
    let (mut admin, mut a) = host(&served, 1);
    assert_eq!(admin.identify(identify::NAMESPACE, 1)[31], 0xff);
    assert_eq!(ask(&mut a, command(Action::Register, 0), (0, 11)), Status::SUCCESS);
    assert_eq!(ask(&mut a, command(Action::Acquire, 2), (11, 0)), Status::SUCCESS);
    assert!(report(&mut a, 64).lasts && persistence(&mut admin, None).result == 1);
    drop((admin, a, served));
    let served = start().unwrap();
    let ((mut admin, mut a), (_b, mut b)) = (host(&served, 1), host(&served, 2));
    assert_eq!((may(&mut a), may(&mut b)), ((true, true), (false, false)));
    assert!(persistence(&mut admin, Some(0)).status.is_success() && !report(&mut a, 64).lasts);
    drop((admin, a, b, served));
    let served = start().unwrap();
    assert_eq!(may(&mut host(&served, 2).1), (true, true));
    drop(served);
    let Some(served) = serve(&disk, Arc::default()) else { return };
    let (mut admin, _a) = host(&served, 1);
    assert_eq!(persistence(&mut admin, Some(1)).status, Status::INVALID_FIELD, "there is no folder");
}
