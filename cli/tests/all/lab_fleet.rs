//! `lab agent` and `lab fleet`: agents as programs of their own, and what happens when one of them
//! or the controller is killed.

use crate::common::{Running, Workshop, flat, schemas, steady};
use diskwright_lab::network::{Network, NetworkSpec};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// A short phase, long enough for several intervals.
pub const SHORT: &str = "--warm-up 200ms --duration 1s --interval 100ms";

pub fn shop() -> Workshop {
    let mut shop = Workshop::new();
    let state = shop.path("state").display().to_string();
    shop.variables.push(("XDG_STATE_HOME", state));
    shop
}

/// Starts an agent, and waits for the line with its address.
#[track_caller]
pub fn agent(shop: &Workshop, options: &str) -> (Running, String) {
    let line = format!("lab agent --listen 127.0.0.1:0 {options}");
    let words: Vec<&str> = line.split(' ').collect();
    started(&mut shop.command(&words))
}

/// Starts the command of an agent, and waits for the line with its address.
#[track_caller]
pub fn started(command: &mut Command) -> (Running, String) {
    let mut child = Running::start(command.stdout(Stdio::piped()).stderr(Stdio::null()));
    let mut address = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut address).unwrap();
    assert!(address.contains('#'), "{command:?} has no address: {address:?}");
    (child, address.trim_end().to_owned())
}

/// `command`, started by `by`, which ends with the program of `command`.
pub fn wrapped(mut by: Command, command: &Command) -> Command {
    by.args(command.get_args());
    by.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    by.current_dir(command.get_current_dir().expect("the folder of the test"));
    by
}

/// A controller that expects agents.
pub struct Expecting {
    pub controller: Running,
    /// Where each agent connects.
    pub addresses: Vec<String>,
    /// Reads the rest of what it says.
    pub rest: JoinHandle<Vec<String>>,
}

