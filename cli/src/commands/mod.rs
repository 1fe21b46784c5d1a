//! The commands: one file each. Arguments in, a library called, words out.

pub mod attach;
pub mod attached;
pub mod check;
pub mod clone;
pub mod compact;
pub mod compare;
pub mod completions;
pub mod convert;
pub mod create;
pub mod detach;
pub mod diskspd;
pub mod experiment;
pub mod info;
pub mod io;
pub mod lab;
pub mod man;
pub mod map;
pub mod merge;
pub mod move_;
pub mod partitions;
pub mod reconnect;
pub mod resize;
pub mod serve;
pub mod serve_ctl;
pub mod snapshot;
pub mod track;
