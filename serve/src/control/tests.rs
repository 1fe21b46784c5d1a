//! Tests of the channel within one process: a folder of its own, and disks that are open here.

use super::{
    client::{find_at, list_in},
    folder::{Folder, identity},
    message::LINE_BYTES_MAX,
    *,
};
use diskwright_disk::{CreateRequest, Disk, Movable, OpenOptions, create};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    fs,
    io::{Read, Write},
    os::unix::{
        fs::{PermissionsExt, symlink},
        net::{UnixListener, UnixStream},
    },
    path::Path,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

struct Scene {
    dir: TempDir,
    folder: Folder,
}

impl Scene {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::make_in(dir.path()).unwrap();
        Self { dir, folder }
    }

    fn disk(&self, name: &str) -> HostedDisk {
        let path = self.dir.path().join(name);
        create(&path, &CreateRequest { size_bytes: Some(8 * MIB), ..CreateRequest::default() }).unwrap();
        let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        HostedDisk { name: name.into(), disk: Arc::new(Movable::new(disk)), limiter: Arc::default() }
    }

    fn open(&self, disks: Vec<HostedDisk>, on_drain: Result<host::OnDrain, String>) -> Channel {
        let metrics: GetMetrics = Box::new(Vec::new);
        let doors = Err("it has no doors".into());
        let host = Host { command: "serve", metrics, doors, on_drain, freezer: None, on_change: None };
        Channel::open_in(self.folder.clone(), disks, host).unwrap()
    }

    fn find(&self, name: &str) -> Result<Option<Client>, ControlError> {
        let id = identity(&self.dir.path().join(name)).unwrap();
        self.folder.socket_of(id).map_or(Ok(None), |socket| find_at(socket, id))
    }
}

fn no_drain() -> Result<host::OnDrain, String> {
    Err("it cannot be drained".into())
}

fn call(client: &Client, operation: Operation) -> Result<Done, ControlError> {
    client.call(operation, &mut |_, _| true)
}

/// Doors that close disks, and open nothing.
struct Closes;

impl DoorKeeper for Closes {
    fn open(&self, _: &str, _: &Path, _: u16) -> Result<(), ControlError> {
        unreachable!()
    }

    fn close(&self, _: &str, _: &Path) -> Result<u16, ControlError> {
        unreachable!()
    }

    fn add(&self, _: &NewDisk) -> Result<HostedDisk, ControlError> {
        unreachable!()
    }

    fn remove(&self, _: &str) -> Result<(), ControlError> {
        Ok(())
    }
}

#[test]
fn a_file_leads_to_the_process_that_has_it_open() {
    let scene = Scene::new();
    let channel = scene.open(vec![scene.disk("one.vhdx")], no_drain());
    let path = scene.dir.path().join("one.vhdx");
    let this = crate::attach::Process::this();
    assert!(scene.folder.leads_to(&path, this));
    let other = crate::attach::Process { start_ticks: this.start_ticks + 1, ..this };
    assert!(!scene.folder.leads_to(&path, other), "another process with its number");
    fs::rename(&path, scene.dir.path().join("moved.vhdx")).unwrap();
    fs::write(&path, "another file").unwrap();
    assert!(!scene.folder.leads_to(&path, this) && !scene.folder.leads_to(Path::new("nowhere"), this));
    drop(channel);
}

#[test]
fn of_two_removals_at_once_one_leaves_the_last_disk() {
    for _ in 0..50 {
        let scene = Scene::new();
        let host = Host {
            command: "serve",
            metrics: Box::new(Vec::new),
            doors: Ok(Arc::new(Closes)),
            on_drain: no_drain(),
            freezer: None,
            on_change: None,
        };
        let channel =
            Channel::open_in(scene.folder.clone(), vec![scene.disk("one.vhdx"), scene.disk("two.vhdx")], host).unwrap();
        let start = std::sync::Barrier::new(2);
        let removed: Vec<bool> = thread::scope(|scope| {
            let both = ["one.vhdx", "two.vhdx"].map(|name| {
                let client = scene.find(name).unwrap().unwrap();
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    call(&client, Operation::RemoveDisk).is_ok()
                })
            });
            both.map(|thread| thread.join().unwrap()).to_vec()
        });
        assert_eq!(removed.iter().filter(|removed| **removed).count(), 1, "{removed:?}");
        drop(channel);
    }
}

