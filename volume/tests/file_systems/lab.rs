//! What the tests share: scratch images, tools, garbage in free ranges.

use diskwright_volume::{Layout, LeftAlone, ReadAt, Volume, free_ranges, volumes};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Write},
    ops::{ControlFlow, Range},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

const OTHER_TESTS_CLEAN_UP_WITHIN: Duration = Duration::from_secs(60);

/// A file as a disk.
pub struct FileDisk {
    file: File,
    size_bytes: u64,
    sector_bytes: u32,
}

impl ReadAt for FileDisk {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn sector_bytes(&self) -> u32 {
        self.sector_bytes
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset_bytes)
    }
}

/// Bytes in memory as a disk.
pub struct Bytes(pub Vec<u8>);

impl ReadAt for Bytes {
    fn size_bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        let start = offset_bytes as usize;
        buf.copy_from_slice(&self.0[start..start + buf.len()]);
        Ok(())
    }
}

/// An image file in a folder that goes with it.
pub struct Scratch {
    folder: TempDir,
}

impl Scratch {
    pub fn new(size_bytes: u64) -> Self {
        // Memory, because the tools sync what they write.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
        let scratch = Self { folder };
        File::create(scratch.image()).unwrap().set_len(size_bytes).unwrap();
        scratch
    }

    pub fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn disk(&self) -> FileDisk {
        self.disk_with_sectors(512)
    }

    pub fn disk_with_sectors(&self, sector_bytes: u32) -> FileDisk {
        let file = File::open(self.image()).unwrap();
        let size_bytes = file.metadata().unwrap().len();
        FileDisk { file, size_bytes, sector_bytes }
    }

    pub fn layout(&self) -> Layout {
        volumes(&self.disk())
    }

    pub fn bytes(&self) -> Vec<u8> {
        fs::read(self.image()).unwrap()
    }

    /// Changes bytes of the image.
    pub fn put(&self, offset_bytes: u64, bytes: &[u8]) {
        File::options().write(true).open(self.image()).unwrap().write_all_at(bytes, offset_bytes).unwrap();
    }

    pub fn get(&self, offset_bytes: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        File::open(self.image()).unwrap().read_exact_at(&mut bytes, offset_bytes).unwrap();
        bytes
    }

    /// Runs a tool; `IMAGE` in its arguments is the image, `DIR/` the folder. Returns what it
    /// prints.
    pub fn run(&self, line: &str) -> String {
        let (status, text) = self.try_run(line);
        assert!(status == Some(0), "{line}: exit status {status:?}\n{text}");
        text
    }

    /// As [`run`](Self::run), with the exit status.
    pub fn try_run(&self, line: &str) -> (Option<i32>, String) {
        let words: Vec<String> = split(line)
            .into_iter()
            .map(|word| word.replace("IMAGE", self.image().to_str().unwrap()))
            .map(|word| word.replace("DIR/", &format!("{}/", self.folder.path().display())))
            .collect();
        let start = Instant::now();
        loop {
            let output = Command::new(&words[0])
                .args(&words[1..])
                .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
                .env("MTOOLS_SKIP_CHECK", "1")
                .stdin(Stdio::null())
                .output()
                .unwrap_or_else(|error| panic!("{line}: {error}"));
            let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            // mkfs.btrfs looks at every loop device of the machine. Another test may just have
            // killed the process behind one of them.
            let is_of_another = text.contains("cannot check mount status");
            if !is_of_another || start.elapsed() > OTHER_TESTS_CLEAN_UP_WITHIN {
                return (output.status.code(), text);
            }
            sleep(Duration::from_millis(200));
        }
    }

    /// Overwrites free bytes of the volumes with 0xA5. Returns the number of free bytes.
    pub fn spoil(&self) -> u64 {
        let disk = self.disk();
        let layout = volumes(&disk);
        layout.volumes.iter().map(|volume| self.spoil_ranges(&free_of(&disk, volume).unwrap())).sum()
    }

    pub fn spoil_ranges(&self, ranges: &[Range<u64>]) -> u64 {
        let file = File::options().write(true).open(self.image()).unwrap();
        let garbage = vec![0xa5; MIB as usize];
        for range in ranges {
            let mut at = range.start;
            while at < range.end {
                // All of it would fill the memory of the tests: inside of a range of many MiB, one
                // block in 64 KiB is written.
                let near_an_edge = at - range.start < 2 * MIB || range.end - at <= 2 * MIB;
                let take = (range.end - at).min(if near_an_edge { 64 << 10 } else { 4 << 10 });
                file.write_all_at(&garbage[..take as usize], at).unwrap();
                at += if near_an_edge { take } else { 64 << 10 };
            }
        }
        ranges.iter().map(|range| range.end - range.start).sum()
    }

    /// Makes the folder `name` with files of many sizes; every third is named "gone".
    pub fn files(&self, name: &str, count: usize) -> PathBuf {
        let folder = self.path(name);
        fs::create_dir_all(folder.join("sub")).unwrap();
        for index in 0..count {
            let file_name = if index % 3 == 2 { format!("gone{index}") } else { format!("kept{index}") };
            let path = folder.join(if index % 5 == 4 { format!("sub/{file_name}") } else { file_name });
            File::create(path).unwrap().write_all(&contents(index)).unwrap();
        }
        folder
    }
}

