//! Attaching by ublk, in a guest whose kernel has the driver: a partitioned disk is attached, gets
//! a file system, is written, trimmed and detached; servers and supervisors are killed; then what
//! the image holds is compared with what the guest said.

use crate::common::Workshop;
use crate::guest_machine::{Guest, find};
use std::{collections::BTreeMap, fs, path::Path, process::Command, time::Instant};

const MODULES: [&str; 6] = ["virtio_blk", "ublk_drv", "loop", "crc32c_generic", "crc32c_intel", "ext4"];

/// What the guest deletes and trims away.
const TRIMMED_BYTES: u64 = 24 << 20;

/// Of the partition with the file system.
const PARTITION_BYTES: u64 = 128 << 20;

/// Every step says what it found; a step that fails ends the script.
const SCRIPT: &str = r#"
export DISKWRIGHT_RUN_DIR=/tmp/run
dw=/programs/diskwright
until_so() { i=0; until eval "$1"; do i=$((i+1)); [ $i -lt 300 ] || { echo "in vain: $1"; return 1; }; sleep 0.2; done; }
pid_of() { $dw attached --json | grep -A1 "\"$1\": {" | sed -n 's/.*"pid": \([0-9]*\).*/\1/p'; }
gone() { [ ! -e /dev/ublkb0 ] && [ ! -e /dev/ublkc0 ] && ! grep -q ublkb0 /proc/mounts; }
mkdir /carrier; mount -t ext4 /dev/vda /carrier; cd /carrier

