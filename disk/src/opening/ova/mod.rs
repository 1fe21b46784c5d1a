//! An OVA: a tar archive with an OVF envelope, a manifest, and disks, which are read in place.
//!
//! ```text
//!   x.ova ─▶ archive.rs: members (name, offset, length) ─▶ envelope and manifest: disks by number
//!                │                                                      │ --disk N or NAME
//!                └────────────▶ files.rs: members as files ◀────────────┘
//!                                   └─▶ WindowStore ─▶ Disk, as for every image
//!   verify.rs: digests of the members against the manifest
//! ```
//!
//! Nothing is unpacked. A disk is opened through a file system whose only files are the members, so
//! whatever an image inside names (an extent, a parent) is another member or nothing.
//!
//! What must hold: every member lies within the archive, and a name with a path is not the name of
//! a member. A disk that this program does not read (compressed as a whole, cut in pieces, with a
//! parent, elsewhere) is listed with the reason, and refused with it.

mod archive;
mod files;
mod verify;

pub use archive::OvaMember;
pub(crate) use verify::context as digest_context;
pub use verify::{Digests, MemberDigest};

use crate::{Disk, DiskError, OpenOptions, Progress, Result};
use archive::Archive;
use diskwright_format::ovf::{Envelope, Manifest, OvfDisk, OvfError, OvfSystem, is_plain_name};
use diskwright_image::ImageError;
use diskwright_store::{CacheMode, Files, LockMode};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// An OVA that is open for reading.
#[derive(Debug)]
pub struct Ova {
    path: PathBuf,
    archive: Archive,
    envelope: Envelope,
    /// The member with the manifest, and what it says.
    manifest: Option<(usize, Manifest)>,
    disks: Vec<OvaDisk>,
    remarks: Vec<String>,
}

/// A disk of an OVA.
#[derive(Debug, Clone)]
pub struct OvaDisk {
    /// Its number, from 1, in the order of the envelope.
    pub number: usize,
    /// What the envelope says of it.
    pub ovf: OvfDisk,
    /// Name of its file.
    pub file: Option<String>,
    /// Length of that file in bytes.
    pub file_bytes: Option<u64>,
    /// Why it cannot be read; `None` if it can.
    pub trouble: Option<String>,
}

/// Whether a path is that of an OVA: by its extension alone, because what a raw disk begins with is
/// up to its guest.
pub fn is_ova(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("ova"))
}

impl Ova {
    /// Opens an OVA and reads its envelope and manifest.
    ///
    /// # Errors
    /// Those of the open; [`ImageError::Corrupt`] for an archive or a text that is damaged or ends
    /// too early; [`ImageError::NotAnImage`] for an archive without an envelope.
    pub fn open(path: &Path, files: &Files) -> Result<Self> {
        let options = diskwright_store::OpenOptions {
            writable: false,
            create_new: false,
            cache: CacheMode::PageCache,
            lock: LockMode::Shared,
        };
        let store = files.open(path, &options)?;
        let archive = Archive::read(store, path)?;
        let mut remarks = archive.remarks.clone();
        let envelopes: Vec<&OvaMember> =
            archive.members.iter().filter(|member| has_extension(&member.name, "ovf")).collect();
        let Some(first) = envelopes.first() else {
            return Err(DiskError::Image(ImageError::NotAnImage {
                path: path.to_owned(),
                found: format!("an archive of {} files without a descriptor (.ovf)", archive.members.len()),
                expected: "an OVA (was it copied completely?)".into(),
            }));
        };
        if envelopes.len() > 1 {
            remarks.push(format!("it has {} descriptors; {} is used", envelopes.len(), first.name));
        }
        if archive.members.first().is_some_and(|member| member.name != first.name) {
            remarks.push(format!("{} is not the first file, as DSP0243 demands", first.name));
        }
        let envelope = Envelope::parse(&archive.text_of(first, path)?).map_err(|error| damaged(path, first, &error))?;
        let manifest_name = format!("{}.mf", first.name.rsplit_once('.').map_or("", |(stem, _)| stem));
        let manifest = match archive.members.iter().position(|member| member.name == manifest_name) {
            Some(index) => {
                let member = &archive.members[index];
                let text = archive.text_of(member, path)?;
                Some((index, Manifest::parse(&text).map_err(|error| damaged(path, member, &error))?))
            }
            None => {
                remarks.push(format!("it has no manifest ({manifest_name}), so its files cannot be verified"));
                None
            }
        };
        let disks =
            (1..).zip(&envelope.disks).map(|(number, disk)| describe(number, disk, &envelope, &archive)).collect();
        Ok(Self { path: path.to_owned(), archive, envelope, manifest, disks, remarks })
    }

    /// The files, in their order.
    pub fn members(&self) -> &[OvaMember] {
        &self.archive.members
    }

    /// The disks, in the order of the envelope.
    pub fn disks(&self) -> &[OvaDisk] {
        &self.disks
    }

    /// The virtual machines of the envelope, in its order.
    pub fn systems(&self) -> &[OvfSystem] {
        &self.envelope.systems
    }

    /// What a user should know, a sentence each.
    pub fn remarks(&self) -> &[String] {
        &self.remarks
    }

    /// Whether there is a manifest.
    pub fn has_manifest(&self) -> bool {
        self.manifest.is_some()
    }

