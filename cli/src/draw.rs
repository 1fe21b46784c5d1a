//! A whole disk on one screen.
//!
//! ```text
//!   extents ─▶ cells       each an equal share of the disk: how many bytes of it each layer owns
//!          └─▶ tallies     of each layer: bytes, fragments, and for each stretch of its file the
//!                          tenth of the disk that it holds
//! ```
//!
//! The glyph of a cell is the layer that owns most of it. A cell of mostly zeros or unallocated
//! space with some data has a glyph of its own, because the data would vanish from the drawing of a
//! large disk. So has every cell with damage. Memory depends on the screen and the number of
//! layers, not on the disk.

use crate::style::{FAINT, RED, Style};
use diskwright_store::{Extent, ExtentKind};
use schemars::JsonSchema;
use serde::Serialize;

/// Unallocated in every layer.
pub const UNALLOCATED: char = '·';
/// Recorded as zeros by a layer.
pub const ZERO: char = '○';
/// Mostly zeros or unallocated, with some data.
pub const SPARSE: char = ':';
/// Partly unreadable: a layer's table is damaged.
pub const DAMAGED: char = '!';
/// A layer deeper than there are letters.
pub const DEEP: char = '+';

const LETTERS: &[u8] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
const LAYER_COLOURS: [&str; 8] = ["32", "36", "33", "35", "34", "92", "96", "93"];
const MIN_CELL_BYTES: u64 = 512;

/// The glyph of the layer at `depth` (0 is the top).
pub fn layer_glyph(depth: u32) -> char {
    LETTERS.get(depth as usize).map_or(DEEP, |&letter| char::from(letter))
}

