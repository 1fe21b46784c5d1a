//! Tests of both reports for a fixed run, of the paper's scripts on the tables, and of the
//! switches.

use super::*;
use diskwright_load::{
    job::{Blocks, Bytes, Caching, Contents, Distribution, Rate, Span},
    record::Run,
};

/// A run of two phases on two targets.
fn example() -> Run {
    serde_json::from_str(include_str!("../../lab/tests/results/run.json")).unwrap()
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

fn parsed(line: &str) -> Profile {
    parse(&words(line)).unwrap_or_else(|error| panic!("{line}: {error}"))
}

/// The first phase of the example run, with the profile of the paper's switches.
fn of_the_paper() -> (Profile, Run) {
    let mut run = example();
    run.phases.truncate(1);
    run.targets[0].size_bytes = 64 << 30;
    (parsed("-r -w30 -d600 -W300 -b8K -t8 -o12 -h -L -Z1M -c64G golden.vhdx flat.raw"), run)
}

#[test]
fn the_papers_command_line_becomes_the_papers_load() {
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

/// The paper's script, word by word:
/// `foreach ($line in $result) {if ($line -like "total:*") { $total=$line; break } }` and
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
    // Each of the three tables has one row for each thread, with as many columns as the head.
    for name in ["Total IO", "Read IO", "Write IO"] {
        let table: Vec<&str> =
            result.lines().skip_while(|line| *line != name).skip(1).take(3 + phase.threads.len()).collect();
        let columns = table[0].split('|').count();
        assert!(table[2..2 + phase.threads.len()].iter().all(|row| row.split('|').count() == columns), "{table:?}");
    }
}

#[test]
fn a_percentile_is_reported_only_with_ten_requests_above_it() {
    let (profile, run) = of_the_paper();
    let text = report(&profile, &run);
    // 39,370 requests: 39 lie above three nines, three above four.
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
fn latencies_need_l_and_the_deviation_of_iops_needs_d() {
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
fn switches_without_effect_are_noted_and_unsupported_ones_are_errors() {
    for switch in ["-frs", "-I1", "-P100", "-x"] {
        let profile = parsed(&format!("{switch} x"));
        assert!(profile.notes.len() == 1 && profile.notes[0].starts_with(switch), "{switch}: {:?}", profile.notes);
    }
    for switch in ["-e", "-ePROCESS", "-Nvni", "-Sr", "-Sm", "-ysgo", "-Z1M,file"] {
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
        "-ag0",
        "-agg0,1",
        "-a256",
        "-f0",
    ] {
        let error = parse(&words(&format!("{switch} x"))).unwrap_err();
        assert!(matches!(&error, SwitchError::BadValue { switch: named, .. } if named == switch), "{switch}: {error}");
    }
    for line in [
        "-F2 -t2 x",
        "-O4 x",
        "-i5 x",
        "-si -T1M x",
        "-Su -Sb x",
        "-h -Sh x",
        "-n -a0 x",
        "-p -r x",
        "-p -si x",
        "-p -F2 -O4 x",
        "-r",
        "x -r",
        "#1",
        "F:",
    ] {
        assert!(matches!(parse(&words(line)), Err(SwitchError::Together(_))), "{line}");
    }
}

#[test]
fn a_profile_is_read_back_from_its_xml() {
    for line in [
        "-r -w30 -d600 -W300 -b8K -t8 -o12 -h -L -Z1M -c64G test1.dat",
        "-s64K -si -d5 -C2 -D500 -L a b",
        "-rs30 -rdpct90/10:10/90 -g500i -w100 -Z -F2 -O4 a b",
        "-b4K -B1M -f1G -j5 -i2 -T16M -Sw -z3 -n x&y",
        "-p -o4 -a0,2,1 a",
        "-g100 -rdabs95/10G:5/90G a",
    ] {
        let profile = parsed(line);
        let back = read_xml_profile(&profile_xml(&profile), &profile.command_line)
            .unwrap_or_else(|error| panic!("{line}: {error}"));
        let (ours, theirs) = (job(&profile).unwrap(), job(&back).unwrap());
        let aligned = |mut job: diskwright_load::Job| {
            // The XML always has the alignment; with switches the default is the block.
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

fn with_target(inner: &str) -> String {
    format!(
        "<Profile>\n<TimeSpans>\n<TimeSpan>\n<Targets>\n<Target>\n<Path>x</Path>\n{inner}</Target></Targets></TimeSpan></TimeSpans></Profile>"
    )
}

#[test]
fn errors_of_a_profile_have_line_found_and_expected() {
    let error = |inner: &str| read_xml_profile(&with_target(inner), "").unwrap_err().to_string();
    for (inner, sentence) in [
        ("<Nonsense>1</Nonsense>", "line 7: found <Nonsense> in <Target>, expected <Path>, <BlockSize>,"),
        (
            "\n\n<BlockSize>many</BlockSize>",
            "line 9: found \"many\" in <BlockSize>, expected a whole number from 0 to 4294967295",
        ),
        (
            "<WriteRatio>101</WriteRatio>",
            "line 7: found \"101\" in <WriteRatio>, expected a whole number from 0 to 100",
        ),
        ("<WriteThrough>yes</WriteThrough>", "line 7: found \"yes\" in <WriteThrough>, expected true or false"),
        (
            "<WriteRatio>1</WriteRatio>\n<WriteRatio>2</WriteRatio>",
            "line 8: found <WriteRatio> a second time in <Target>",
        ),
        (
            "<Throughput unit=\"MBPS\">5</Throughput>",
            "line 7: found the unit \"MBPS\" of <Throughput>, expected BPMS or IOPS",
        ),
        ("<MemoryMappedIo>true</MemoryMappedIo>", "line 7: <MemoryMappedIo> is not supported: files are not"),
        (
            "<ParallelAsyncIO>true</ParallelAsyncIO><Random>4096</Random>",
            "line 7: found \"true\" in <ParallelAsyncIO>, expected false",
        ),
        ("<Distribution><Percent><Range>5</Range></Percent></Distribution>", "<Range> without the attribute IO"),
        ("<BlockSize>4096</BlokSize>", "line 7: found "),
        ("<BlockSize>&huge;</BlockSize>", "line 7: found the unknown entity"),
    ] {
        let error = error(inner);
        assert!(error.contains(sentence), "{inner}: {error}");
    }
    let of = |xml: &str| read_xml_profile(xml, "").unwrap_err().to_string();
    assert_eq!(
        of("<Profile>\n<TimeSpans/></Profile>"),
        "line 2: found <TimeSpans> without <TimeSpan>, expected <TimeSpan>"
    );
    assert!(of("<Job/>").contains("line 1: found <Job>, expected <Profile>"));
    assert!(of("name = \"x\"\n").contains("line 1: found \"name = "));
    assert!(of("<Profile>\n<TimeSpans>\n").contains("the end of the file within <TimeSpans> of line 2"));
    assert!(of("<!DOCTYPE x [<!ENTITY a \"b\">]><Profile/>").contains("a document type"));
    assert!(of(&"<Profile>".repeat(1000)).contains("nested 16 deep"));
    assert!(of(&with_target("").replace(">x<", ">*0<")).contains("\"*0\" in <Path>, expected a template"));
    let target = read_xml_profile(&with_target(""), "").unwrap().time_spans.remove(0).targets.remove(0);
    assert_eq!(target, Target::new("x"));
}

#[test]
fn a_profile_may_be_utf_8_or_utf_16_with_a_byte_order_mark() {
    let text = with_target("").replace(">x<", ">d\u{e4}ta<");
    let units = |to: fn(u16) -> [u8; 2]| text.encode_utf16().flat_map(to).collect::<Vec<u8>>();
    let marked = |mark: &[u8], bytes: Vec<u8>| [mark, &bytes].concat();
    for bytes in [
        text.clone().into_bytes(),
        marked(&[0xef, 0xbb, 0xbf], text.clone().into_bytes()),
        marked(&[0xff, 0xfe], units(u16::to_le_bytes)),
        marked(&[0xfe, 0xff], units(u16::to_be_bytes)),
    ] {
        assert_eq!(xml_profile_text(&bytes).unwrap(), text);
    }
    let error = xml_profile_text(b"<Profile>\n\xe4").unwrap_err().to_string();
    assert!(error.starts_with("line 2: found the byte 0xe4, expected text"), "{error}");
}

fn with_profile(line: &str, xml: &str) -> Result<Profile, String> {
    let command = ProfileCommand::parse(&words(line)).map_err(|error| error.to_string())?.expect("it has -X");
    let profile = read_xml_profile(xml, "").map_err(|error| error.to_string())?;
    command.apply(profile).map_err(|error| error.to_string())
}

#[test]
fn switches_with_x_override_the_profile() {
    let xml = profile_xml(&parsed("-b4K -r -d100 -W50 -C3 -z9 -o7 x"));
    let profile = with_profile("-d5 -W0 -Xp.xml -z7 -v -Rxml", &xml).unwrap();
    let span = &profile.time_spans[0];
    assert_eq!((span.duration_s, span.warm_up_s, span.cool_down_s, span.seed), (5, 0, 3, 7));
    assert_eq!((profile.verbose, profile.form, profile.profile_only), (true, ResultForm::Xml, false));
    assert_eq!((span.targets[0].block_bytes, span.targets[0].requests), (4096, 7));
    assert_eq!(profile.command_line, "diskwright diskspd -d5 -W0 -Xp.xml -z7 -v -Rxml");
    let unchanged = with_profile("-Xp.xml", &xml).unwrap();
    assert_eq!((unchanged.time_spans[0].duration_s, unchanged.form), (100, ResultForm::Text));
    for refused in ["-b8K -Xp.xml", "-Xp.xml -r", "-Xp.xml -t2", "-Xp.xml -c1G"] {
        let switch = refused.split(' ').find(|word| !word.starts_with("-X")).unwrap();
        assert!(with_profile(refused, &xml).unwrap_err().starts_with(&format!("{switch} cannot be used with -X")));
    }
    for wrong in ["-X", "-Xa -Xb", "-Xa -d0", "-Xa -Rjson", "x -Xa"] {
        assert!(ProfileCommand::parse(&words(wrong)).is_err(), "{wrong}");
    }
    assert_eq!(ProfileCommand::parse(&words("-r x")), Ok(None));
}

#[test]
fn targets_of_the_command_line_replace_templates() {
    let xml = profile_xml(&parsed("-b4K *2 fixed *1 *2"));
    let paths =
        |profile: &Profile| profile.time_spans[0].targets.iter().map(|target| target.path.clone()).collect::<Vec<_>>();
    assert_eq!(paths(&with_profile("-Xp.xml a b", &xml).unwrap()), ["b", "fixed", "a", "b"]);
    assert!(
        with_profile("-Xp.xml a", &xml).unwrap_err().contains("*2 is a template, and the command line names 1 targets")
    );
    assert!(with_profile("-Xp.xml a b c", &xml).unwrap_err().contains("template *3, so c would not be used"));
    assert!(with_profile("-Xp.xml", &xml).unwrap_err().contains("*2 is a template"));
    // A profile that is only printed may keep its templates.
    let printed = with_profile("-Rp -Xp.xml", &xml).unwrap();
    assert_eq!(paths(&printed), ["*2", "fixed", "*1", "*2"]);
    assert!(report(&printed, &of_the_paper().1).contains("path: template target '2'"));
    assert!(job(&printed).unwrap_err().to_string().contains("*2: it is a template"));
}

#[test]
fn the_input_parameters_have_rate_limit_and_distribution() {
    let run = of_the_paper().1;
    let text = |line: &str| report(&parsed(line), &run);
    assert!(text("-g500i x").contains("\t\tIO priority: normal\n\t\tthroughput rate-limited to 500 IOPS\n"));
    assert!(text("-g100 x").contains("\t\tthroughput rate-limited to 100 B/ms\n"));
    assert!(!text("x").contains("rate-limited") && !text("x").contains("Distribution"));
    assert!(text("-rdpct90/10:0/10:10/80 x").contains(
        "\t\tIO Distribution:\n\t\t    90% of IO => [ 0% -  10%) of target\n\t\t     0% of IO => [10% -  20%) of target\n\t\t    10% of IO => [20% - 100%) of target\n"
    ));
    assert!(text("-rdabs95/10G:5/1536M x").contains(
        "\t\tIO Distribution:\n\t\t    95% of IO => [     0    -     10GiB)\n\t\t     5% of IO => [    10GiB -  11.50GiB)\n"
    ));
    assert!(
        text("-F2 -O4 a b")
            .contains("\tthread pool with 2 threads\n\tnumber of outstanding I/O operations per thread: 4\n")
    );
}

#[test]
fn threads_are_bound_round_robin_unless_n_disables_affinity() {
    let cpus = |line: &str| job(&parsed(line)).unwrap().0.phases[0].loads[0].cpus.clone();
    assert_eq!(cpus("x"), Some(vec![]));
    assert_eq!(cpus("-a x"), Some(vec![]));
    assert_eq!(cpus("-ag x"), Some(vec![]));
    assert_eq!(cpus("-n x"), None);
    assert_eq!(cpus("-a0,2,1 x"), Some(vec![0, 2, 1]));
    assert_eq!(cpus("-ag0,0,1 x"), Some(vec![0, 1]));
    let error = job(&parsed("-ag0,0,g1,2 x")).unwrap_err().to_string();
    assert!(error.contains("1/2") && error.contains("one group of processors"), "{error}");
    let text = report(&parsed("-a0,1 x"), &of_the_paper().1);
    assert!(text.contains("\tadvanced affinity round robin (group/core): 0/0, 0/1\n"), "{text}");
}

#[test]
fn with_p_each_request_has_a_stream_of_its_own() {
    let load = |line: &str| job(&parsed(line)).unwrap().0.phases[0].loads[0].clone();
    assert!(load("-p -o4 x").parallel && !load("-o4 x").parallel);
    assert!(parsed("-p -o1 x").notes[0].starts_with("-p has no effect"));
    assert!(report(&parsed("-p x"), &of_the_paper().1).contains("\t\tusing parallel async I/O\n"));
}

#[test]
fn each_thread_has_the_deviation_of_its_own_iops() {
    let (mut profile, mut run) = of_the_paper();
    profile.time_spans[0].iops_every_ms = Some(1000);
    for (number, thread) in run.phases[0].threads.iter_mut().enumerate() {
        let reads = number as f64;
        thread.iops_std_dev =
            Some(diskwright_load::record::IopsStdDev { reads, writes: reads + 0.25, both: reads + 0.5 });
    }
    let text = report(&profile, &run);
    for (name, part) in [("Read IO", 0.0), ("Write IO", 0.25), ("Total IO", 0.5)] {
        let rows = text.lines().skip_while(|line| *line != name).skip(3).take(run.phases[0].threads.len());
        for (number, row) in rows.enumerate() {
            let cell = row.split('|').nth(6).unwrap().trim();
            assert_eq!(cell, format!("{:.2}", number as f64 + part), "{name}: {row}");
        }
    }
}
