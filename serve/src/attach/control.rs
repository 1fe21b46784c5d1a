//! How `detach` talks to the supervisor of a disk: a request and an answer, one line of JSON each,
//! over a unix socket that only its owner can reach.

use crate::attach::{error::AttachError, record::RecordDir, release::DetachOptions};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

/// The longest line that is read.
const LINE_BYTES: u64 = 64 << 10;

/// How long the supervisor waits for a request. `detach` itself waits for the answer without a
/// limit, because a flush may be slow.
const PATIENCE: Duration = Duration::from_secs(5);

/// The supervisor's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    /// The disk was detached.
    Detached,
    /// The disk was detached, but data was lost. The text is a sentence.
    Lost(String),
    /// The disk is still attached. The text is a sentence.
    Refused(String),
}

/// Asks the supervisor to detach the disk, and waits for the answer.
///
/// # Errors
/// The supervisor's error, or that it cannot be reached.
pub(crate) fn ask(home: &RecordDir, detach: DetachOptions) -> Result<(), AttachError> {
    let path = home.control();
    let failed = |source: io::Error| AttachError::State {
        doing: "talk to the supervisor over",
        path: path.clone(),
        source,
        hint: "; try again",
    };
    let mut stream = UnixStream::connect(&path).map_err(failed)?;
    send(&mut stream, &detach).map_err(failed)?;
    match receive::<Answer>(&stream).map_err(failed)? {
        Answer::Detached => Ok(()),
        Answer::Lost(sentence) | Answer::Refused(sentence) => Err(AttachError::Supervisor(sentence)),
    }
}

/// Reads the request of a client that has connected.
pub(crate) fn question(stream: &UnixStream) -> io::Result<DetachOptions> {
    stream.set_read_timeout(Some(PATIENCE))?;
    receive(stream)
}

/// Sends the answer.
pub(crate) fn answer(stream: &mut UnixStream, answer: &Answer) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    send(stream, answer)
}

fn send(stream: &mut UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line)
}

fn receive<T: for<'de> Deserialize<'de>>(stream: &UnixStream) -> io::Result<T> {
    let mut line = String::new();
    BufReader::new(stream.take(LINE_BYTES)).read_line(&mut line)?;
    if line.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&line)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_and_its_answer() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let detach = DetachOptions { unmount: true, force: false };
        send(&mut ours, &detach).unwrap();
        assert_eq!(question(&theirs).unwrap(), detach);
        let refused = Answer::Refused("it is in use".into());
        answer(&mut theirs, &refused).unwrap();
        assert_eq!(receive::<Answer>(&ours).unwrap(), refused);
    }

    #[test]
    fn invalid_requests_are_errors() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"detach!\n").unwrap();
        assert!(question(&theirs).is_err());
        drop(ours);
        assert!(question(&theirs).is_err());
    }
}
