//! DH-HMAC-CHAP of the NVMe/TCP target, with a host of our own that answers rightly and wrongly.
//! The host of a kernel is in `cli/tests/all/guest.rs`.

use crate::common::{
    Served, file_of_secrets, memory,
    nvme_host::{HOST, Host, SUBSYSTEM, Said, Ways, in_capsule_of, plain, with_room},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use diskwright_nvme::{
    NvmeDevice, NvmeUri,
    wire::{
        Command, Completion, Status, admin,
        auth::{self, Failure},
        fabrics::{self, property},
        identify, nvm,
    },
};
use diskwright_serve::{
    Keyring, ThreadError,
    net::{Address, Export, Listener, ServeError, ServerOptions},
    nvme,
    secrets::{Credentials, Secrets},
};
use diskwright_store::{Blocking, Endpoint, EngineKind};
use ring::hmac;
use std::sync::Arc;

const KEY: [u8; 32] = [0x5a; 32];
const OTHER_KEY: [u8; 32] = [0xa5; 32];

fn text_of(key: &[u8; 32], hash: &str) -> String {
    let sum = crc32fast::hash(key).to_le_bytes();
    format!("DHHC-1:{hash}:{}:", STANDARD.encode([&key[..], &sum].concat()))
}

fn start(clients: &[(&str, &str)], server: Option<&str>) -> Result<Served, ServeError> {
    let of = |name: &str, secret: &str| Credentials::new(name, secret).unwrap();
    let clients = clients.iter().map(|(name, secret)| of(name, secret)).collect();
    let secrets = Secrets::new(clients, server.map(|secret| of("subsystem", secret))).unwrap();
    let options = ServerOptions { secrets: Some(Arc::new(Keyring::new(secrets))), ..ServerOptions::default() };
    let export = Export { name: "disk".into(), description: String::new(), device: memory(1 << 20, true) };
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&Address::Unix(dir.path().join("socket"))).unwrap();
    let server = nvme::start(SUBSYSTEM, vec![export], vec![listener], options)?;
    Ok(Served { server: Some(server), dir })
}

