//! The process that serves one attached disk: it has the disk open, mounts it as a FUSE file, and moves its bytes until it is unmounted.
//!
//! What it has to say it says on its standard output, a line of JSON each ([`ServerSays`]), to the supervisor that started it: first that
//! the disk is mounted (or why not), at the end that it is closed (or what was lost). Unmounting is how it is told to end. It does nothing
//! else, so nothing else can take it down with it, and when it dies all the same, the supervisor sees that its output has ended.

use crate::{
    attach::error::AttachError,
    fuse::{self, DISK_NAME, MountOptions, Shape, View},
};
use diskwright_disk::Disk;
use diskwright_store::{BlockDevice, EngineKind};
use serde::{Deserialize, Serialize};
use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// A line from the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServerSays {
    /// The disk is there.
    Mounted {
        /// The disk as a file.
        fuse_file: PathBuf,
        /// Size in bytes.
        size: u64,
        /// Logical sector in bytes.
        sector_size: u32,
        /// Nobody can write.
        read_only: bool,
        /// What the user should know, a sentence each.
        warnings: Vec<String>,
    },
    /// It could not be opened or mounted.
    Failed {
        /// Why, as a sentence.
        error: String,
    },
    /// It was unmounted and closed. With an error, what was written and not flushed may be lost.
    Closed {
        /// What went wrong.
        error: Option<String>,
    },
}

impl ServerSays {
    /// Writes the line. That nobody listens any more is for nobody to hear.
    pub fn say(&self, out: &mut dyn Write) {
        if let Ok(mut line) = serde_json::to_vec(self) {
            line.push(b'\n');
            let _ = out.write_all(&line).and_then(|()| out.flush());
        }
    }
}

/// Seconds since 1970.
pub(crate) fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Mounts `disk` at `point`, serves it until it is unmounted, and closes it. Everything it has to say goes to `out`.
///
/// # Errors
/// What it has said already.
pub fn serve_disk(disk: Arc<Disk>, point: &Path, engine: EngineKind, out: &mut dyn Write) -> Result<(), AttachError> {
    // Memory that the kernel frees by writing to this disk must not be waited for here. Without the right to ask for that it is a risk that
    // every user-space disk has.
    let _ = rustix::process::configure_io_flusher_behavior(true);
    let geometry = disk.geometry();
    let warnings = disk.warnings().to_vec();
    let mounted = (|| {
        let shape = fuse::shape_of(point)?;
        let fd = fuse::mount(point, &MountOptions { shape, read_only: geometry.read_only })?;
        Ok((shape, fd))
    })();
    let (shape, fd) = match mounted {
        Ok(mounted) => mounted,
        Err(error) => {
            let error = AttachError::Fuse(error);
            ServerSays::Failed { error: error.to_string() }.say(out);
            return Err(error);
        }
    };
    let fuse_file = match shape {
        Shape::File => point.to_owned(),
        Shape::Directory => point.join(DISK_NAME),
    };
    ServerSays::Mounted {
        fuse_file,
        size: geometry.size_bytes,
        sector_size: geometry.logical_sector_bytes,
        read_only: geometry.read_only,
        warnings,
    }
    .say(out);
    let view = View {
        shape,
        size_bytes: geometry.size_bytes,
        unit_bytes: geometry.physical_sector_bytes.max(4096),
        read_only: geometry.read_only,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        time_seconds: now_seconds(),
    };
    let device: Arc<dyn BlockDevice> = disk.clone();
    let served = fuse::serve(fd, device, view, engine).map_err(AttachError::Fuse);
    let closed = disk.close().map_err(|error| AttachError::Server(error.to_string()));
    let result = served.and(closed);
    ServerSays::Closed { error: result.as_ref().err().map(ToString::to_string) }.say(out);
    result
}
