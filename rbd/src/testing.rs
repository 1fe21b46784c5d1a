//! A cluster for tests, on this machine: one monitor, one manager and one OSD in memory, without
//! authentication. Enabled by the feature `testing`.

use std::{
    env, fs, io,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(120);
const FSID: &str = "7b1f6a3e-1f0c-4f0e-9d7e-5f5a4c0d2e11";
const OSD: &str = "0f5d1c5e-8a55-4d2a-9c7e-2f6f0f0e6d01";
const PROGRAMS: [&str; 6] = ["ceph-mon", "ceph-osd", "ceph-mgr", "ceph", "rbd", "monmaptool"];

/// A cluster with a pool "rbd". Its daemons end with the value.
#[derive(Debug)]
pub struct Cluster {
    conf: PathBuf,
    osd: Option<Child>,
    others: Vec<Child>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for daemon in self.others.iter_mut().chain(&mut self.osd) {
            // It may have ended.
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

fn check_installed(programs: &[&str]) -> Result<(), String> {
    let paths = env::var_os("PATH").unwrap_or_default();
    let is_there = |program: &str| env::split_paths(&paths).any(|path| path.join(program).exists());
    match programs.iter().find(|program| !is_there(program)) {
        Some(program) => Err(format!("{program} is not installed")),
        None => Ok(()),
    }
}

fn settings(folder: &Path, port: u16, more: &str) -> String {
    let at = folder.display();
    format!(
        "[global]\nfsid = {FSID}\nmon_host = v1:127.0.0.1:{port}\nmon_initial_members = a\n\
         auth_cluster_required = none\nauth_service_required = none\nauth_client_required = none\n\
         osd_pool_default_size = 1\nosd_pool_default_min_size = 1\nosd_crush_chooseleaf_type = 0\n\
         mon_allow_pool_size_one = true\nosd_pool_default_pg_autoscale_mode = off\n\
         osd_objectstore = memstore\nmemstore_device_bytes = 6442450944\n\
         public_addr = 127.0.0.1\ncluster_addr = 127.0.0.1\nosd_heartbeat_grace = 60\n\
         run_dir = {at}\nlog_file = {at}/$name.log\npid_file = {at}/$name.pid\nadmin_socket = {at}/$name.asok\n\
         mon_data = {at}/mon\nosd_data = {at}/osd\nmgr_data = {at}/mgr\n\
         mon_data_avail_crit = 1\nmon_data_avail_warn = 2\n{more}\n"
    )
}

impl Cluster {
    /// Starts a cluster whose files are in `folder`, with more lines of settings.
    ///
    /// # Errors
    /// What is missing, or what has failed.
    pub fn start(folder: &Path, more: &str) -> Result<Self, String> {
        check_installed(&PROGRAMS)?;
        Self::begin(folder, more).map_err(|error| format!("a cluster could not be started: {error}"))
    }

    fn begin(folder: &Path, more: &str) -> io::Result<Self> {
        for daemon in ["mon", "osd", "mgr"] {
            fs::create_dir_all(folder.join(daemon))?;
        }
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let conf = folder.join("ceph.conf");
        fs::write(&conf, settings(folder, port, more))?;
        let mut cluster = Self { conf, osd: None, others: Vec::new() };
        let map = folder.join("monmap").display().to_string();
        let place = format!("[v1:127.0.0.1:{port}]");
        cluster.must("monmaptool", &["--create", "--addv", "a", &place, "--fsid", FSID, &map])?;
        cluster.must("ceph-mon", &["--mkfs", "-i", "a", "--monmap", &map])?;
        cluster.others.push(cluster.daemon("ceph-mon", "a")?);
        cluster.others.push(cluster.daemon("ceph-mgr", "x")?);
        cluster.until("ceph", &["osd", "new", OSD, "0", "--connect-timeout", "5"])?;
        cluster.must("ceph-osd", &["--mkfs", "-i", "0", "--osd-uuid", OSD])?;
        cluster.osd = Some(cluster.daemon("ceph-osd", "0")?);
        cluster.must("ceph", &["osd", "pool", "create", "rbd", "8"])?;
        cluster.until("rbd", &["pool", "init", "rbd"])?;
        Ok(cluster)
    }

    fn daemon(&self, program: &str, id: &str) -> io::Result<Child> {
        let mut command = Command::new(program);
        command.args(["-f", "-i", id, "-c"]).arg(&self.conf);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    }

    /// One of Ceph's programs, with the settings of this cluster. It ends within a minute.
    pub fn command(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.arg("60").arg(program).args(words).arg("-c").arg(&self.conf).stdin(Stdio::null());
        command
    }

    fn succeeds(&self, program: &str, words: &[&str]) -> io::Result<bool> {
        let mut command = self.command(program, words);
        Ok(command.stdout(Stdio::null()).stderr(Stdio::null()).status()?.success())
    }

    fn must(&self, program: &str, words: &[&str]) -> io::Result<()> {
        match self.succeeds(program, words)? {
            true => Ok(()),
            false => Err(io::Error::other(format!("{program} {} has failed", words.join(" ")))),
        }
    }

    fn until(&self, program: &str, words: &[&str]) -> io::Result<()> {
        let begun = Instant::now();
        while !self.succeeds(program, words)? {
            if begun.elapsed() > PATIENCE {
                return self.must(program, words);
            }
            thread::sleep(Duration::from_millis(200));
        }
        Ok(())
    }

    /// Starts the cluster's S3 server, with a user. Returns its address.
    ///
    /// # Errors
    /// What is missing, or what has failed.
    pub fn start_gateway(&mut self, access: &str, secret: &str) -> Result<String, String> {
        check_installed(&["radosgw", "radosgw-admin"])?;
        self.begin_gateway(access, secret).map_err(|error| format!("the gateway could not be started: {error}"))
    }

    fn begin_gateway(&mut self, access: &str, secret: &str) -> io::Result<String> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut command = Command::new("radosgw");
        command.args(["-f", "-n", "client.gateway", "--ms_mon_client_mode=crc", "-c"]).arg(&self.conf);
        command.arg(format!("--rgw_frontends=beast endpoint=127.0.0.1:{port}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.others.push(command.spawn()?);
        let begun = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if begun.elapsed() > PATIENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            thread::sleep(Duration::from_millis(200));
        }
        let (access, secret) = (format!("--access-key={access}"), format!("--secret={secret}"));
        self.must("radosgw-admin", &["user", "create", "--uid=test", "--display-name=test", &access, &secret])?;
        Ok(format!("http://127.0.0.1:{port}"))
    }

    /// The file of its settings.
    pub fn conf(&self) -> &Path {
        &self.conf
    }

    /// Runs Ceph's `rbd`. Whether it has succeeded.
    pub fn rbd(&self, words: &[&str]) -> bool {
        self.succeeds("rbd", words).unwrap_or(false)
    }

    /// What Ceph's `rbd` prints.
    pub fn says(&self, words: &[&str]) -> String {
        let output = self.command("rbd", words).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
    }

    /// Process of the OSD; 0 if it was killed.
    pub fn osd(&self) -> u32 {
        self.osd.as_ref().map_or(0, Child::id)
    }

    /// Ends the OSD at once.
    pub fn kill_osd(&mut self) {
        if let Some(mut osd) = self.osd.take() {
            let _ = osd.kill();
            let _ = osd.wait();
        }
    }
}
