//! Reservations and atomic commands of the iSCSI target, across the doors of a disk.

use crate::{
    common::{
        Served, eventually,
        iscsi_initiator::{Initiator, TARGET, Ways, cdb_16},
        memory, nvme_host,
    },
    iscsi::{exported, is_untouched, read, serve, served, write},
    nvme_reservations,
    vhost_user::Slow,
};
use diskwright_iscsi::scsi::op;
use diskwright_nbd::{NbdDevice, NbdUri};
use diskwright_nvme::{NvmeDevice, NvmeUri, wire::reservation::Action};
use diskwright_serve::{
    nbd,
    net::{Address, Listener, ServerOptions},
    nvme,
    reservations::ReservationTable,
    vhost_user::{
        VhostUserOptions, VhostUserServer,
        front_end::{FrontEnd, FrontOptions},
    },
};
use diskwright_store::{BlockDevice, Blocking, Endpoint, EngineKind};
use std::{
    sync::{Arc, atomic::Ordering},
    thread,
    time::Duration,
};

/// PERSISTENT RESERVE OUT.
pub fn reserve(initiator: &mut Initiator, action: u8, kind: u8, key: u64, other: u64, flags: u8) -> u8 {
    let mut list = [key.to_be_bytes(), other.to_be_bytes(), [0; 8]].concat();
    list[20] = flags;
    initiator.give(0, &[op::PERSISTENT_RESERVE_OUT, action, kind, 0, 0, 0, 0, 0, 24, 0], &list).status
}

#[test]
fn reservations_shut_out_others_and_survive_a_restart() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), memory(1 << 20, true));
    let start = || {
        let table = ReservationTable::kept_in(dir.path());
        table.load("disk").unwrap();
        let options = ServerOptions { reservations: Arc::new(table), ..ServerOptions::default() };
        serve(vec![exported("disk", Arc::clone(&disk))], options)
    };
    let Some(served) = start() else { return };
    let (at_a, at_b) = (Ways::default(), Ways { initiator: "iqn.2026-11.org.example:b", ..Ways::default() });
    let mut a = Initiator::session(&served.socket(), at_a.clone());
    let mut b = Initiator::session(&served.socket(), at_b.clone());
    assert_eq!(reserve(&mut a, 0, 0, 0, 11, 1), 0);
    assert_eq!(reserve(&mut b, 0, 0, 0, 22, 1), 0);
    assert_eq!(reserve(&mut a, 1, 5, 11, 0, 0), 0, "write exclusive, registrants only");
    assert!(write(&mut b, 0, &[1; 512]).is_good());
    let mut stranger = Initiator::session(&served.socket(), Ways { isid: 5, ..Ways::default() });
    assert_eq!(write(&mut stranger, 0, &[2; 512]).status, 0x18, "RESERVATION CONFLICT");
    assert!(read(&mut stranger, 0, 1).is_good());
    drop(served);
    // The server starts again: nothing is forgotten.
    let Some(served) = start() else { return };
    let mut a = Initiator::session(&served.socket(), at_a);
    let mut b = Initiator::session(&served.socket(), at_b);
    let mut stranger = Initiator::session(&served.socket(), Ways { isid: 5, ..Ways::default() });
    assert_eq!(write(&mut stranger, 0, &[2; 512]).status, 0x18);
    assert!(write(&mut a, 0, &[3; 512]).is_good());
    // b takes over, and a is shut out at once and told why.
    assert_eq!(reserve(&mut b, 5, 1, 22, 11, 0), 0);
    assert_eq!(write(&mut a, 0, &[4; 512]).sense, Some((6, 0x2a, 5)));
    assert_eq!(write(&mut a, 0, &[4; 512]).status, 0x18);
    assert!(read(&mut a, 0, 1).data == [3; 512]);
    let keys = a.fetch(0, &[op::PERSISTENT_RESERVE_IN, 0, 0, 0, 0, 0, 0, 0, 64, 0], 64).data;
    assert_eq!(keys[4..], [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 22]);
    assert_eq!(reserve(&mut b, 3, 0, 22, 0, 0), 0);
    assert!(write(&mut stranger, 0, &[5; 512]).is_good());
}

