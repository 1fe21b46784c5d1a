//! What a server's answer means: bytes, "try again", or an error.
//!
//! ```text
//!   206, the range asked for, the same ETag   bytes
//!   412, 416, another ETag or size            the object has changed
//!   401, 403; 404, 410                        denied; missing
//!   408, 425, 429, 5xx, a connection lost     try again
//!   everything else                           the server is wrong
//! ```
//!
//! Nothing of an answer is used before all of its head was checked.

use crate::{error::ObjectError, uri::Scheme};
use reqwest::{
    Response, StatusCode,
    header::{self, HeaderMap},
};
use std::{
    ops::Range,
    time::{Duration, SystemTime},
};

/// Most of an error's body that is read.
const SAID_BYTES: usize = 4096;
/// The longest pause that a server may ask for.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Why a request brought no bytes.
#[derive(Debug, Clone)]
pub(crate) enum Failure {
    /// Another try may succeed.
    Passing {
        /// What happened.
        said: String,
        /// How long the server asks to wait.
        pause: Option<Duration>,
        /// Whether a connection was made.
        is_connected: bool,
    },
    /// It will not.
    Final(ObjectError),
}

impl Failure {
    pub(crate) fn passing(said: impl Into<String>) -> Self {
        Self::Passing { said: said.into(), pause: None, is_connected: true }
    }
}

/// The version of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Its length in bytes.
    pub size_bytes: u64,
    /// Its ETag, with the quotes.
    pub etag: String,
    /// When it was last modified, if the server says so.
    pub modified: Option<SystemTime>,
}

/// What a request asked for.
#[derive(Debug, Clone)]
pub(crate) struct Asked<'a> {
    pub(crate) name: &'a str,
    pub(crate) scheme: Scheme,
    pub(crate) range: Range<u64>,
    /// The version that it must be of; `None` for the first request.
    pub(crate) version: Option<&'a Version>,
}

impl Asked<'_> {
    fn wrong(&self, what: impl Into<String>) -> Failure {
        Failure::Final(ObjectError::Wrong { name: self.name.into(), what: what.into() })
    }

    fn changed(&self, found: impl Into<String>) -> Failure {
        Failure::Final(ObjectError::Changed { name: self.name.into(), found: found.into() })
    }

    fn unsuitable(&self, what: &str) -> Failure {
        Failure::Final(ObjectError::Unsuitable { name: self.name.into(), what: what.into() })
    }

    /// Checks the head of an answer that has bytes. Returns the version that they are of.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<Version, Failure> {
        let encoding = text(headers, header::CONTENT_ENCODING).unwrap_or("identity");
        if !encoding.eq_ignore_ascii_case("identity") {
            return Err(self.wrong(format!("it is encoded as {encoding:?}")));
        }
        let range = text(headers, header::CONTENT_RANGE).unwrap_or_default();
        let Some((start, end, size_bytes)) = content_range(range) else {
            return Err(self.wrong(format!("Content-Range is {range:?}")));
        };
        // Before its version is known, an object may be shorter than what was asked for.
        let is_short = self.version.is_none() && end == size_bytes && end < self.range.end;
        if start != self.range.start || end != self.range.end && !is_short {
            let (wanted, last) = (self.range.start, self.range.end.saturating_sub(1));
            return Err(self.wrong(format!("bytes {wanted}-{last} were asked for, and it sends {range:?}")));
        }
        let len = text(headers, header::CONTENT_LENGTH).and_then(|len| len.parse::<u64>().ok());
        if len.is_some_and(|len| len != end - start) {
            return Err(self.wrong(format!("{} bytes were asked for, and it sends {}", end - start, len.unwrap_or(0))));
        }
        let etag = text(headers, header::ETAG).unwrap_or_default();
        if let Some(version) = self.version {
            if etag != version.etag {
                return Err(self.changed(format!("its ETag was {}, and is {etag}", version.etag)));
            }
            if size_bytes != version.size_bytes {
                return Err(self.changed(format!("it had {} bytes, and has {size_bytes}", version.size_bytes)));
            }
        }
        if etag.is_empty() || etag.starts_with("W/") {
            return Err(self.unsuitable("it has no strong ETag, so a change of the object would go unnoticed"));
        }
        let modified = text(headers, header::LAST_MODIFIED).and_then(|date| httpdate::parse_http_date(date).ok());
        Ok(Version { size_bytes, etag: etag.to_owned(), modified })
    }

    /// What an answer without the bytes means.
    pub(crate) async fn refusal(&self, answer: Response) -> Failure {
        let status = answer.status();
        let name = self.name.to_owned();
        let pause = text(answer.headers(), header::RETRY_AFTER).and_then(|seconds| seconds.parse().ok());
        let pause = pause.map(|seconds| Duration::from_secs(seconds).min(PAUSE_MAX));
        let size_now = text(answer.headers(), header::CONTENT_RANGE).and_then(|range| range.strip_prefix("bytes */"));
        let size_now = size_now.map(str::to_owned);
        let region = answer.headers().get("x-amz-bucket-region").and_then(|region| region.to_str().ok());
        if let (Some(region), true) = (region, status.is_redirection() || status == StatusCode::BAD_REQUEST) {
            return Failure::Final(ObjectError::Region { name, region: region.to_owned() });
        }
        let said = said(answer).await;
        match status {
            StatusCode::OK => self.unsuitable("it ignores the header Range, and sends whole objects only"),
            StatusCode::PRECONDITION_FAILED => self.changed(match self.version {
                Some(version) => format!("its ETag is no longer {}", version.etag),
                None => said,
            }),
            StatusCode::RANGE_NOT_SATISFIABLE if self.version.is_none() => self.unsuitable("the object is empty"),
            StatusCode::RANGE_NOT_SATISFIABLE => {
                let now = size_now.map_or(String::new(), |size| format!(", and has {size}"));
                let had = self.version.map_or(0, |version| version.size_bytes);
                self.changed(format!("it had {had} bytes{now}"))
            }
            StatusCode::NOT_FOUND | StatusCode::GONE => {
                let hint = if self.scheme == Scheme::S3 { ", the bucket, and AWS_ENDPOINT_URL" } else { "" };
                Failure::Final(ObjectError::Missing { name, said, hint })
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                let hint = denied_hint(self.scheme, &said);
                Failure::Final(ObjectError::Denied { name, said, hint })
            }
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS => {
                Failure::Passing { said, pause, is_connected: true }
            }
            StatusCode::NOT_IMPLEMENTED => self.unsuitable(&said),
            status if status.is_server_error() => Failure::Passing { said, pause, is_connected: true },
            _ => self.wrong(said),
        }
    }
}