fn served(clients: &[(&str, &str)], server: Option<&str>) -> Option<Served> {
    match start(clients, server) {
        Ok(served) => Some(served),
        Err(ServeError::Thread(ThreadError::Ring { source })) => {
            eprintln!("skipped: no io_uring: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// An admin queue that is connected and must authenticate itself, and its controller.
fn connected(served: &Served, queue: u16, controller: u16) -> (Host, u16) {
    let mut host = Host::initialize(&served.socket(), Ways::default());
    let done = host.connect(queue, SUBSYSTEM, controller, Ways::default());
    assert_eq!((done.status, done.result & auth::REQUIRED), (Status::SUCCESS, auth::REQUIRED));
    (host, done.result as u16)
}

fn command(kind: u8, len_bytes: usize) -> Command {
    Command {
        opcode: fabrics::OPCODE,
        nsid: kind.into(),
        cdw: [0xe9_01_01_00, len_bytes as u32, 0, 0, 0, 0],
        ..plain()
    }
}

fn send(host: &mut Host, message: &[u8]) -> Status {
    let command = Command { sgl: in_capsule_of(message.len()), ..command(auth::SEND, message.len()) };
    host.ask(command, message).0.status
}

fn receive(host: &mut Host) -> (Status, Vec<u8>) {
    let (done, message) = host.ask(Command { sgl: with_room(4096).sgl, ..command(auth::RECEIVE, 4096) }, &[]);
    (done.status, message)
}

fn negotiate(hashes: &[u8], groups: &[u8]) -> Vec<u8> {
    let mut message = vec![0; 8 + 64];
    (message[4], message[7], message[8], message[10], message[11]) = (9, 1, 1, hashes.len() as u8, groups.len() as u8);
    message[12..12 + hashes.len()].copy_from_slice(hashes);
    message[42..42 + groups.len()].copy_from_slice(groups);
    message
}

fn response(key: &[u8], challenge: &[u8], sequence: u32, names: (&str, &str, &str)) -> Vec<u8> {
    let text = auth::hashed(challenge, sequence, 9, 0, names);
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), &text).as_ref().to_vec()
}

/// Authenticates by a key; `theirs` is the key that the subsystem must have.
fn authenticate(host: &mut Host, key: &[u8], theirs: Option<&[u8]>) -> Result<(), u8> {
    assert_eq!(send(host, &negotiate(&[1], &[1, 0])), Status::SUCCESS);
    let (status, challenge) = receive(host);
    assert_eq!((status, challenge[1], challenge[6], challenge[8], challenge[9]), (Status::SUCCESS, 1, 32, 1, 0));
    let sequence = u32::from_le_bytes(challenge[12..16].try_into().unwrap());
    let mut reply = vec![0; 16];
    (reply[0], reply[1], reply[4], reply[6], reply[8], reply[12]) = (1, 2, 9, 32, theirs.is_some().into(), 3);
    reply.extend(response(key, &challenge[16..48], sequence, ("HostHost", HOST, SUBSYSTEM)));
    reply.extend([7; 32]);
    assert_eq!(send(host, &reply), Status::SUCCESS);
    let (status, answer) = receive(host);
    assert_eq!(status, Status::SUCCESS);
    if answer[1] == 0xf1 {
        assert!(matches!(host.hear(), Said::End));
        return Err(answer[7]);
    }
    assert_eq!(answer[1], 3);
    if let Some(theirs) = theirs {
        let expected = response(theirs, &[7; 32], 3, ("Controller", SUBSYSTEM, HOST));
        assert_eq!((answer[8], &answer[16..48]), (1, &expected[..]));
        assert_eq!(send(host, &[1, 4, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), Status::SUCCESS);
    }
    Ok(())
}

#[test]
fn every_queue_proves_who_its_host_is() {
    let (key, other) = (text_of(&KEY, "00"), text_of(&OTHER_KEY, "00"));
    let Some(served) = served(&[(HOST, &key)], Some(&other)) else { return };
    let (mut host, controller) = connected(&served, 0, 0xffff);
    // Nothing else is let through before.
    let get = Command {
        opcode: fabrics::OPCODE,
        nsid: fabrics::PROPERTY_GET.into(),
        cdw: [0, property::STATUS, 0, 0, 0, 0],
        ..plain()
    };
    let identify =
        Command { opcode: admin::IDENTIFY, cdw: [identify::CONTROLLER.into(), 0, 0, 0, 0, 0], ..with_room(4096) };
    for command in [get, identify] {
        assert_eq!(host.ask(command, &[]).0.status, Status::AUTHENTICATION);
    }
    assert_eq!(receive(&mut host).0, Status::SEQUENCE, "nothing is to be asked for yet");
    authenticate(&mut host, &KEY, Some(&OTHER_KEY)).unwrap();
    host.set_configuration(property::ENABLE);
    assert_eq!(host.identify(identify::CONTROLLER, 0).len(), 4096);
    let (mut io, _) = connected(&served, 1, controller);
    assert_eq!(io.write(1, 0, &[1; 512], true, 0), Status::AUTHENTICATION);
    assert_eq!(io.write(1, 0, &[1; 512], false, 0), Status::AUTHENTICATION);
    assert_eq!(io.plain(nvm::FLUSH, 1, 0, 1, 0), Status::AUTHENTICATION);
    authenticate(&mut io, &KEY, None).unwrap();
    assert_eq!(io.write(1, 0, &[1; 512], true, 0), Status::SUCCESS);
    assert_eq!(io.read(1, 0, 1).unwrap(), [1; 512]);
    // Once more, while it is let in.
    authenticate(&mut host, &KEY, None).unwrap();
    assert_eq!(host.identify(identify::CONTROLLER, 0).len(), 4096);
}

#[test]
fn wrong_secrets_and_messages_are_refused() {
    let key = text_of(&KEY, "00");
    let Some(served) = served(&[(HOST, &key)], None) else { return };
    let failed = Err(Failure::Failed as u8);
    assert_eq!(authenticate(&mut connected(&served, 0, 0xffff).0, &OTHER_KEY, None), failed);
    assert_eq!(authenticate(&mut connected(&served, 0, 0xffff).0, &KEY, Some(&OTHER_KEY)), failed, "it has no secret");
    let cases: [(Vec<u8>, Failure); 6] = [
        (negotiate(&[9], &[0]), Failure::Hash),
        (negotiate(&[1], &[1]), Failure::Group),
        ([0, 0, 0, 0, 9, 0, 1, 0].to_vec(), Failure::Protocol),
        ([1, 2, 0, 0, 9, 0, 32, 0].to_vec(), Failure::Payload),
        ([1, 4, 0, 0, 9, 0, 0, 0].to_vec(), Failure::Message),
        ([7; 64].to_vec(), Failure::Message),
    ];
    for (message, failure) in cases {
        let (mut host, _) = connected(&served, 0, 0xffff);
        assert_eq!(send(&mut host, &message), Status::SUCCESS);
        let (status, answer) = receive(&mut host);
        assert_eq!((status, answer[1], answer[7]), (Status::SUCCESS, 0xf1, failure as u8));
        assert!(matches!(host.hear(), Said::End));
    }
    // Another security protocol, and a length that is not allowed.
    let (mut host, _) = connected(&served, 0, 0xffff);
    let wrong = Command { cdw: [0xea_01_01_00, 8, 0, 0, 0, 0], sgl: in_capsule_of(8), ..command(auth::SEND, 8) };
    assert_eq!(host.ask(wrong, &[0; 8]).0.status, Status::INVALID_FIELD);
    assert_eq!(send(&mut host, &[0; 5000]), Status::INVALID_FIELD);
    let long = Command { sgl: in_capsule_of(8), ..command(auth::SEND, 64) };
    assert_eq!(host.ask(long, &[0; 8]).0.status, Status::SGL_LENGTH);
    // A host that is not known; a disk that is served without secrets asks for none.
    let Some(strict) = self::served(&[("nqn.2026-01.org.example:another", &key)], None) else { return };
    assert_eq!(authenticate(&mut connected(&strict, 0, 0xffff).0, &KEY, None), failed);
    let Completion { result, .. } = {
        let mut host = Host::initialize(&strict.socket(), Ways::default());
        host.connect(0, fabrics_discovery(), 0xffff, Ways::default())
    };
    assert_eq!(result & auth::REQUIRED, 0, "discovery is open");
}

fn fabrics_discovery() -> &'static str {
    diskwright_nvme::wire::DISCOVERY_NQN
}

#[test]
fn a_secret_that_is_no_key_is_told_at_the_start() {
    for secret in
        ["a secret of a host", "DHHC-1:00:AAAA:", &text_of(&KEY, "02"), &text_of(&KEY, "09"), &text_of(&KEY, "00")[1..]]
    {
        let error = start(&[(HOST, secret)], None).err().expect("it is refused").to_string();
        assert!(error.contains("nvme gen-dhchap-key") && !error.contains(secret), "{error}");
    }
    // Names of another protocol may be there too.
    assert!(start(&[("iqn.2026-11.org.example:a", "a secret of a host")], None).is_ok());
}

#[test]
fn our_host_and_the_subsystem_prove_who_they_are() {
    let other = text_of(&OTHER_KEY, "00");
    let dir = tempfile::tempdir().unwrap();
    for hash in ["00", "01"] {
        let key = text_of(&KEY, hash);
        let Some(served) = served(&[(HOST, &key)], Some(&other)) else { return };
        let open = |client: (&str, &str), server: Option<&str>, name: Option<&str>| {
            let server = server.map(|secret| ("subsystem", secret));
            let secrets = Some(file_of_secrets(dir.path(), client, server));
            let plain = NvmeUri::at(Endpoint::Unix(served.socket()), SUBSYSTEM, 1);
            NvmeDevice::open(&NvmeUri { secrets, host_nqn: name.map(str::to_owned), ..plain }, true)
        };
        for server in [None, Some(&*other)] {
            let device = open((HOST, &key), server, None).unwrap();
            Blocking::open(&device, EngineKind::Auto).unwrap().write(0, &[1; 4096], true).unwrap();
        }
        for (outcome, words) in [
            (open((HOST, &text_of(&OTHER_KEY, hash)), None, None), "does not accept the secret of this host"),
            (open((HOST, &key), Some(&text_of(&[0x33; 32], "00")), None), "does not prove that it is"),
            (open((HOST, "not a key at all"), None, None), "has not the form DHHC-1"),
            (open((HOST, &key), None, Some("nqn.2026-01.org.example:other")), "no client"),
            (NvmeDevice::open(&NvmeUri::at(Endpoint::Unix(served.socket()), SUBSYSTEM, 1), true), "?secrets=FILE"),
        ] {
            let told = outcome.unwrap_err().to_string();
            assert!(told.contains(words), "{told}");
            assert!(!told.contains(&key), "no secret is told");
        }
    }
}
