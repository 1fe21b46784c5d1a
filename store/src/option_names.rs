//! Options that error texts and warnings name.
//!
//! An error that an option would avoid names that option of this library, in backticks:
//!
//! ```text
//!   … insist with `OpenOptions::allow_parent_write`
//!   … allow it with `ParentPolicy::allowed_dirs` = /images
//! ```
//!
//! A program calls these options by names of its own: a switch, a keyword argument, a field of a
//! form. It passes each text that it shows through [`rename_options`]. The names are part of the
//! text and not of the error's type, because an error passes through `io::Error` and through other
//! errors' sentences, and warnings are sentences only.
//!
//! Every option that a text names is a public field of a public type. The program's table of
//! switches (`cli/src/switches.rs`) has a row for each, and its tests read the sources of the
//! libraries: an option without a row fails, and so does a switch in a text.

/// What follows an option's name where the text gives it a value.
const VALUE: &str = " = ";

/// `text` with the caller's names for the options in it.
///
/// `name_of` is called with each option, as in `OpenOptions::format`, and whether a value follows.
/// Its answer takes the place of the name, of the backticks, and of the ` = ` before a value. Where
/// it answers `None`, the text stays as it is.
///
/// ```
/// use diskwright_store::rename_options;
///
/// let text = "allow it with `ParentPolicy::allowed_dirs` = /images";
/// let told = rename_options(text, |option, has_value| match option {
///     "ParentPolicy::allowed_dirs" if has_value => Some("--allow-parent-dir ".into()),
///     _ => None,
/// });
/// assert_eq!(told, "allow it with --allow-parent-dir /images");
/// ```
pub fn rename_options(text: &str, name_of: impl Fn(&str, bool) -> Option<String>) -> String {
    let mut told = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('`') {
        told.push_str(&rest[..start]);
        rest = &rest[start..];
        let renamed = option_at(rest).and_then(|(option, len, has_value)| Some((name_of(option, has_value)?, len)));
        let (name, len) = renamed.unwrap_or_else(|| ("`".into(), 1));
        told.push_str(&name);
        rest = &rest[len..];
    }
    told + rest
}

/// The option whose opening backtick begins `text`, the length of what names it, and whether a
/// value follows.
fn option_at(text: &str) -> Option<(&str, usize, bool)> {
    let (option, after) = text.strip_prefix('`')?.split_once('`')?;
    let (owner, field) = option.split_once("::")?;
    let is_name =
        |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let has_value = after.starts_with(VALUE);
    let len = option.len() + 2 + if has_value { VALUE.len() } else { 0 };
    (is_name(owner) && is_name(field)).then_some((option, len, has_value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str) -> String {
        rename_options(text, |option, has_value| {
            let switch = match option {
                "Some::format" => "--format",
                "Some::force" => "--force",
                _ => return None,
            };
            Some(format!("{switch}{}", if has_value { " " } else { "" }))
        })
    }

    #[test]
    fn options_get_the_names_of_the_program() {
        assert_eq!(told("use `Some::force`; see `Some::format`"), "use --force; see --format");
        assert_eq!(told("use `Some::format` = raw, or `Some::force`"), "use --format raw, or --force");
        assert_eq!(told("`Some::format` = "), "--format ");
    }

    #[test]
    fn everything_else_stays_as_it_is() {
        for text in [
            "",
            "no option",
            "`diskwright check` tells",
            "`Other::format` = raw",
            "`Some::format",
            "Some::format",
            "`Some:: format`",
            "`::format`",
            "`Some::`",
            "`é::ü`",
            "``",
            "`",
        ] {
            assert_eq!(told(text), text);
        }
        // A backtick in a name hides no option behind it.
        assert_eq!(told("a`b.vhd: use `Some::force`"), "a`b.vhd: use --force");
        assert_eq!(told("`Some::format` = /a`b` (or `Some::force`)"), "--format /a`b` (or --force)");
    }
}
