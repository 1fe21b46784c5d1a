//! What a repository needs of the server that keeps it.
//!
//! The server must be *consistent*: what was written is listed and read from then on, by all. S3 is
//! so since 2020, and so are versitygw and Ceph's gateway. And it must honour
//! `If-None-Match: *`, which every push tests (`session.rs`).

use crate::error::Result;
use rustix::time::{ClockId, clock_gettime};
use std::{
    fmt, thread,
    time::{Duration, SystemTime},
};

/// An object of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its key within the repository.
    pub key: String,
    /// Its length in bytes.
    pub size_bytes: u64,
    /// When it was written, by the clock of the server.
    pub modified: SystemTime,
}

/// The objects of a repository, by their keys. Calls wait for the server. They are made by several
/// threads at once.
pub trait Remote: Send + Sync + fmt::Debug {
    /// Name of an object for messages, as `s3://BUCKET/FOLDER/KEY`.
    fn name_of(&self, key: &str) -> String;

    /// The first `most_bytes` of an object; `None` if there is none.
    ///
    /// # Errors
    /// The server's refusal, or that it does not answer.
    fn get(&self, key: &str, most_bytes: u64) -> Result<Option<Vec<u8>>>;

    /// Writes an object, over one that is there.
    ///
    /// # Errors
    /// As [`Remote::get`]. It may have been written all the same.
    fn put(&self, key: &str, bytes: Vec<u8>) -> Result<()>;

    /// Writes an object if there is none (`If-None-Match: *`), by one request that is not repeated.
    /// `false` if there is one.
    ///
    /// # Errors
    /// As [`Remote::put`].
    fn put_new(&self, key: &str, bytes: Vec<u8>) -> Result<bool>;

    /// All objects of a folder, which is empty or ends with a slash. Without those in folders
    /// below, if `is_flat`.
    ///
    /// # Errors
    /// As [`Remote::get`].
    fn list(&self, folder: &str, is_flat: bool) -> Result<Vec<Listed>>;

    /// Time of this machine since any moment. It goes on while the machine sleeps.
    fn clock(&self) -> Duration {
        let now = clock_gettime(ClockId::Boottime);
        Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32)
    }

    /// Lets time go by before another try.
    fn pause(&self, pause: Duration) {
        thread::sleep(pause);
    }

    /// Deletes objects, those that are there.
    ///
    /// # Errors
    /// As [`Remote::get`]. Some may have been deleted.
    fn delete(&self, keys: &[String]) -> Result<()>;
}
