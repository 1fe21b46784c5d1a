//! `diskwright snapshot list`: the tree of a folder's images.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    sizes::Human,
    switches,
    table::{Align, Columns},
    timestamp,
};
use diskwright_disk::{DiskError, FolderImages, FoundParent};
use diskwright_store::LockMode;
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::Path};

/// What `snapshot list --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Listing {
    /// The folder.
    folder: String,
    /// Images of the folder, parents before their children.
    images: Vec<Listed>,
    /// Files with the extension of an image that cannot be read.
    unreadable: Vec<Unreadable>,
    /// Images that were not read because the folder has too many.
    not_read: usize,
}

impl Document for Listing {
    const SCHEMA: &'static str = "diskwright.snapshots/1";
}

/// An image of the folder.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Listed {
    /// Path of the image.
    file: String,
    /// Depth in the tree: 0 for an image without a parent in this folder.
    depth: usize,
    /// `vhd` or `vhdx`.
    format: String,
    /// `fixed`, `dynamic` or `differencing`.
    #[serde(rename = "type")]
    disk_type: String,
    /// Virtual size in bytes.
    virtual_size: u64,
    /// What its file occupies, in bytes.
    size_on_disk: Option<u64>,
    /// When it was made, where that is recorded (VHD).
    created: Option<String>,
    /// The path of its parent, if a file is there that is the parent.
    parent: Option<String>,
    /// Why the parent cannot be used.
    parent_error: Option<String>,
}

/// A file that cannot be read.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Unreadable {
    /// Path of the file.
    file: String,
    /// Why the file cannot be read.
    error: String,
}

/// Prints the tree of the folder, or of that of an image.
pub(super) fn list(context: &mut Context, place: &Path) -> Outcome {
    if !place.exists() {
        return Err(Failure::new(format!("{}: no such file or folder; name a folder with images", place.display())));
    }
    // The images of a disk lie beside its file, not beside a symbolic link to it.
    let target = if place.is_symlink() { place.canonicalize()? } else { place.to_owned() };
    let folder = match target.is_dir() {
        true => &*target,
        false => target.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new(".")),
    };
    let open = context.global.open_options(false);
    if !target.is_dir() {
        // Whoever names a pipe or a device does not mean its folder.
        let read = diskwright_store::OpenOptions { lock: LockMode::None, ..Default::default() };
        open.files.open_canonical(&target.canonicalize()?, false, &read).map_err(DiskError::from)?;
    }
    let family = FolderImages::of(folder, &open)?;
    let trouble = |parent: &FoundParent| match parent {
        FoundParent::Missing(places) => Some(format!("its parent is missing: looked for {}", places.join(", "))),
        FoundParent::Wrong(why) => Some(switches::with_switches(why)),
        FoundParent::None | FoundParent::Here(_) | FoundParent::Elsewhere(_) => None,
    };
    if context.global.json {
        let images = family.walk().into_iter().map(|node| {
            let member = &family.members[node.index];
            Listed {
                file: json::path(&member.path),
                depth: node.depth,
                format: member.info.format.to_string(),
                disk_type: member.info.disk_type.to_string(),
                virtual_size: member.info.size_bytes,
                size_on_disk: member.allocated_bytes,
                created: member.info.created_seconds.map(timestamp::utc_from_2000),
                parent: match &member.parent {
                    FoundParent::Here(at) => Some(json::path(&family.members[*at].path)),
                    FoundParent::Elsewhere(path) => Some(json::path(path)),
                    _ => None,
                },
                parent_error: trouble(&member.parent),
            }
        });
        let unreadable = family.unreadable.iter();
        let report = Listing {
            folder: json::path(folder),
            images: images.collect(),
            unreadable: unreadable
                .map(|(file, error)| Unreadable { file: json::path(file), error: switches::with_switches(error) })
                .collect(),
            not_read: family.not_read,
        };
        context.print_json(&report)?;
        return Ok(exit::OK);
    }
    let mut table = Columns::new(&[
        ("image", Align::Left),
        ("type", Align::Left),
        ("size", Align::Right),
        ("on disk", Align::Right),
    ]);
    let mut notes = Vec::new();
    // For each depth whether a sibling of the ancestor there is still to come.
    let mut open = Vec::new();
    for node in family.walk() {
        let member = &family.members[node.index];
        let name = member.path.file_name().unwrap_or_default().to_string_lossy();
        table.row(vec![
            format!("{}{}", branch(&mut open, node.depth, node.is_last), printable(&name)),
            format!("{} {}", member.info.format, member.info.disk_type),
            Human(member.info.size_bytes).to_string(),
            member.allocated_bytes.map_or_else(String::new, |bytes| Human(bytes).to_string()),
        ]);
        match &member.parent {
            FoundParent::Elsewhere(path) => {
                notes.push(format!("{name}: its parent is in another folder: {}", path.display()));
            }
            other => notes.extend(trouble(other).map(|why| format!("{name}: {why}"))),
        }
    }
    notes.extend(family.unreadable.iter().map(|(_, error)| switches::with_switches(error)));
    if family.not_read > 0 {
        notes.push(format!("{} more images were not read", family.not_read));
    }
    if family.members.is_empty() && notes.is_empty() {
        writeln!(context.text(), "no images in {}", printable(&json::path(folder)))?;
        return Ok(exit::OK);
    }
    table.within(context.style.limit()).write(&mut context.out)?;
    if !notes.is_empty() {
        writeln!(context.out)?;
    }
    for note in notes {
        writeln!(context.text(), "{}", printable(&note))?;
    }
    Ok(exit::OK)
}

/// Deepest level of indentation of the tree; deeper images stay in that column.
const DEEPEST_INDENT: usize = 8;

/// The lines of the tree in front of an image.
fn branch(open: &mut Vec<bool>, depth: usize, is_last: bool) -> String {
    open.truncate(depth.saturating_sub(1));
    if depth == 0 {
        return String::new();
    }
    let shown = open.len().saturating_sub(DEEPEST_INDENT);
    let mut text: String = open[shown..].iter().map(|&more| if more { "│  " } else { "   " }).collect();
    text.push_str(if is_last { "└─ " } else { "├─ " });
    open.push(!is_last);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_has_lines_to_the_siblings_that_follow() {
        let mut open = Vec::new();
        let nodes = [(0, true), (1, false), (2, false), (3, true), (2, true), (1, true), (2, true), (0, true)];
        let drawn: Vec<String> = nodes.iter().map(|&(depth, is_last)| branch(&mut open, depth, is_last)).collect();
        assert_eq!(drawn, ["", "├─ ", "│  ├─ ", "│  │  └─ ", "│  └─ ", "└─ ", "   └─ ", ""]);
    }
}
