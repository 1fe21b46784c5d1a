//! The kernel of a guest, and the modules that the guest needs.

use crate::{LabError, Result, peer};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Modules for the guest's devices. A kernel may have them built in.
const MODULES: [&str; 3] = ["virtio_pci", "virtio_blk", "virtio_console"];
/// Modules for a network card and the clients of NVMe/TCP, iSCSI and SMB (which names its
/// algorithms nowhere).
pub(super) const NETWORK_MODULES: [&str; 10] =
    ["virtio_net", "sch_netem", "nvme_tcp", "sd_mod", "iscsi_tcp", "ccm", "ghash_generic", "gcm", "cmac", "cifs"];
/// Modules of dm-cache and of its policy smq, which it names nowhere.
pub(super) const CACHE_MODULES: [&str; 2] = ["dm_cache", "dm_cache_smq"];
/// Environment variable with the folder of a kernel.
pub const DIR_VARIABLE: &str = "DISKWRIGHT_GUEST_DIR";

/// A kernel with its modules.
#[derive(Debug, Clone)]
pub struct Kernel {
    image: PathBuf,
    /// `lib/modules/VERSION`.
    modules: PathBuf,
}

/// A module, decompressed.
pub(super) struct Module {
    /// File name, with `.ko` at the end.
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
}

impl Kernel {
    /// Finds a kernel: in `dir`; else in the folder that `DISKWRIGHT_GUEST_DIR` names; else in
    /// `diskwright/guest` of the user's cache; else the kernel of this machine in `/boot`. A folder
    /// has `vmlinuz` and `lib/modules/VERSION`.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] if there is none.
    pub fn find(dir: Option<&Path>) -> Result<Self> {
        if let Some(dir) = dir {
            return Self::in_folder(dir).ok_or_else(|| LabError::BadOptions {
                what: format!("{} has no kernel for the guest", dir.display()),
                hint: "name a folder with vmlinuz and lib/modules/VERSION".into(),
            });
        }
        let usual = usual_dir();
        Self::in_folder(&usual).or_else(Self::of_this_machine).ok_or_else(|| LabError::BadOptions {
            what: format!(
                "there is no kernel for the guest: neither {} nor the kernel of this machine in /boot can be read",
                usual.join("vmlinuz").display()
            ),
            hint: "name a folder with vmlinuz and lib/modules/VERSION (`GuestChoice::kernel`)".into(),
        })
    }

    fn in_folder(dir: &Path) -> Option<Self> {
        // QEMU runs in a folder of its own.
        let dir = dir.canonicalize().ok()?;
        let versions = fs::read_dir(dir.join("lib/modules")).ok()?;
        let mut versions: Vec<PathBuf> = versions.flatten().map(|entry| entry.path()).collect();
        versions.sort();
        Some(Self { image: readable(dir.join("vmlinuz"))?, modules: versions.pop()? })
    }

    fn of_this_machine() -> Option<Self> {
        let release = rustix::system::uname().release().to_str().ok()?.to_owned();
        let modules = Path::new("/lib/modules").join(&release);
        let image = [Path::new("/boot").join(format!("vmlinuz-{release}")), modules.join("vmlinuz")];
        image.into_iter().find_map(readable).filter(|_| modules.is_dir()).map(|image| Self { image, modules })
    }

    pub(super) fn image(&self) -> &Path {
        &self.image
    }

    /// The modules for the guest's devices and `further` ones with what they depend on, in the
    /// order of loading.
    pub(super) fn modules(&self, further: &[&str]) -> Result<Vec<Module>> {
        let table = self.modules.join("modules.dep");
        let text = fs::read_to_string(&table).map_err(LabError::file("read", &table))?;
        order(&text, &[&MODULES, further].concat()).into_iter().map(|path| self.module(&path)).collect()
    }

    fn module(&self, path: &str) -> Result<Module> {
        let file = self.modules.join(path);
        let name = format!("{}.ko", module_name(path));
        let unpack = |program: &str| {
            let mut command = Command::new(peer::find(program).unwrap_or_else(|| program.into()));
            command.arg("-dc").arg(&file);
            let output = command.output().map_err(LabError::file("start", program))?;
            if output.status.success() {
                return Ok(output.stdout);
            }
            Err(LabError::Program {
                command: format!("{command:?}"),
                status: output.status.to_string(),
                output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            })
        };
        let bytes = match file.extension().and_then(|extension| extension.to_str()) {
            Some("xz") => unpack("xz")?,
            Some("zst") => unpack("zstd")?,
            Some("gz") => unpack("gzip")?,
            _ => fs::read(&file).map_err(LabError::file("read", &file))?,
        };
        Ok(Module { name, bytes })
    }
}

fn readable(file: PathBuf) -> Option<PathBuf> {
    fs::File::open(&file).ok().map(|_| file)
}

/// The folder that `DISKWRIGHT_GUEST_DIR` names, else `diskwright/guest` of the user's cache.
fn usual_dir() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = || set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache"))).unwrap_or_default();
    set(DIR_VARIABLE).unwrap_or_else(|| cache().join("diskwright/guest"))
}

/// `kernel/drivers/block/virtio_blk.ko.xz` and `virtio-blk.ko` are `virtio_blk`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

/// The paths of `wanted` and of what they depend on, by the lines of `modules.dep`, each after its
/// dependencies.
fn order(table: &str, wanted: &[&str]) -> Vec<String> {
    let mut paths = Vec::new();
    let mut known = BTreeSet::new();
    for name in wanted {
        let lines = table.lines().filter_map(|line| line.split_once(':'));
        let Some((module, needs)) = lines.into_iter().find(|(module, _)| module_name(module) == *name) else {
            continue;
        };
        // The last that is named depends on nothing.
        for path in needs.split_whitespace().rev().chain([module]) {
            if known.insert(module_name(path)) {
                paths.push(path.to_owned());
            }
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_after_what_they_depend_on_and_once() {
        let table = "kernel/v/virtio_pci.ko: kernel/v/virtio-pci-modern.ko kernel/v/virtio_ring.ko kernel/v/virtio.ko\n\
                     kernel/b/virtio_blk.ko.xz: kernel/v/virtio_ring.ko kernel/v/virtio.ko\n";
        let found = order(table, &MODULES);
        assert_eq!(
            found,
            [
                "kernel/v/virtio.ko",
                "kernel/v/virtio_ring.ko",
                "kernel/v/virtio-pci-modern.ko",
                "kernel/v/virtio_pci.ko",
                "kernel/b/virtio_blk.ko.xz"
            ]
        );
    }

    #[test]
    fn a_folder_without_a_kernel_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = Kernel::find(Some(dir.path())).unwrap_err().to_string();
        assert!(error.contains("has no kernel") && error.contains("vmlinuz"), "{error}");
        fs::create_dir_all(dir.path().join("lib/modules/6.1")).unwrap();
        fs::write(dir.path().join("vmlinuz"), "").unwrap();
        assert!(Kernel::find(Some(dir.path())).unwrap().modules.ends_with("6.1"));
        // By a relative name, as it is typed.
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        let mut name: PathBuf = here.components().skip(1).map(|_| "..").collect();
        name.push(dir.path().strip_prefix("/").unwrap());
        let found = Kernel::find(Some(&name)).unwrap();
        assert!(name.is_relative() && found.image.is_absolute() && found.modules.is_absolute(), "{found:?}");
    }
}
