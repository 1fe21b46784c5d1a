//! Who this host is: its NQN, its id, and the keys by which it proves that.

use super::{ClientError, Result};
use crate::{key::Key, uri::NvmeUri, wire::fabrics};
use diskwright_store::secrets::{Credentials, Secrets};
use std::fs;

/// The keys of both sides, and their owners.
#[derive(Debug, Clone)]
pub(super) struct Keys {
    /// The host's.
    pub(super) host: Key,
    /// The subsystem's, if it is to prove itself.
    pub(super) subsystem: Option<Key>,
}

/// Who this host is.
#[derive(Debug, Clone)]
pub(super) struct HostName {
    pub(super) nqn: String,
    pub(super) id: [u8; 16],
    pub(super) keys: Option<Keys>,
}

impl HostName {
    /// The name in the URI, that of the secrets if they have only one, that of the system, or one
    /// of this machine.
    ///
    /// # Errors
    /// [`ClientError::Secrets`], [`ClientError::Authentication`].
    pub(super) fn of(uri: &NvmeUri) -> Result<Self> {
        let line_of = |path| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
        let machine = line_of("/etc/machine-id").unwrap_or_default();
        let mut id = [0; 16];
        for (byte, digits) in id.iter_mut().zip(machine.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).unwrap_or_default();
            *byte = u8::from_str_radix(digits, 16).unwrap_or_default();
        }
        let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
        let of_machine = || {
            let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
            format!("nqn.2014-08.org.nvmexpress:uuid:{}", parts.join("-"))
        };
        let of_system = line_of("/etc/nvme/hostnqn").filter(|nqn| fabrics::check_nqn(nqn).is_ok());
        let Some(path) = &uri.secrets else {
            return Ok(Self { nqn: uri.host_nqn.clone().or(of_system).unwrap_or_else(of_machine), id, keys: None });
        };
        let secrets = Secrets::read(path)?;
        let own = secrets.own(uri.host_nqn.as_deref())?;
        let key_of = |owner: &Credentials| {
            Key::parse(&owner.secret_text()).ok_or_else(|| ClientError::Authentication {
                peer: uri.endpoint.to_string(),
                what: format!("the secret of {:?} has not the form DHHC-1:HH:BASE64:", owner.name()),
            })
        };
        let keys = Keys { host: key_of(own)?, subsystem: secrets.server().map(key_of).transpose()? };
        Ok(Self { nqn: own.name().to_owned(), id, keys: Some(keys) })
    }
}