/// A glyph in its colour.
pub fn paint(style: &Style, glyph: char, text: &str) -> String {
    match LETTERS.iter().position(|&letter| char::from(letter) == glyph) {
        Some(depth) => style.paint(LAYER_COLOURS[depth % LAYER_COLOURS.len()], text),
        None if glyph == DAMAGED => style.paint(RED, text),
        None if glyph == DEEP || glyph == SPARSE => text.to_owned(),
        None => style.paint(FAINT, text),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Layer(u32),
    Zero,
    Unallocated,
    Damaged,
}

/// What one layer contributes to the disk as it reads now.
#[derive(Debug, Clone, Default, Serialize, JsonSchema)]
pub struct LayerTally {
    /// Bytes of the disk that are read from the layer.
    pub data_bytes: u64,
    /// Runs of bytes that lie together both on the disk and in the file.
    pub fragments: u64,
    /// Fragments that lie before their predecessor in the file.
    pub out_of_order: u64,
    #[serde(skip)]
    last_end_bytes: Option<u64>,
    #[serde(skip)]
    file_bytes: u64,
    #[serde(skip)]
    tenths: Vec<[u64; 10]>,
}

impl LayerTally {
    fn add(&mut self, extent: &Extent, file_offset_bytes: u64, disk_bytes: u64) {
        let end_bytes = file_offset_bytes.saturating_add(extent.len_bytes);
        if self.last_end_bytes != Some(file_offset_bytes) {
            self.fragments += 1;
            self.out_of_order += u64::from(self.last_end_bytes.is_some_and(|last| file_offset_bytes < last));
        }
        self.last_end_bytes = Some(end_bytes);
        let cells = self.tenths.len() as u64;
        let mut at_bytes = file_offset_bytes;
        while cells > 0 && at_bytes < end_bytes.min(self.file_bytes) {
            let cell = share_of(at_bytes, self.file_bytes, cells);
            let piece_end_bytes = share_start(cell + 1, self.file_bytes, cells).min(end_bytes);
            let middle_bytes = extent.offset_bytes + (at_bytes - file_offset_bytes) + (piece_end_bytes - at_bytes) / 2;
            let tenth = share_of(middle_bytes, disk_bytes, 10).min(9);
            self.tenths[cell as usize][tenth as usize] += piece_end_bytes - at_bytes;
            at_bytes = piece_end_bytes;
        }
    }

    /// One glyph for each stretch of the file: the tenth of the disk of which it holds most, or a
    /// blank.
    pub fn file_line(&self) -> String {
        let glyph = |tenths: &[u64; 10]| {
            let most = (0..10).rev().max_by_key(|&tenth| tenths[tenth]).unwrap_or(0);
            if tenths[most] == 0 { UNALLOCATED } else { char::from(LETTERS[most]) }
        };
        self.tenths.iter().map(glyph).collect()
    }
}

/// The drawing, complete when all extents have been added.
#[derive(Debug)]
pub struct Drawing {
    size_bytes: u64,
    columns: usize,
    cells: Vec<Vec<(Owner, u64)>>,
    /// Share of each layer, by depth.
    pub layers: Vec<LayerTally>,
    /// Bytes that a layer records as zero.
    pub zero_bytes: u64,
    /// Bytes that no layer has allocated.
    pub unallocated_bytes: u64,
    /// Bytes that cannot be read because a layer's table is damaged.
    pub damaged_bytes: u64,
}

impl Drawing {
    /// An empty drawing of `columns` by at most `rows` cells. `file_bytes` are the lengths of the
    /// layers' files, top first.
    pub fn new(size_bytes: u64, columns: usize, rows: usize, file_bytes: &[u64]) -> Self {
        let columns = columns.max(1);
        let cells = ((columns * rows.max(1)) as u64).min((size_bytes / MIN_CELL_BYTES).max(1)) as usize;
        let tally =
            |&file_bytes: &u64| LayerTally { file_bytes, tenths: vec![[0; 10]; columns], ..LayerTally::default() };
        Self {
            size_bytes,
            columns,
            cells: vec![Vec::new(); cells],
            layers: file_bytes.iter().map(tally).collect(),
            zero_bytes: 0,
            unallocated_bytes: 0,
            damaged_bytes: 0,
        }
    }

    /// Adds an extent. Extents come in order of their offsets.
    pub fn add(&mut self, extent: &Extent) {
        let owner = match extent.kind {
            ExtentKind::Data => Owner::Layer(extent.depth),
            ExtentKind::Zero => Owner::Zero,
            ExtentKind::Unallocated => Owner::Unallocated,
            ExtentKind::Damaged => Owner::Damaged,
        };
        match owner {
            Owner::Zero => self.zero_bytes += extent.len_bytes,
            Owner::Unallocated => self.unallocated_bytes += extent.len_bytes,
            Owner::Damaged => self.damaged_bytes += extent.len_bytes,
            Owner::Layer(depth) => {
                if let Some(tally) = self.layers.get_mut(depth as usize) {
                    tally.data_bytes += extent.len_bytes;
                    if let Some(file_offset_bytes) = extent.file_offset_bytes {
                        tally.add(extent, file_offset_bytes, self.size_bytes);
                    }
                }
            }
        }
        let cells = self.cells.len() as u64;
        let end_bytes = extent.offset_bytes.saturating_add(extent.len_bytes).min(self.size_bytes);
        let mut at_bytes = extent.offset_bytes;
        while at_bytes < end_bytes {
            let cell = share_of(at_bytes, self.size_bytes, cells);
            let piece_end_bytes = share_start(cell + 1, self.size_bytes, cells).min(end_bytes);
            let owners = &mut self.cells[cell as usize];
            match owners.iter_mut().find(|(known, _)| *known == owner) {
                Some((_, bytes)) => *bytes += piece_end_bytes - at_bytes,
                None => owners.push((owner, piece_end_bytes - at_bytes)),
            }
            at_bytes = piece_end_bytes;
        }
    }

    /// The rows: the offset of the first cell, and a glyph for each cell.
    pub fn rows(&self) -> Vec<(u64, String)> {
        let cells = self.cells.len() as u64;
        let row = |(index, row): (usize, &[Vec<(Owner, u64)>])| {
            (
                share_start((index * self.columns) as u64, self.size_bytes, cells),
                row.iter().map(|owners| glyph(owners)).collect(),
            )
        };
        self.cells.chunks(self.columns).enumerate().map(row).collect()
    }

    /// Bytes of a cell, rounded to the nearest.
    pub fn cell_bytes(&self) -> u64 {
        let cells = self.cells.len() as u64;
        (self.size_bytes + cells / 2) / cells
    }

    /// All bytes that are read from a layer.
    pub fn data_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.data_bytes).sum()
    }
}

fn glyph(owners: &[(Owner, u64)]) -> char {
    // Of equal owners the first wins, which owns the start of the cell.
    let most = owners.iter().rev().max_by_key(|(_, bytes)| *bytes).map_or(Owner::Unallocated, |(owner, _)| *owner);
    if owners.iter().any(|(owner, _)| *owner == Owner::Damaged) {
        return DAMAGED;
    }
    let has_data = owners.iter().any(|(owner, _)| matches!(owner, Owner::Layer(_)));
    match most {
        Owner::Layer(depth) => layer_glyph(depth),
        _ if has_data => SPARSE,
        Owner::Zero => ZERO,
        Owner::Unallocated => UNALLOCATED,
        Owner::Damaged => DAMAGED,
    }
}

// Share i of n begins at the first byte b with b * n / total >= i, so that the two functions agree
// on every byte.
fn share_of(at_bytes: u64, total_bytes: u64, shares: u64) -> u64 {
    (u128::from(at_bytes) * u128::from(shares) / u128::from(total_bytes.max(1))) as u64
}

