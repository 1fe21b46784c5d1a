//! Whose name requests to a bucket are made in.
//!
//! ```text
//!   AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN     first
//!   AWS_PROFILE, or "default", in ~/.aws/credentials and ~/.aws/config
//!   a web identity, a container's or an instance's role             last
//! ```
//!
//! The region and the server come from `AWS_REGION` and `AWS_ENDPOINT_URL`, or from the profile.
//! `AWS_SKIP_SIGNATURE=true` reads a public bucket without credentials. These are the variables of
//! the AWS tools. Roles are left to the `object_store` crate, which renews them.

use crate::{
    answer::Failure,
    client,
    error::{ObjectError, Result},
    settings::{AwsVariables, Settings},
    uri::{ObjectUri, is_loopback},
};
use object_store::{
    ClientOptions, RetryConfig,
    aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey as Key},
    client::{HttpClient, HttpConnector},
    path::Path as ObjectPath,
    signer::Signer,
};
use reqwest::{Client, Method, Url};
use std::{collections::HashMap, fs, path::PathBuf, sync::Arc, time::Duration};

/// How often credentials are asked for again: most machines have no role.
const SIGNING_RETRIES: usize = 2;
const DEFAULT_REGION: &str = "us-east-1";

/// A bucket on its server, and who reads it.
#[derive(Debug)]
pub(crate) struct Bucket {
    store: AmazonS3,
    endpoint: String,
    /// Requests are not signed.
    is_public: bool,
    name: String,
}

/// Gives `object_store` the client of this process.
#[derive(Debug)]
struct OurClient(Client);

impl HttpConnector for OurClient {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.0.clone()))
    }
}

impl Bucket {
    /// The bucket that a name names.
    ///
    /// # Errors
    /// [`ObjectError::Credentials`], [`ObjectError::PlainHttp`].
    pub(crate) fn of(uri: &ObjectUri, settings: &Settings) -> Result<Self> {
        Self::with_retries(uri, settings, SIGNING_RETRIES)
    }

    fn with_retries(uri: &ObjectUri, settings: &Settings, max_retries: usize) -> Result<Self> {
        let failed = |why: String| ObjectError::Credentials { name: uri.name(), why };
        let keys =
            settings.aws.iter().filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value)));
        let builder = keys.fold(AmazonS3Builder::new(), |builder, (key, value)| builder.with_config(key, value));
        let mut builder = builder.with_bucket_name(uri.host());
        if let Some(profile) = Profile::of_user(&settings.aws).map_err(failed)? {
            builder = profile.complete(builder);
        }
        if builder.get_config_value(&Key::Region).is_none() {
            builder = builder.with_region(DEFAULT_REGION);
        }
        let region = builder.get_config_value(&Key::Region).unwrap_or_default();
        let endpoint = builder.get_config_value(&Key::Endpoint);
        if let Some(rest) = endpoint.as_deref().and_then(|endpoint| endpoint.strip_prefix("http://")) {
            let is_allowed = settings.allow_http || is_loopback(rest.split('/').next().unwrap_or_default());
            if !is_allowed {
                return Err(ObjectError::PlainHttp { name: endpoint.unwrap_or_default() });
            }
            builder = builder.with_allow_http(true);
        }
        let is_public = builder.get_config_value(&Key::SkipSignature).as_deref() == Some("true");
        let endpoint = endpoint.unwrap_or_else(|| format!("https://s3.{region}.amazonaws.com"));
        let retry = RetryConfig { max_retries, retry_timeout: settings.timeout, ..RetryConfig::default() };
        let store = builder.with_http_connector(OurClient(client::client(settings)?)).with_retry(retry).build();
        let store = store.map_err(|error| failed(error.to_string()))?;
        Ok(Self { store, endpoint, is_public, name: uri.host().to_owned() })
    }

    /// What writes to the bucket. Repeats a request that fails so many times.
    ///
    /// # Errors
    /// As [`Bucket::of`]; [`ObjectError::Credentials`] if requests are not signed.
    pub(crate) fn writer(uri: &ObjectUri, settings: &Settings, retries: usize) -> Result<Arc<AmazonS3>> {
        let bucket = Self::with_retries(uri, settings, retries)?;
        if bucket.is_public {
            let why = "AWS_SKIP_SIGNATURE is set, and nothing is written without a signature".to_owned();
            return Err(ObjectError::Credentials { name: uri.name(), why });
        }
        Ok(Arc::new(bucket.store))
    }

    /// The server.
    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// A URL by which anyone may read an object for some time.
    pub(crate) async fn signed_url(&self, name: &str, key: &str, valid: Duration) -> Result<Url, Failure> {
        let failed = |why: String| Failure::Final(ObjectError::Credentials { name: name.into(), why });
        let path = ObjectPath::parse(key)
            .map_err(|_| Failure::Final(ObjectError::BadName { name: name.into(), why: "it is not a valid key" }))?;
        if self.is_public {
            let mut url = Url::parse(&self.endpoint).map_err(|error| failed(error.to_string()))?;
            if let Ok(mut parts) = url.path_segments_mut() {
                parts.pop_if_empty().push(&self.name).extend(key.split('/'));
            }
            return Ok(url);
        }
        self.store.signed_url(Method::GET, &path, valid).await.map_err(|error| {
            let error = error.to_string();
            // An instance's role is asked for last, and most machines have none.
            match error.contains("169.254.169.254") {
                true => failed(
                    "neither AWS_ACCESS_KEY_ID nor a profile is there, and this machine has no role; for a public \
                     bucket set AWS_SKIP_SIGNATURE=true"
                        .into(),
                ),
                false => failed(error),
            }
        })
    }
}

