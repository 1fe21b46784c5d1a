//! Translates hints of errors and warnings for users of `diskspd`: the options of `lab run` are
//! replaced by DiskSpd's switches with the same effect.
//!
//! Options of the library (`PrepareOptions::create_bytes`) are not replaced here: the program's
//! table of switches does that.

/// Pairs of a text in a message of `lab run` and its replacement.
const HINTS: [(&str, &str); 15] = [
    ("or use a smaller working set", "or use less of it (-f)"),
    ("fill it first", "name a file that does not exist and let -c create it, since such files are filled"),
    (", such as incompressible ones", " (-Zr, or no -Z)"),
    ("go past it with O_DIRECT, or use a larger working set", "use -Su or -Sh, or more of the target (-f, -B)"),
    ("use a folder on another file system", "use a target on another file system"),
    ("use a larger target or a smaller working set", "use a larger target or less of it (-f, -B)"),
    ("use a larger working set or smaller blocks", "use more of the target (-f, -B) or smaller blocks (-b)"),
    (
        "use fewer threads, a smaller depth or smaller blocks",
        "use fewer threads (-t, -F), requests (-o, -O) or smaller blocks (-b)",
    ),
    ("use a larger working set or fewer spots", "use more of the target (-f, -B) or fewer ranges (-rd)"),
    ("use more threads with less depth each", "use more threads (-t) with fewer requests each (-o)"),
    ("use a lower rate or more depth", "use a lower rate (-g) or more requests in flight (-o)"),
    ("give the run more time or fewer targets", "give the run more time (-d) or fewer targets"),
    ("give each target its own threads", "give each target its own threads (-t, not -F)"),
    ("the block of", "the block (-b) of"),
    ("the stride of", "the stride (-s) of"),
];

/// Replaces the options of `lab run` in `sentence` by DiskSpd's switches.
pub fn with_diskspds_switches(sentence: &str) -> String {
    HINTS.iter().fold(sentence.to_owned(), |sentence, (ours, theirs)| sentence.replace(ours, theirs))
}

#[cfg(test)]
#[path = "hints_tests.rs"]
mod tests;