    /// The disk with this number, id or file name; without one the only disk.
    ///
    /// # Errors
    /// [`DiskError::Usage`] if it is not there, and without a name if there are several.
    pub fn find(&self, wanted: Option<&str>) -> Result<&OvaDisk> {
        let names = || {
            let name = |disk: &OvaDisk| format!("{} ({})", disk.number, disk.file.as_ref().unwrap_or(&disk.ovf.id));
            self.disks.iter().take(20).map(name).collect::<Vec<_>>().join(", ")
        };
        let refuse =
            |what: String, hint: String| DiskError::Usage { what: format!("{}: {what}", self.path.display()), hint };
        match (wanted, &self.disks[..]) {
            (_, []) => Err(DiskError::BadOptions {
                what: format!("{}: it has no disks", self.path.display()),
                hint: "name another OVA".into(),
            }),
            (None, [disk]) => Ok(disk),
            (None, disks) => Err(refuse(
                format!("it has {} disks: {}", disks.len(), names()),
                "say which one with `OpenOptions::ova_disk`".into(),
            )),
            (Some(wanted), disks) => {
                let by_name = disks.iter().find(|disk| disk.file.as_deref() == Some(wanted) || disk.ovf.id == wanted);
                let by_number = || disks.iter().find(|disk| wanted.parse() == Ok(disk.number));
                by_name
                    .or_else(by_number)
                    .ok_or_else(|| refuse(format!("it has no disk {wanted:?}"), format!("its disks are {}", names())))
            }
        }
    }

    /// Opens a disk for reading, as any image. `options.format` is that of the image.
    ///
    /// # Errors
    /// As [`Ova::find`] and [`Disk::open`]; [`ImageError::Unsupported`] for a disk that cannot be
    /// read; [`DiskError::BadOptions`] if it is to be written.
    pub fn open_disk(self, options: &OpenOptions) -> Result<Arc<Disk>> {
        if options.writable {
            return Err(DiskError::BadOptions {
                what: format!("{}: a disk inside an OVA is only read", self.path.display()),
                hint: "convert it into an image of its own".into(),
            });
        }
        let disk = self.find(options.ova_disk.as_deref())?;
        let (Some(file), None) = (&disk.file, &disk.trouble) else {
            let what = disk.trouble.clone().unwrap_or_else(|| "it has no file".into());
            return Err(DiskError::Image(ImageError::Unsupported {
                path: self.path.join(disk.file.as_ref().unwrap_or(&disk.ovf.id)),
                what,
                hint: "unpack the OVA with tar and the program that made it".into(),
            }));
        };
        let name = self.path.join(file);
        let files = files::files(self.path.clone(), self.archive);
        Disk::open(&name, &OpenOptions { files, ova_disk: None, ..options.clone() })
    }

    /// Computes the digests of all files and compares them with the manifest.
    ///
    /// # Errors
    /// Those of reading; [`DiskError::Stopped`].
    pub fn verify(&self, progress: &mut Progress<'_>) -> Result<Digests> {
        let Some((own, manifest)) = &self.manifest else { return Ok(Digests::default()) };
        verify::verify(&self.path, &self.archive, *own, manifest, progress)
    }
}

fn has_extension(name: &str, wanted: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(stem, extension)| !stem.is_empty() && extension.eq_ignore_ascii_case(wanted))
}

fn damaged(path: &Path, member: &OvaMember, error: &OvfError) -> DiskError {
    DiskError::Image(ImageError::Corrupt {
        path: path.join(&member.name),
        structure: error.structure,
        offset_bytes: member.offset_bytes,
        found: format!("{} in line {}", error.found, error.line),
        expected: error.expected.clone(),
    })
}

/// What is known of a disk, and why it cannot be read.
fn describe(number: usize, ovf: &OvfDisk, envelope: &Envelope, archive: &Archive) -> OvaDisk {
    let mut disk = OvaDisk { number, ovf: ovf.clone(), file: None, file_bytes: None, trouble: None };
    let Some(file_ref) = &ovf.file_ref else {
        disk.trouble = Some("an empty disk, which has no file".into());
        return disk;
    };
    let Some(file) = envelope.file_of(ovf) else {
        disk.trouble = Some(format!("a disk whose file {file_ref:?} is not among the references"));
        return disk;
    };
    disk.file = Some(file.href.clone());
    let member = archive.members.iter().find(|member| member.name == file.href);
    disk.file_bytes = member.map(|member| member.size_bytes);
    disk.trouble = if let Some(how) = &file.compression {
        Some(format!("a disk that is compressed as a whole ({how})"))
    } else if file.chunk_bytes.is_some() {
        Some("a disk that is cut into pieces (ovf:chunkSize)".into())
    } else if !is_plain_name(&file.href) {
        Some(format!("a disk whose file {:?} has a path", file.href))
    } else if let Some(parent) = &ovf.parent_ref {
        Some(format!("a disk that depends on another one ({parent})"))
    } else {
        match (member, file.size_bytes) {
            (None, _) => Some("a disk whose file is not in the archive".into()),
            (Some(member), Some(said)) if said != member.size_bytes => Some(format!(
                "a disk whose file has {} bytes where the descriptor says {said}, perhaps cut or compressed",
                member.size_bytes
            )),
            _ => None,
        }
    };
    disk
}

#[cfg(test)]
mod tests;