#[test]
fn the_process_of_a_disk_is_found_and_asked() {
    let scene = Scene::new();
    let (one, two) = (scene.disk("one.vhdx"), scene.disk("two.vhd"));
    let channel = scene.open(vec![one.clone(), two.clone()], no_drain());
    for (name, held) in [("one.vhdx", &one), ("two.vhd", &two)] {
        let client = scene.find(name).unwrap().expect("it is found");
        assert_eq!(client.peer.pid, std::process::id());
        let Done::Counted(statistics) = call(&client, Operation::Statistics).unwrap() else { panic!("other answer") };
        assert_eq!(statistics.disk.name, name);
        assert_eq!(Some(&*statistics.disk.file), held.disk.disk().file());
        assert_eq!((statistics.disk.virtual_size, statistics.chain.len()), (8 * MIB, 1));
        assert_eq!(statistics.process.disks.len(), 2);
        let size = 16 * MIB;
        let dry = call(&client, Operation::Resize { size, dry_run: true }).unwrap();
        assert!(matches!(dry, Done::Resized(Resized { new_file_size: None, .. })), "{dry:?}");
        assert_eq!(held.disk.geometry().size_bytes, 8 * MIB);
        call(&client, Operation::Resize { size, dry_run: false }).unwrap();
        assert_eq!(held.disk.geometry().size_bytes, size);
        let error = call(&client, Operation::Resize { size: MIB, dry_run: false }).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidInput);
        assert!(error.to_string().contains("while the disk is open"), "{error}");
    }
    let listing = list_in(&scene.folder);
    assert_eq!((listing.processes.len(), listing.silent.len()), (1, 0));
    // A socket for the process and a link for each disk, which no other user can reach.
    let control = scene.dir.path().join("control");
    assert_eq!(fs::metadata(&control).unwrap().permissions().mode() & 0o777, 0o700);
    let sockets = scene.folder.sockets();
    assert_eq!(sockets.len(), 1);
    assert_eq!(fs::metadata(&sockets[0]).unwrap().permissions().mode() & 0o777, 0o600);
    channel.end(Ok(()));
    let left: Vec<_> = fs::read_dir(&control).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["lock"], "the socket and the links are gone");
    assert!(scene.find("one.vhdx").unwrap().is_none());
}

#[test]
fn a_drain_is_answered_when_the_disks_are_closed() {
    let scene = Scene::new();
    let held = scene.disk("one.vhdx");
    let (tell, told) = mpsc::channel();
    let on_drain: host::OnDrain = Box::new(move || tell.send(()).unwrap());
    let channel = scene.open(vec![held.clone()], Ok(on_drain));
    let client = scene.find("one.vhdx").unwrap().unwrap();
    let waiting = thread::spawn(move || call(&client, Operation::Drain));
    told.recv_timeout(Duration::from_secs(60)).unwrap();
    channel.close_gate();
    assert!(scene.find("one.vhdx").unwrap().is_none(), "the file leads to no process any more");
    thread::sleep(Duration::from_millis(50));
    assert!(!waiting.is_finished(), "it is answered when the disks are closed");
    held.disk.close().unwrap();
    channel.end(Ok(()));
    let done = waiting.join().unwrap().unwrap();
    assert_eq!(done, Done::Drained { files: vec![held.disk.disk().file().unwrap().to_owned()] });
}