/// A door without reservations is not a way around them.
/// A disk behind the iSCSI target and, by other doors, in this process again.
struct OtherDoors {
    /// Words of the error for what is reserved, and the disk by the door.
    doors: [(&'static str, Box<dyn BlockDevice>); 3],
    iscsi: Served,
    _servers: (diskwright_serve::net::Server, diskwright_serve::net::Server, VhostUserServer),
    dir: tempfile::TempDir,
}

fn other_doors(disk: &Arc<dyn BlockDevice>) -> Option<OtherDoors> {
    let table = Arc::new(ReservationTable::default());
    let options = || ServerOptions { reservations: Arc::clone(&table), ..ServerOptions::default() };
    let exports = || vec![exported("disk", Arc::clone(disk))];
    let iscsi = serve(exports(), options())?;
    let dir = tempfile::tempdir().unwrap();
    let socket = |name: &str| dir.path().join(name);
    let listen = |name: &str| Listener::bind(&Address::Unix(socket(name))).unwrap();
    const SUBSYSTEM: &str = "nqn.2026-01.org.example:disks";
    let nbd = nbd::start(exports(), vec![listen("nbd")], options()).unwrap();
    let nvme = nvme::start(SUBSYSTEM, exports(), vec![listen("nvme")], options()).unwrap();
    let reservations = Arc::clone(&table);
    let machine = VhostUserOptions { name: "disk".into(), queues: 1, is_ephemeral: false, reservations };
    let machine = VhostUserServer::start(Arc::clone(disk), listen("machine"), machine).unwrap();
    let nvme_uri = NvmeUri::at(Endpoint::Unix(socket("nvme")), SUBSYSTEM, 1);
    let front = FrontOptions { queues: 1, depth: 4, payload_bytes: 4096, ..FrontOptions::default() };
    let doors: [(&str, Box<dyn BlockDevice>); 3] = [
        ("EPERM", Box::new(NbdDevice::open(&NbdUri::unix(socket("nbd"), "disk"), true).unwrap())),
        ("reservation conflict", Box::new(NvmeDevice::open(&nvme_uri, true).unwrap())),
        ("", Box::new(FrontEnd::connect(&socket("machine"), front).unwrap())),
    ];
    Some(OtherDoors { doors, iscsi, _servers: (nbd, nvme, machine), dir })
}

#[test]
fn clients_of_other_doors_are_refused_what_is_reserved() {
    let Some(OtherDoors { doors, iscsi, .. }) = &other_doors(&memory(1 << 20, true)) else { return };
    let mut a = Initiator::session(&iscsi.socket(), Ways::default());
    let mut queues: Vec<_> =
        doors.iter().map(|(word, device)| (*word, Blocking::open(&**device, EngineKind::Auto).unwrap())).collect();
    let mut all = |reads: bool, writes: bool| {
        for (word, queue) in &mut queues {
            for (is_allowed, done) in [
                (reads, queue.read(0, &mut [0; 4096])),
                (writes, queue.write(4096, &[7; 4096], false)),
                (writes, queue.discard(8192, 4096)),
                (true, queue.flush()),
            ] {
                match done {
                    Ok(()) => assert!(is_allowed, "{word}: reads {reads}, writes {writes}"),
                    Err(error) => assert!(!is_allowed && error.to_string().contains(*word), "{word}: {error}"),
                }
            }
        }
    };
    all(true, true);
    assert_eq!(reserve(&mut a, 0, 0, 0, 11, 0), 0);
    all(true, true);
    assert_eq!(reserve(&mut a, 1, 1, 11, 0, 0), 0, "write exclusive");
    all(true, false);
    assert_eq!(reserve(&mut a, 2, 1, 11, 0, 0), 0, "released");
    assert_eq!(reserve(&mut a, 1, 3, 11, 0, 0), 0, "exclusive access");
    all(false, false);
    assert!(write(&mut a, 0, &[1; 512]).is_good());
    assert_eq!(reserve(&mut a, 2, 3, 11, 0, 0), 0, "released");
    all(true, true);
    assert_eq!(reserve(&mut a, 3, 0, 11, 0, 0), 0, "cleared");
    assert!(a.plain(0, &[op::RESERVE_6, 0, 0, 0, 0, 0]).is_good());
    all(false, false);
    assert!(a.plain(0, &[op::RELEASE_6, 0, 0, 0, 0, 0]).is_good());
    all(true, true);
}

/// An NVMe host and an iSCSI initiator are participants of the same reservations.
#[test]
fn a_host_and_an_initiator_reserve_the_same_disk() {
    let Some(OtherDoors { iscsi, dir, .. }) = &other_doors(&memory(1 << 20, true)) else { return };
    let mut initiator = Initiator::session(&iscsi.socket(), Ways::default());
    let socket = dir.path().join("nvme");
    let ways = nvme_host::Ways::default();
    let (_admin, controller) = nvme_host::Host::admin(&socket, ways);
    let mut host = nvme_host::Host::io(&socket, controller, 1, ways);
    assert_eq!(reserve(&mut initiator, 0, 0, 0, 11, 0), 0);
    assert_eq!(reserve(&mut initiator, 1, 5, 11, 0, 0), 0, "all that are registered may write");
    let conflict = diskwright_nvme::wire::Status::RESERVATION_CONFLICT;
    assert_eq!(host.write(1, 0, &[1; 512], true, 0), conflict);
    let mut ask =
        |action, kind, keys| nvme_reservations::ask(&mut host, nvme_reservations::command(action, kind), keys);
    assert!(ask(Action::Register, 0, (0, 22)).is_success());
    // Both are seen from both sides.
    let keys = initiator.fetch(0, &[op::PERSISTENT_RESERVE_IN, 0, 0, 0, 0, 0, 0, 0, 64, 0], 64).data;
    assert_eq!((keys[7], keys[15], keys[23]), (16, 11, 22));
    let full = initiator.fetch(0, &[op::PERSISTENT_RESERVE_IN, 3, 0, 0, 0, 0, 0, 1, 0, 0], 256);
    assert!(full.is_good() && full.data.len() > 64, "{full:?}");
    let there = nvme_reservations::report(&mut host, 4096);
    let seen: Vec<_> = there.registrants.iter().map(|one| (one.key, one.holds)).collect();
    assert_eq!((there.kind, seen), (3, vec![(11, true), (22, false)]));
    assert!(host.write(1, 0, &[2; 512], true, 0).is_success() && write(&mut initiator, 1, &[3; 512]).is_good());
    let mut ask =
        |action, kind, keys| nvme_reservations::ask(&mut host, nvme_reservations::command(action, kind), keys);
    assert!(ask(Action::PreemptAndAbort, 1, (22, 11)).is_success());
    assert_eq!(write(&mut initiator, 1, &[4; 512]).sense, Some((6, 0x2a, 5)), "the registration was preempted");
    assert_eq!(write(&mut initiator, 1, &[4; 512]).status, 0x18, "RESERVATION CONFLICT");
    assert!(read(&mut initiator, 1, 1).data == [3; 512]);
}

/// COMPARE AND WRITE, as a command and its data: `new` if the first block has `old`.
fn compare_and_write(old: u8, new: u8) -> ([u8; 16], Vec<u8>) {
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (op::COMPARE_AND_WRITE, 1);
    (cdb, [[old; 512], [new; 512]].concat())
}

/// Lets the requests of a slow disk go when it is dropped, also when a test has failed.
struct LetGo<'a>(&'a Slow);

impl Drop for LetGo<'_> {
    fn drop(&mut self) {
        self.0.held.store(false, Ordering::SeqCst);
    }
}

