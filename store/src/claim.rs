//! The claim of this process on block devices that it writes to.
//!
//! While a device is open with O_EXCL it cannot be mounted, and an open fails if it is mounted. The
//! kernel gives such a claim to one open file. A disk in use opens its images a second time before
//! it merges them, so the claim is a descriptor of its own here: all writable stores of a device
//! share it, and it ends with the last of them. What keeps two disks of one process apart is the
//! lock ([`crate::lock`]), which belongs to each open file.
//!
//! One mutex of std guards the claims: they outlive every scheduled run of the tests
//! ([`crate::sync`]). It is held while a device is claimed, so that one process claims it once.

use rustix::{fd::OwnedFd, io::Errno};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A claim; the device stays claimed while one of its clones exists.
pub(crate) type Claim = Arc<OwnedFd>;

/// Device numbers and their claims.
static CLAIMS: Mutex<Vec<(u64, Weak<OwnedFd>)>> = Mutex::new(Vec::new());

/// The claim on the device with this number. `open` opens it with O_EXCL.
pub(crate) fn claim(number: u64, open: &dyn Fn() -> Result<OwnedFd, Errno>) -> Result<Claim, Errno> {
    let mut claims = CLAIMS.lock().unwrap_or_else(PoisonError::into_inner);
    claims.retain(|(_, claim)| claim.strong_count() > 0);
    let present = claims.iter().find(|(device, _)| *device == number).and_then(|(_, claim)| claim.upgrade());
    if let Some(present) = present {
        return Ok(present);
    }
    let new = Arc::new(open()?);
    claims.push((number, Arc::downgrade(&new)));
    Ok(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[test]
    fn a_device_is_claimed_once_until_its_last_user_is_gone() {
        let opens = AtomicU32::new(0);
        let open = || {
            opens.fetch_add(1, Ordering::Relaxed);
            Ok(std::fs::File::open("/dev/null").unwrap().into())
        };
        // Numbers that no device of the machine has.
        let (one, other) = (u64::MAX, u64::MAX - 1);
        let first = claim(one, &open).unwrap();
        let second = claim(one, &open).unwrap();
        assert!(Arc::ptr_eq(&first, &second) && opens.load(Ordering::Relaxed) == 1);
        let _third = claim(other, &open).unwrap();
        drop((first, second));
        assert!(matches!(claim(one, &|| Err(Errno::BUSY)), Err(Errno::BUSY)));
        let _fourth = claim(one, &open).unwrap();
        assert_eq!(opens.load(Ordering::Relaxed), 3);
    }
}
