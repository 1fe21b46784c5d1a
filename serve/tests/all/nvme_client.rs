//! Our NVMe/TCP host with our target: contents against a model, many requests in flight, errors.

use crate::common::{
    Served, memory,
    model::{DISK_BYTES, contents_match_a_model, reap_all},
    nvme_host::SUBSYSTEM,
    raw_file,
};
use diskwright_nvme::{ClientError, NvmeDevice, NvmeUri, wire::Digests};
use diskwright_serve::{
    ThreadError,
    net::{Address, Export, Listener, ServeError, ServerOptions},
    nvme,
};
use diskwright_store::{BlockDevice, CacheMode, Endpoint, IoBuf, QueueOptions, Request};
use std::{io, sync::Arc};

fn serve(devices: Vec<Arc<dyn BlockDevice>>, options: ServerOptions) -> Option<Served> {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&Address::Unix(dir.path().join("socket"))).unwrap();
    let exports = (0..).zip(devices);
    let exports = exports.map(|(n, device)| Export { name: format!("{n}"), description: String::new(), device });
    match nvme::start(SUBSYSTEM, exports.collect(), vec![listener], options) {
        Ok(server) => Some(Served { server: Some(server), dir }),
        Err(ServeError::Thread(ThreadError::Ring { source })) => {
            eprintln!("skipped: no io_uring: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn uri(served: &Served, digests: Digests) -> NvmeUri {
    NvmeUri { digests, ..NvmeUri::at(Endpoint::Unix(served.socket()), SUBSYSTEM, 1) }
}

fn contents_match(digests: Digests, options: ServerOptions, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let device = raw_file(&dir.path().join("disk"), DISK_BYTES as u64, CacheMode::PageCache);
    let Some(served) = serve(vec![device], options) else { return };
    contents_match_a_model(&NvmeDevice::open(&uri(&served, digests), true).unwrap(), seed);
    assert_eq!(served.server().metrics().totals().broken, 0);
}

#[test]
fn contents_match_a_model_in_every_way_of_connecting() {
    for (seed, digests) in (0..4_u8).map(|bits| (u64::from(bits), Digests::from_bits_truncate(bits))) {
        contents_match(digests, ServerOptions::default(), seed);
    }
}

#[test]
fn contents_match_a_model_when_the_share_is_small() {
    let options = ServerOptions { requests_max: 3, request_bytes_max: 64 << 10, ..ServerOptions::default() };
    contents_match(Digests::DATA, options, 77);
}

#[test]
fn each_queue_is_a_connection_and_they_are_limited() {
    let Some(served) = serve(vec![memory(1 << 20, true)], ServerOptions::default()) else { return };
    let device = NvmeDevice::open(&uri(&served, Digests::empty()), true).unwrap();
    let info = device.info();
    assert_eq!((info.queues, info.entries, info.capsule_bytes, info.transfer_bytes), (32, 128, 8192, 1 << 20));
    let open = || device.open_queue(&QueueOptions::default());
    let queues: Vec<_> = (0..32).map(|_| open().unwrap()).collect();
    assert_eq!(served.server().metrics().totals().connections, 33);
    let error = open().unwrap_err().to_string();
    assert!(error.contains("all 32 I/O queues"), "{error}");
    drop(queues);
    // The target may not have noticed yet that the connections have ended.
    let start = std::time::Instant::now();
    while let Err(error) = open() {
        assert!(start.elapsed() < crate::common::PATIENCE, "{error}");
    }
}

#[test]
fn names_that_do_not_exist_and_disks_that_cannot_be_written() {
    let devices = vec![memory(1 << 20, true), memory(1 << 20, false)];
    let Some(mut served) = serve(devices, ServerOptions::default()) else { return };
    let all = uri(&served, Digests::empty());
    let error = |uri: NvmeUri, writable| NvmeDevice::open(&uri, writable).unwrap_err();
    let told = error(NvmeUri { nsid: Some(3), ..all.clone() }, false);
    assert!(matches!(told, ClientError::Unknown { .. }) && told.to_string().contains("it has [1, 2]"), "{told}");
    let told = error(NvmeUri { nsid: None, ..all.clone() }, false).to_string();
    assert!(told.contains("?nsid=N"), "{told}");
    let other = Some("nqn.2026-01.org.example:others".to_owned());
    let told = error(NvmeUri { subsystem: other, ..all.clone() }, false).to_string();
    assert!(told.contains("refuses to connect to the subsystem: invalid parameters"), "{told}");
    let told = error(NvmeUri { nsid: Some(2), ..all.clone() }, true);
    assert!(matches!(told, ClientError::Unusable { .. }), "{told}");
    let device = NvmeDevice::open(&NvmeUri { nsid: Some(2), ..all.clone() }, false).unwrap();
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    let refused = queue.push(Request::write(0, 512, IoBuf::new(512), 0)).unwrap_err();
    assert_eq!(refused.reason.kind(), io::ErrorKind::ReadOnlyFilesystem);
    // A server that ends takes the requests with it, and says so.
    served.stop().unwrap();
    queue.push(Request::read(0, 512, IoBuf::new(512), 7)).unwrap();
    let completion = reap_all(&mut *queue).pop().unwrap();
    let told = completion.result.unwrap_err().to_string();
    assert!(completion.buf.is_some() && told.contains("the connection broke while"), "{told}");
    assert!(NvmeDevice::open(&all, false).unwrap_err().to_string().contains("cannot connect"));
}

#[test]
fn an_error_of_the_disk_reaches_the_caller() {
    let Some(served) = serve(vec![memory(1 << 20, true)], ServerOptions::default()) else { return };
    let device = NvmeDevice::open(&uri(&served, Digests::empty()), true).unwrap();
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    let other = NvmeDevice::open(&uri(&served, Digests::empty()), true).unwrap();
    served
        .server()
        .add(Export { name: "2".into(), description: String::new(), device: memory(1 << 20, true) })
        .unwrap();
    served.server().remove("0").unwrap();
    queue.push(Request::read(4096, 512, IoBuf::new(512), 7)).unwrap();
    let told = reap_all(&mut *queue).pop().unwrap().result.unwrap_err().to_string();
    assert!(told.ends_with("the target answered a read of 512 bytes at 4096 with: invalid namespace"), "{told}");
    drop((device, other));
}
