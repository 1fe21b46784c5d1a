//! An OVA: the archive around a streamOptimized VMDK.
//!
//! ```text
//!   header │ x.ovf + blanks │ header │ x.mf │ header ║ x-disk1.vmdk │ padding │ 2 blocks of zeros
//!   └──────────── reserved, written last ──────────┘ └ written first, its digest with it
//! ```
//!
//! DSP0243 wants the envelope first, then the manifest. Both depend on the disk: its length and its
//! digest are known when it is complete. So the space in front of the disk is reserved, and filled
//! at the end. The length of a manifest does not depend on its digests. The envelope is followed by
//! blanks up to the reserved length, which XML allows behind the root element.

use super::super::options::ConvertOptions;
use super::{
    super::azure::start_of,
    encode::{Written, explain},
    vmdk,
};
use crate::{
    Opened, Progress, Result,
    copying::{copy::Failure, packing::Output},
    error::from_io,
    opening::ova::digest_context,
};
use diskwright_format::{
    ovf::{Appliance, DigestKind, Manifest, ManifestEntry, is_plain_name},
    tar::{TAR_BLOCK_BYTES, TarHeader},
};
use diskwright_store::Store;
use diskwright_volume::Boot;
use std::{
    io,
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// Where the disk begins: a multiple of this, so that it is written by O_DIRECT without copies.
const DISK_ALIGNMENT_BYTES: u64 = 4096;
/// The longest name of a machine, so that the names of its files fit into a header.
const NAME_MAX_BYTES: usize = 80;

/// Names and lengths of what stands in front of the disk.
struct OvaPreamble {
    name: String,
    envelope_bytes: u64,
    manifest_bytes: u64,
}

impl OvaPreamble {
    fn of(appliance: &Appliance, name: &str) -> Self {
        let manifest_bytes = manifest(name, appliance, &[0; 32], &[0; 32]).to_text().len() as u64;
        let mut front = Self {
            name: name.to_owned(),
            envelope_bytes: (appliance.text_max_bytes() as u64).next_multiple_of(TAR_BLOCK_BYTES),
            manifest_bytes,
        };
        let end_bytes = front.len_bytes();
        front.envelope_bytes += end_bytes.next_multiple_of(DISK_ALIGNMENT_BYTES) - end_bytes;
        front
    }

    /// Length of everything in front of the disk.
    fn len_bytes(&self) -> u64 {
        3 * TAR_BLOCK_BYTES + self.envelope_bytes + self.manifest_bytes.next_multiple_of(TAR_BLOCK_BYTES)
    }

    /// The bytes in front of the disk.
    fn bytes(&self, appliance: &Appliance, disk_digest: &[u8]) -> io::Result<Vec<u8>> {
        let mut envelope = appliance.to_text().into_bytes();
        envelope.resize(self.envelope_bytes as usize - 1, b' ');
        envelope.push(b'\n');
        let mut digest = digest_context(DigestKind::Sha256);
        digest.update(&envelope);
        let manifest = manifest(&self.name, appliance, digest.finish().as_ref(), disk_digest).to_text();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let mut bytes = Vec::new();
        for (name, contents) in
            [(envelope_name(&self.name), &envelope[..]), (format!("{}.mf", self.name), manifest.as_bytes())]
        {
            let header = TarHeader::of_file(&name, contents.len() as u64, now).map_err(io::Error::other)?;
            bytes.extend(header);
            bytes.extend(contents);
            bytes.resize(bytes.len().next_multiple_of(TAR_BLOCK_BYTES as usize), 0);
        }
        let header = TarHeader::of_file(&appliance.disk_file, appliance.disk_file_bytes, now);
        bytes.extend(header.map_err(io::Error::other)?);
        Ok(bytes)
    }
}

/// Writes the source into the empty file `store`, which will be called `dest`.
pub(super) fn write(
    source: (&Opened, &Path),
    (store, dest): (&Arc<dyn Store>, &Path),
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<Written> {
    let free_bytes = diskwright_store::free_bytes(dest);
    let on_dest = |error| explain(source, dest, free_bytes, Some(Failure::Dest(error)));
    let (_, boot) = start_of(source.0, options.source.engine)
        .map_err(|error| from_io("read its partition table", source.1, error))?;
    let name = machine_name(dest);
    let mut appliance = Appliance {
        name: name.clone(),
        disk_file: format!("{name}-disk1.vmdk"),
        disk_file_bytes: 0,
        capacity_bytes: source.0.device().geometry().size_bytes,
        populated_bytes: 0,
        is_uefi: boot == Some(Boot::Uefi),
    };
    let front = OvaPreamble::of(&appliance, &name);
    let start_bytes = front.len_bytes();
    let mut output = Output::new(Arc::clone(store), start_bytes, Some(digest_context(DigestKind::Sha256)));
    let mut written = vmdk::write(source, (&mut output, dest), &appliance.disk_file, options, progress)?;
    let digest = output.take_digest().ok_or_else(|| on_dest(io::Error::other("the digest was not computed")))?;
    appliance.disk_file_bytes = written.file_bytes;
    appliance.populated_bytes = written.outcome.copied_bytes;
    // The padding of the disk, and the end of the archive.
    let padding_bytes = written.file_bytes.next_multiple_of(TAR_BLOCK_BYTES) - written.file_bytes;
    output.append(&vec![0; (padding_bytes + 2 * TAR_BLOCK_BYTES) as usize]).map_err(on_dest)?;
    written.file_bytes = output.flush().map_err(on_dest)?;
    let bytes = front.bytes(&appliance, digest.as_ref()).map_err(on_dest)?;
    debug_assert_eq!(bytes.len() as u64, start_bytes);
    store.write_at(&bytes, 0).map_err(on_dest)?;
    if appliance.is_uefi {
        written.outcome.warnings.push(format!(
            "{}: the disk starts by UEFI, which VirtualBox does not read from an OVA: enable EFI in the settings of the machine after the import",
            dest.display()
        ));
    }
    Ok(written)
}

/// The name of the machine and of its files: that of the OVA.
fn machine_name(dest: &Path) -> String {
    let stem = dest.file_stem().and_then(|stem| stem.to_str());
    let is_usable = |stem: &&str| is_plain_name(stem) && stem.len() <= NAME_MAX_BYTES;
    stem.filter(is_usable).unwrap_or("appliance").to_owned()
}

fn envelope_name(name: &str) -> String {
    format!("{name}.ovf")
}

fn manifest(name: &str, appliance: &Appliance, envelope: &[u8], disk: &[u8]) -> Manifest {
    let entry = |name: String, digest: &[u8]| ManifestEntry { name, kind: DigestKind::Sha256, digest: digest.into() };
    Manifest { entries: vec![entry(envelope_name(name), envelope), entry(appliance.disk_file.clone(), disk)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserved_space_fits_whatever_the_lengths() {
        for (name, bytes) in [("a", 0), ("größe", 1 << 20), ("a & b", 9 << 30), ("x", u64::MAX)] {
            let empty = Appliance {
                name: name.into(),
                disk_file: format!("{name}-disk1.vmdk"),
                disk_file_bytes: 0,
                capacity_bytes: 64 << 40,
                populated_bytes: 0,
                is_uefi: false,
            };
            let front = OvaPreamble::of(&empty, name);
            assert!(front.len_bytes().is_multiple_of(DISK_ALIGNMENT_BYTES));
            let complete = Appliance { disk_file_bytes: bytes, populated_bytes: bytes, ..empty };
            assert_eq!(front.bytes(&complete, &[7; 32]).unwrap().len() as u64, front.len_bytes());
        }
    }

    #[test]
    fn names_that_do_not_fit_into_an_archive_are_replaced() {
        let long = "x".repeat(81);
        for (dest, name) in [("/a/b.ova", "b"), ("a:b.ova", "appliance"), (&format!("{long}.ova"), "appliance")] {
            assert_eq!(machine_name(Path::new(dest)), name);
        }
    }
}