/// Starts a controller that expects this number of agents, and waits for their addresses.
#[track_caller]
pub fn expecting(shop: &Workshop, agents: usize, options: &str) -> Expecting {
    let line = format!("lab fleet --expect {agents} {options}");
    let words: Vec<&str> = line.split_whitespace().collect();
    let mut controller = Running::start(shop.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let mut lines = BufReader::new(controller.stderr.take().unwrap()).lines().map(Result::unwrap);
    let address = |line: String| Some(line.split_once("--connect ")?.1.split(' ').next()?.to_owned());
    let addresses: Vec<String> = lines.by_ref().filter_map(address).take(agents).collect();
    Expecting { controller, addresses, rest: thread::spawn(move || lines.collect()) }
}

pub fn read(shop: &Workshop, name: &str) -> Value {
    serde_json::from_slice(&fs::read(shop.path(name)).unwrap()).unwrap()
}

#[test]
fn a_fleet_measures_and_its_result_is_that_of_a_run() {
    let shop = shop();
    let (_one, first) = agent(&shop, "data=test.raw --create-size 8M");
    let (_two, second) = agent(&shop, "data=null:1G --read-only");
    let fleet = format!("lab fleet --agent one={first} --agent two={second} {SHORT} -o r.json --label rack=7");
    let printed = flat(&shop.ok(&fleet));
    for part in ["2 agents measured", "one: data", "two: data", "Each agent", "certificate", "saved to r.json"] {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    let result = read(&shop, "r.json");
    assert_eq!(result["schema"], "diskwright.lab.run/2");
    let fleet = &result["fleet"];
    assert_eq!((&fleet["agents"][0]["name"], &fleet["agents"][1]["targets"][0]), (&"one".into(), &1.into()));
    assert_eq!(fleet["agents"].as_array().unwrap().len(), 2);
    // The token was not written anywhere.
    let token = first.rsplit_once('/').unwrap().1;
    assert!(!fs::read_to_string(shop.path("r.json")).unwrap().contains(token) && !printed.contains(token));
    // Reports, exports and comparisons read it.
    assert!(flat(&shop.ok("lab report r.json")).contains("2 agents measured"));
    shop.ok("lab report r.json --as html -o r.html");
    assert!(fs::read_to_string(shop.path("r.html")).unwrap().contains("Each agent"));
    shop.ok("lab report r.json --as csv -o r.csv");
    // An agent admits the controller again without its token.
    let again = format!("lab fleet --agent {} --agent {second} {SHORT} -o s.json", first.rsplit_once('/').unwrap().0);
    let printed: Value = shop.json(&again);
    assert_eq!(printed["end"]["kind"], "complete");
}

#[test]
fn a_plan_has_groups_and_a_sweep_finds_how_many_agents_are_enough() {
    let shop = shop();
    let (_one, first) = agent(&shop, "null:1G");
    let (_two, second) = agent(&shop, "null:1G");
    let plan = format!(
        "[[group]]\nname = \"readers\"\nagents = [\"a={first}\"]\n\
         [[group]]\nname = \"writers\"\nagents = [\"b={second}\"]\nprofile = \"w.toml\"\n"
    );
    fs::write(shop.path("plan.toml"), plan).unwrap();
    let profile = "name = \"w\"\n[[phase]]\nname = \"main\"\n[[phase.load]]\nread_percent = 0.0\n";
    fs::write(shop.path("w.toml"), profile).unwrap();
    shop.ok(&format!("lab fleet plan.toml {SHORT} -o r.json"));
    let result = read(&shop, "r.json");
    assert_eq!(result["job"]["phase"][0]["load"].as_array().unwrap().len(), 2);
    let threads = &result["phases"][0]["threads"];
    assert_eq!((&threads[0]["writes"]["ios"], &threads[1]["reads"]["ios"]), (&0.into(), &0.into()));
    let refused = shop.fails(2, &format!("lab fleet plan.toml {SHORT} --vary agents=1,2 -o t.json"));
    assert!(refused.contains("different loads"), "{refused}");

    let sweep =
        format!("lab fleet --agent a={first} --agent b={second} {SHORT} --vary agents=1,2 --rounds 2 -o s.json");
    let printed = flat(&shop.ok(&sweep));
    assert!(printed.contains("agents 1") || printed.contains("agents"), "{printed}");
    let result = read(&shop, "s.json");
    assert_eq!(result["schema"], "diskwright.lab.sweep/3");
    let rounds: Vec<usize> =
        result["cells"].as_array().unwrap().iter().map(|cell| cell["rounds"].as_array().unwrap().len()).collect();
    assert_eq!(rounds, [2, 2]);
    // It goes on where it was.
    let more = flat(&shop.ok(&sweep.replace("--rounds 2", "--rounds 3")));
    assert!(more.contains("saved to s.json"), "{more}");
}

#[test]
fn a_fleet_compares_targets_in_interleaved_rounds() {
    let shop = shop();
    let (_one, first) = agent(&shop, "a=null:1G b=null:2G");
    let (_two, second) = agent(&shop, "a=null:1G b=null:2G");
    let line = format!("lab fleet --agent one={first} --agent two={second} --compare --target a");
    assert!(shop.fails(2, &line).contains("needs two targets or more"));
    let short = "--warm-up 0 --duration 300ms --interval 100ms --rounds 2";
    let printed = flat(&shop.ok(&format!("{line} --target b {short} -o c.json")));
    assert!(printed.contains("saved to c.json"), "{printed}");
    let result = read(&shop, "c.json");
    assert_eq!(result["schema"], "diskwright.lab.compare/3");
    let sides: Vec<&Value> = result["sides"].as_array().unwrap().iter().map(|side| &side["name"]).collect();
    assert_eq!(sides, ["a", "b"]);
    let refused = shop.fails(2, &format!("lab fleet --agent {first} --rounds 3"));
    assert!(refused.contains("belongs to a sweep"), "{refused}");
}

#[test]
fn a_study_of_queue_depth_measures_with_all_agents_and_is_resumed() {
    let shop = shop();
    let (_one, first) = agent(&shop, "data=one.raw --create-size 8M");
    let (_two, second) = agent(&shop, "data=two.raw --create-size 8M");
    let short = "--threads 2 --target-depth 8 --rounds 1 --cell 0.03 --write-back";
    let line = format!("lab study queue-depth --quick --agent one={first} --agent two={second} {short} -o q.json");
    let refused = |more: &str| flat(&steady(&shop.fails(1, &format!("{line} {more}"))));
    assert!(refused("--target other").contains("one: there is no target \"other\" here; there are data"));
    assert!(refused("--target data --target more").contains("measures one on each agent"));
    assert!(shop.fails(1, &line.replace("depth 8", "depth 7")).contains("cannot be shared by 2 agents"));
    assert!(shop.fails(2, &format!("{line} --destroy-data")).contains("cannot be used with"));
    assert!(shop.fails(2, "lab study queue-depth --identity x.pem").contains("--agent"));
    assert!(!shop.path("q.json").exists(), "nothing was measured");

    // Stopped after its first stage.
    let words: Vec<&str> = line.split_whitespace().collect();
    let child = Running::start(shop.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let begun = Instant::now();
    while !fs::read_to_string(shop.path("q.json")).is_ok_and(|saved| saved.contains("\"stage\"")) {
        assert!(begun.elapsed() < Duration::from_secs(120), "no stage was saved");
        thread::sleep(Duration::from_millis(20));
    }
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(child.output().unwrap().status.code(), Some(130));
    let partial = read(&shop, "q.json");
    assert_eq!((&partial["end"]["kind"], &partial["stages"][0]["stage"]), (&"stopped".into(), &"agents".into()));

    let printed = flat(&shop.ok(&line));
    for part in ["Measured by 2 agents at the same time", "number of agents", "one thread on each agent", "Each agent"]
    {
        assert!(printed.contains(part), "{part}: {printed}");
    }
    schemas::validate(&fs::read_to_string(shop.path("q.json")).unwrap());
    let whole = read(&shop, "q.json");
    assert_eq!((&whole["end"]["kind"], whole["stages"].as_array().unwrap().len()), (&"complete".into(), 5));
    assert_eq!(whole["settings"]["agents"][1]["name"], "two");
    for number in 0..2 {
        let rounds = |result: &Value| result["stages"][0]["sweep"]["cells"][number]["rounds"].clone();
        assert_eq!(rounds(&whole), rounds(&partial), "no window is measured twice");
    }
    assert_eq!(whole["pre_test"], partial["pre_test"]);
    for stage in whole["stages"].as_array().unwrap() {
        for cell in stage["sweep"]["cells"].as_array().unwrap() {
            let of = |name: &str| cell[name].as_u64().unwrap();
            assert_eq!(of("in_flight"), of("files") * of("threads") * of("queue_depth"), "{cell}");
            assert!(stage["stage"] == "agents" || of("files") == 2, "{cell}");
            assert!(stage["stage"] != "combinations" || of("in_flight") == 8, "{cell}");
            assert_eq!(cell["rounds"].as_array().unwrap().len(), 1);
        }
    }
    // One agent more is another test bed.
    let (_three, third) = agent(&shop, "a=null:16M b=null:16M");
    let more = line.replace("--threads", &format!("--agent three={third} --threads")).replace("depth 8", "depth 6");
    assert!(flat(&shop.fails(1, &more)).contains("was measured by one ("), "other agents");
    let several = flat(&shop.fails(1, &more.replace("q.json", "r.json")));
    assert!(several.contains("the agent three allows 2 targets (a, b)") && several.contains("(--target)"), "{several}");
    shop.ok("lab report q.json -o q.html");
    assert!(fs::read_to_string(shop.path("q.html")).unwrap().contains("agents × threads × depth"));
}

#[test]
fn a_network_that_is_cut_for_a_while_costs_nothing_and_one_that_stays_cut_is_a_loss() {
    let network = match Network::start(&NetworkSpec::default()) {
        Ok(network) => network,
        Err(why) => {
            println!("skipped: a fleet over a network: {why}");
            return;
        }
    };
    let shop = shop();
    let (_here, first) = agent(&shop, "null:1G");
    let own = shop.command(&["lab", "agent", "--listen", &format!("{}:0", network.server()), "null:1G"]);
    let (_there, second) = started(&mut wrapped(network.command(own.get_program()), &own));
    let fleet = |more: &str| {
        let line = format!(
            "lab fleet --agent one={first} --agent two={} --warm-up 0 --duration 6s --interval 100ms {more} -o r.json",
            second.trim_end()
        );
        let words: Vec<&str> = line.split_whitespace().collect();
        Running::start(shop.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()))
    };
    let run = fleet("--lost-after 20s");
    thread::sleep(Duration::from_secs(2));
    network.cut(true).unwrap();
    thread::sleep(Duration::from_secs(2));
    network.cut(false).unwrap();
    let ended = run.output().unwrap();
    assert_eq!(ended.status.code(), Some(0), "{}", String::from_utf8_lossy(&ended.stdout));
    let result = read(&shop, "r.json");
    assert_eq!(
        (&result["end"]["kind"], &result["phases"][0]["window_ns"]),
        (&"complete".into(), &6_000_000_000_u64.into())
    );

    let run = fleet("--lost-after 1s --on-loss go-on");
    thread::sleep(Duration::from_secs(3));
    network.cut(true).unwrap();
    let ended = run.output().unwrap();
    network.cut(false).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{}", String::from_utf8_lossy(&ended.stdout));
    assert_eq!(read(&shop, "r.json")["fleet"]["lost"][0]["agent"], 1);
}

#[test]
fn an_agent_that_is_killed_is_told_and_the_figures_before_are_kept() {
    let shop = shop();
    let (_one, first) = agent(&shop, "null:1G");
    let (mut two, second) = agent(&shop, "null:1G");
    let line = format!(
        "lab fleet --agent one={first} --agent two={second} --warm-up 0 --duration 8s --interval 100ms \
         --lost-after 1s --on-loss go-on -o r.json"
    );
    let words: Vec<&str> = line.split_whitespace().collect();
    let child = Running::start(shop.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()));
    thread::sleep(Duration::from_secs(4));
    two.kill().unwrap();
    let ended = child.output().unwrap();
    let printed = flat(&String::from_utf8(ended.stdout).unwrap());
    assert_eq!(ended.status.code(), Some(1), "{printed}");
    assert!(printed.contains("two was lost") && printed.contains("the result is incomplete since"), "{printed}");
    let result = read(&shop, "r.json");
    assert_eq!(result["fleet"]["lost"][0]["agent"], 1);
    let window_ns = result["phases"][0]["window_ns"].as_u64().unwrap();
    assert!(window_ns > 0 && window_ns < 8_000_000_000, "{window_ns}");
    let series = result["phases"][0]["series"].as_array().unwrap();
    assert!(series.last().unwrap()["start_ns"].as_u64().unwrap() > 7_000_000_000, "the other one went on");
}

#[test]
fn a_controller_that_is_killed_goes_on_and_nothing_is_measured_twice() {
    let shop = shop();
    let (_one, first) = agent(&shop, "null:1G");
    let (_two, second) = agent(&shop, "null:1G");
    let line = format!(
        "lab fleet --agent one={first} --agent two={second} --warm-up 0 --duration 6s --interval 100ms -o r.json"
    );
    let words: Vec<&str> = line.split_whitespace().collect();
    let mut child = Running::start(shop.command(&words).stdout(Stdio::null()).stderr(Stdio::null()));
    let begun = Instant::now();
    while !shop.path("r.json").exists() {
        assert!(begun.elapsed() < Duration::from_secs(30), "it has not begun");
        thread::sleep(Duration::from_millis(20));
    }
    // Into the phase, which all agents have started.
    thread::sleep(Duration::from_millis(1500));
    child.kill().unwrap();
    child.wait().unwrap();
    let before = read(&shop, "r.json");
    assert_eq!(before["end"]["kind"], "stopped");
    let printed = flat(&shop.ok(&line));
    assert!(printed.contains("2 agents measured. All were active for 6.00 s"), "{printed}");
    let after = read(&shop, "r.json");
    assert_eq!(after["fleet"]["run"], before["fleet"]["run"]);
    // Twice would be 12 seconds and more.
    assert!(begun.elapsed() < Duration::from_millis(11_800), "it was measured once: {:?}", begun.elapsed());
}

#[test]
fn an_agent_writes_only_what_its_own_command_line_allows() {
    let shop = shop();
    fs::write(shop.path("mine.raw"), vec![7; 1 << 20]).unwrap();
    let (_one, first) = agent(&shop, "data=mine.raw");
    let (_two, second) = agent(&shop, "data=mine.raw --read-only");
    let write = |address: &str, more: &str| {
        steady(&shop.fails(1, &format!("lab fleet --agent one={address} {SHORT} {more} -o r.json")))
    };
    let refused = write(&first, "--read-percent 0");
    assert!(
        refused.contains("one: data would be overwritten, but holds") || refused.contains("would be overwritten"),
        "{refused}"
    );
    let refused = write(&first, "--fill");
    assert!(refused.contains("would be overwritten"), "{refused}");
    let refused = write(&second, "--read-percent 0");
    assert!(refused.contains("allows reading only"), "{refused}");
    let refused = write(&second, "--target other");
    assert!(refused.contains("there is no target \"other\" here; there are data"), "{refused}");
    assert_eq!(fs::read(shop.path("mine.raw")).unwrap(), vec![7; 1 << 20]);
    assert!(!shop.path("r.json").exists(), "nothing was measured");
}

#[test]
fn agents_connect_to_a_controller_that_expects_them() {
    let shop = shop();
    let Expecting { controller, addresses, rest } = expecting(&shop, 2, &format!("{SHORT} -o r.json"));
    let agents: Vec<Running> = addresses
        .iter()
        .map(|address| {
            let words = ["lab", "agent", "--connect", address, "null:1G"];
            Running::start(shop.command(&words).stdout(Stdio::null()).stderr(Stdio::null()))
        })
        .collect();
    let ended = controller.output().unwrap();
    assert_eq!(ended.status.code(), Some(0), "{:?}", rest.join().unwrap());
    assert_eq!(read(&shop, "r.json")["fleet"]["agents"].as_array().unwrap().len(), 2);
    drop(agents);
}

#[test]
fn strangers_and_mistakes_are_refused_with_a_reason() {
    let shop = shop();
    let fingerprint = shop.ok("lab fleet --fingerprint").trim_end().to_owned();
    assert_eq!(fingerprint.len(), 64);
    let (_one, pinned) = agent(&shop, &format!("null: --controller {fingerprint}"));
    assert!(!pinned.contains('/'), "no token is made for a pinned controller");
    shop.ok(&format!("lab fleet --agent {pinned} {SHORT} -o r.json"));
    let stranger = shop.fails(1, &format!("lab fleet --agent {pinned} --identity other.pem {SHORT} -o r.json"));
    assert!(stranger.contains("is not pinned here, and no token was given"), "{stranger}");
    let place = pinned.split('#').next().unwrap();
    let wrong = shop.fails(1, &format!("lab fleet --agent {place}#{fingerprint} {SHORT} -o s.json"));
    assert!(wrong.contains("its fingerprint is") && wrong.contains("compare the fingerprint"), "{wrong}");
    let nobody = shop.fails(1, &format!("lab fleet --agent 127.0.0.1:1#{fingerprint} {SHORT} -o s.json"));
    assert!(nobody.contains("127.0.0.1:1: cannot connect") && nobody.contains("is it running"), "{nobody}");
    for (line, code, why) in [
        ("lab fleet", 2, "no agent is named"),
        ("lab fleet --agent host:1", 1, "the fingerprint is missing"),
        ("lab fleet nothing.toml", 1, "nothing.toml"),
        ("lab agent a=null: a=null:", 2, "two targets are called a"),
        ("lab agent null: --controller abc", 2, "not a fingerprint"),
        ("lab agent null: --connect host:1", 1, "the fingerprint is missing"),
        ("lab agent null: --listen 127.0.0.1:x", 2, "not a port"),
    ] {
        let error = shop.fails(code, line);
        assert!(error.contains(why), "{line}: {error}");
    }
    let count = shop.fails(1, &format!("lab fleet --agent {pinned} --count 100 -o s.json"));
    assert!(count.contains("ends after a count of requests"), "{count}");
}

#[test]
fn an_agent_tells_where_it_is_as_json_and_ends_by_a_signal() {
    let shop = shop();
    let words = ["lab", "agent", "--listen", "127.0.0.1:0", "data=null:", "--json"];
    let mut child = Running::start(shop.command(&words).stdout(Stdio::piped()).stderr(Stdio::null()));
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut printed = String::new();
    while !printed.ends_with("}\n") {
        printed.push_str(&(lines.next().unwrap() + "\n"));
    }
    assert_eq!(schemas::validate(&printed), "diskwright.lab.agent/1");
    let told: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(told["targets"][0], "data");
    assert!(told["address"].as_str().unwrap().contains(told["fingerprint"].as_str().unwrap()));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