/// A profile of the AWS tools.
#[derive(Debug, Default)]
struct Profile(HashMap<String, String>);

impl Profile {
    /// The profile to use; `None` if there is no such file.
    fn of_user(variables: &AwsVariables) -> Result<Option<Self>, String> {
        let wanted = variables.get("AWS_PROFILE").or_else(|| variables.get("AWS_DEFAULT_PROFILE"));
        let file = |name: &str, default: &str| {
            variables.get(name).map(PathBuf::from).or_else(|| Some(PathBuf::from(variables.get("HOME")?).join(default)))
        };
        let read = |path: Option<PathBuf>| path.and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
        let credentials = read(file("AWS_SHARED_CREDENTIALS_FILE", ".aws/credentials"));
        let config = read(file("AWS_CONFIG_FILE", ".aws/config"));
        Self::of(&credentials, &config, wanted)
    }

    fn of(credentials: &str, config: &str, wanted: Option<&str>) -> Result<Option<Self>, String> {
        let name = wanted.unwrap_or("default");
        let in_config = if name == "default" { name.to_owned() } else { format!("profile {name}") };
        let (found, more) = (section(credentials, name), section(config, &in_config));
        if found.is_none() && more.is_none() {
            return match wanted {
                Some(name) => Err(format!("~/.aws has no profile {name:?}, which AWS_PROFILE names")),
                None => Ok(None),
            };
        }
        let mut all = more.unwrap_or_default();
        all.extend(found.unwrap_or_default());
        if !all.contains_key("aws_access_key_id") {
            for by in ["sso_session", "sso_start_url", "credential_process", "role_arn"] {
                if all.contains_key(by) {
                    return Err(format!(
                        "the profile {name:?} uses {by}, which is not supported; set the variables that `aws configure export-credentials --format env` prints"
                    ));
                }
            }
        }
        Ok(Some(Self(all)))
    }

    /// Adds to a builder what the environment has not set.
    fn complete(self, mut builder: AmazonS3Builder) -> AmazonS3Builder {
        let has_keys = builder.get_config_value(&Key::AccessKeyId).is_some();
        let keys = [
            ("aws_access_key_id", Key::AccessKeyId, !has_keys),
            ("aws_secret_access_key", Key::SecretAccessKey, !has_keys),
            ("aws_session_token", Key::Token, !has_keys),
            ("region", Key::Region, builder.get_config_value(&Key::Region).is_none()),
            ("endpoint_url", Key::Endpoint, builder.get_config_value(&Key::Endpoint).is_none()),
        ];
        for (name, key, is_wanted) in keys {
            if let Some(value) = self.0.get(name).filter(|_| is_wanted) {
                builder = builder.with_config(key, value);
            }
        }
        builder
    }
}

/// The pairs of a section of an INI file.
fn section(text: &str, name: &str) -> Option<HashMap<String, String>> {
    let mut found: Option<HashMap<String, String>> = None;
    let mut is_wanted = false;
    for line in text.lines() {
        let line = line.trim();
        if let Some(title) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            is_wanted = title.split_whitespace().eq(name.split_whitespace());
            if is_wanted {
                found.get_or_insert_default();
            }
        } else if let (true, Some((key, value))) = (is_wanted && !line.starts_with(['#', ';']), line.split_once('=')) {
            let (key, value) = (key.trim().to_ascii_lowercase(), value.trim().to_owned());
            found.get_or_insert_default().insert(key, value);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDENTIALS: &str = "\
# comment
[default]
aws_access_key_id = AKIA1
aws_secret_access_key=one=two

[ lab ]
aws_access_key_id = AKIA2
aws_secret_access_key = three
aws_session_token = four
";
    const CONFIG: &str = "\
[default]
region = eu-central-1
[profile lab]
endpoint_url = http://127.0.0.1:9000
[profile sso]
sso_session = company
";

    #[test]
    fn a_profile_is_put_together_from_both_files() {
        let get = |wanted: Option<&str>, key: &str| {
            Profile::of(CREDENTIALS, CONFIG, wanted).unwrap().unwrap().0.get(key).cloned()
        };
        assert_eq!(get(None, "aws_secret_access_key").as_deref(), Some("one=two"));
        assert_eq!(get(None, "region").as_deref(), Some("eu-central-1"));
        assert_eq!(get(Some("lab"), "aws_session_token").as_deref(), Some("four"));
        assert_eq!(get(Some("lab"), "endpoint_url").as_deref(), Some("http://127.0.0.1:9000"));
        assert!(Profile::of("", "", None).unwrap().is_none());
        assert!(Profile::of(CREDENTIALS, CONFIG, Some("no")).unwrap_err().contains("no profile \"no\""));
        assert!(Profile::of(CREDENTIALS, CONFIG, Some("sso")).unwrap_err().contains("sso_session"));
    }
}
