//! Other programs: finds them, runs them, and measures their cost.

use crate::{LabError, Result};
use diskwright_load::clock::CpuTime;
use nix::sys::signal::SigSet;
use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Instant,
};

/// Characters of a failed program's output that are shown, from its end.
const OUTPUT_MAX: usize = 400;

/// Finds a program in `PATH`, or in `/usr/sbin` and `/sbin`, which a user's `PATH` may lack.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// The sentence that a program is not installed.
pub fn missing(name: &str, package: &str) -> String {
    format!("{name} is not installed (apt-get install {package})")
}

/// Cost of running a program.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// Wall-clock time, nanoseconds.
    pub wall_ns: u64,
    /// CPU time of the program and its children.
    pub cpu: CpuTime,
}

/// Runs a program and parses its standard output with `read`, whose error is a phrase for the
/// message.
///
/// # Errors
/// [`LabError::File`] if it cannot be started; [`LabError::Program`] if the program or `read`
/// fails.
pub fn answer<T>(command: &mut Command, read: impl FnOnce(&str) -> Result<T, String>) -> Result<T> {
    let output = command.output().map_err(LabError::file("start", command.get_program()))?;
    let failed = |why: &str| LabError::Program {
        command: format!("{command:?}"),
        status: output.status.to_string(),
        output: format!("{why} {}", String::from_utf8_lossy(&output.stderr).trim()),
    };
    if !output.status.success() {
        return Err(failed("error output:"));
    }
    read(&String::from_utf8_lossy(&output.stdout)).map_err(|why| failed(&why))
}

/// Runs a program; `input` is the file for its standard input.
///
/// # Errors
/// [`LabError::Program`] if the program fails, or prints "failed": qemu-io then exits with 0.
pub fn run<A: AsRef<OsStr>>(program: &Path, args: &[A], input: Option<&Path>) -> Result<Cost> {
    let mut command = Command::new(program);
    command.args(args);
    command.stdin(match input {
        Some(path) => Stdio::from(File::open(path).map_err(LabError::file("open", path))?),
        None => Stdio::null(),
    });
    let (cpu, start) = (CpuTime::of_children(), Instant::now());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = spawn(&mut command).and_then(Child::wait_with_output).map_err(LabError::file("start", program))?;
    let cost = Cost { wall_ns: start.elapsed().as_nanos() as u64, cpu: CpuTime::of_children() - cpu };
    let output_text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() && !output_text.contains("failed") {
        return Ok(cost);
    }
    let tail: String = output_text.chars().rev().take(OUTPUT_MAX).collect::<Vec<_>>().into_iter().rev().collect();
    Err(LabError::Program {
        command: format!("{command:?}"),
        status: output.status.to_string(),
        output: tail.trim().to_owned(),
    })
}

/// Starts a program with no signal blocked. This process blocks some signals and handles them in a
/// thread. A child process inherits the signal mask of the thread that starts it, so without this a
/// server could not be ended by SIGTERM.
///
/// # Errors
/// If the program cannot be started.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    let blocked = SigSet::thread_get_mask()?;
    SigSet::empty().thread_set_mask()?;
    let spawned = command.spawn();
    blocked.thread_set_mask()?;
    spawned
}

/// The first line of `qemu-img --version`; `None` if it is not installed.
pub fn qemu_version() -> Option<String> {
    let output = Command::new(find("qemu-img")?).arg("--version").output().ok()?;
    String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
}

/// Reads a whole file into the page cache.
///
/// # Errors
/// [`LabError::File`].
pub fn warm(path: &Path) -> Result<()> {
    let failed = || LabError::file("read", path);
    let mut file = File::open(path).map_err(failed())?;
    let mut buf = vec![0; 1 << 20];
    while file.read(&mut buf).map_err(failed())? > 0 {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_run_and_their_failures_reported() {
        let shell = find("sh").unwrap();
        assert_eq!(find("no-such-program-anywhere"), None);
        run(&shell, &["-c", "exit 0"], None).unwrap();
        let error = run(&shell, &["-c", "echo why >&2; exit 7"], None).unwrap_err().to_string();
        assert!(error.contains("why") && error.contains('7'), "{error}");
        assert!(run(&shell, &["-c", "echo write failed: No space"], None).is_err(), "an exit code of 0 is not enough");
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script");
        std::fs::write(&script, "exit 5\n").unwrap();
        assert!(run::<&str>(&shell, &[], Some(&script)).is_err(), "the script is its input");
    }

    #[test]
    fn a_child_hears_the_signals_that_we_have_blocked() {
        use nix::sys::signal::{SigSet, Signal, kill};
        use std::os::unix::process::ExitStatusExt;
        let blocked = SigSet::from_iter([Signal::SIGTERM]);
        blocked.thread_block().unwrap();
        let mut child = spawn(Command::new(find("sleep").unwrap()).arg("60")).unwrap();
        assert!(SigSet::thread_get_mask().unwrap().contains(Signal::SIGTERM), "it stays blocked here");
        kill(nix::unistd::Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGTERM as i32));
        blocked.thread_unblock().unwrap();
    }
}
