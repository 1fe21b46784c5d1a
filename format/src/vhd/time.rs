//! Time stamps: seconds since 2000-01-01 00:00 UTC, in 32 bits (until 2136).

/// 2000-01-01 00:00 UTC in Unix time.
const EPOCH_UNIX_SECONDS: i64 = 946_684_800;

/// Converts Unix time to a VHD time stamp. Times out of range become the nearest time stamp.
pub fn seconds_from_unix(unix_seconds: i64) -> u32 {
    unix_seconds.saturating_sub(EPOCH_UNIX_SECONDS).clamp(0, i64::from(u32::MAX)) as u32
}

/// Converts a VHD time stamp to Unix time.
pub fn seconds_to_unix(vhd_seconds: u32) -> i64 {
    EPOCH_UNIX_SECONDS + i64::from(vhd_seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stamps_count_from_2000_and_saturate() {
        assert_eq!(seconds_from_unix(EPOCH_UNIX_SECONDS), 0);
        assert_eq!(seconds_from_unix(0), 0);
        assert_eq!(seconds_from_unix(i64::MAX), u32::MAX);
        assert_eq!(seconds_from_unix(i64::MIN), 0);
        assert_eq!(seconds_from_unix(seconds_to_unix(812_345_678)), 812_345_678);
    }
}
