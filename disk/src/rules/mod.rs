//! Checks an image against the rules of the place that it goes to: Azure, Windows, VMware.
//!
//! ```text
//!   open disk ─▶ facts.rs: what was read ─┬─▶ azure.rs    a table of rules ─▶ a verdict for each
//!                                         ├─▶ windows.rs  another table
//!                                         └─▶ vmware.rs   ESXi, Workstation, VirtualBox, OVF
//! ```
//!
//! A rule is a pure function of the facts. It says what was found, and if it does not hold, what
//! changes the image so that it complies. `convert` asks the same rules before it copies for a
//! place. Another place is another table and a variant of [`Destination`].
//!
//! What must hold: a rule is only what its place refuses, with its source in a comment. What cannot
//! be known from here is not applicable, and the verdict says so; it is never called held.

mod azure;
mod facts;
mod gpt;
mod rule;
mod vmware;
mod windows;

pub(crate) use azure::{MAX_BYTES as AZURE_MAX_BYTES, MIN_BYTES as AZURE_MIN_BYTES, UNIT_BYTES as AZURE_UNIT_BYTES};
pub use facts::{ChainFacts, ImageFacts, TableFacts};
pub use rule::{Judgement, Rule, Verdict};
use std::fmt;

/// A place that an image goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Destination {
    /// An upload to Azure, as a managed disk.
    Azure,
    /// Windows and Hyper-V: `Mount-VHD`, a virtual machine.
    Windows,
    /// VMware ESXi.
    Esxi,
    /// VMware Workstation and Fusion.
    Workstation,
    /// Oracle VirtualBox.
    VirtualBox,
    /// A package of OVF, for any importer.
    Ovf,
}

impl Destination {
    /// All places, in the order in which they are listed.
    pub const ALL: [Self; 6] = [Self::Azure, Self::Windows, Self::Esxi, Self::Workstation, Self::VirtualBox, Self::Ovf];

    /// The rules, in the order in which they are shown.
    pub fn rules(self) -> &'static [Rule] {
        match self {
            Self::Azure => azure::RULES,
            Self::Windows => windows::RULES,
            Self::Esxi => vmware::ESXI,
            Self::Workstation => vmware::WORKSTATION,
            Self::VirtualBox => vmware::VIRTUALBOX,
            Self::Ovf => vmware::OVF,
        }
    }

    /// What each rule says of an image.
    pub fn judge(self, facts: &ChainFacts) -> Vec<Judgement> {
        self.rules().iter().map(|rule| Judgement { rule, verdict: (rule.judge)(facts) }).collect()
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Azure => "Azure",
            Self::Windows => "Windows",
            Self::Esxi => "ESXi",
            Self::Workstation => "Workstation",
            Self::VirtualBox => "VirtualBox",
            Self::Ovf => "OVF",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_names_of_a_place_are_unique_and_typed_easily() {
        for place in Destination::ALL {
            let names: BTreeSet<&str> = place.rules().iter().map(|rule| rule.name).collect();
            assert_eq!(names.len(), place.rules().len(), "{place}");
            let is_plain = |name: &&str| name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
            assert!(names.iter().all(is_plain), "{names:?}");
        }
    }
}
