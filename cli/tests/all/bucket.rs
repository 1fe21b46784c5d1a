//! Servers that are not in Debian's packages or need settings: found, started, and waited for.

use crate::common::{Running, Workshop};
use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(20);

/// A program of the system, or `None` after saying that the test is skipped.
pub fn found(test: &str, program: &str) -> Option<PathBuf> {
    let places = std::env::var_os("PATH").unwrap_or_default();
    let home = std::env::var_os("HOME").map(|home| PathBuf::from(home).join("go/bin"));
    // Where `./test` installs what is not in Debian.
    let own = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("go");
    let all = std::env::split_paths(&places).chain([PathBuf::from("/usr/sbin"), own]).chain(home);
    let found = all.map(|place| place.join(program)).find(|path| path.exists());
    if found.is_none() {
        println!("skipped: {test}: {program} is not installed");
    }
    found
}

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub fn wait_for(port: u16) {
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(begun.elapsed() < PATIENCE, "the server does not listen");
        thread::sleep(Duration::from_millis(20));
    }
}

/// versitygw in front of the folder "buckets", with these buckets. The commands of the workshop use
/// it from now on.
pub fn versitygw(test: &str, shop: &mut Workshop, buckets: &[&str]) -> Option<Running> {
    let program = found(test, "versitygw")?;
    found(test, "curl")?;
    let (data, more, port) = (shop.path("buckets"), shop.path("meta"), free_port());
    // A folder is a bucket.
    buckets.iter().for_each(|bucket| fs::create_dir_all(data.join(bucket)).unwrap());
    fs::create_dir_all(&more).unwrap();
    let mut command = Command::new(program);
    command.args(["--access", "AKIATEST", "--secret", "very-secret", "--port", &format!("127.0.0.1:{port}")]);
    command.args(["posix", "--sidecar"]).arg(&more).arg(&data);
    let running = Running::start(command.stdout(Stdio::null()).stderr(fs::File::create(shop.path("gw.log")).unwrap()));
    wait_for(port);
    shop.variables = vec![
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
        ("AWS_ACCESS_KEY_ID", "AKIATEST".into()),
        ("AWS_SECRET_ACCESS_KEY", "very-secret".into()),
        ("AWS_REGION", "us-east-1".into()),
        ("DISKWRIGHT_HTTP_TIMEOUT", "5".into()),
        ("HOME", shop.path("home").display().to_string()),
    ];
    Some(running)
}
