//! Both reports from a fixed run, the paper's scripts against the tables, the switches one by one.

use super::*;
use crate::{
    job::{Blocks, Bytes, Caching, Contents, Distribution, Rate, Span},
    record::Run,
    report::example,
};

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

fn parsed(line: &str) -> Profile {
    parse(&words(line)).unwrap_or_else(|error| panic!("{line}: {error}"))
}

/// The run of the examples, as if it had been asked for with the paper's switches: its first phase alone.
fn of_the_paper() -> (Profile, Run) {
    let mut run = example::run();
    run.phases.truncate(1);
    run.targets[0].size_bytes = 64 << 30;
    (parsed("-r -w30 -d600 -W300 -b8K -t8 -o12 -h -L -Z1M -c64G golden.vhdx flat.raw"), run)
}

#[test]
fn the_papers_command_line_is_the_papers_load() {
    let profile = parsed("-r -w30 –d600 –W300 -b8K –t8 -o12 -h -L -Z1M -c64G test1.dat");
    assert_eq!(profile.notes, Vec::<String>::new());
    let (job, paths) = job(&profile).unwrap();
    assert_eq!(paths, ["test1.dat"]);
    assert_eq!((job.cache, job.contents), (Caching::DirectWriteThrough, Contents::Incompressible));
    let phase = &job.phases[0];
    assert_eq!((phase.duration, phase.warm_up), (Span::from_secs(600), Span::from_secs(300)));
    let load = &phase.loads[0];
    assert_eq!((load.block.clone(), load.read_percent, load.random_percent), (Blocks::One(Bytes(8192)), 70.0, 100.0));
    assert_eq!((load.threads, load.queue_depth), (8, 12));
    assert_eq!(profile.time_spans[0].targets[0].create_bytes, Some(64 << 30));
}

#[test]
fn the_text_report() {
    let (profile, run) = of_the_paper();
    insta::assert_snapshot!(report(&profile, &run));
}

#[test]
fn the_xml_report() {
    let (mut profile, run) = of_the_paper();
    profile.time_spans[0].iops_every_ms = Some(1000);
    let xml = results_xml(&profile, &run);
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    insta::assert_snapshot!(xml.replace(&format!("<ComputerName>{}<", host.trim()), "<ComputerName>HOST<"));
}

/// The paper's script, word by word: `foreach ($line in $result) {if ($line -like "total:*") { $total=$line; break } }` and
/// `$total.Split("|")[2].Trim()`.
#[test]
fn the_papers_scripts_find_the_right_figures() {
    let (profile, run) = of_the_paper();
    let result = report(&profile, &run);
    let first = |start: &str| result.lines().find(|line| line.starts_with(start)).unwrap();
    let (total, avg) = (first("total:"), first("avg."));
    let field = |line: &str, number: usize| line.split('|').nth(number).unwrap().trim().to_owned();
    let phase = &run.phases[0];
    let both = phase.total().both;
    assert_eq!(field(total, 2), format!("{:.2}", both.bytes as f64 / 1024.0 / 1024.0 / phase.window_s()));
    assert_eq!(field(total, 3), format!("{:.2}", phase.iops()));
    assert_eq!(field(total, 4), format!("{:.3}", both.service.mean_ns() / 1e6));
    let busy: f64 = phase
        .cpu
        .cores
        .iter()
        .map(|core| {
            let busy = (core.user_ns + core.system_ns + core.irq_ns) as f64;
            100.0 * busy / (busy + (core.idle_ns + core.iowait_ns) as f64)
        })
        .sum::<f64>()
        / phase.cpu.cores.len() as f64;
    assert_eq!(field(avg, 1), format!("{busy:.2}%"));
    // One row for each thread in each of the three tables, and every row has as many columns as the head.
    for name in ["Total IO", "Read IO", "Write IO"] {
        let table: Vec<&str> =
            result.lines().skip_while(|line| *line != name).skip(1).take(3 + phase.threads.len()).collect();
        let columns = table[0].split('|').count();
        assert!(table[2..2 + phase.threads.len()].iter().all(|row| row.split('|').count() == columns), "{table:?}");
    }
}