dev=$($dw attach disk.vhdx)
queue=/sys/block/ublkb0/queue
echo GUEST: device $dev $(cat /sys/block/ublkb0/size $queue/logical_block_size $queue/physical_block_size $queue/discard_max_bytes $queue/write_zeroes_max_bytes $queue/fua $queue/max_hw_sectors_kb)
$dw attached --json | grep -q '"by": "ublk"'
[ -b ${dev}p1 ] && [ -b ${dev}p2 ]
echo GUEST: queues $(ls -d /sys/block/ublkb0/mq/* | wc -l) scans $(dmesg | grep -c ' ublkb0: p1 p2')
/programs/mke2fs -q -t ext4 -b 4096 ${dev}p1
mount -t ext4 ${dev}p1 /mnt
mkdir /mnt/a
dd if=/dev/urandom of=/mnt/a/one bs=64k count=48 2>/dev/null
dd if=/dev/urandom of=/mnt/a/two bs=4097 count=99 2>/dev/null
i=0; while [ $i -lt 20 ]; do echo file $i of the guest > /mnt/a/small$i; i=$((i+1)); done
dd if=/dev/urandom of=/mnt/gone bs=1M count=TRIMMED 2>/dev/null
sync; full=$(du -k /carrier/disk.vhdx | cut -f1)
rm /mnt/gone; sync; fstrim /mnt
cd /mnt; find . -type f | sort | xargs sha256sum > /tmp/sums; cd /carrier
sed 's/^/GUEST: sum /' /tmp/sums

if $dw detach disk.vhdx 2>/tmp/said; then echo detached while mounted; false; fi
grep -q 'mounted at /mnt' /tmp/said
umount /mnt
exec 4<${dev}p1
if $dw detach $dev 2>/tmp/said; then echo detached while open; false; fi
grep -q 'open in' /tmp/said
exec 4<&-
loop=$(losetup -f); losetup $loop ${dev}p2
if $dw detach $dev 2>/tmp/said; then echo detached beneath a loop device; false; fi
grep -q "used by $loop" /tmp/said
losetup -d $loop
$dw detach $dev
gone
echo GUEST: detached $full $(du -k disk.vhdx | cut -f1)

$dw attach disk.vhdx --read-only --mount /mnt --partition 1 >/dev/null
(cd /mnt && sha256sum -c /tmp/sums >/dev/null)
if touch /mnt/x 2>/dev/null; then echo written to a read-only disk; false; fi
$dw detach /mnt --unmount
gone
echo GUEST: read-only

for options in "" "--io-engine pread"; do
  dev=$($dw attach disk.vhdx $options)
  /programs/fio --name=verify --filename=${dev}p2 --direct=1 --ioengine=libaio --rw=randwrite --bsrange=512-64k --serialize_overlap=1 --iodepth=32 --size=4M --verify=crc32c --verify_fatal=1 --randseed=7 --output-format=terse >/tmp/fio 2>&1 || { cat /tmp/fio; false; }
  $dw detach $dev
done
gone
echo GUEST: verified

dev=$($dw attach disk.vhdx)
$dw resize disk.vhdx +16M >/dev/null
echo GUEST: resized $(cat /sys/block/ublkb0/size) $(uname -r)
dd if=/dev/zero of=$dev bs=1M seek=$(($(cat /sys/block/ublkb0/size) / 2048 - 1)) count=1 conv=fsync 2>/dev/null
$dw detach $dev
gone

# Blocks that were written before: nothing is lost with the server, and the next one goes on.
dev=$($dw attach disk.vhdx --limit iops=888000)
$dw serve-ctl disk.vhdx limit iops=777000 >/dev/null
server=$(pid_of server)
/programs/fio --name=recover --filename=${dev}p2 --direct=1 --ioengine=libaio --rw=randwrite --bs=4k --serialize_overlap=1 --iodepth=8 --size=4M --loops=30 --verify=crc32c --verify_fatal=1 --randseed=7 --output-format=terse >/tmp/fio 2>&1 &
fio=$!
sleep 2
[ -e /proc/$fio ] || { echo fio has ended; cat /tmp/fio; false; }
kill -9 $server
wait $fio || { cat /tmp/fio; false; }
[ "$(pid_of server)" != $server ] || { echo no other server; false; }
[ "$($dw attached | grep -c ublkb0)" = 1 ] || { $dw attached; false; }
$dw serve-ctl disk.vhdx statistics | grep -q '777000 requests per second' || { $dw serve-ctl disk.vhdx statistics; false; }
$dw detach $dev
gone
echo GUEST: server recovered

# Another file has the name of the image: no other server takes it for the disk.
cp disk.vhdx copy.vhdx
dev=$($dw attach copy.vhdx)
mv copy.vhdx moved.vhdx; cp disk.vhdx copy.vhdx
kill -9 $(pid_of server)
until_so gone
until_so '$dw attached 2>&1 | grep -q "another file"'
rm moved.vhdx copy.vhdx
# A snapshot has put another file in its place: that one is the disk.
cp disk.vhdx copy.vhdx
dev=$($dw attach copy.vhdx)
server=$(pid_of server)
$dw snapshot copy.vhdx >/dev/null
kill -9 $server
dd if=$dev of=/dev/null bs=64k count=4 2>/dev/null
[ "$(pid_of server)" != $server ] || { echo no other server after a snapshot; false; }
$dw detach $dev
rm copy*
echo GUEST: image told apart

# How long an attach takes here, and how long this program takes to start.
$dw create child.vhdx --parent disk.vhdx >/dev/null
seconds() { cut -d' ' -f1 /proc/uptime; }
spent=0
for i in 1 2 3 4 5; do
  start=$(seconds); dev=$($dw attach child.vhdx); end=$(seconds)
  $dw detach $dev
  spent=$(echo $spent $start $end | awk '{print $1 + $3 - $2}')
done
start=$(seconds); for i in 1 2 3 4 5; do $dw --version >/dev/null; done; end=$(seconds)
echo GUEST: attach takes $(echo $spent | awk '{print $1 * 200}') ms, start takes $(echo $start $end | awk '{print ($2 - $1) * 200}') ms
rm child.vhdx

# New blocks: what was completed is lost with the server, so the device goes too.
dev=$($dw attach disk.vhdx)
mount -t ext4 ${dev}p1 /mnt
server=$(pid_of server)
(dd if=/dev/urandom of=/mnt/more bs=64k count=100000 conv=fsync 2>/dev/null || true; sync || true; touch /tmp/ended) &
until kill -STOP $server; [ "$(cat /tmp/run/*/risk)" = 1 ]; do kill -CONT $server; sleep 0.1; done
kill -9 $server
until_so '[ -e /tmp/ended ]'
until_so gone
until_so '$dw attached 2>&1 | grep -q "killed by signal 9"'
echo GUEST: server killed

