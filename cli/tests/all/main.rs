//! All tests of the program but the soak, in one binary: each binary links the whole program.

#[path = "../attaching/mod.rs"]
mod attaching;
#[path = "../../../nbd/tests/certificates/mod.rs"]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../guest_machine/mod.rs"]
mod guest_machine;
#[path = "../killing/mod.rs"]
mod killing;
#[path = "../serving/mod.rs"]
mod serving;
#[path = "../../../disk/tests/small_fs/mod.rs"]
mod small_fs;

mod attach;
mod attach_file_systems;
mod backups;
mod bucket;
mod ceph;
mod compact;
mod compact_in_use;
mod control;
mod convert_compare_check;
mod converting;
mod create_info;
mod diff;
mod doubts;
mod dry_run;
mod face;
mod formats;
mod guest;
mod guest_life;
mod guest_nvmet;
mod guest_ublk;
mod guest_vhost_user;
mod io;
mod kill;
mod kill_steps;
mod kill_steps_heal;
mod lab_access_paths;
mod lab_conclusions;
mod lab_exports;
mod lab_fleet;
mod lab_fleet_clocks;
mod lab_fleet_guest;
mod lab_load_and_file;
mod lab_native_and_guest;
mod lab_report;
mod lab_run;
mod lab_saving;
mod lab_studies;
mod live_merge;
mod loops;
mod map;
mod mounted_life;
mod moving;
mod nbd;
mod objects;
mod partitions;
mod pushing;
mod qcow2;
mod readme;
mod reconnect;
mod repair;
mod rescue;
mod resize;
mod schemas;
mod serve;
mod serve_clients;
mod serve_iscsi;
mod serve_nvme;
mod serve_tls;
mod serve_unit;
mod server_death;
mod several;
mod smb;
mod snapshot;
mod space;
mod split_raw;
mod streams;
mod terminal;
mod told;
mod tracking;
mod vdi;
mod vhost_user;
mod vmdk;
mod wrong_input;
