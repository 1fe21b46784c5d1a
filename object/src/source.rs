//! One object: its version, and ranges of it.
//!
//! ```text
//!   open ─▶ GET bytes=0-15 ─▶ size, ETag, start   a server that ignores ranges is refused here
//!   get  ─▶ GET bytes=a-b, If-Match: ETag ─▶ exactly these bytes of this version, or a failure
//! ```
//!
//! An object in S3 is read by a signed URL, like any other one. The signature holds for
//! [`SIGNED_FOR`] and is renewed before that.
//!
//! A redirect is followed if it does not lead from HTTPS to HTTP, and to another host only if the
//! URL has no secrets.

use crate::{
    answer::{Asked, Failure, Version},
    client,
    credentials::Bucket,
    error::{ObjectError, Result},
    seal::SEAL_ENDING,
    settings::Settings,
    tries::Tries,
    uri::{ObjectUri, Scheme, is_loopback},
};
use reqwest::{Client, Response, StatusCode, Url, header};
use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How long a signature holds.
const SIGNED_FOR: Duration = Duration::from_secs(3600);
/// How long it is used.
const SIGNED_USE: Duration = Duration::from_secs(600);
const REDIRECTS_MAX: usize = 5;
/// Bytes that are read to open an object: by them it shows whether it is a manifest.
const START_BYTES: u64 = 16;

/// Where the object is.
#[derive(Debug)]
enum Address {
    Url(Url),
    Bucket { bucket: Arc<Bucket>, signed: Mutex<Option<(Instant, Url)>> },
}

/// An object on its server.
#[derive(Debug)]
pub(crate) struct Source {
    uri: ObjectUri,
    name: String,
    client: Client,
    address: Address,
    pub(crate) timeout: Duration,
}

impl Source {
    /// An object. No request is made yet.
    pub(crate) fn new(uri: ObjectUri, settings: &Settings) -> Result<Self> {
        let name = uri.name();
        if uri.key().is_empty() {
            return Err(ObjectError::BadName { name, why: "it names no object: expected s3://BUCKET/KEY" });
        }
        if uri.scheme() == Scheme::Http && !settings.allow_http && !uri.is_loopback() {
            return Err(ObjectError::PlainHttp { name });
        }
        let client = client::client(settings)?;
        let address = match uri.scheme() {
            Scheme::S3 => Address::Bucket { bucket: Arc::new(Bucket::of(&uri, settings)?), signed: Mutex::default() },
            Scheme::Https | Scheme::Http => Address::Url(url_of(&uri)?),
        };
        Ok(Self { uri, name, client, address, timeout: settings.timeout })
    }

    /// An object in the same folder, or in one below it.
    pub(crate) fn beside(&self, key: &str) -> Result<Self> {
        let uri = self.uri.beside(key);
        let address = match &self.address {
            Address::Bucket { bucket, .. } => Address::Bucket { bucket: Arc::clone(bucket), signed: Mutex::default() },
            Address::Url(_) => Address::Url(url_of(&uri)?),
        };
        Ok(Self { name: uri.name(), uri, client: self.client.clone(), address, timeout: self.timeout })
    }

    /// The seal of this object.
    pub(crate) fn seal(&self) -> Result<Self> {
        let name = self.uri.key().rsplit('/').next().unwrap_or_default();
        self.beside(&format!("{name}{SEAL_ENDING}"))
    }

    /// The name, without secrets.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What tells this object from others of the same name: the server of a bucket.
    pub(crate) fn server(&self) -> &str {
        match &self.address {
            Address::Url(_) => "",
            Address::Bucket { bucket, .. } => bucket.endpoint(),
        }
    }

    /// The version that is there now, and its first bytes. Asks again for as long as the timeout.
    pub(crate) async fn version(&self) -> Result<(Version, Vec<u8>)> {
        let mut start = Vec::new();
        let asked = Asked { name: &self.name, scheme: self.uri.scheme(), range: 0..START_BYTES, version: None };
        let version = self.ask_again(&asked, Tries::of_opening(self.timeout), &mut start).await?;
        Ok((version, start))
    }

    /// The first bytes of an object whose version does not matter, all of them if it is shorter.
    pub(crate) async fn get_start(&self, len_bytes: u64, into: &mut Vec<u8>) -> Result<Version> {
        let asked = Asked { name: &self.name, scheme: self.uri.scheme(), range: 0..len_bytes, version: None };
        self.ask_again(&asked, Tries::new(self.timeout), into).await
    }

    /// Bytes of a version, in place of what `into` has. Asks again for as long as the timeout.
    pub(crate) async fn get(&self, range: Range<u64>, version: &Version, into: &mut Vec<u8>) -> Result<()> {
        let asked = Asked { name: &self.name, scheme: self.uri.scheme(), range, version: Some(version) };
        self.ask_again(&asked, Tries::new(self.timeout), into).await.map(|_| ())
    }

    async fn ask_again(&self, asked: &Asked<'_>, mut tries: Tries, bytes: &mut Vec<u8>) -> Result<Version> {
        loop {
            let answered = tries.limited(self.ask(asked, bytes)).await;
            if let Some(result) = tries.judge(&self.name, answered).await {
                return result;
            }
        }
    }