fn share_start(share: u64, total_bytes: u64, shares: u64) -> u64 {
    (u128::from(share) * u128::from(total_bytes)).div_ceil(u128::from(shares.max(1))) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn extent(offset_mib: u64, len_mib: u64, kind: ExtentKind, depth: u32, file_mib: Option<u64>) -> Extent {
        Extent {
            offset_bytes: offset_mib * MIB,
            len_bytes: len_mib * MIB,
            kind,
            depth,
            file: 0,
            file_offset_bytes: file_mib.map(|mib| mib * MIB),
        }
    }

    #[test]
    fn paints_owners_zeros_and_traces() {
        let mut drawing = Drawing::new(40 * MIB, 10, 2, &[100 * MIB, 50 * MIB]);
        for piece in [
            extent(0, 10, ExtentKind::Data, 0, Some(4)),
            extent(10, 10, ExtentKind::Data, 1, Some(20)),
            extent(20, 10, ExtentKind::Zero, 0, None),
            extent(30, 5, ExtentKind::Unallocated, 0, None),
            Extent { len_bytes: MIB / 4, ..extent(35, 1, ExtentKind::Data, 0, Some(1)) },
            Extent {
                offset_bytes: 35 * MIB + MIB / 4,
                len_bytes: 5 * MIB - MIB / 4,
                ..extent(0, 0, ExtentKind::Unallocated, 0, None)
            },
        ] {
            drawing.add(&piece);
        }
        assert_eq!(drawing.rows(), [(0, "0000011111".to_owned()), (20 * MIB, "○○○○○··:··".to_owned())]);
        assert_eq!((drawing.zero_bytes, drawing.cell_bytes()), (10 * MIB, 2 * MIB));
        assert_eq!(drawing.data_bytes() + drawing.zero_bytes + drawing.unallocated_bytes, 40 * MIB);
        assert_eq!((drawing.layers[0].fragments, drawing.layers[0].out_of_order), (2, 1));
        assert_eq!((drawing.layers[1].fragments, drawing.layers[1].out_of_order), (1, 0));
    }

    #[test]
    fn the_file_line_tells_order() {
        let mut drawing = Drawing::new(100 * MIB, 10, 1, &[100 * MIB]);
        drawing.add(&extent(0, 100, ExtentKind::Data, 0, Some(0)));
        assert_eq!(drawing.layers[0].file_line(), "0123456789");

        let mut backwards = Drawing::new(100 * MIB, 10, 1, &[200 * MIB]);
        (0..10).for_each(|i| backwards.add(&extent(i * 10, 10, ExtentKind::Data, 0, Some(90 - i * 10))));
        assert_eq!(backwards.layers[0].file_line(), "86420·····");
        assert_eq!((backwards.layers[0].fragments, backwards.layers[0].out_of_order), (10, 9));
    }

    #[test]
    fn damage_shows_however_small_it_is() {
        let mut drawing = Drawing::new(100 * MIB, 10, 1, &[100 * MIB]);
        drawing.add(&extent(0, 50, ExtentKind::Data, 0, Some(0)));
        drawing.add(&Extent { len_bytes: 512, ..extent(50, 1, ExtentKind::Damaged, 0, None) });
        drawing.add(&Extent {
            offset_bytes: 50 * MIB + 512,
            len_bytes: 50 * MIB - 512,
            ..extent(0, 0, ExtentKind::Unallocated, 0, None)
        });
        assert_eq!(drawing.rows(), [(0, "00000!····".to_owned())]);
        assert_eq!((drawing.damaged_bytes, drawing.data_bytes()), (512, 50 * MIB));
    }

    #[test]
    fn a_tiny_disk_has_few_cells() {
        let mut drawing = Drawing::new(1024, 80, 16, &[1024]);
        drawing.add(&Extent {
            offset_bytes: 0,
            len_bytes: 1024,
            kind: ExtentKind::Data,
            depth: 0,
            file: 0,
            file_offset_bytes: Some(0),
        });
        assert_eq!(drawing.rows(), [(0, "00".to_owned())]);
    }

    #[test]
    fn deep_layers_share_a_glyph() {
        assert_eq!([0, 9, 10, 35, 36, 61, 62, 1023].map(layer_glyph), ['0', '9', 'a', 'z', 'A', 'Z', '+', '+']);
    }

    #[test]
    fn the_largest_disk_does_not_overflow() {
        let mut drawing = Drawing::new(64 << 40, 80, 24, &[u64::MAX]);
        drawing.add(&Extent {
            offset_bytes: 0,
            len_bytes: 64 << 40,
            kind: ExtentKind::Data,
            depth: 0,
            file: 0,
            file_offset_bytes: Some(u64::MAX - 5),
        });
        assert!(drawing.rows().iter().all(|(_, row)| row.chars().all(|c| c == '0')));
    }

    proptest! {
        #[test]
        fn shares_agree(total in 1u64..1 << 46, shares in 1u64..5000, at in 0u64..1 << 46) {
            let at = at % total;
            let share = share_of(at, total, shares);
            prop_assert!(share < shares);
            prop_assert!(share_start(share, total, shares) <= at && at < share_start(share + 1, total, shares));
        }
    }
}