#[test]
fn only_as_many_nines_as_the_sample_supports() {
    let (profile, run) = of_the_paper();
    let text = report(&profile, &run);
    // 39,370 requests: ten lie beyond three nines, three beyond four.
    assert!(text.contains("3-nines") && !text.contains("4-nines"), "{text}");
    let xml = results_xml(&profile, &run);
    assert!(xml.contains("<Percentile>99.9</Percentile>") && !xml.contains("<Percentile>99.99</Percentile>"));
}

#[test]
fn a_run_that_was_stopped_before_it_measured_says_so() {
    let (profile, mut run) = of_the_paper();
    run.phases.clear();
    assert!(report(&profile, &run).contains("interrupted before the measurements began"));
    assert!(results_xml(&profile, &run).contains("<Error>"));
}

#[test]
fn without_l_no_latencies_and_with_d_their_scatter() {
    let (mut profile, run) = of_the_paper();
    profile.time_spans[0].measure_latency = false;
    assert!(!report(&profile, &run).contains("AvgLat"));
    profile.time_spans[0].iops_every_ms = Some(1000);
    let text = report(&profile, &run);
    let total = text.lines().find(|line| line.starts_with("total:")).unwrap();
    assert!(total.rsplit('|').next().unwrap().trim().parse::<f64>().unwrap() > 0.0, "{total}");
}

#[test]
fn switches_become_loads() {
    let load = |line: &str| job(&parsed(line)).unwrap().0.phases[0].loads[0].clone();
    assert_eq!(load("x").block, Blocks::One(Bytes(65536)));
    assert_eq!((load("x").read_percent, load("x").random_percent, load("x").queue_depth), (100.0, 0.0, 2));
    assert_eq!(load("-b4K -r16K x").align, Some(Bytes(16384)));
    assert_eq!(load("-b4K -s8b x").stride, Some(Bytes(32768)));
    assert!(load("-si x").interlocked);
    assert_eq!(load("-rs40 x").random_percent, 40.0);
    assert_eq!((load("-B1M -f3M x").start, load("-B1M -f3M x").working_set), (Bytes(1 << 20), Bytes(2 << 20)));
    assert_eq!(load("-B1M:4M x").working_set, Bytes(4 << 20));
    assert_eq!(load("-g100 x").rate, Some(Rate::Throughput { per_thread: Bytes(100_000) }));
    assert_eq!(load("-g500i x").rate, Some(Rate::Iops { per_thread: 500.0 }));
    assert_eq!(load("-i32 -j5 x").burst.unwrap().pause, Span::from_millis(5));
    assert_eq!(load("-j5 x").think_time, Span::from_millis(5));
    let Distribution::Spots { spots } = load("-r -rdpct90/10:5/20 x").distribution else { panic!("no spots") };
    assert_eq!((spots.len(), spots[0].io_percent, spots[1].target_percent), (2, 90.0, 20.0));
    let Distribution::Spots { spots } = load("-rdabs95/10G:5/90G x").distribution else { panic!("no spots") };
    assert_eq!(spots[0].length, Some(Bytes(10 << 30)));
    let shared = load("-F4 -O8 a b");
    assert_eq!((shared.threads, shared.across_targets, shared.queue_depth, shared.targets), (4, true, 4, vec![0, 1]));
    for (line, cache) in [
        ("x", Caching::Cached),
        ("-Sb x", Caching::Cached),
        ("-S x", Caching::Direct),
        ("-Su x", Caching::Direct),
        ("-Sw x", Caching::WriteThrough),
        ("-Sbw x", Caching::WriteThrough),
        ("-Suw x", Caching::DirectWriteThrough),
        ("-Sh x", Caching::DirectWriteThrough),
        ("-h x", Caching::DirectWriteThrough),
    ] {
        assert_eq!(job(&parsed(line)).unwrap().0.cache, cache, "{line}");
    }
    assert_eq!(job(&parsed("-w100 -Z x")).unwrap().0.contents, Contents::Zero);
    assert_eq!(job(&parsed("-z7 x")).unwrap().0.seed, 7);
    assert_eq!(job(&parsed("-D250 x")).unwrap().0.interval, Span::from_millis(250));
}