#[test]
fn no_write_of_another_door_comes_between_a_comparison_and_its_write() {
    let disk = Slow::over(memory(1 << 20, true));
    let as_device: Arc<dyn BlockDevice> = disk.clone();
    let Some(OtherDoors { doors, iscsi, .. }) = &other_doors(&as_device) else { return };
    let mut a = Initiator::session(&iscsi.socket(), Ways::default());
    let mut b = Initiator::session(&iscsi.socket(), Ways { isid: 2, ..Ways::default() });
    assert!(write(&mut a, 0, &[1; 512]).is_good());
    let written = || disk.durable.lock().unwrap().len();
    for (round, (_, device)) in doors.iter().enumerate() {
        let (old, new) = (round as u8 * 2 + 1, round as u8 * 2 + 2);
        let (other, next) = (new + 100, new + 1);
        // A comparison while another door writes the block.
        disk.held.store(true, Ordering::SeqCst);
        let before = written();
        let write_by_door = |byte: u8| {
            Blocking::open(&**device, EngineKind::Auto).unwrap().write(0, &[byte; 512], false).unwrap();
        };
        thread::scope(|scope| {
            let _let_go = LetGo(&disk);
            scope.spawn(|| write_by_door(old));
            eventually("the write reaches the disk", || written() > before);
            let (cdb, data) = compare_and_write(old, new);
            let ended = a.give(0, &cdb, &data);
            assert_eq!(ended.status, diskwright_iscsi::scsi::status::BUSY, "{ended:?}");
        });
        // A write by another door while the comparison is under way.
        disk.held.store(true, Ordering::SeqCst);
        let before = written();
        let (cdb, data) = compare_and_write(old, new);
        let header = a.command(0, &cdb, 0, 1024, 1024);
        a.send(&header, &data);
        eventually("the comparison is in flight", || iscsi.server().metrics().totals().in_flight > 0);
        thread::scope(|scope| {
            let _let_go = LetGo(&disk);
            scope.spawn(|| write_by_door(other));
            thread::sleep(Duration::from_millis(50));
            assert_eq!(written(), before, "the write waits");
        });
        assert!(a.ended(&[]).is_good());
        assert_eq!(read(&mut b, 0, 1).data, [other; 512], "the write is not lost");
        assert!(write(&mut b, 0, &[next; 512]).is_good());
    }
}

/// Sends a write of which the disk gets hold, and does not wait for its end.
fn begin_write(initiator: &mut Initiator, byte: u8) {
    let header = initiator.command(0, &cdb_16(op::WRITE_16, 0, 0, 1), 0, 512, 512);
    initiator.send(&header, &[byte; 512]);
}

