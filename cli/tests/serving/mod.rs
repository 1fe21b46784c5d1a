//! `diskwright serve` in the background of a test, as the user types it.

#![allow(dead_code, reason = "each test file uses its own part")]

use crate::common::{Workshop, schemas};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::Deserialize;
use std::{
    fs::{self, File},
    io::{Read, Write},
    net::TcpStream,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

/// How long something may take that another process does.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A server that runs.
pub struct Serving {
    child: Child,
    /// What it has announced with `--json`.
    pub said: serde_json::Value,
    log: std::path::PathBuf,
}

impl Serving {
    /// Starts it and waits until it has announced itself; `None`, told by name, where there is no
    /// io_uring.
    pub fn start(shop: &Workshop, line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        Self::started(shop, shop.command(&words))
    }

    /// The same with a command that was made ready.
    pub fn started(shop: &Workshop, mut command: Command) -> Option<Self> {
        let log = (0..).map(|n| shop.path(&format!("serve{n}.log"))).find(|path| !path.exists()).unwrap();
        command.arg("--json").stdout(Stdio::piped()).stderr(File::create(&log).unwrap());
        let mut child = command.spawn().expect("diskwright starts");
        let mut documents = serde_json::Deserializer::from_reader(child.stdout.take().unwrap());
        let said = serde_json::Value::deserialize(&mut documents);
        let mut serving = Self { child, said: serde_json::Value::Null, log };
        match said {
            Ok(said) => {
                schemas::validate(&said.to_string());
                serving.said = said;
            }
            Err(_) => {
                let _ = serving.child.wait();
                let log = serving.log();
                assert!(log.contains("io_uring"), "{log}");
                println!("skipped: serving: {log}");
                return None;
            }
        }
        Some(serving)
    }

    /// The first URI of an export.
    pub fn uri(&self, name: &str) -> String {
        let exports = self.said["exports"].as_array().expect("a list");
        let export = exports.iter().find(|export| export["name"] == name).expect("it is exported");
        export["uris"][0].as_str().unwrap().to_owned()
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    #[track_caller]
    pub fn wait_for_log(&self, words: &str) {
        wait_until(&format!("{words:?} is logged"), || self.log().contains(words));
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Ends it by a signal, and gives its exit code.
    pub fn stop(self, signal: Signal) -> Option<i32> {
        self.signal(signal);
        self.wait()
    }

    /// Waits until it has ended, and gives its exit code.
    pub fn wait(mut self) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(start.elapsed() < PATIENCE, "it does not end:\n{}", self.log());
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            println!("the server's log:\n{}", self.log());
        }
    }
}

#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Runs a program that others wrote, in the workshop; `None`, and a skip by name, where it is not
/// installed.
pub fn program(shop: &Workshop, name: &str, args: &[&str]) -> Option<Output> {
    match Command::new(name).args(args).current_dir(shop.path("")).stdin(Stdio::null()).output() {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: {name} is not installed");
            None
        }
        Err(error) => panic!("{name}: {error}"),
    }
}

/// What such a program says, when it must succeed.
#[track_caller]
pub fn said(shop: &Workshop, name: &str, args: &[&str]) -> Option<String> {
    let output = program(shop, name, args)?;
    let said = text(&output);
    assert!(output.status.success(), "{name} {args:?}: {said}");
    Some(said)
}

pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The body of a page over HTTP.
pub fn page(url: &str) -> String {
    let (host, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut stream = TcpStream::connect(host).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(stream, "GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    body.to_owned()
}
