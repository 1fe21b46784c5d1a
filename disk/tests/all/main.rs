//! The tests of disks, in one binary: each binary links the whole library. Tests that measure the
//! memory of their process have binaries of their own, and so has `races`, which the thread
//! sanitizer runs.

#[path = "../common/mod.rs"]
mod common;
#[path = "../damage/mod.rs"]
mod damage;
#[path = "../images/mod.rs"]
mod images;
#[path = "../meddled/mod.rs"]
mod meddled;
#[path = "../patchwork/mod.rs"]
mod patchwork;
#[path = "../rescuing/mod.rs"]
mod rescuing;
#[path = "../small_fs/mod.rs"]
mod small_fs;

mod absorb;
mod absorb_load;
mod bad_input;
mod bad_places;
mod chains;
mod changing;
mod children;
mod converting;
mod damaged_blocks;
mod damaged_tables;
mod diff;
mod diff_exports;
mod dry_runs;
mod durable_writes;
mod failed_syncs;
mod foreign_vhd;
mod formats;
mod full_disk;
mod hostile_images;
mod huge;
mod late_lanes;
mod late_syncs;
mod live_merges;
mod live_snapshots;
mod mapped_devices;
mod merge;
mod model;
mod moving;
mod moving_faults;
mod names;
mod odd_sizes;
mod other_formats;
mod panics;
mod pieces;
mod qcow2;
mod reconnect;
mod repairs;
mod rescue;
mod rescue_doubts;
mod rescue_file_systems;
mod rescue_structures;
mod resizing;
mod scan_bound;
mod second_opinions;
mod second_readers;
mod semantic_damages;
mod snapshots;
mod split_raw;
mod threads;
mod tracking;
mod tracking_points;
mod undo;
mod undo_files;
mod vmdk;
mod waiting;
mod who_is_blamed;