fn denied_hint(scheme: Scheme, said: &str) -> &'static str {
    match scheme {
        Scheme::S3 if said.contains("Expired") => "the credentials have expired: renew them",
        Scheme::S3 if said.contains("Skewed") => "the clock of this machine is wrong",
        Scheme::S3 => "look at AWS_PROFILE or AWS_ACCESS_KEY_ID, and at the policy of the bucket",
        Scheme::Https | Scheme::Http => {
            "if it needs a user, write https://USER:PASSWORD@HOST/PATH; a signed address may have expired"
        }
    }
}

fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// First byte, end and total of `bytes 0-1023/4096`.
fn content_range(text: &str) -> Option<(u64, u64, u64)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, last) = range.split_once('-')?;
    let number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u64>().ok())?;
    let (start, last, total) = (number(start)?, number(last)?, number(total)?);
    (start <= last && last < total).then_some((start, last + 1, total))
}

/// The status of an answer, with the code and the message of an S3 error.
async fn said(mut answer: Response) -> String {
    let status = answer.status().to_string();
    let mut body = Vec::new();
    while let Ok(Some(piece)) = answer.chunk().await {
        body.extend_from_slice(&piece[..piece.len().min(SAID_BYTES - body.len())]);
        if body.len() == SAID_BYTES {
            break;
        }
    }
    let body = String::from_utf8_lossy(&body);
    let element = |name: &str| {
        let rest = body.split_once(&format!("<{name}>"))?.1;
        let text = rest.split_once('<')?.0.trim();
        (!text.is_empty()).then(|| text.chars().filter(|letter| !letter.is_control()).take(200).collect::<String>())
    };
    match (element("Code"), element("Message")) {
        (Some(code), Some(message)) => format!("{status}: {code}: {message}"),
        (Some(code), None) => format!("{status}: {code}"),
        _ => status,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reqwest::header::HeaderValue;

    #[test]
    fn ranges_are_read_and_wrong_ones_refused() {
        assert_eq!(content_range("bytes 0-1023/4096"), Some((0, 1024, 4096)));
        for bad in [
            "bytes 0-1023/*",
            "bytes */4096",
            "bytes 5-4/10",
            "bytes 0-10/10",
            "bytes -1-3/10",
            "bytes +1-3/10",
            "bytes 0-18446744073709551615/18446744073709551616",
            "0-1/2",
            "",
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_head_of_an_answer_must_fit_what_was_asked() {
        let version = Version { size_bytes: 100, etag: "\"a\"".into(), modified: None };
        let check = |version: Option<&Version>, pairs: &[(header::HeaderName, &str)]| {
            let asked = Asked { name: "s3://b/k", scheme: Scheme::S3, range: 10..20, version };
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_RANGE, HeaderValue::from_static("bytes 10-19/100"));
            headers.insert(header::ETAG, HeaderValue::from_static("\"a\""));
            for (name, value) in pairs {
                headers.insert(name.clone(), HeaderValue::from_str(value).unwrap());
            }
            match asked.check(&headers) {
                Ok(found) => Ok(found.size_bytes),
                Err(Failure::Final(error)) => Err(error.to_string()),
                Err(Failure::Passing { said, .. }) => panic!("{said}"),
            }
        };
        assert_eq!(check(Some(&version), &[(header::CONTENT_LENGTH, "10")]), Ok(100));
        for (name, value, why) in [
            (header::CONTENT_RANGE, "bytes 11-20/100", "bytes 10-19 were asked for"),
            (header::CONTENT_RANGE, "bytes 10-18/100", "bytes 10-19 were asked for"),
            (header::CONTENT_RANGE, "bytes 10-19/99", "it had 100 bytes, and has 99"),
            (header::CONTENT_LENGTH, "9", "10 bytes were asked for, and it sends 9"),
            (header::CONTENT_ENCODING, "gzip", "encoded"),
            (header::ETAG, "\"b\"", "its ETag was \"a\", and is \"b\""),
        ] {
            let error = check(Some(&version), &[(name, value)]).unwrap_err();
            assert!(error.contains(why), "{value}: {error}");
        }
        for etag in ["W/\"a\"", ""] {
            let error = check(None, &[(header::ETAG, etag)]).unwrap_err();
            assert!(error.contains("no strong ETag"), "{error}");
        }
    }
}
