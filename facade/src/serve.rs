//! Disks for NBD clients: qemu, nbdcopy, nbd-client, or [`NbdDevice`](crate::NbdDevice).
//!
//! A server is given exports (a disk under a name) and listeners (unix sockets, TCP), and serves
//! until it is stopped. Writable exports on TCP without TLS are refused unless
//! [`ServerOptions::insecure_writes`] says otherwise. The server needs io_uring, and
//! [`ThreadError::Ring`] says where there is none. [`tls`] reads a folder of certificates for
//! [`ServerOptions::tls`]. [`ephemeral`] puts a temporary child on a disk that is open read-only:
//! clients can write, and their writes are dropped at the end.
//!
//! ```
//! use diskwright_lib::serve::{Address, Export, Listener, ServeError, ServerOptions, nbd};
//! use diskwright_lib::serve::ThreadError;
//! use diskwright_lib::{CreateRequest, Disk, DiskStream, NbdDevice, NbdUri, OpenOptions, create};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let (path, socket) = (dir.path().join("disk.vhdx"), dir.path().join("disk.sock"));
//! # create(&path, &CreateRequest { size_bytes: Some(64 << 20), ..CreateRequest::default() })?;
//! let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() })?;
//! let export = Export { name: "disk".into(), description: String::new(), device: disk.clone() };
//! let listener = Listener::bind(&Address::Unix(socket.clone()))?;
//! let server = match nbd::start(vec![export], vec![listener], ServerOptions::default()) {
//!     Err(ServeError::Thread(ThreadError::Ring { source })) => {
//!         eprintln!("skipped: no io_uring: {source}");
//!         return Ok(());
//!     }
//!     started => started?,
//! };
//!
//! // A client, here in the same process.
//! let export = NbdDevice::open(&NbdUri::unix(&socket, "disk"), true)?;
//! let mut stream = DiskStream::open(Arc::new(export))?;
//! stream.write_at(4096, b"over the wire")?;
//! let mut text = [0; 13];
//! stream.read_at(4096, &mut text)?;
//! assert_eq!(&text, b"over the wire");
//! drop(stream);
//!
//! server.stop()?;
//! disk.close()?;
//! # Ok(())
//! # }
//! ```

pub use diskwright_serve::{
    ThreadError,
    ephemeral::{EphemeralError, on_top_of as ephemeral},
    nbd,
    net::{Address, Export, ExportError, ListenError, Listener, ServeError, Server, ServerOptions},
};

pub use diskwright_nbd::tls::{TlsError, server as tls};
