//! How `detach` speaks with the supervisor of a disk: one line of JSON there, one back, over a
//! socket that only its owner can reach.

use crate::attach::{error::AttachError, record::Home, release::Detach};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

/// Longest line that is read.
const LINE_BYTES: u64 = 64 << 10;

/// How long the supervisor waits for a line. The one who asks waits as long as it takes: a flush
/// may be slow.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the supervisor answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Answer {
    /// The disk is detached.
    Detached,
    /// It is detached, but something was lost: a sentence.
    Lost(String),
    /// It is still attached: a sentence.
    Refused(String),
}

/// Asks the supervisor to detach, and waits until it has.
///
/// # Errors
/// Its sentence; or that it is not there.
pub(crate) fn ask(home: &Home, detach: Detach) -> Result<(), AttachError> {
    let path = home.control();
    let failed = |source: io::Error| AttachError::State {
        doing: "speak with the supervisor by",
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

/// The question of somebody who has connected.
pub(crate) fn question(stream: &UnixStream) -> io::Result<Detach> {
    stream.set_read_timeout(Some(PATIENCE))?;
    receive(stream)
}

/// The answer.
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
    fn a_question_and_its_answer() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let detach = Detach { unmount: true, force: false };
        send(&mut ours, &detach).unwrap();
        assert_eq!(question(&theirs).unwrap(), detach);
        let refused = Answer::Refused("it is in use".into());
        answer(&mut theirs, &refused).unwrap();
        assert_eq!(receive::<Answer>(&ours).unwrap(), refused);
    }

    #[test]
    fn nonsense_is_no_question() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(b"detach!\n").unwrap();
        assert!(question(&theirs).is_err());
        drop(ours);
        assert!(question(&theirs).is_err());
    }
}
