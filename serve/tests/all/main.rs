//! The tests of servers, in one binary: each binary links the whole library.

#[path = "../../../nbd/tests/certificates/mod.rs"]
mod certificates;
#[path = "../common/mod.rs"]
mod common;
#[path = "../seen/mod.rs"]
mod seen;
#[path = "../../../nbd/tests/common/mod.rs"]
mod servers;
#[path = "../steps/mod.rs"]
mod steps;

mod client;
mod counts;
mod floods;
mod flushes;
mod hostile;
mod inside_export;
mod iscsi;
mod iscsi_client;
mod iscsi_copy;
mod iscsi_reservations;
mod limits;
mod nbd;
mod nvme;
mod nvme_auth;
mod nvme_client;
mod nvme_reservations;
mod panics;
mod pieces;
mod resize;
mod second_opinions;
mod tls;
mod vhost_liar;
mod vhost_user;
