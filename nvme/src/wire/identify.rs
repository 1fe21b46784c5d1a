//! Identify data: what a controller and a namespace are. Base, "Identify Command"; NVM, "Identify
//! Namespace Data Structure".

use super::{PAGE_BYTES, array, put, put_text, text_at, u16_at, u32_at, u64_at};

/// CNS: a namespace.
pub const NAMESPACE: u8 = 0x00;
/// CNS: the controller.
pub const CONTROLLER: u8 = 0x01;
/// CNS: the ids of the active namespaces.
pub const ACTIVE_NAMESPACES: u8 = 0x02;
/// CNS: the globally unique ids of a namespace.
pub const DESCRIPTORS: u8 = 0x03;

/// A page of identify data.
pub type Page = Box<[u8; PAGE_BYTES]>;

fn page() -> Page {
    Box::new([0; PAGE_BYTES])
}

/// A controller. Base, "Identify Controller Data Structure". Fields that are not here are 0 or
/// constants of this implementation ([`Controller::encode`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Controller {
    /// SN: serial number, at most 20 bytes.
    pub serial: String,
    /// MN: model, at most 40 bytes.
    pub model: String,
    /// FR: version of the firmware, at most 8 bytes.
    pub firmware: String,
    /// CNTLID.
    pub id: u16,
    /// VER.
    pub version: u32,
    /// MDTS: the largest data of a command are 2 to this power, in pages of 4 KiB.
    pub transfer_exponent: u8,
    /// CNTRLTYPE is 2: the controller is that of the discovery subsystem.
    pub is_discovery: bool,
    /// KAS: granularity of the keep-alive time-out, in 100 ms.
    pub keep_alive_granularity: u16,
    /// MAXCMD: entries of a queue.
    pub queue_entries: u16,
    /// NN: the largest id of a namespace.
    pub namespaces: u32,
    /// ONCS: optional commands.
    pub optional_commands: u16,
    /// SUBNQN.
    pub subsystem: String,
    /// IOCCSZ: size of a command's capsule, in 16 bytes.
    pub capsule_units: u32,
}

impl Controller {
    /// ONCS: compare, dataset management, write zeroes, reservations, verify.
    pub const COMMANDS: u16 = 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 7;
    /// OAES: notices when the list or the size of namespaces changes.
    pub const NAMESPACE_NOTICES: u32 = 1 << 8;
    /// AERL: event requests that may be outstanding, less one.
    pub const EVENT_REQUESTS: u8 = 3;

    /// The page.
    pub fn encode(&self) -> Page {
        let mut out = page();
        put_text(&mut out[..], 4, 20, &self.serial, b' ');
        put_text(&mut out[..], 24, 40, &self.model, b' ');
        put_text(&mut out[..], 64, 8, &self.firmware, b' ');
        // CMIC: several controllers; their access to namespaces is told.
        out[76] = 1 << 1 | if self.is_discovery { 0 } else { 1 << 3 };
        out[77] = self.transfer_exponent;
        put(&mut out[..], 78, &self.id.to_le_bytes());
        put(&mut out[..], 80, &self.version.to_le_bytes());
        let notices = if self.is_discovery { 0 } else { Self::NAMESPACE_NOTICES };
        put(&mut out[..], 92, &notices.to_le_bytes());
        // CTRATT: host ids of 128 bits; commands count as keep-alive.
        put(&mut out[..], 96, &(1_u32 | 1 << 6).to_le_bytes());
        out[111] = if self.is_discovery { 2 } else { 1 };
        // ACL, AERL; FRMW: one slot, read-only; LPA: effects of commands, offsets of log pages.
        (out[258], out[259], out[260], out[261]) = (3, Self::EVENT_REQUESTS, 0b11, 0b110);
        put(&mut out[..], 320, &self.keep_alive_granularity.to_le_bytes());
        if !self.is_discovery {
            // ANATT: 10 s. ANACAP: optimized. ANAGRPMAX, NANAGRPID.
            (out[342], out[343]) = (10, 1);
            put(&mut out[..], 344, &1_u32.to_le_bytes());
            put(&mut out[..], 348, &1_u32.to_le_bytes());
        }
        // SQES and CQES: entries of 64 and 16 bytes.
        (out[512], out[513]) = (0x66, 0x44);
        put(&mut out[..], 514, &self.queue_entries.to_le_bytes());
        put(&mut out[..], 516, &self.namespaces.to_le_bytes());
        put(&mut out[..], 520, &self.optional_commands.to_le_bytes());
        // VWC: there is a cache; a flush of all namespaces at once is not supported.
        out[525] = 0b101;
        // SGLS: supported, with offsets in the capsule and transport data blocks.
        put(&mut out[..], 536, &(1_u32 | 1 << 20 | 1 << 21).to_le_bytes());
        put(&mut out[..], 540, &self.namespaces.to_le_bytes());
        put_text(&mut out[..], 768, 256, &self.subsystem, 0);
        put(&mut out[..], 1792, &self.capsule_units.to_le_bytes());
        // IORCSZ: a response capsule of 16 bytes. MSDBD: one SGL descriptor.
        put(&mut out[..], 1796, &1_u32.to_le_bytes());
        out[1803] = 1;
        out
    }

