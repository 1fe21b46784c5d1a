use diskwright_lab::{child::*, progress::Step, study::*};
fn main() {
    let args: Vec<std::ffi::OsString> = std::env::args_os().skip(1).collect();
    if args.first().is_some_and(|a| a == "bench-child") {
        println!("{}", child_main(&args[1..]).unwrap());
        return;
    }
    let o = ContainersOptions {
        quick: true,
        dir: Some("/tmp/lab/scratch".into()),
        output: Some("/tmp/lab/out.json".into()),
        launcher: Some(ChildLauncher::current_exe(["bench-child"]).unwrap()),
        ..Default::default()
    };
    let mut last = String::new();
    let t = std::time::Instant::now();
    let mut p = |s: Step<'_>| {
        if s.phase != last {
            eprintln!("{:7.2} {}", t.elapsed().as_secs_f64(), s.phase);
            last = s.phase.into();
        }
        true
    };
    match run(&o, &mut p) {
        Ok(r) => println!("{}\n{:.1} s", render(&r.result, false), t.elapsed().as_secs_f64()),
        Err(e) => println!("ERROR {e}"),
    }
}
