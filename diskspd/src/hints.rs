//! Hints in the words of who typed DiskSpd's switches. The lab's errors and warnings name the
//! options of `lab run`; here each is followed by, or replaced with, the switch that does the same.
//!
//! `--destroy-data` stays: `diskspd` has it too.

/// What the lab says, and what says the same to a user of `diskspd`.
const HINTS: [(&str, &str); 17] = [
    ("(--create-size)", "(-c)"),
    ("leave --create-size out", "leave -c out"),
    ("or use a smaller working set", "or use less of it (-f)"),
    ("fill it first", "name a file that is not there and let -c make it, for such files are filled"),
    (", such as incompressible ones", " (-Zr, or no -Z)"),
    ("go past it with O_DIRECT", "go past it (-Su, -Sh)"),
    ("use a folder on another file system", "use a target on another file system"),
    ("use a larger target or a smaller working set", "use a larger target or less of it (-f, -B)"),
    ("use a larger working set or smaller blocks", "use more of the target (-f, -B) or smaller blocks (-b)"),
    (
        "use fewer threads, a smaller depth or smaller blocks",
        "use fewer threads (-t, -F), requests (-o, -O) or smaller blocks (-b)",
    ),
    ("use a larger working set or fewer spots", "use more of the target (-f, -B) or fewer ranges (-rd)"),
    ("use more threads with less depth each", "use more threads (-t) with fewer requests each (-o)"),
    ("use a lower one, or more depth", "use a lower one (-g), or more requests in flight (-o)"),
    ("give the run more time or fewer targets", "give the run more time (-d) or fewer targets"),
    ("give each target its own threads", "give each target its own threads (-t, not -F)"),
    ("the block of", "the block (-b) of"),
    ("the stride of", "the stride (-s) of"),
];

/// `sentence` with DiskSpd's switches for the options of `lab run`.
pub fn with_diskspds_switches(sentence: &str) -> String {
    HINTS.iter().fold(sentence.to_owned(), |sentence, (ours, theirs)| sentence.replace(ours, theirs))
}

#[cfg(test)]
#[path = "hints_tests.rs"]
mod tests;