#[test]
fn what_has_no_effect_is_noted_and_what_cannot_be_had_is_refused_by_name() {
    for switch in ["-a0,1", "-ag", "-ag0,0,1,g1,2", "-frs", "-I1", "-P100", "-x"] {
        let profile = parsed(&format!("{switch} x"));
        assert!(profile.notes.len() == 1 && profile.notes[0].starts_with(switch), "{switch}: {:?}", profile.notes);
    }
    for switch in ["-e", "-ePROCESS", "-Nvni", "-p", "-Sr", "-Sm", "-ysgo", "-Z1M,file"] {
        let error = parse(&words(&format!("{switch} x"))).unwrap_err();
        assert!(matches!(&error, SwitchError::Refused { switch: named, .. } if named == switch), "{switch}: {error}");
        assert!(error.to_string().starts_with(switch), "{error}");
    }
    for switch in ["-q", "-k5", "-H", "-", "-La", "--nonsense"] {
        let error = parse(&words(&format!("{switch} x"))).unwrap_err();
        assert!(matches!(&error, SwitchError::Unknown { switch: named } if named == switch), "{switch}: {error}");
    }
    for switch in [
        "-b0",
        "-b8Q",
        "-d0",
        "-dx",
        "-w101",
        "-o0",
        "-t0",
        "-rs101",
        "-rdpct90",
        "-rdpct90/50:20/60",
        "-Sx",
        "-Rjson",
        "-a0,",
        "-f0",
    ] {
        let error = parse(&words(&format!("{switch} x"))).unwrap_err();
        assert!(matches!(&error, SwitchError::BadValue { switch: named, .. } if named == switch), "{switch}: {error}");
    }
    for line in ["-F2 -t2 x", "-O4 x", "-i5 x", "-si -T1M x", "-Su -Sb x", "-h -Sh x", "-r", "x -r", "#1", "F:"] {
        assert!(matches!(parse(&words(line)), Err(SwitchError::Together(_))), "{line}");
    }
}

#[test]
fn a_profile_comes_back_from_its_xml() {
    for line in [
        "-r -w30 -d600 -W300 -b8K -t8 -o12 -h -L -Z1M -c64G test1.dat",
        "-s64K -si -d5 -C2 -D500 -L a b",
        "-rs30 -rdpct90/10:10/90 -g500i -w100 -Z -F2 -O4 a b",
        "-b4K -B1M -f1G -j5 -i2 -T16M -Sw -z3 -n x&y",
    ] {
        let profile = parsed(line);
        let back = read_xml_profile(&profile_xml(&profile), &profile.command_line)
            .unwrap_or_else(|error| panic!("{line}: {error}"));
        let (ours, theirs) = (job(&profile).unwrap(), job(&back).unwrap());
        let aligned = |mut job: crate::Job| {
            // The XML always says the alignment; the switches may leave it to the block.
            for load in job.phases.iter_mut().flat_map(|phase| &mut phase.loads) {
                let Blocks::One(block) = load.block else { continue };
                if load.random_percent > 0.0 {
                    load.align.get_or_insert(block);
                } else {
                    load.stride.get_or_insert(block);
                }
            }
            job
        };
        assert_eq!(aligned(ours.0), aligned(theirs.0), "{line}");
        assert_eq!(ours.1, theirs.1);
    }
}

#[test]
fn an_xml_element_that_is_not_known_is_named() {
    let xml = |inner: &str| {
        format!(
            "<Profile><TimeSpans><TimeSpan><Targets><Target><Path>x</Path>{inner}</Target></Targets></TimeSpan></TimeSpans></Profile>"
        )
    };
    let error = |inner: &str| read_xml_profile(&xml(inner), "").unwrap_err().to_string();
    assert!(error("<Nonsense>1</Nonsense>").contains("Nonsense"), "{}", error("<Nonsense>1</Nonsense>"));
    assert!(error("<ParallelAsyncIO>true</ParallelAsyncIO>").contains("<ParallelAsyncIO>"));
    assert!(error("<BlockSize>many</BlockSize>").contains("cannot be read"));
    assert!(read_xml_profile("<Profile><TimeSpans/></Profile>", "").unwrap_err().to_string().contains("<TimeSpan>"));
    assert_eq!(read_xml_profile(&xml(""), "").unwrap().time_spans[0].targets[0], Target::new("x"));
}
