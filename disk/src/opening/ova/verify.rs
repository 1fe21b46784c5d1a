//! Digests of the members of an OVA, against its manifest.

use super::archive::Archive;
use crate::{DiskError, Progress, Result, error::file_error};
use diskwright_format::ovf::{DigestKind, Manifest};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256, SHA512};
use std::path::Path;

/// Bytes that are read at once.
const CHUNK_BYTES: usize = 1 << 20;

/// What a comparison of digests has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Digests {
    /// The files of the archive and of the manifest, except the manifest itself and a certificate.
    pub members: Vec<MemberDigest>,
}

/// A file and its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberDigest {
    /// Name of the file within the OVA.
    pub name: String,
    /// How the digest is computed; `None` if the manifest does not have the file.
    pub kind: Option<DigestKind>,
    /// Whether the digest is the one of the manifest; `None` for a file that is in one of both
    /// only.
    pub is_same: Option<bool>,
}

impl Digests {
    /// Whether every file has the digest of the manifest.
    pub fn all_same(&self) -> bool {
        self.members.iter().all(|member| member.is_same == Some(true))
    }
}

/// Starts to compute a digest.
pub(crate) fn context(kind: DigestKind) -> Context {
    Context::new(match kind {
        DigestKind::Sha1 => &SHA1_FOR_LEGACY_USE_ONLY,
        DigestKind::Sha256 => &SHA256,
        DigestKind::Sha512 => &SHA512,
    })
}

/// Compares all members. `own` is the index of the manifest.
pub(super) fn verify(
    path: &Path,
    archive: &Archive,
    own: usize,
    manifest: &Manifest,
    progress: &mut Progress<'_>,
) -> Result<Digests> {
    let total_bytes: u64 = archive.members.iter().map(|member| member.size_bytes).sum();
    let (mut digests, mut done_bytes) = (Digests::default(), 0);
    let mut buf = vec![0; CHUNK_BYTES];
    for (index, member) in archive.members.iter().enumerate() {
        // The certificate signs the manifest, which cannot have its digest.
        if index == own || member.name.ends_with(".cert") {
            done_bytes += member.size_bytes;
            continue;
        }
        let Some(entry) = manifest.entry(&member.name) else {
            digests.members.push(MemberDigest { name: member.name.clone(), kind: None, is_same: None });
            done_bytes += member.size_bytes;
            continue;
        };
        let mut context = context(entry.kind);
        let mut rest = member.size_bytes;
        while rest > 0 {
            if !progress(done_bytes, total_bytes) {
                return Err(DiskError::Stopped);
            }
            let now = rest.min(CHUNK_BYTES as u64) as usize;
            let at = member.offset_bytes + member.size_bytes - rest;
            let read = archive.store.read_at(&mut buf[..now], at);
            read.map_err(|error| file_error("read it", path, error))?;
            context.update(&buf[..now]);
            rest -= now as u64;
            done_bytes += now as u64;
        }
        let is_same = Some(context.finish().as_ref() == entry.digest);
        digests.members.push(MemberDigest { name: member.name.clone(), kind: Some(entry.kind), is_same });
    }
    for entry in &manifest.entries {
        if !archive.members.iter().any(|member| member.name == entry.name) {
            digests.members.push(MemberDigest { name: entry.name.clone(), kind: Some(entry.kind), is_same: None });
        }
    }
    Ok(digests)
}