#[test]
fn a_drain_that_loses_data_says_so() {
    let scene = Scene::new();
    let (tell, told) = mpsc::channel();
    let on_drain: host::OnDrain = Box::new(move || tell.send(()).unwrap());
    let channel = scene.open(vec![scene.disk("one.vhdx")], Ok(on_drain));
    let client = scene.find("one.vhdx").unwrap().unwrap();
    let waiting = thread::spawn(move || call(&client, Operation::Drain));
    told.recv_timeout(Duration::from_secs(60)).unwrap();
    // As after a panic: nobody has called `end`.
    drop(channel);
    let error = waiting.join().unwrap().unwrap_err().to_string();
    assert!(error.contains("before it had closed"), "{error}");
}

#[test]
fn what_killed_processes_leave_is_nobody_and_goes() {
    let scene = Scene::new();
    let held = scene.disk("one.vhdx");
    let control = scene.dir.path().join("control");
    // A process that has never been, and a live one whose number is in the name of another's
    // socket.
    let stale = control.join("4194303-1-0.sock");
    drop(UnixListener::bind(&stale).unwrap());
    let id = identity(held.disk.disk().file().unwrap()).unwrap();
    scene.folder.publish(id, &stale).unwrap();
    assert!(scene.find("one.vhdx").unwrap().is_none(), "nobody listens");
    assert!(list_in(&scene.folder).processes.is_empty());
    let channel = scene.open(vec![held], no_drain());
    assert!(!stale.exists(), "the next channel removes it");
    assert!(scene.find("one.vhdx").unwrap().is_some());
    channel.end(Ok(()));
    assert!(list_in(&scene.folder).silent.is_empty());
}

#[test]
fn a_socket_of_another_process_and_a_reused_inode_are_not_believed() {
    let scene = Scene::new();
    let (one, other) = (scene.disk("one.vhdx"), scene.disk("other.vhdx"));
    let control = scene.dir.path().join("control");
    // This process listens on a socket with the name of process 1.
    let false_name = control.join("1-1-0.sock");
    let _listener = UnixListener::bind(&false_name).unwrap();
    let id = identity(one.disk.disk().file().unwrap()).unwrap();
    scene.folder.publish(id, &false_name).unwrap();
    let error = scene.find("one.vhdx").unwrap_err().to_string();
    assert!(error.contains("which is not its socket"), "{error}");
    assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
    // A link that leads out of the folder is not followed.
    let link = control.join(format!("{:x}-{:x}", id.device, id.inode));
    fs::remove_file(&link).unwrap();
    symlink("/tmp/elsewhere.sock", &link).unwrap();
    assert!(scene.find("one.vhdx").unwrap().is_none());
    // A link whose file was removed, and its inode given to another one.
    fs::remove_file(&link).unwrap();
    let channel = scene.open(vec![other], no_drain());
    scene.folder.publish(id, &scene.folder.sockets()[0]).unwrap();
    assert!(scene.find("one.vhdx").unwrap().is_none(), "the process does not have that file");
    drop(channel);
    assert!(link.is_symlink(), "only the links of its own disks go");
}