#[test]
fn a_node_that_was_fenced_writes_nothing_late() {
    let disk = Slow::over(memory(1 << 20, true));
    let Some(served) = serve(vec![exported("disk", disk.clone())], ServerOptions::default()) else { return };
    let mut a = Initiator::session(&served.socket(), Ways::default());
    let mut b = Initiator::session(&served.socket(), Ways { isid: 2, ..Ways::default() });
    assert_eq!(reserve(&mut a, 0, 0, 0, 11, 0), 0);
    assert_eq!(reserve(&mut b, 0, 0, 0, 22, 0), 0);
    assert_eq!(reserve(&mut a, 1, 1, 11, 0, 0), 0);
    disk.held.store(true, Ordering::SeqCst);
    begin_write(&mut a, 7);
    eventually("the write is in flight", || served.server().metrics().totals().in_flight > 0);
    let preempted = thread::scope(|scope| {
        let preempting = scope.spawn(|| reserve(&mut b, 5, 1, 22, 11, 0));
        thread::sleep(Duration::from_millis(700));
        assert!(!preempting.is_finished(), "a write of the other one is in flight");
        disk.held.store(false, Ordering::SeqCst);
        preempting.join().unwrap()
    });
    assert_eq!(preempted, 0);
    // It ended before the preemption was answered.
    assert!(a.ended(&[]).is_good());
    assert_eq!(write(&mut a, 0, &[8; 512]).sense, Some((6, 0x2a, 5)));
    assert!(read(&mut b, 0, 1).data == [7; 512]);
}

/// A node that hangs has asked for a write and sends no data. It must not delay the others, and its
/// data must not be written when they come after all.
#[test]
fn a_write_without_its_data_does_not_delay_a_preemption() {
    let Some(served) = served() else { return };
    let mut a = Initiator::session(&served.socket(), Ways { immediate: false, ..Ways::default() });
    let mut b = Initiator::session(&served.socket(), Ways { isid: 2, ..Ways::default() });
    assert_eq!(reserve(&mut a, 0, 0, 0, 11, 0), 0);
    assert_eq!(reserve(&mut b, 0, 0, 0, 22, 0), 0);
    assert_eq!(reserve(&mut a, 1, 1, 11, 0, 0), 0);
    let header = a.command(0, &cdb_16(op::WRITE_16, 0, 0, 8), 0, 4096, 0);
    a.send(&header, &[]);
    let asked = a.receive().unwrap();
    assert_eq!(asked.opcode(), 0x31);
    assert_eq!(reserve(&mut b, 5, 1, 22, 11, 0), 0);
    assert!(is_untouched(&mut b, 8));
    a.data_out(asked.u32_at(20), 0, &[9; 4096]);
    assert_eq!(a.ended(&[]).status, 0x18, "RESERVATION CONFLICT");
    assert!(is_untouched(&mut b, 8));
}

#[test]
fn a_change_of_reservations_has_a_list_of_24_bytes() {
    let Some(served) = served() else { return };
    let mut initiator = Initiator::session(&served.socket(), Ways::default());
    let mut cdb = [op::PERSISTENT_RESERVE_OUT, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(initiator.plain(0, &cdb).sense, Some((5, 0x1a, 0)));
    cdb[8] = 32;
    assert_eq!(initiator.give(0, &cdb, &[0; 32]).sense, Some((5, 0x1a, 0)));
}

#[test]
fn a_port_is_let_in_again_when_its_earlier_writes_have_ended() {
    let disk = Slow::over(memory(1 << 20, true));
    let Some(served) = serve(vec![exported("disk", disk.clone())], ServerOptions::default()) else { return };
    let mut first = Initiator::session(&served.socket(), Ways::default());
    disk.held.store(true, Ordering::SeqCst);
    begin_write(&mut first, 7);
    eventually("the write is in flight", || served.server().metrics().totals().in_flight > 0);
    let mut again = Initiator::connect(&served.socket(), Ways::default());
    let keys = [("InitiatorName", again.ways.initiator.to_owned()), ("TargetName", TARGET.to_owned())];
    let answer = again.log_in_with(0x87, &keys);
    assert_eq!(answer.header[36..38], [3, 1], "service unavailable");
    disk.held.store(false, Ordering::SeqCst);
    eventually("the write has ended", || served.server().metrics().totals().in_flight == 0);
    let mut again = Initiator::session(&served.socket(), Ways::default());
    assert!(read(&mut again, 0, 1).data == [7; 512]);
}

#[test]
fn without_a_folder_reservations_cannot_last() {
    let Some(served) = served() else { return };
    let mut initiator = Initiator::session(&served.socket(), Ways::default());
    assert_eq!(reserve(&mut initiator, 0, 0, 0, 11, 1), 2);
    assert_eq!(reserve(&mut initiator, 0, 0, 0, 11, 0), 0);
}