    /// Decodes the page.
    pub fn decode(page: &[u8; PAGE_BYTES]) -> Self {
        Self {
            serial: text_at(page, 4, 20),
            model: text_at(page, 24, 40),
            firmware: text_at(page, 64, 8),
            id: u16_at(page, 78),
            version: u32_at(page, 80),
            transfer_exponent: page[77],
            is_discovery: page[111] == 2,
            keep_alive_granularity: u16_at(page, 320),
            queue_entries: u16_at(page, 514),
            namespaces: u32_at(page, 516),
            optional_commands: u16_at(page, 520),
            subsystem: text_at(page, 768, 256),
            capsule_units: u32_at(page, 1792),
        }
    }
}

/// A namespace. Fields that are not here are 0 or constants of this implementation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Namespace {
    /// NSZE: size in blocks.
    pub blocks: u64,
    /// The size of a block is 2 to this power.
    pub block_exponent: u8,
    /// NPWG: the writes that cost no read have a multiple of so many blocks, less one.
    pub preferred_blocks: u16,
    /// NSATTR: write protected.
    pub is_read_only: bool,
    /// DLFEAT: deallocated blocks read as zeros, and write zeroes may deallocate.
    pub deallocates_to_zeros: bool,
    /// MS of the format in use: bytes of metadata with each block.
    pub metadata_bytes: u16,
    /// Bit 0 of RESCAP: reservations can outlast a restart.
    pub reservations_last: bool,
    /// NGUID.
    pub guid: [u8; 16],
}

impl Namespace {
    /// The page.
    pub fn encode(&self) -> Page {
        let mut out = page();
        put(&mut out[..], 0, &self.blocks.to_le_bytes());
        put(&mut out[..], 8, &self.blocks.to_le_bytes());
        put(&mut out[..], 16, &self.blocks.to_le_bytes());
        // NSFEAT: thin provisioning; the preferred sizes are valid.
        out[24] = 1 | 1 << 4;
        // NMIC: several controllers may have the namespace.
        out[30] = 1;
        // RESCAP: all types of reservations, and the key may be ignored as in version 1.3.
        out[31] = 0xfe | u8::from(self.reservations_last);
        // ANAGRPID.
        put(&mut out[..], 92, &1_u32.to_le_bytes());
        out[33] = if self.deallocates_to_zeros { 1 | 1 << 3 } else { 0 };
        // NPWG, NPWA, NPDG, NPDA.
        for at in [64, 66, 68, 70] {
            put(&mut out[..], at, &self.preferred_blocks.to_le_bytes());
        }
        out[99] = u8::from(self.is_read_only);
        put(&mut out[..], 104, &self.guid);
        // LBAF0.
        put(&mut out[..], 128, &self.metadata_bytes.to_le_bytes());
        out[130] = self.block_exponent;
        out
    }

    /// Decodes the page. A namespace that does not exist has no blocks.
    pub fn decode(page: &[u8; PAGE_BYTES]) -> Self {
        let format = usize::from(page[26] & 0xf);
        Self {
            blocks: u64_at(page, 0),
            block_exponent: page[130 + 4 * format],
            preferred_blocks: if page[24] & 1 << 4 != 0 { u16_at(page, 64) } else { 0 },
            is_read_only: page[99] & 1 != 0,
            deallocates_to_zeros: page[33] & 0b111 == 1 && page[33] & 1 << 3 != 0,
            metadata_bytes: u16_at(page, 128 + 4 * format),
            reservations_last: page[31] & 1 != 0,
            guid: array(page, 104),
        }
    }
}

/// The list of namespaces whose ids are larger than `after`.
pub fn active_namespaces(ids: impl Iterator<Item = u32>, after: u32) -> Page {
    let mut out = page();
    let mut found: Vec<u32> = ids.filter(|&id| id > after).collect();
    found.sort_unstable();
    for (entry, id) in out.chunks_exact_mut(4).zip(found) {
        entry.copy_from_slice(&id.to_le_bytes());
    }
    out
}

/// The ids of a list, up to the first that is 0.
pub fn listed_namespaces(page: &[u8; PAGE_BYTES]) -> impl Iterator<Item = u32> {
    page.chunks_exact(4).map(|entry| u32_at(entry, 0)).take_while(|&id| id != 0)
}

/// The descriptors of a namespace: NGUID and UUID, which are the same here.
pub fn descriptors(uuid: [u8; 16]) -> Page {
    let mut out = page();
    for (at, kind) in [(0, 2), (20, 3)] {
        (out[at], out[at + 1]) = (kind, 16);
        put(&mut out[..], at + 4, &uuid);
    }
    // CSI: the NVM command set.
    (out[40], out[41]) = (4, 1);
    out
}
