//! Settings of the process, from environment variables.
//!
//! ```text
//!   DISKWRIGHT_CACHE         folder of the cache   (~/.cache/diskwright, /var/cache/diskwright)
//!   DISKWRIGHT_CACHE_SIZE    its size at most, in bytes or as 20G   (20 GiB)
//!   DISKWRIGHT_HTTP_TIMEOUT  seconds until a server that does not answer is an error   (60)
//!   DISKWRIGHT_ALLOW_HTTP    1: http:// also to other machines
//!   AWS_..., HOME            credentials and servers of buckets: see `credentials.rs`
//! ```

use crate::error::{ObjectError, Result};
use std::{collections::BTreeMap, env, fmt, path::PathBuf, time::Duration};

const CACHE_BYTES: u64 = 20 << 30;
const TIMEOUT: Duration = Duration::from_secs(60);

/// The variables of the AWS tools, some of which are secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct AwsVariables(BTreeMap<String, String>);

impl AwsVariables {
    /// A variable, unless it is not set or empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

impl FromIterator<(String, String)> for AwsVariables {
    fn from_iter<T: IntoIterator<Item = (String, String)>>(pairs: T) -> Self {
        let is_ours = |name: &str| name.starts_with("AWS_") || name == "HOME";
        Self(pairs.into_iter().filter(|(name, _)| is_ours(name)).collect())
    }
}

impl fmt::Debug for AwsVariables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

/// Settings of the process; see the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Folder of the cache. `None` if the user has no folder for it: then nothing is kept.
    pub cache: Option<PathBuf>,
    /// Bytes that the cache may hold.
    pub cache_bytes: u64,
    /// How long a server may fail to answer until that is an error.
    pub timeout: Duration,
    /// Whether other machines may be read without encryption.
    pub allow_http: bool,
    /// Credentials and servers of buckets.
    pub aws: AwsVariables,
}

impl Settings {
    /// The settings of the environment.
    ///
    /// # Errors
    /// A variable has a value that means nothing.
    pub fn of_environment() -> Result<Self> {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let aws =
            env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Ok(Self { aws: aws.collect(), ..Self::of(variable, rustix::process::geteuid().is_root())? })
    }

    fn of(variable: impl Fn(&str) -> Option<String>, is_root: bool) -> Result<Self> {
        let bad = |name: &str, why| ObjectError::BadName { name: name.into(), why };
        let below = |folder: String, rest: &str| Some(PathBuf::from(folder).join(rest));
        let default_cache = match variable("XDG_CACHE_HOME") {
            Some(folder) => below(folder, "diskwright"),
            None if is_root => Some(PathBuf::from("/var/cache/diskwright")),
            None => variable("HOME").and_then(|home| below(home, ".cache/diskwright")),
        };
        let cache_bytes = variable("DISKWRIGHT_CACHE_SIZE")
            .map(|text| size(&text).ok_or_else(|| bad("DISKWRIGHT_CACHE_SIZE", "expected a size, such as 20G")));
        let timeout = variable("DISKWRIGHT_HTTP_TIMEOUT").map(|text| {
            let seconds = text.parse().ok().filter(|seconds| (1..=86_400).contains(seconds));
            seconds
                .map(Duration::from_secs)
                .ok_or_else(|| bad("DISKWRIGHT_HTTP_TIMEOUT", "expected a number of seconds from 1 to 86400"))
        });
        let allow_http = match variable("DISKWRIGHT_ALLOW_HTTP").as_deref() {
            None | Some("0") => false,
            Some("1") => true,
            Some(_) => return Err(bad("DISKWRIGHT_ALLOW_HTTP", "expected 0 or 1")),
        };
        Ok(Self {
            cache: variable("DISKWRIGHT_CACHE").map(PathBuf::from).or(default_cache),
            cache_bytes: cache_bytes.transpose()?.unwrap_or(CACHE_BYTES),
            timeout: timeout.transpose()?.unwrap_or(TIMEOUT),
            allow_http,
            aws: AwsVariables::default(),
        })
    }
}

/// Bytes of "20G", "500M" or "1000".
fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_not_shown() {
        let pairs = [("AWS_SECRET_ACCESS_KEY", "word"), ("PATH", "/bin"), ("HOME", "/home/me"), ("AWS_PROFILE", "")];
        let aws: AwsVariables = pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into_iter().collect();
        assert_eq!(
            (aws.get("AWS_SECRET_ACCESS_KEY"), aws.get("PATH"), aws.get("AWS_PROFILE")),
            (Some("word"), None, None)
        );
        let shown = format!("{aws:?}");
        assert!(shown.contains("AWS_SECRET_ACCESS_KEY") && !shown.contains("word"), "{shown}");
    }

    #[test]
    fn variables_are_read_and_wrong_ones_named() {
        let of = |pairs: &[(&str, &str)], is_root| {
            Settings::of(
                |name| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()),
                is_root,
            )
        };
        let found = of(&[("HOME", "/home/me")], false).unwrap();
        assert_eq!(found.cache, Some("/home/me/.cache/diskwright".into()));
        assert_eq!((found.cache_bytes, found.timeout.as_secs(), found.allow_http), (20 << 30, 60, false));
        assert_eq!(of(&[], true).unwrap().cache, Some("/var/cache/diskwright".into()));
        assert_eq!(of(&[], false).unwrap().cache, None);
        let set = [("DISKWRIGHT_CACHE", "/c"), ("DISKWRIGHT_CACHE_SIZE", "500M"), ("DISKWRIGHT_ALLOW_HTTP", "1")];
        let found = of(&set, false).unwrap();
        assert_eq!((found.cache, found.cache_bytes, found.allow_http), (Some("/c".into()), 500 << 20, true));
        for bad in [
            ("DISKWRIGHT_CACHE_SIZE", "much"),
            ("DISKWRIGHT_CACHE_SIZE", "99999999999999T"),
            ("DISKWRIGHT_HTTP_TIMEOUT", "0"),
            ("DISKWRIGHT_ALLOW_HTTP", "yes"),
        ] {
            assert!(of(&[bad], false).unwrap_err().to_string().starts_with(bad.0), "{bad:?}");
        }
    }
}
