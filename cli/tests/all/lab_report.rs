//! `lab report` and `diskspd`, as the user types them. The page is opened in a browser that
//! somebody else wrote.

use crate::common::{Running, Workshop};
use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    process::{Command, Stdio},
};

/// A result that is kept with the sources.
fn kept(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../lab/tests/results").join(name)
}

fn with_results(names: &[&str]) -> Workshop {
    let shop = Workshop::new();
    for name in names {
        fs::copy(kept(name), shop.path(name)).expect("a kept result");
    }
    shop
}

/// The exact figures of a page: the values of its `<data>` elements.
fn figures(page: &str) -> BTreeSet<String> {
    let values = page.split("<data value=\"").skip(1).filter_map(|rest| rest.split('"').next());
    values.map(str::to_owned).collect()
}

/// What a browser makes of the page, and what it had to say.
fn browsed(shop: &Workshop, page: &str) -> Option<(String, String)> {
    browsed_with(shop, page, &[])
}

fn browsed_with(shop: &Workshop, page: &str, options: &[&str]) -> Option<(String, String)> {
    let chromium = ["chromium", "chromium-browser", "google-chrome"].into_iter().find(|name| {
        Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
    })?;
    let output = Command::new(chromium)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"])
        .args(["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"])
        .arg(format!("--user-data-dir={}", shop.path("browser").display()))
        .args(options)
        .arg("--dump-dom")
        .arg(format!("file://{}", shop.path(page).display()))
        .output()
        .expect("the browser starts");
    assert!(output.status.success(), "{output:?}");
    Some((String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[test]
fn a_browser_shows_the_page_without_errors_and_with_the_figures_of_the_json() {
    let shop = with_results(&["run.json", "containers.json"]);
    shop.ok("lab report run.json containers.json -o page.html");
    let Some((dom, said)) = browsed(&shop, "page.html") else {
        println!("skipped: chromium is not installed; the page was not opened in a browser");
        return;
    };
    let complaints: Vec<&str> = said.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
    assert!(dom.matches("<svg").count() >= 8 && dom.contains("</html>"));
    let run: serde_json::Value = serde_json::from_slice(&fs::read(kept("run.json")).unwrap()).unwrap();
    let shown = figures(&dom);
    for phase in run["phases"].as_array().unwrap() {
        let sum = |direction: &str, field: &str| -> u64 {
            phase["threads"].as_array().unwrap().iter().map(|thread| thread[direction][field].as_u64().unwrap()).sum()
        };
        let seconds = phase["window_ns"].as_f64().unwrap() / 1e9;
        let (ios, bytes) = (sum("reads", "ios") + sum("writes", "ios"), sum("reads", "bytes") + sum("writes", "bytes"));
        assert!(shown.contains(&ios.to_string()), "{ios} requests are not in the page");
        for wanted in [ios as f64 / seconds, bytes as f64 / 1e6 / seconds] {
            let close = |text: &String| text.parse::<f64>().is_ok_and(|value| (value / wanted - 1.0).abs() < 1e-9);
            assert!(shown.iter().any(close), "{wanted} is not in the page");
        }
    }
}

/// A page that shows `page.html` in a frame of 400 pixels, unfolds everything in it, and lists what
/// is cut off: text that leaves the frame without a scroll bar, and text that leaves its drawing.
const NARROW: &str = r#"<!DOCTYPE html><meta charset="utf-8">
<iframe src="page.html" style="width:400px;height:900px;border:0"></iframe><pre id="found">not looked at</pre>
<script>
document.querySelector("iframe").onload = event => {
  const shown = event.target.contentDocument, found = [];
  const tell = (what, element) => found.push(what + ": " + element.tagName + " " + element.textContent.slice(0, 60));
  for (const folded of shown.querySelectorAll("details")) folded.open = true;
  if (shown.documentElement.scrollWidth > 400) found.push("the page has " + shown.documentElement.scrollWidth + " pixels");
  let drawn = 0;
  for (const element of shown.body.querySelectorAll("*")) {
    const at = element.getBoundingClientRect(), drawing = element.closest("svg");
    if (at.width === 0) continue;
    if (drawing && drawing !== element) {
      const whole = drawing.getBoundingClientRect();
      if (element.tagName !== "text") continue;
      drawn += 1;
      if (at.left < whole.left - 1 || at.right > whole.right + 1 || at.top < whole.top - 1 || at.bottom > whole.bottom + 1)
        tell("cut off in its drawing", element);
    } else if (at.right > 401 && !element.parentElement.closest(".scroll, pre")) tell("cut off", element);
  }
  document.getElementById("found").textContent = "looked at " + drawn + " texts in drawings\n" + found.join("\n") + "\nend";
};
</script>"#;

#[test]
fn nothing_is_cut_off_on_a_page_of_400_pixels() {
    let shop = with_results(&["run.json", "containers.json", "compare.json", "acceptance.json", "zero-payload.json"]);
    shop.ok("lab sweep null: --vary queue-depth=1..6 --vary block-size=4K,64K --rounds 2 --warm-up 0 --duration 10ms --output sweep.json");
    shop.ok(
        "lab report run.json containers.json compare.json acceptance.json zero-payload.json sweep.json -o page.html",
    );
    fs::write(shop.path("narrow.html"), NARROW).unwrap();
    let options = ["--allow-file-access-from-files", "--virtual-time-budget=20000"];
    let Some((dom, _)) = browsed_with(&shop, "narrow.html", &options) else {
        println!("skipped: chromium is not installed; the page was not opened at 400 pixels");
        return;
    };
    let (_, found) = dom.split_once("<pre id=\"found\">").unwrap();
    let (found, _) = found.split_once("</pre>").unwrap();
    let lines: Vec<&str> = found.lines().collect();
    let [first, cut_off @ .., "end"] = &lines[..] else { panic!("{found}") };
    let drawn: usize = first.split(' ').nth(2).and_then(|count| count.parse().ok()).unwrap_or(0);
    assert!(drawn > 100, "{first}");
    let cut_off: Vec<&&str> = cut_off.iter().filter(|line| !line.is_empty()).collect();
    assert!(cut_off.is_empty(), "{cut_off:#?}");
}

#[test]
fn the_extension_says_what_is_written_and_json_comes_back() {
    let shop = with_results(&["run.json", "containers.json", "acceptance.json"]);
    let csv = shop.ok("lab report run.json --as csv -o -");
    assert!(csv.starts_with("result,started_utc,phase,scope,") && csv.contains("\r\nrun.json,"), "{csv}");
    assert!(shop.ok("lab report run.json --table series --as csv -o -").starts_with("result,phase,start_s,"));
    shop.ok("lab report run.json acceptance.json -o all.md");
    assert!(fs::read_to_string(shop.path("all.md")).unwrap().starts_with("# "));
    shop.ok("lab report run.json containers.json -o all.json");
    let told = shop.json("lab report all.json -o all.html");
    assert_eq!(told["results"].as_array().unwrap().len(), 2);
    assert_eq!(told["results"][0]["file"], "all.json");
    // One result alone is itself, but for times that are written in a larger unit.
    let alone: serde_json::Value = serde_json::from_str(&shop.ok("lab report run.json --as json -o -")).unwrap();
    let kept: serde_json::Value = serde_json::from_slice(&fs::read(kept("run.json")).unwrap()).unwrap();
    assert_eq!((&kept["schema"], &alone["schema"]), (&"diskwright.lab.run/2".into(), &"diskwright.lab.run/2".into()));
    let of_phase = ["series", "cpu", "steady", "window_ns", "threads/0/reads", "threads/0/writes"];
    let parts = ["targets", "machine", "warnings", "labels"].map(|part| format!("/{part}")).into_iter();
    for part in parts.chain(of_phase.map(|part| format!("/phases/0/{part}"))) {
        let (was, is) = (kept.pointer(&part), alone.pointer(&part));
        assert!(was.is_some() && was == is, "{part} has changed on the way");
    }
}

#[test]
fn what_is_no_result_is_told_and_nothing_is_written() {
    let shop = with_results(&["run.json"]);
    let run = fs::read_to_string(shop.path("run.json")).unwrap();
    fs::write(shop.path("newer.json"), run.replace("lab.run/2", "lab.run/9")).unwrap();
    fs::write(shop.path("cut.json"), &run[..run.len() / 2]).unwrap();
    fs::write(shop.path("other.json"), "{\"schema\": \"fio/3\"}").unwrap();
    fs::write(shop.path("page.json"), "<html>").unwrap();
    for (file, words) in [
        ("newer.json", "written by a newer Diskwright"),
        ("cut.json", "ends in the middle"),
        ("other.json", "not a result of the lab"),
        ("page.json", "is not JSON"),
        ("missing.json", "No such file"),
    ] {
        let sentence = shop.fails(1, &format!("lab report run.json {file} -o page.html"));
        assert!(sentence.contains(words) && sentence.contains(file), "{sentence}");
    }
    assert!(!shop.path("page.html").exists());
    assert!(shop.fails(1, "lab report run.json -o run.json").contains("is one of the results"));
    assert_eq!(fs::read_to_string(shop.path("run.json")).unwrap(), run);
    assert!(shop.fails(1, "lab report run.json -o page.txt").contains("--as"));
}

#[test]
fn diskspd_prints_what_scripts_take_apart() {
    let shop = Workshop::new();
    let report = shop.ok("diskspd -r -w30 -d1 -W0 -b8K -t2 -o4 -h -L -Z1M null:64M");
    let first = |start: &str| report.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{report}"));
    let total: Vec<&str> = first("total:").split('|').map(str::trim).collect();
    for figure in &total[1..=4] {
        assert!(figure.parse::<f64>().unwrap() > 0.0, "{total:?}");
    }
    assert!(first("avg.").split('|').nth(1).unwrap().trim().ends_with('%'));
    assert!(report.contains("Command Line: diskwright diskspd -r -w30") && report.contains("%-ile"));
    let xml = shop.ok("diskspd --save r.json -d1 -W0 -b4K -L -Rxml null:64M");
    assert!(xml.starts_with("<Results>") && xml.contains("<ReadCount>") && xml.ends_with("</Results>\n"), "{xml}");
    shop.ok("lab report r.json -o r.html");
}

#[test]
fn diskspd_makes_its_files_and_writes_no_others() {
    let shop = Workshop::new();
    fs::write(shop.path("precious"), vec![7; 1 << 20]).unwrap();
    let sentence = shop.fails(1, "diskspd -w100 -b4K -d1 -W0 precious");
    assert!(sentence.contains("precious"), "{sentence}");
    assert_eq!(fs::read(shop.path("precious")).unwrap(), vec![7; 1 << 20]);
    shop.ok("diskspd -c8M -w50 -b4K -r -d1 -W0 made.dat");
    assert_eq!(fs::metadata(shop.path("made.dat")).unwrap().len(), 8 << 20);
}

#[test]
fn diskspd_names_the_switch_that_is_wrong() {
    let shop = Workshop::new();
    assert!(shop.fails(2, "diskspd -r -k7 null:").contains("-k7 is not a DiskSpd switch"));
    assert!(shop.fails(2, "diskspd -w101 null:").contains("-w101"));
    assert!(shop.fails(2, "diskspd -ePROCESS null:").contains("-ePROCESS is not supported"));
    assert!(shop.ok("diskspd -?").contains("-b<size>"));
    let profile = shop.ok("diskspd -Rpxml -r -b4K -d1 -W0 null:64M");
    fs::write(shop.path("p.xml"), &profile).unwrap();
    assert!(shop.ok("diskspd -Xp.xml -Rtext").contains("using random I/O (alignment: 4096)"));
    fs::write(shop.path("bad.xml"), profile.replace("BlockSize", "BlokSize")).unwrap();
    let sentence = shop.fails(1, "diskspd -Xbad.xml");
    assert!(sentence.contains("bad.xml: line ") && sentence.contains("found <BlokSize> in <Target>"), "{sentence}");
}

#[test]
fn diskspd_takes_switches_and_targets_beside_a_profile() {
    let shop = Workshop::new();
    let profile = shop.ok("diskspd -Rp -b4K -d300 -W200 *1 *2");
    assert!(profile.contains("<Path>*1</Path>"), "{profile}");
    fs::write(shop.path("p.xml"), &profile).unwrap();
    let report = shop.ok("diskspd -Xp.xml -d1 -W0 -Rtext null:64M null:32M");
    for told in ["duration: 1s", "warm up time: 0s", "path: 'null:64M'", "path: 'null:32M'", "total:"] {
        assert!(report.contains(told), "{told}: {report}");
    }
    assert!(shop.fails(2, "diskspd -Xp.xml -b8K null:64M null:32M").contains("-b8K cannot be used with -X"));
    assert!(shop.fails(1, "diskspd -Xp.xml -d1 null:64M").contains("*2 is a template"));
}

#[test]
fn diskspd_c_refuses_a_disk_that_is_smaller_and_names_its_own_switches() {
    let shop = Workshop::new();
    shop.ok("create small.vhdx --size 8M");
    let sentence = shop.fails(1, "diskspd -c16M -r -d1 -W0 small.vhdx");
    assert!(sentence.contains("small.vhdx exists and has 8388608 bytes") && sentence.contains("(-c)"), "{sentence}");
    let sentence = shop.fails(1, "diskspd -c4M -f8M -r -d1 -W0 small.dat");
    assert!(sentence.contains("(-f, -B)") && !sentence.contains("--"), "{sentence}");
    let ended = shop.run("diskspd -r -d1 -W0 -b4K small.vhdx");
    assert!(ended.stderr.contains("let -c create it") && !ended.stderr.contains("--fill"), "{ended:?}");
}

/// The processors of each measuring thread of a run, as the kernel tells them.
fn processors_of_threads(shop: &Workshop, switches: &[&str]) -> BTreeSet<(String, String)> {
    let line: Vec<&str> = ["diskspd", "-b4K", "-r", "-t2", "-d3", "-W0"]
        .into_iter()
        .chain(switches.iter().copied())
        .chain(["null:64M"])
        .collect();
    let run = Running::start(shop.command(&line).stdout(Stdio::null()).stderr(Stdio::null()));
    let found = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", run.id())).into_iter().flatten();
        let of = |task: std::io::Result<fs::DirEntry>| {
            let task = task.ok()?.path();
            let name = fs::read_to_string(task.join("comm")).ok()?;
            let status = fs::read_to_string(task.join("status")).ok()?;
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
            name.starts_with("load-").then(|| (name.trim().to_owned(), list.trim().to_owned()))
        };
        tasks.filter_map(of).collect::<BTreeSet<_>>()
    };
    // A thread binds itself a moment after it was started: what is told after a while is what
    // holds.
    let mut last = BTreeSet::new();
    for _ in 0..20 {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let now = found();
        if now.len() == 2 {
            last = now;
        }
    }
    last
}

#[test]
fn diskspd_binds_its_threads_to_processors_in_turns() {
    let shop = Workshop::new();
    let of = |switches: &[&str]| {
        processors_of_threads(&shop, switches).into_iter().map(|(_, list)| list).collect::<Vec<_>>()
    };
    let free = of(&["-n"]);
    assert_eq!(free.len(), 2);
    assert_eq!(free[0], free[1]);
    if free[0].parse::<u32>().is_ok() {
        println!("skipped: this process may use one processor only");
        return;
    }
    let first: String = free[0].chars().take_while(char::is_ascii_digit).collect();
    assert_eq!(of(&[&format!("-a{first}")]), [first.clone(), first.clone()]);
    let turns = of(&[]);
    assert_eq!(turns[0], first);
    assert!(turns[1] != first && turns[1].parse::<u32>().is_ok(), "{turns:?}");
}

#[test]
fn diskspd_binds_threads_and_tells_the_scatter_of_each() {
    let shop = Workshop::new();
    let line = "-b4K -r -o4 -t2 -d1 -W0 -D100 null:64M";
    let report = shop.ok(&format!("diskspd -a0 {line}"));
    assert!(report.contains("advanced affinity round robin (group/core): 0/0"), "{report}");
    let rows: Vec<&str> = report.lines().skip_while(|line| *line != "Total IO").skip(3).take(2).collect();
    for row in rows {
        assert!(row.split('|').nth(5).unwrap().trim().parse::<f64>().unwrap() > 0.0, "{row}");
    }
    let sentence = shop.fails(1, &format!("diskspd -a250 {line}"));
    assert!(sentence.contains("processor 250 is not available"), "{sentence}");
    assert!(shop.ok(&format!("diskspd -n {line}")).contains("affinity disabled"));
}
