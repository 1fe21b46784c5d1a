//! `[NAME=]SOCKET`: a disk of a virtual machine on the command line of `serve`.

use super::word::DiskWord;
use crate::exit::Failure;
use std::path::PathBuf;

/// A socket at which a disk is that of a virtual machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineWord {
    /// Name of the disk's export. `None` for the only disk.
    pub disk: Option<String>,
    /// The socket.
    pub socket: PathBuf,
}

impl MachineWord {
    /// Parses a word. A `=` ends the name if no slash comes before it.
    ///
    /// # Errors
    /// A sentence for clap: there is no socket.
    pub fn parse(word: &str) -> Result<Self, String> {
        let (disk, socket) = match word.split_once('=') {
            Some((name, socket)) if !name.contains('/') => (Some(name.to_owned()), socket),
            _ => (None, word),
        };
        if socket.is_empty() {
            return Err("a socket has a path".into());
        }
        Ok(Self { disk, socket: socket.into() })
    }

    /// The index of its disk.
    ///
    /// # Errors
    /// There is no such disk, or it is not clear which one is meant.
    pub fn disk_among(&self, disks: &[DiskWord]) -> Result<usize, Failure> {
        let names = || disks.iter().map(|disk| disk.name.as_str()).collect::<Vec<_>>().join(", ");
        let socket = self.socket.display();
        match &self.disk {
            None if disks.len() == 1 => Ok(0),
            None => Err(Failure::usage(format!(
                "--vhost-user {socket}: a socket is one disk of the machine; write --vhost-user NAME={socket}, with one of the names {}",
                names()
            ))),
            Some(name) => disks.iter().position(|disk| disk.name == *name).ok_or_else(|| {
                Failure::usage(format!(
                    "--vhost-user {name}={socket}: no disk has the name {name:?}; the names are {}",
                    names()
                ))
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_before_their_sockets() {
        let word = |disk: Option<&str>, socket: &str| MachineWord { disk: disk.map(Into::into), socket: socket.into() };
        for (text, expected) in [
            ("/run/vm.sock", word(None, "/run/vm.sock")),
            ("db=/run/vm.sock", word(Some("db"), "/run/vm.sock")),
            ("./a=b.sock", word(None, "./a=b.sock")),
            ("db=a=b", word(Some("db"), "a=b")),
        ] {
            assert_eq!(MachineWord::parse(text), Ok(expected), "{text}");
        }
        assert!(MachineWord::parse("db=").is_err() && MachineWord::parse("").is_err());
    }

    #[test]
    fn a_socket_is_one_disk() {
        let disks = |words: &[&str]| words.iter().map(|word| DiskWord::parse(word).unwrap()).collect::<Vec<_>>();
        let (one, two) = (disks(&["a.vhdx"]), disks(&["a.vhdx", "db=b.vhdx"]));
        let index = |word: &str, disks: &[DiskWord]| MachineWord::parse(word).unwrap().disk_among(disks);
        assert_eq!(index("s", &one).unwrap(), 0);
        assert_eq!(index("db=s", &two).unwrap(), 1);
        assert!(index("s", &two).unwrap_err().to_string().contains("the names a.vhdx, db"));
        assert!(index("c=s", &two).unwrap_err().to_string().contains("no disk has the name \"c\""));
    }
}
