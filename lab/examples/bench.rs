use diskwright_lab::{bench::*, child::*, progress::Step};
fn main() {
    let mut args: Vec<std::ffi::OsString> = std::env::args_os().skip(1).collect();
    if args.first().is_some_and(|a| a == "bench-child") {
        println!("{}", child_main(&args[1..]).unwrap());
        return;
    }
    let quick = args.first().is_some_and(|a| a == "quick");
    if quick {
        args.remove(0);
    }
    let rows: Vec<Row> = args.iter().map(|a| Row::from_name(a.to_str().unwrap()).unwrap()).collect();
    let o = BenchOptions {
        quick,
        dir: Some("/tmp/lab/scratch".into()),
        launcher: Some(ChildLauncher::current_exe(["bench-child"]).unwrap()),
        ..Default::default()
    };
    let mut last = String::new();
    let t = std::time::Instant::now();
    let mut p = |s: Step<'_>| {
        let m = format!("{}", s.phase);
        if m != last {
            eprintln!("{:7.2} {}", t.elapsed().as_secs_f64(), m);
            last = m;
        }
        true
    };
    let r = run(&rows, &o, &mut p).unwrap();
    println!("{}", render(&r, false));
}