/// The image, mounted through a loop device until this is dropped.
pub struct Mounted<'a> {
    scratch: &'a Scratch,
}

impl<'a> Mounted<'a> {
    /// `None` where this is not possible: not root, no loop devices, not in this kernel.
    pub fn new(scratch: &'a Scratch, options: &str) -> Option<Self> {
        Self::by(scratch, &format!("mount -o loop,{options} IMAGE DIR/mount"))
    }

    /// Mounts by this command.
    pub fn by(scratch: &'a Scratch, line: &str) -> Option<Self> {
        fs::create_dir_all(scratch.path("mount")).unwrap();
        let (status, text) = scratch.try_run(line);
        if status != Some(0) {
            println!("{line}: {text}");
        }
        (status == Some(0)).then(|| Self { scratch })
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.scratch.path("mount").join(name)
    }
}

impl Mounted<'_> {
    /// Another test may have copied the mount into a namespace of its own for a moment. As long as
    /// that exists the kernel may write to the image.
    fn wait_for_the_loop_device(&self) {
        // `losetup` would open the devices of all tests, and these could not be detached meanwhile.
        let image = self.scratch.image();
        let is_backing = |device: &fs::DirEntry| {
            let file = fs::read_to_string(device.path().join("loop/backing_file"));
            file.is_ok_and(|file| Path::new(file.trim()) == image)
        };
        let start = Instant::now();
        while fs::read_dir("/sys/block").unwrap().flatten().any(|device| is_backing(&device)) {
            assert!(start.elapsed() < OTHER_TESTS_CLEAN_UP_WITHIN, "the image is still mounted somewhere");
            sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        // A child that another test is just starting may hold a file of this one for a moment.
        for _ in 0..50 {
            if self.scratch.try_run("umount DIR/mount").0 == Some(0) {
                return self.wait_for_the_loop_device();
            }
            sleep(Duration::from_millis(100));
        }
        self.scratch.run("umount DIR/mount");
    }
}

/// Contents of the file with this number: from 1 byte to 700 KiB.
pub fn contents(index: usize) -> Vec<u8> {
    let len = 1 + (index * index * 7919) % [300, 5_000, 70_000, 700_000][index % 4];
    (0..len)
        .map(|at| (at as u32).wrapping_mul(2_654_435_761).rotate_left(index as u32 % 31) as u8 ^ index as u8)
        .collect()
}

/// Splits at spaces; 'quoted words' stay together.
fn split(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (index, part) in line.split('\'').enumerate() {
        if index % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

/// The free ranges, after a check of order and sum.
pub fn free_of(disk: &dyn ReadAt, volume: &Volume) -> Result<Vec<Range<u64>>, LeftAlone> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let total_bytes = free_ranges(disk, volume, &mut |range| {
        ranges.push(range);
        ControlFlow::Continue(())
    })?;
    assert!(ranges.iter().all(|range| range.start < range.end && range.end <= disk.size_bytes()));
    assert_eq!(total_bytes, ranges.iter().map(|range| range.end - range.start).sum::<u64>());
    assert_eq!(volume.free_bytes, Ok(total_bytes), "both passes count the same");
    Ok(ranges)
}

/// Merges neighbours.
pub fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.retain(|range| !range.is_empty());
    ranges.sort_by_key(|range| range.start);
    ranges.dedup_by(|next, kept| {
        let touches = next.start == kept.end;
        if touches {
            kept.end = next.end;
        }
        touches
    });
    ranges
}

/// Whether every one of `inner` lies in one of `outer`.
pub fn lies_in(inner: &[Range<u64>], outer: &[Range<u64>]) -> bool {
    inner.iter().all(|range| outer.iter().any(|around| around.start <= range.start && range.end <= around.end))
}

/// Whether the tools are installed; says which is not.
pub fn have(test: &str, tools: &[&str]) -> bool {
    let places = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    let missing = tools.iter().find(|tool| !places.iter().any(|place| Path::new(place).join(tool).exists()));
    if let Some(tool) = missing {
        println!("skipped: {test}: {tool} is not installed");
    }
    missing.is_none()
}

/// All files below `folder`, by path.
pub fn tree(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut todo = vec![folder.to_owned()];
    while let Some(next) = todo.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else {
                found.insert(path.strip_prefix(folder).unwrap().to_owned(), fs::read(&path).unwrap());
            }
        }
    }
    found
}

/// Damages every byte of `places` in several ways, each by itself. A volume that still gives
/// something up must give up nothing but `free`, where `strict`; it must never panic.
pub fn damage_each_byte(bytes: Vec<u8>, places: &[Range<usize>], free: &[Range<u64>], strict: bool) -> usize {
    let mut disk = Bytes(bytes);
    let mut refused = 0;
    for at in places.iter().cloned().flatten() {
        let found = disk.0[at];
        for value in [found ^ 0xff, found ^ 1, found ^ 0x80, 0, found.wrapping_add(1)] {
            if value == found {
                continue;
            }
            disk.0[at] = value;
            for volume in volumes(&disk).volumes {
                match free_of(&disk, &volume) {
                    Ok(ranges) if strict => {
                        assert!(lies_in(&ranges, free), "byte {at}: {found:#x} to {value:#x} frees used blocks");
                    }
                    Ok(_) => {}
                    Err(_) => refused += 1,
                }
            }
        }
        disk.0[at] = found;
    }
    refused
}