dev=$($dw attach disk.vhdx)
supervisor=$(pid_of supervisor)
kill -9 $supervisor
dd if=/dev/urandom of=${dev}p2 bs=64k count=4 conv=fsync 2>/dev/null
[ "$($dw attached | grep -c ublkb0)" = 1 ]
$dw detach disk.vhdx
gone
echo GUEST: supervisor killed

dev=$($dw attach disk.vhdx --mount /mnt --partition 1)
supervisor=$(pid_of supervisor); server=$(pid_of server)
kill -9 $supervisor $server
(ls /mnt; dd if=$dev of=/dev/null bs=4k count=64) >/dev/null 2>&1 &
until_so '$dw attached 2>&1 | grep -q "have died"'
until_so gone
echo GUEST: both killed

dev=$($dw attach disk.vhdx)
mount -t ext4 ${dev}p1 /mnt
server=$(pid_of server)
dd if=/dev/zero of=/mnt/late bs=64k count=4 2>/dev/null
kill -STOP $server
$dw detach disk.vhdx --force 2>/tmp/said || grep -q 'killed by signal 9' /tmp/said
until_so gone
echo GUEST: hung server ended

dev=$($dw attach disk.vhdx --by loop)
echo GUEST: by loop $dev
[ -b ${dev}p1 ]
$dw detach $dev
$dw check disk.vhdx >/dev/null || [ $? = 3 ]
cd /; umount /carrier
"#;

#[test]
fn a_disk_attached_by_ublk_in_a_guest_is_whole_and_leaves_nothing_behind() {
    attach_in_a_guest(None);
}

/// Linux 7.x. It takes several minutes, so `./test` leaves it to `--long`.
#[test]
fn the_same_in_a_guest_of_a_newer_kernel() {
    if std::env::var_os("DISKWRIGHT_GUESTS").is_none() {
        println!("skipped: attach by ublk in a guest with a newer kernel (left to ./test --long)");
        return;
    }
    attach_in_a_guest(Some("trixie-backports"));
}

