//! How a machine starts from a disk, by its partition table alone.
//!
//! ```text
//!   GPT   an EFI system partition ─▶ UEFI     else a BIOS boot partition ─▶ BIOS
//!   MBR   type ef                 ─▶ UEFI     else an active partition   ─▶ BIOS
//! ```
//!
//! A disk for both is counted as UEFI, which has the wider limits. Whether an operating system lies
//! on the disk is not examined: some start from partitions without any mark.

use crate::{
    read::{ReadAt, Window, one_extent},
    table::{self, TableKind},
};

/// Type of the EFI system partition in a GPT.
const EFI_SYSTEM: &str = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b";
/// Type of the partition in a GPT that has GRUB's second stage for machines with a BIOS.
const BIOS_BOOT: &str = "21686148-6449-6e6f-744e-656564454649";
/// Type of the EFI system partition in an MBR.
const EFI_SYSTEM_MBR: &str = "ef";

/// How a machine starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Boot {
    /// With a BIOS: generation 1 of Hyper-V and Azure.
    Bios,
    /// With UEFI: generation 2 of Hyper-V and Azure.
    Uefi,
}

/// The partition table of `disk`, and how a machine starts from it: `None` if no partition is
/// marked for that, as on a disk of data.
pub fn boot(disk: &dyn ReadAt) -> (TableKind, Option<Boot>) {
    let found = table::find(disk);
    let has = |wanted: &str| found.partitions.iter().any(|partition| partition.type_text.as_deref() == Some(wanted));
    let boot = match found.kind {
        TableKind::None => None,
        TableKind::Gpt if has(EFI_SYSTEM) => Some(Boot::Uefi),
        TableKind::Gpt => has(BIOS_BOOT).then_some(Boot::Bios),
        TableKind::Mbr if has(EFI_SYSTEM_MBR) => Some(Boot::Uefi),
        TableKind::Mbr => {
            let whole = one_extent(0..disk.size_bytes());
            table::has_active(&Window::new(disk, &whole)).then_some(Boot::Bios)
        }
    };
    (found.kind, boot)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    /// A disk of 4 MiB with these bytes in its first sector.
    struct Disk([u8; 512]);

    impl ReadAt for Disk {
        fn size_bytes(&self) -> u64 {
            4 << 20
        }

        fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
            for (at, byte) in (offset_bytes..).zip(buf) {
                *byte = self.0.get(at as usize).copied().unwrap_or(0);
            }
            Ok(())
        }
    }

    fn mbr(flag: u8, type_byte: u8) -> Disk {
        let mut sector = [0; 512];
        sector[446] = flag;
        sector[450] = type_byte;
        sector[454..458].copy_from_slice(&2048_u32.to_le_bytes());
        sector[458..462].copy_from_slice(&2048_u32.to_le_bytes());
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        Disk(sector)
    }

    #[test]
    fn the_marks_of_an_mbr_decide() {
        assert_eq!(boot(&mbr(0x80, 0x07)), (TableKind::Mbr, Some(Boot::Bios)));
        assert_eq!(boot(&mbr(0, 0x07)), (TableKind::Mbr, None));
        assert_eq!(boot(&mbr(0, 0xef)), (TableKind::Mbr, Some(Boot::Uefi)));
        assert_eq!(boot(&Disk([0; 512])), (TableKind::None, None));
    }
}
