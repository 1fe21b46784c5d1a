//! A folder of a bucket as the place of a repository. Requests, their signatures and their tries
//! are those of the `object_store` crate.

use super::remote::{Listed, Remote};
use crate::{
    credentials::Bucket,
    error::{ObjectError, Result},
    runtime,
    settings::Settings,
    uri::{ObjectUri, Scheme},
};
use futures_util::{StreamExt, TryStreamExt};
use object_store::{
    Error as StoreError, GetOptions, GetRange, ObjectMeta, ObjectStore, PutMode, PutOptions, PutPayload, aws::AmazonS3,
    path::Path as ObjectPath,
};
use std::{future::Future, path::Path, sync::Arc};

/// How often a request is repeated, within the timeout.
const RETRIES: usize = 10;

/// A folder of a bucket; see the module documentation.
#[derive(Debug)]
pub struct S3Remote {
    store: Arc<AmazonS3>,
    /// Repeats no request.
    once: Arc<AmazonS3>,
    /// `s3://BUCKET/FOLDER/`, or `s3://BUCKET/`.
    name: String,
    /// `FOLDER/`, or nothing.
    folder: String,
}

impl S3Remote {
    /// The folder of a repository.
    ///
    /// # Errors
    /// [`ObjectError::BadName`] for a name that is not `s3://BUCKET/FOLDER`; as for opening an
    /// object.
    pub fn new(folder: &Path, settings: &Settings) -> Result<Self> {
        let uri = ObjectUri::parse(folder)?;
        Self::at(&uri, uri.key().trim_end_matches('/'), settings)
    }

    /// The folder in which a disk lies, and the name of the disk in it.
    ///
    /// # Errors
    /// As [`S3Remote::new`].
    pub fn of_disk(disk: &Path, settings: &Settings) -> Result<(Self, String)> {
        let uri = ObjectUri::parse(disk)?;
        let (folder, name) = uri.key().rsplit_once('/').unwrap_or(("", uri.key()));
        if name.is_empty() {
            let why = "it names no disk: expected s3://BUCKET/FOLDER/NAME";
            return Err(ObjectError::BadName { name: uri.name(), why });
        }
        Ok((Self::at(&uri, folder, settings)?, name.to_owned()))
    }

    fn at(uri: &ObjectUri, folder: &str, settings: &Settings) -> Result<Self> {
        if uri.scheme() != Scheme::S3 {
            let why = "disks are pushed to buckets: expected s3://BUCKET/FOLDER";
            return Err(ObjectError::BadName { name: uri.name(), why });
        }
        let folder = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        let name = format!("{}{}/{folder}", Scheme::S3.prefix(), uri.host());
        let (store, once) = (Bucket::writer(uri, settings, RETRIES)?, Bucket::writer(uri, settings, 0)?);
        Ok(Self { store, once, name, folder })
    }

    fn path(&self, key: &str) -> Result<ObjectPath> {
        let why = "it is not a valid key";
        let bad = |_| ObjectError::BadName { name: self.name_of(key), why };
        ObjectPath::parse(format!("{}{key}", self.folder)).map_err(bad)
    }

    /// Waits for a request about `key`.
    fn wait<T: Send + 'static>(
        &self,
        key: &str,
        request: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<T> {
        let started = runtime::wait_for(request);
        let name = self.name_of(key);
        started
            .map_err(|source| ObjectError::local("start a thread for", Path::new(&name), source))?
            .map_err(|error| refusal(name, &error))
    }
}

/// What an error of `object_store` means.
fn refusal(name: String, error: &StoreError) -> ObjectError {
    let said = last_cause(error);
    match error {
        StoreError::NotFound { .. } => ObjectError::Missing { name, said, hint: ", the bucket, and AWS_ENDPOINT_URL" },
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => ObjectError::Denied {
            name,
            said,
            hint: "look at AWS_PROFILE or AWS_ACCESS_KEY_ID, and at the policy of the bucket",
        },
        StoreError::NotSupported { .. } | StoreError::NotImplemented { .. } => {
            ObjectError::NoRepository { name, what: said }
        }
        _ => ObjectError::Failed { name, said },
    }
}

/// The innermost error, which says what has happened. On one line.
fn last_cause(error: &StoreError) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    let said: String = cause.to_string().chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    match (element(&said, "Code"), element(&said, "Message")) {
        (Some(code), Some(message)) => format!("{code}: {message}"),
        (Some(code), None) => code.to_owned(),
        _ => said.chars().take(400).collect(),
    }
}

/// The text of an element of an S3 error.
fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let rest = text.split_once(&format!("<{name}>"))?.1;
    Some(rest.split_once('<')?.0.trim()).filter(|found| !found.is_empty())
}

impl Remote for S3Remote {
    fn name_of(&self, key: &str) -> String {
        format!("{}{key}", self.name)
    }

    fn get(&self, key: &str, most_bytes: u64) -> Result<Option<Vec<u8>>> {
        let (store, path) = (Arc::clone(&self.store), self.path(key)?);
        let options = GetOptions { range: Some(GetRange::Bounded(0..most_bytes)), ..GetOptions::default() };
        self.wait(key, async move {
            match store.get_opts(&path, options).await {
                Ok(found) => found.bytes().await.map(|bytes| Some(bytes.to_vec())),
                Err(StoreError::NotFound { .. }) => Ok(None),
                Err(error) => Err(error),
            }
        })
    }

    fn put(&self, key: &str, bytes: Vec<u8>) -> Result<()> {
        let (store, path) = (Arc::clone(&self.store), self.path(key)?);
        self.wait(key, async move {
            store.put_opts(&path, PutPayload::from(bytes), PutOptions::default()).await.map(|_| ())
        })
    }

    fn put_new(&self, key: &str, bytes: Vec<u8>) -> Result<bool> {
        let (store, path) = (Arc::clone(&self.once), self.path(key)?);
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        self.wait(key, async move {
            match store.put_opts(&path, PutPayload::from(bytes), options).await {
                Ok(_) => Ok(true),
                Err(StoreError::AlreadyExists { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        })
    }

    fn list(&self, folder: &str, is_flat: bool) -> Result<Vec<Listed>> {
        let (store, own) = (Arc::clone(&self.store), self.folder.clone());
        let within = format!("{own}{folder}");
        let within = if within.is_empty() { None } else { Some(self.path(folder)?) };
        let found: Vec<ObjectMeta> = self.wait(folder, async move {
            match is_flat {
                true => store.list_with_delimiter(within.as_ref()).await.map(|found| found.objects),
                false => store.list(within.as_ref()).try_collect().await,
            }
        })?;
        let listed = found.into_iter().filter_map(|found| {
            let key = found.location.as_ref().strip_prefix(&own)?.to_owned();
            Some(Listed { key, size_bytes: found.size, modified: found.last_modified.into() })
        });
        Ok(listed.collect())
    }

    fn delete(&self, keys: &[String]) -> Result<()> {
        let Some(first) = keys.first() else { return Ok(()) };
        let paths: Vec<ObjectPath> = keys.iter().map(|key| self.path(key)).collect::<Result<_>>()?;
        let store = Arc::clone(&self.store);
        self.wait(first, async move {
            let paths = futures_util::stream::iter(paths.into_iter().map(Ok)).boxed();
            let mut deleted = store.delete_stream(paths);
            while let Some(result) = deleted.next().await {
                match result {
                    Ok(_) | Err(StoreError::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        })
    }
}