fn line(stream: &mut UnixStream) -> String {
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn hostile(socket: &Path, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    // The process may answer and close before everything is sent.
    let _ = stream.write_all(request);
    line(&mut stream)
}

#[test]
fn hostile_requests_are_refused_and_block_nobody() {
    let scene = Scene::new();
    let held = scene.disk("one.vhdx");
    let channel = scene.open(vec![held], no_drain());
    let socket = scene.folder.sockets().remove(0);
    for (request, words) in [
        (&b"nonsense\n"[..], "cannot be read"),
        (b"{\"version\":2,\"operation\":\"list\"}\n", "has version 2, and this process"),
        (b"{\"version\":1,\"operation\":\"explode\"}\n", "does not know the operation"),
        (b"{\"version\":1,\"operation\":\"statistics\"}\n", "needs a disk"),
        (
            b"{\"version\":1,\"operation\":\"drain\",\"disk\":{\"device\":0,\"inode\":0}}\n",
            "does not write to that file",
        ),
    ] {
        let said = hostile(&socket, request);
        assert!(said.contains("\"event\":\"error\"") && said.contains(words), "{said}");
    }
    assert_eq!(hostile(&socket, &vec![b'{'; 4 * LINE_BYTES_MAX]), "", "a flood is cut off");
    // Clients that send nothing use up the places, and the others are told so at once.
    let idle: Vec<UnixStream> = (0..40).map(|_| UnixStream::connect(&socket).unwrap()).collect();
    let start = Instant::now();
    let refused = idle.into_iter().rev().map(|mut stream| line(&mut stream)).find(|said| !said.is_empty());
    assert!(refused.is_some_and(|said| said.contains("has 16 clients already")), "there is a limit");
    assert!(start.elapsed() < stream::PATIENCE, "who comes too late is refused at once");
    // The idle ones were dropped, which the process sees sooner or later, one by one.
    let error = loop {
        assert!(start.elapsed() < Duration::from_secs(60));
        let Ok(client) = scene.find("one.vhdx") else { continue };
        let error = call(&client.expect("it is there"), Operation::Drain).unwrap_err();
        if !error.to_string().contains("clients already") {
            break error;
        }
    };
    assert_eq!((error.to_string().as_str(), error.code()), ("it cannot be drained", ErrorCode::Unsupported));
    channel.end(Ok(()));
}

#[test]
fn two_operations_do_not_change_one_disk() {
    let scene = Scene::new();
    let held = scene.disk("one.vhdx");
    let channel = scene.open(vec![held], no_drain());
    let client = Arc::new(scene.find("one.vhdx").unwrap().unwrap());
    let sizes = [16, 24, 32, 40, 48, 56].map(|mib| mib * MIB);
    let ended: Vec<Result<Done, ControlError>> = thread::scope(|scope| {
        let calls: Vec<_> = sizes
            .into_iter()
            .map(|size| {
                let client = Arc::clone(&client);
                scope.spawn(move || call(&client, Operation::Resize { size, dry_run: false }))
            })
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    // Which of them come first is open; each has grown the disk or was refused with a reason.
    assert!(ended.iter().any(Result::is_ok));
    for error in ended.into_iter().filter_map(Result::err) {
        let said = error.to_string();
        assert!(said.contains("resize is under way") || said.contains("while the disk is open"), "{said}");
    }
    channel.end(Ok(()));
    assert!(call(&client, Operation::Statistics).unwrap_err().to_string().contains("has ended"));
}

#[test]
fn a_compaction_is_stopped_with_its_client_and_done_by_the_next_one() {
    let scene = Scene::new();
    let held = scene.disk("one.vhdx");
    let mut io = Blocking::open(&*held.disk, EngineKind::Auto).unwrap();
    io.write(0, &vec![7; 8 * MIB as usize], false).unwrap();
    io.discard(0, 4 * MIB).unwrap();
    let channel = scene.open(vec![held], no_drain());
    let client = scene.find("one.vhdx").unwrap().unwrap();
    let dry = call(&client, Operation::Compact { dry_run: true }).unwrap();
    let Done::Compacted(dry) = dry else { panic!("{dry:?}") };
    assert!(dry.new_file_size + 4 * MIB <= dry.old_file_size && dry.virtual_size == 8 * MIB, "{dry:?}");
    let stopped = client.call(Operation::Compact { dry_run: false }, &mut |_, _| false).unwrap_err();
    assert_eq!(stopped.code(), ErrorCode::Stopped, "{stopped}");
    // The process stops at its next report, or has ended by then.
    let done = loop {
        match call(&client, Operation::Compact { dry_run: false }) {
            Ok(done) => break done,
            Err(error) => assert!(error.to_string().contains("compact is under way"), "{error}"),
        }
    };
    let Done::Compacted(done) = done else { panic!("{done:?}") };
    assert_eq!(done.new_file_size, dry.new_file_size);
    assert_eq!(fs::metadata(scene.dir.path().join("one.vhdx")).unwrap().len(), dry.new_file_size);
    let mut found = vec![0; 8 * MIB as usize];
    io.read(0, &mut found).unwrap();
    let half = 4 * MIB as usize;
    assert!(found[..half].iter().all(|byte| *byte == 0) && found[half..].iter().all(|byte| *byte == 7));
    channel.end(Ok(()));
}
