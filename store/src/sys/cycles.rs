//! The processor's cycle counter.

#![allow(unsafe_code)]

/// The processor's time-stamp counter, which runs at a constant rate on current processors; `None`
/// if there is none that a program may read.
pub fn cycle_counter() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: RDTSC is part of every x86-64 processor and reads only the counter.
    return Some(unsafe { core::arch::x86_64::_rdtsc() });
    #[cfg(not(target_arch = "x86_64"))]
    None
}
