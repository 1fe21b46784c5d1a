use super::*;
use crate::engine::{chain::Layer, device::Disk, work::Work};
use diskwright_image::{CreateOptions, DiskType, Format, ParentLink, probe};
use diskwright_store::{Blocking, EngineKind, MemoryStore, Store};

#[test]
fn a_lost_request_fails_the_wait_for_a_grace_period() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("disk", vec![0; 4096]));
    let image = probe::open(store, Some(Format::Raw), true, 512).unwrap();
    let chain = Chain::new(vec![Layer { path: "disk".into(), image }], 1 << 20).unwrap();
    let shared = Arc::new(Shared::new(chain, Vec::new()));
    shared.wait_for_grace().unwrap();
    let queue = shared.epochs.join();
    queue.enter();
    queue.abandon();
    // The second call finds the unfinished grace period of the first.
    for _ in 0..2 {
        let error = shared.wait_for_grace().unwrap_err().to_string();
        assert!(error.contains("was never answered"), "{error}");
    }
}

fn layer(name: &str, disk_type: DiskType) -> Layer {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(name));
    let parent = (disk_type == DiskType::Differencing)
        .then(|| ParentLink { relative_path: Some(".\\base".into()), ..ParentLink::default() });
    let options = CreateOptions {
        disk_type,
        size_bytes: 8 << 20,
        block_bytes: Some(1 << 20),
        logical_sector_bytes: 512,
        physical_sector_bytes: 4096,
        parent,
        preallocate: false,
        disk_id: None,
        own: Default::default(),
    };
    Format::Vhdx.driver().create(Arc::clone(&store), &options).unwrap();
    Layer { path: name.into(), image: probe::open(store, Some(Format::Vhdx), true, 512).unwrap() }
}

/// A chain that changes before its grace period begins would send some requests to the new top,
/// and others, which begin after those have ended, to the former one.
#[test]
fn a_layer_joins_at_the_moment_at_which_its_grace_period_begins() {
    let disk = Disk::from_layers(vec![layer("base", DiskType::Dynamic)], Vec::new()).unwrap();
    let queue = disk.shared.epochs.join();
    let request = queue.enter();
    disk.shared.begin_grace(|_| {}).unwrap();
    thread::scope(|scope| {
        let pushing = scope.spawn(|| disk.push_layer(layer("top", DiskType::Differencing)));
        thread::sleep(std::time::Duration::from_millis(50));
        let layers_before = disk.layers().len();
        queue.leave(request.parity);
        pushing.join().unwrap().unwrap();
        assert_eq!(layers_before, 1, "its period cannot begin yet");
    });
    assert_eq!(disk.layers().len(), 2);
}

/// A request is planned on one chain, needs tables, and releases the lock. Before the tables are
/// read another image joins and takes a write. The tables of the former chain do not show it.
#[test]
fn work_that_was_planned_before_an_image_joined_does_not_hide_what_was_written_since() {
    let old_top = layer("old", DiskType::Differencing);
    let disk = Disk::from_layers(vec![old_top, layer("base", DiskType::Dynamic)], Vec::new()).unwrap();
    let mut queue = Blocking::open(&disk, EngineKind::Sync).unwrap();
    queue.write(0, &[1; 4096], false).unwrap();
    let before = disk.shared.chain();
    let stale = [Work::Decide { unit: 0 }, Work::Fold { page: 0 }];
    disk.push_layer(layer("top", DiskType::Differencing)).unwrap();
    queue.write(1024, &[2; 512], false).unwrap();
    for work in stale {
        if matches!(work, Work::Fold { .. }) {
            // As if the page had been dropped at the memory limit.
            before.map.clear();
        }
        disk.shared.carry_out(&before, &work).unwrap();
        let mut found = [0; 4096];
        queue.read(0, &mut found).unwrap();
        let expected = |at: usize| if (1024..1536).contains(&at) { 2 } else { 1 };
        assert!(found.iter().enumerate().all(|(at, &byte)| byte == expected(at)), "{work:?}");
    }
}
