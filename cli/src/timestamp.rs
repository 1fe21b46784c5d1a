//! Dates of image files: seconds since 2000-01-01 (VHD) or 1970-01-01 (qcow2), printed as UTC.

/// Days from 1970-01-01 to 2000-01-01.
const DAYS_BEFORE_2000: i64 = 10_957;

/// `2026-02-03 04:05:06 UTC` for seconds since 2000-01-01 00:00 UTC, in the proleptic Gregorian
/// calendar.
pub fn utc_from_2000(seconds: u32) -> String {
    utc(i64::from(seconds / 86_400) + DAYS_BEFORE_2000, seconds % 86_400)
}

/// The same for seconds since 1970-01-01 00:00 UTC.
pub fn utc_from_1970(seconds: u32) -> String {
    utc(i64::from(seconds / 86_400), seconds % 86_400)
}

fn utc(days_since_1970: i64, of_day: u32) -> String {
    let (year, month, day) = civil_from_days(days_since_1970);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", of_day / 3600, of_day / 60 % 60, of_day % 60)
}

// Counts years from 1 March, so that the leap day ends a year and months have a regular pattern of
// lengths (153 days in five months); an era is 400 years, after which the calendar repeats.
fn civil_from_days(days_since_1970: i64) -> (i64, i64, i64) {
    let days = days_since_1970 + 719_468;
    let era = days.div_euclid(146_097);
    let of_era = days.rem_euclid(146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        assert_eq!(utc_from_2000(0), "2000-01-01 00:00:00 UTC");
        assert_eq!(utc_from_2000(59 * 86_400 + 86_399), "2000-02-29 23:59:59 UTC");
        assert_eq!(utc_from_2000(60 * 86_400), "2000-03-01 00:00:00 UTC");
        // date -u -d @$((946684800 + 823662306))
        assert_eq!(utc_from_2000(823_662_306), "2026-02-06 03:05:06 UTC");
        // date -u -d @1770346806
        assert_eq!(utc_from_1970(1_770_346_806), "2026-02-06 03:00:06 UTC");
        assert_eq!(utc_from_2000(u32::MAX), "2136-02-07 06:28:15 UTC");
    }
}