fn attach_in_a_guest(suite: Option<&str>) {
    let Some(mut guest) = Guest::of_suite(suite, &MODULES, &["mke2fs", "fio"]) else { return };
    for program in ["e2fsck", "debugfs", "sha256sum", "sfdisk", "mke2fs"] {
        if find(program).is_none() {
            println!("skipped: a guest: {program} is not installed");
            return;
        }
    }
    let shop = Workshop::new();
    let tool = |name: &str, args: &[&str], file: &Path| {
        let output = Command::new(find(name).unwrap()).args(args).arg(file).output().unwrap();
        assert!(output.status.success(), "{name} {args:?}: {output:?}");
    };
    // A disk with two partitions, in a file system on a disk that the guest can mount.
    shop.ok("create blank.raw --size 192M");
    let table = format!("label: gpt\nstart=2048, size={}\nsize=32M\n", PARTITION_BYTES / 512);
    fs::write(shop.path("table"), table).unwrap();
    let (table, blank) = (shop.path("table"), shop.path("blank.raw"));
    let cut = format!("{} -q {} < {}", find("sfdisk").unwrap().display(), blank.display(), table.display());
    tool("sh", &["-c", &cut], Path::new(""));
    fs::create_dir(shop.path("carried")).unwrap();
    shop.ok("convert blank.raw carried/disk.vhdx");
    let carrier = shop.path("carrier.raw");
    fs::File::create(&carrier).unwrap().set_len(384 << 20).unwrap();
    tool("mke2fs", &["-q", "-t", "ext4", "-d", shop.path("carried").to_str().unwrap()], &carrier);
    guest.add_own_program();
    guest.give_disk(&carrier);
    let Some(console) = guest.run(&SCRIPT.replace("TRIMMED", &(TRIMMED_BYTES >> 20).to_string())) else { return };
    println!("{console}");
    // The firmware leaves the cursor's orders before the first line.
    let said = |word: &str| -> Vec<Vec<String>> {
        let lines = console.lines().filter_map(|line| line.split_once("GUEST: ")?.1.strip_prefix(word));
        lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    };
    let device = &said("device")[0];
    assert_eq!(device[0], "/dev/ublkb0");
    assert_eq!(device[1].parse::<u64>().unwrap() * 512, 192 << 20, "{console}");
    assert_eq!(device[2], "512", "{console}");
    assert!(device[4] != "0" && device[5] != "0" && device[6] == "1", "discard, zeroes, FUA: {device:?}");
    for word in [
        "detached",
        "read-only",
        "verified",
        "server recovered",
        "image told apart",
        "server killed",
        "supervisor killed",
        "both killed",
        "hung server",
        "by loop",
    ] {
        assert_eq!(said(word).len(), 1, "{word}: {console}");
    }
    let [queues, _, scans] = &said("queues")[0][..] else { panic!("{console}") };
    assert_eq!(queues, "2", "one for each processor of the guest");
    println!("the guest's kernel scanned for partitions: {scans} times");
    let took: Vec<f64> = said("attach")[0].iter().filter_map(|word| word.parse().ok()).collect();
    let begun = Instant::now();
    (0..5).for_each(|_| drop(shop.ok("--version")));
    let here_ms = begun.elapsed().as_secs_f64() * 200.0;
    let [attach_ms, start_ms] = took[..] else { panic!("{console}") };
    println!(
        "a chain is attached in {attach_ms} ms, in the time of {:.1} starts of this program ({start_ms} ms in the guest, {here_ms:.1} ms here)",
        attach_ms / start_ms
    );
    // The driver knows of new sizes since Linux 6.16. Before, the device keeps its size.
    let resized = &said("resized")[0];
    let mut version = resized[1].split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    let knows_sizes = (version.next(), version.next()) >= (Some(6), Some(16));
    let mib = if knows_sizes { 208 } else { 192 };
    assert_eq!(resized[0].parse::<u64>().unwrap() * 512, mib << 20, "{resized:?}");
    println!("ublk on Linux {}: a device of 192 MiB has {mib} MiB when its disk has got 208", resized[1]);
    let kib: Vec<u64> = said("detached")[0].iter().map(|number| number.parse().unwrap()).collect();
    assert!(kib[0] - kib[1] > (TRIMMED_BYTES >> 10) / 2, "KiB before and after fstrim: {kib:?}");
    let sums: BTreeMap<String, String> =
        said("sum").into_iter().map(|words| (words[1].clone(), words[0].clone())).collect();
    assert_eq!(sums.len(), 22, "{console}");

    // The image is sound, and so is the file system in it, though a server was killed in the middle
    // of writing; what was flushed before is there.
    let image = shop.path("disk.vhdx");
    tool("debugfs", &["-R", &format!("dump disk.vhdx {}", image.display())], &carrier);
    let checked = shop.run("check disk.vhdx");
    assert!([Some(0), Some(3)].contains(&checked.code), "{checked:?}");
    shop.ok("convert disk.vhdx disk.raw");
    let part = shop.path("part.raw");
    let cut = format!(
        "dd if={} of={} bs=1M skip=1 count={} status=none",
        shop.path("disk.raw").display(),
        part.display(),
        PARTITION_BYTES >> 20
    );
    tool("sh", &["-c", &cut], Path::new(""));
    // Its journal is replayed first, as a mount would.
    let replayed = Command::new(find("e2fsck").unwrap()).arg("-fy").arg(&part).output().unwrap();
    assert!(replayed.status.code().is_some_and(|code| code < 4), "{replayed:?}");
    for (name, sum) in &sums {
        let copy = shop.path("copy");
        tool("debugfs", &["-R", &format!("dump {} {}", name.trim_start_matches('.'), copy.display())], &part);
        let output = Command::new("sha256sum").arg(&copy).output().unwrap();
        let found = String::from_utf8_lossy(&output.stdout);
        assert_eq!(found.split_whitespace().next(), Some(sum.as_str()), "{name} differs");
        fs::remove_file(&copy).unwrap();
    }
}
