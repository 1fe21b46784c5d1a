//! The verdict of the study `native-and-guest`.

use super::record::{NULL, Pair, SERVER_REQUESTS};
use crate::{cells::Cell, guest::Accelerator};
use diskwright_stats::{
    numbers::{duration, ratio},
    summary::median,
};

/// The smallest and the largest of some values.
pub(crate) fn range(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let fold = |range: Option<(f64, f64)>, value: f64| {
        Some(range.map_or((value, value), |(min, max)| (min.min(value), max.max(value))))
    };
    values.into_iter().fold(None, fold)
}

/// "0.91 to 0.99", or "0.91" if both look alike.
pub(crate) fn between(range: (f64, f64), write: impl Fn(f64) -> String) -> String {
    let (min, max) = (write(range.0), write(range.1));
    if min == max { min } else { format!("{min} to {max}") }
}

/// The verdict: of the IOPS if the guest runs on the machine's processors, else of the server's
/// work, which does not depend on the guest's speed.
pub(super) fn verdict(cells: &[Cell], accelerator: Accelerator, stopped: bool) -> String {
    let partial = if stopped { "Partial: " } else { "" };
    let pairs = Pair::all(cells);
    let text = match accelerator {
        Accelerator::Kvm => by_iops(&pairs),
        Accelerator::Tcg => by_server(&pairs),
    };
    format!("{partial}{}", text.unwrap_or_else(|| "No request of the guest was measured.".into()))
}

fn by_iops(pairs: &[Pair<'_>]) -> Option<String> {
    let mut said = Vec::new();
    for disk in disks(pairs) {
        let of = pairs.iter().filter(|pair| pair.native.part == disk && pair.native.in_flight > 1);
        let ratios = of.filter_map(|pair| Some(pair.guest.ratio(pair.native, |round| round.iops)?.median()));
        said.push(format!("{disk} {}", between(range(ratios)?, ratio)));
    }
    let added = range(pairs.iter().filter_map(Pair::added_ns))?;
    Some(format!(
        "IOPS in the guest relative to the host: {}; a single request takes {} longer.",
        said.join(", "),
        between(added, duration)
    ))
}

fn by_server(pairs: &[Pair<'_>]) -> Option<String> {
    let requests = pairs.iter().filter_map(|pair| median(&pair.guest.more(SERVER_REQUESTS)?));
    let requests = between(range(requests)?, ratio);
    let mut said = Vec::new();
    for disk in disks(pairs) {
        let of = || pairs.iter().filter(|pair| pair.native.part == disk && pair.native.in_flight > 1);
        let native = range(of().filter_map(Pair::native_cpu_ns))?;
        let guest = range(of().filter_map(Pair::guest_cpu_ns))?;
        said.push(format!("{disk} {} ({} on the host)", between(guest, duration), between(native, duration)));
    }
    Some(format!(
        "The guest’s processor is emulated, so its IOPS are those of the emulation. A request of the guest is {requests} requests to the server. CPU time of the engine per request, beyond the {NULL} disk: {}.",
        said.join(", ")
    ))
}

/// The disks in the order of their cells.
pub(crate) fn disks<'a>(pairs: &[Pair<'a>]) -> Vec<&'a str> {
    let mut disks: Vec<&str> = Vec::new();
    for pair in pairs {
        if !disks.contains(&&*pair.native.part) {
            disks.push(&pair.native.part);
        }
    }
    disks
}

#[cfg(test)]
mod tests {
    use super::{super::example::cells, *};

    #[test]
    fn an_emulated_guest_is_judged_by_the_servers_work() {
        let cells = cells();
        let said = verdict(&cells, Accelerator::Tcg, false);
        assert_eq!(
            said,
            "The guest’s processor is emulated, so its IOPS are those of the emulation. A request of the guest is 1.00 requests to the server. \
             CPU time of the engine per request, beyond the null disk: raw file 5.00 µs (4.00 µs on the host), VHDX dynamic 6.00 µs (5.00 µs on the host)."
        );
        assert!(verdict(&cells, Accelerator::Tcg, true).starts_with("Partial: The guest"));
    }

    #[test]
    fn a_guest_on_the_machines_processors_is_judged_by_its_iops() {
        let said = verdict(&cells(), Accelerator::Kvm, false);
        assert_eq!(
            said,
            "IOPS in the guest relative to the host: raw file 0.50, VHDX dynamic 0.50; a single request takes 100 µs longer."
        );
        assert!(verdict(&[], Accelerator::Kvm, false).contains("No request"));
    }
}