    async fn ask(&self, asked: &Asked<'_>, bytes: &mut Vec<u8>) -> Result<Version, Failure> {
        let mut answer = self.send(asked).await?;
        if answer.status() != StatusCode::PARTIAL_CONTENT {
            if answer.status() == StatusCode::FORBIDDEN {
                // Perhaps the signature's credentials have expired.
                self.forget_signature();
            }
            return Err(asked.refusal(answer).await);
        }
        let version = asked.check(answer.headers())?;
        let wanted = (asked.range.end.min(version.size_bytes) - asked.range.start) as usize;
        bytes.clear();
        bytes.reserve_exact(wanted);
        loop {
            match answer.chunk().await {
                Ok(Some(piece)) if piece.len() <= wanted - bytes.len() => bytes.extend_from_slice(&piece),
                Ok(Some(_)) => {
                    let what = format!("it sends more than the {wanted} bytes that were asked for");
                    return Err(Failure::Final(ObjectError::Wrong { name: self.name.clone(), what }));
                }
                Ok(None) if bytes.len() == wanted => return Ok(version),
                Ok(None) => return Err(Failure::passing(format!("it sent {} of {wanted} bytes", bytes.len()))),
                Err(error) => return Err(lost(error)),
            }
        }
    }

    /// Sends a request, and follows redirects.
    async fn send(&self, asked: &Asked<'_>) -> Result<Response, Failure> {
        let mut url = self.url().await?;
        for _ in 0..REDIRECTS_MAX {
            let last = asked.range.end.saturating_sub(1);
            let mut request = self
                .client
                .get(url.clone())
                .header(header::RANGE, format!("bytes={}-{last}", asked.range.start))
                .header(header::ACCEPT_ENCODING, "identity");
            if let Some(version) = asked.version {
                request = request.header(header::IF_MATCH, &version.etag);
            }
            if let Some((user, password)) = &self.uri.secrets().user {
                request = request.basic_auth(user, Some(password));
            }
            let answer = request.send().await.map_err(lost)?;
            let is_redirect = answer.status().is_redirection() && answer.status() != StatusCode::NOT_MODIFIED;
            // S3 says where the bucket is, but the signature is for the region that was asked.
            if !is_redirect || answer.headers().contains_key("x-amz-bucket-region") {
                return Ok(answer);
            }
            url = self.redirected(&url, &answer).map_err(Failure::Final)?;
        }
        let what = format!("it leads from one address to the next, more than {REDIRECTS_MAX} times");
        Err(Failure::Final(ObjectError::Wrong { name: self.name.clone(), what }))
    }

    /// Where a redirect leads, if it may be followed.
    fn redirected(&self, from: &Url, answer: &Response) -> Result<Url> {
        let to = answer.headers().get(header::LOCATION).and_then(|to| to.to_str().ok());
        let to = to.and_then(|to| from.join(to).ok()).filter(|to| to.has_host());
        let Some(to) = to else {
            let what = format!("{} without an address", answer.status());
            return Err(ObjectError::Wrong { name: self.name.clone(), what });
        };
        let host = |url: &Url| url.host_str().unwrap_or_default().to_owned();
        let refused = |why| Err(ObjectError::Redirect { name: self.name.clone(), to: host(&to), why });
        let is_same = (host(from), from.port_or_known_default()) == (host(&to), to.port_or_known_default());
        let has_secrets = matches!(self.address, Address::Bucket { .. }) || !self.uri.secrets().is_empty();
        match to.scheme() {
            "https" => {}
            "http" if from.scheme() == "http" && (is_same || is_loopback(&host(&to))) => {}
            "http" => return refused("without encryption"),
            _ => return refused("by another protocol"),
        }
        if has_secrets && !is_same {
            return refused("another host, which would be shown secrets");
        }
        Ok(to)
    }

    /// The URL to ask now.
    async fn url(&self) -> Result<Url, Failure> {
        let (bucket, signed) = match &self.address {
            Address::Url(url) => return Ok(url.clone()),
            Address::Bucket { bucket, signed } => (bucket, signed),
        };
        let known = signed.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((_, url)) = known.filter(|(since, _)| since.elapsed() < SIGNED_USE) {
            return Ok(url);
        }
        let url = bucket.signed_url(&self.name, self.uri.key(), SIGNED_FOR).await?;
        *signed.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), url.clone()));
        Ok(url)
    }

    fn forget_signature(&self) {
        if let Address::Bucket { signed, .. } = &self.address {
            *signed.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

/// The address of an object on a web server. The user is not part of it.
fn url_of(uri: &ObjectUri) -> Result<Url> {
    let query = uri.secrets().query.as_ref().map(|query| format!("?{query}")).unwrap_or_default();
    // A blank, for example, becomes %20; what is encoded already stays.
    let text = format!("{}{}/{}{query}", uri.scheme().prefix(), uri.host(), uri.key());
    Url::parse(&text).map_err(|_| ObjectError::BadName { name: uri.name(), why: "it is not a valid URL" })
}

/// A request that got no whole answer. The URL, which may have a signature, is not shown.
fn lost(error: reqwest::Error) -> Failure {
    let error = error.without_url();
    let mut said = error.to_string();
    // The first error only says that a request failed.
    let mut source = std::error::Error::source(&error);
    while let Some(inner) = source {
        said = inner.to_string();
        source = inner.source();
    }
    Failure::Passing { said, pause: None, is_connected: !error.is_connect() }
}
