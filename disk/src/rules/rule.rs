//! A rule of a place, and what it says of an image.

use super::facts::ChainFacts;

/// A rule of a place.
#[derive(Debug)]
pub struct Rule {
    /// A name for programs: `format`, `size-unit`. Names of rules do not change.
    pub name: &'static str,
    /// What the place expects: a part of a sentence.
    pub expected: &'static str,
    pub(super) judge: fn(&ChainFacts) -> Verdict,
}

/// What a rule says of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The image complies.
    Holds {
        /// What the image has.
        found: String,
    },
    /// The rule does not hold: the place refuses the image, or a part of its contents is not found
    /// there.
    Broken {
        /// What the image has.
        found: String,
        /// How to comply, as a sentence.
        remedy: String,
    },
    /// The rule says nothing about this image.
    NotApplicable {
        /// Why the rule does not apply, to follow "not applicable".
        why: String,
    },
}

impl Verdict {
    pub(super) fn holds(found: impl ToString) -> Self {
        Self::Holds { found: found.to_string() }
    }

    pub(super) fn broken(found: impl ToString, remedy: impl Into<String>) -> Self {
        Self::Broken { found: found.to_string(), remedy: remedy.into() }
    }

    pub(super) fn not_applicable(why: impl Into<String>) -> Self {
        Self::NotApplicable { why: why.into() }
    }

    /// `Holds` if `holds`, else `Broken`.
    pub(super) fn either(holds: bool, found: impl ToString, remedy: &str) -> Self {
        if holds { Self::holds(found) } else { Self::broken(found, remedy) }
    }
}

/// A rule and its verdict.
#[derive(Debug)]
pub struct Judgement {
    /// The rule that was judged.
    pub rule: &'static Rule,
    /// What it says of the image.
    pub verdict: Verdict,
}

impl Judgement {
    /// Whether the place refuses the image for this rule.
    pub fn is_broken(&self) -> bool {
        matches!(self.verdict, Verdict::Broken { .. })
    }
}
