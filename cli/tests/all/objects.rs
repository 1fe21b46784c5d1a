//! Golden images in a bucket and on a web server, with children on the local disk, and the cache
//! between them.

use crate::bucket::{found, free_port, versitygw, wait_for};
use crate::certificates;
use crate::common::{Running, Workshop, flat};
use diskwright_object::testing::{Fault, TestServer};
use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

const PATIENCE: Duration = Duration::from_secs(20);

/// A golden image, as a file and as an object with its bytes.
fn golden(shop: &Workshop) -> Vec<u8> {
    shop.ok("create golden.vhdx --size 64M");
    shop.ok("io golden.vhdx -c 'write -P 7 1M 8M' -c 'write -P 9 40M 64K' -c flush");
    fs::read(shop.path("golden.vhdx")).unwrap()
}

#[test]
fn a_child_on_the_local_disk_of_a_golden_image_on_a_server() {
    let (shop, server) = (Workshop::new(), TestServer::start());
    server.put("images/golden.vhdx", golden(&shop), "\"1\"");
    let (url, allowed) = (server.url("images/golden.vhdx"), server.url("images"));
    shop.ok(&format!("io '{url}' -r -c 'read -P 7 1M 8M'"));
    // The child's own word is not enough.
    shop.ok(&format!("create child.vhdx --parent '{url}'"));
    let error = flat(&shop.fails(1, "io child.vhdx -c 'read 1M 4K'"));
    assert!(error.contains(&format!("--allow-parent-dir {allowed}")), "{error}");
    let with = format!("--allow-parent-dir '{allowed}'");
    let shown = flat(&shop.ok(&format!("info child.vhdx --chain {with}")));
    assert!(shown.contains(&url), "{shown}");
    shop.ok(&format!("io child.vhdx {with} -c 'read -P 7 1M 8M' -c 'write -P 5 2M 4K' -c flush"));
    shop.ok(&format!("io child.vhdx {with} -c 'read -P 5 2M 4K' -c 'read -P 7 2052K 1M' -c 'read -P 9 40M 64K'"));
    shop.ok(&format!("convert child.vhdx flat.qcow2 --verify {with}"));
    shop.ok(&format!("compare child.vhdx flat.qcow2 {with}"));
    assert_eq!(shop.run(&format!("compare '{url}' golden.vhdx")).code, Some(0));
    // All that was needed is kept.
    server.take_seen();
    server.always(Some(Fault::Status(503, String::new())));
    let opened = server.take_seen().len();
    assert_eq!(opened, 0);
    server.always(None);
    shop.ok(&format!("io child.vhdx {with} -c 'read -P 7 3M 6M'"));
    let seen = server.take_seen();
    assert!(seen.iter().all(|seen| seen.range == Some(0..16)), "{seen:?}");
}

#[test]
fn children_of_all_formats_have_their_parent_on_a_server() {
    let (shop, server) = (Workshop::new(), TestServer::start());
    for (format, parent) in [("vhdx", "vhdx"), ("vhd", "vhd"), ("qcow2", "qcow2"), ("vmdk", "vmdk"), ("qcow2", "raw")] {
        let golden = format!("golden of {format}.{parent}");
        shop.ok(&format!("create '{golden}' --size 64M"));
        shop.ok(&format!("io '{golden}' -c 'write -P 7 1M 1M' -c flush"));
        server.put(&format!("a/{}", golden.replace(' ', "%20")), fs::read(shop.path(&golden)).unwrap(), "\"1\"");
        let url = server.url(&format!("a/{}", golden.replace(' ', "%20")));
        let with = format!("--allow-parent-dir '{}'", server.url("a"));
        shop.ok(&format!("create child-of-{parent}.{format} --parent '{url}'"));
        shop.ok(&format!("io child-of-{parent}.{format} {with} -c 'read -P 7 1M 1M' -c 'write -P 5 8M 64K' -c flush"));
        // With a copy of the parent here it needs no server.
        // A VHD has recorded when the object was last modified.
        let more = if format == "vhd" { "--ignore-parent-timestamp" } else { "" };
        shop.ok(&format!("reconnect child-of-{parent}.{format} --parent '{golden}' {more}"));
        shop.ok(&format!("io child-of-{parent}.{format} -c 'read -P 7 1M 1M' -c 'read -P 5 8M 64K'"));
    }
}

#[test]
fn a_sealed_image_is_proved_block_by_block() {
    let (shop, server) = (Workshop::new(), TestServer::start());
    let mut bytes = golden(&shop);
    let sealed = shop.json("seal golden.vhdx");
    let root = sealed["root"].as_str().unwrap();
    let shown = flat(&shop.ok(&format!("seal golden.vhdx --check --root {root}")));
    assert!(shown.contains("are as they were sealed") && shown.contains(root), "{shown}");
    let error = flat(&shop.fails(1, "seal golden.vhdx"));
    assert!(error.contains("golden.vhdx.seal: file exists"), "{error}");
    let other = "0".repeat(64);
    let error = flat(&shop.fails(1, &format!("seal golden.vhdx --check --root {other}")));
    assert!(error.contains(&format!("its digest is {root}, expected {other}")), "{error}");
    shop.fails(2, &format!("seal golden.vhdx --root {root}"));
    shop.fails(2, "seal golden.vhdx --check --root 00");
    shop.fails(2, "seal s3://golden/debian.vhdx");

    let seal = fs::read(shop.path("golden.vhdx.seal")).unwrap();
    server.put("a/golden.vhdx", bytes.clone(), "\"1\"");
    server.put("a/golden.vhdx.seal", seal.clone(), "\"s\"");
    let url = server.url("a/golden.vhdx");
    let with = format!("--allow-parent-dir '{}'", server.url("a"));
    let at = bytes.iter().rposition(|byte| *byte == 7).unwrap();
    // What a server sent before anybody asked for a seal proves nothing.
    bytes[at] ^= 1;
    server.put("a/golden.vhdx", bytes.clone(), "\"1\"");
    shop.ok(&format!("cache prefetch '{url}'"));
    shop.ok(&format!("create child.vhdx --parent '{url}'"));
    let shown = flat(&shop.ok(&format!("info child.vhdx --chain {with}")));
    assert!(shown.contains(&format!("&seal={root}")), "{shown}");
    let read = format!("io child.vhdx -r {with} -c 'read -P 7 1M 8M'");
    let error = flat(&shop.fails(1, &read));
    assert!(error.contains("are not those that were sealed"), "{error}");
    bytes[at] ^= 1;
    server.put("a/golden.vhdx", bytes.clone(), "\"1\"");
    shop.ok(&read);
    // What was proved once is in the cache, and stays proved.
    server.put("a/golden.vhdx", vec![0; bytes.len()], "\"1\"");
    shop.ok(&read);
    for (bad, why) in [
        (vec![0; 24], "it does not begin with DWSEAL"),
        (seal[..seal.len() - 32].to_vec(), "digests, expected"),
        ([&seal[..seal.len() - 1], &[seal[seal.len() - 1] ^ 1]].concat(), "expected"),
    ] {
        server.put("a/golden.vhdx.seal", bad, "\"s\"");
        let error = flat(&shop.fails(1, &read));
        assert!(error.contains(why) && error.contains("seal"), "{error}");
    }
    // The file here.
    shop.ok("io golden.vhdx -c 'write -P 1 1M 4K' -c flush");
    let found = shop.run("seal golden.vhdx --check --json");
    let report: serde_json::Value = serde_json::from_str(&found.stdout).unwrap();
    assert_eq!(found.code, Some(3));
    assert!(!report["different"].as_array().unwrap().is_empty(), "{report}");
}

#[test]
fn the_cache_is_listed_dropped_and_filled() {
    let (shop, server) = (Workshop::new(), TestServer::start());
    let bytes = golden(&shop);
    server.put("golden.vhdx", bytes.clone(), "\"1\"");
    let url = server.url("golden.vhdx");
    let shown = flat(&shop.ok("cache list"));
    assert!(shown.contains("0 bytes of at most 20 GiB"), "{shown}");
    shop.ok(&format!("io '{url}' -r -c 'read -P 9 40M 64K'"));
    let listed = shop.json("cache list");
    let held = listed["held"].as_u64().unwrap();
    assert!(held > 0 && held < bytes.len() as u64 && listed["objects"][0]["name"] == url.as_str(), "{listed}");
    // What this machine has read is fetched on another one, and no more.
    let read = &listed["objects"][0]["read_ranges"];
    assert!(listed["objects"][0]["read"].as_u64().unwrap() < held, "{listed}");
    fs::write(shop.path("boot.json"), listed.to_string()).unwrap();
    shop.ok("cache drop --everything");
    assert_eq!(shop.json("cache list")["held"], 0);
    shop.ok(&format!("cache prefetch '{url}' --ranges boot.json"));
    assert_eq!(shop.json("cache list")["objects"][0]["ranges"], *read);
    server.take_seen();
    shop.ok(&format!("io '{url}' -r -c 'read -P 9 40M 64K'"));
    assert!(server.take_seen().iter().all(|seen| seen.range == Some(0..16)));
    shop.ok(&format!("cache prefetch '{url}'"));
    let shown = flat(&shop.ok(&format!("cache list '{url}'")));
    assert!(shown.contains(&url) && shown.contains(" no "), "{shown}");
    assert_eq!(shop.json("cache list")["held"], bytes.len());
    shop.ok(&format!("cache drop '{url}'"));
    assert_eq!(shop.json("cache list")["objects"].as_array().unwrap().len(), 0);
    // Wrong input.
    let error = shop.fails(1, &format!("cache prefetch '{url}' --ranges golden.vhdx"));
    assert!(flat(&error).contains("cannot read it"), "{error}");
    fs::write(shop.path("other.json"), "{}").unwrap();
    let error = shop.fails(1, &format!("cache prefetch '{url}' --ranges other.json"));
    assert!(flat(&error).contains("expected what `cache list URL --json` prints"), "{error}");
    let error = shop.fails(2, "cache drop golden.vhdx");
    assert!(flat(&error).contains("expected s3://BUCKET/KEY"), "{error}");
    shop.fails(2, "cache drop");
}

#[test]
fn what_cannot_be_done_with_an_object_is_said() {
    let (shop, server) = (Workshop::new(), TestServer::start());
    server.put("golden.vhdx", golden(&shop), "\"1\"");
    let url = server.url("golden.vhdx");
    for (line, why) in [
        (
            format!("io '{url}' -c 'write 0 4K'"),
            "an object cannot be written in place; open it read-only, or make a child of it",
        ),
        (format!("create '{}' --size 1M", server.url("new.vhdx")), "an object cannot be written in place"),
        (format!("compact '{url}'"), "an object cannot be written in place"),
        (format!("info '{}'", server.url("none.vhdx")), "the server has no such object (404 Not Found)"),
        ("info http://192.0.2.1/x.vhdx".into(), "http:// is not encrypted"),
        ("info https://user:word@".into(), "it has no host"),
    ] {
        let error = flat(&shop.fails(1, &line));
        assert!(error.contains(why) && !error.contains("word"), "{line}: {error}");
    }
    // A file that a program changed while it lay there: the child says so, and shows nothing wrong.
    let with = format!("--allow-parent-dir '{}'", server.url(""));
    shop.ok(&format!("create child.vhdx --parent '{url}'"));
    shop.ok("io golden.vhdx -c 'write -P 1 1M 4K' -c flush");
    server.put("golden.vhdx", fs::read(shop.path("golden.vhdx")).unwrap(), "\"2\"");
    let error = flat(&shop.fails(1, &format!("io child.vhdx {with} -c 'read 1M 4K'")));
    assert!(error.contains("the object is another version: it has ETag \"2\""), "{error}");
    let error = flat(&shop.fails(1, &format!("reconnect child.vhdx --parent '{url}'")));
    assert!(error.contains("is not the disk it was made from"), "{error}");
}

#[test]
fn a_child_records_the_version_of_its_parent() {
    let (shop, server) = (Workshop::new(), TestServer::start());
    let with = format!("--allow-parent-dir '{}'", server.url("a"));
    for (format, parent) in [("vhdx", "vhdx"), ("vhd", "vhd"), ("qcow2", "raw"), ("vmdk", "vmdk")] {
        let (golden, child) = (format!("a.{parent}"), format!("child.{format}"));
        shop.ok(&format!("create {golden} --size 64M"));
        shop.ok(&format!("io {golden} -c 'write -P 7 1M 1M' -c flush"));
        let bytes = fs::read(shop.path(&golden)).unwrap();
        fs::remove_file(shop.path(&golden)).unwrap();
        server.put(&format!("a/{golden}"), bytes.clone(), "\"1\"");
        let url = server.url(&format!("a/{golden}"));
        shop.ok(&format!("create {child} --parent '{url}'"));
        let recorded = format!("{url}#etag=%221%22&size={}", bytes.len());
        let shown = flat(&shop.ok(&format!("info {child} --chain {with}")));
        assert!(shown.contains(&recorded), "{shown}");
        // Uploaded again: it may be the same or not.
        server.put(&format!("a/{golden}"), bytes, "\"2\"");
        for line in [format!("io {child} {with} -r -c 'read 1M 4K'"), format!("info '{recorded}'")] {
            let error = flat(&shop.fails(1, &line));
            assert!(error.contains("it has ETag \"2\"") && error.contains("expected ETag \"1\""), "{error}");
        }
        let more = if format == "vhd" { "--ignore-parent-timestamp" } else { "" };
        shop.ok(&format!("reconnect {child} --parent '{url}' {more}"));
        shop.ok(&format!("io {child} {with} -r -c 'read -P 7 1M 1M'"));
        let shown = flat(&shop.ok(&format!("info {child} --chain {with}")));
        assert!(shown.contains("#etag=%222%22"), "{shown}");
    }
}

/// nginx with TLS in front of a folder.
fn nginx(shop: &Workshop, root: &Path) -> Option<(Running, u16)> {
    let program = found("a golden image behind nginx", "nginx")?;
    let (state, port) = (shop.path("nginx"), free_port());
    fs::create_dir(&state).unwrap();
    certificates::write(&state);
    let (at, root) = (state.display(), root.display());
    let config = format!(
        "daemon off; master_process off; pid {at}/pid; error_log {at}/log;\nevents {{}}\nhttp {{\n  access_log {at}/access;\n  \
         client_body_temp_path {at}/t1; proxy_temp_path {at}/t2; fastcgi_temp_path {at}/t3; uwsgi_temp_path {at}/t4; scgi_temp_path {at}/t5;\n  \
         server {{ listen 127.0.0.1:{port} ssl; ssl_certificate {at}/server-cert.pem; ssl_certificate_key {at}/server-key.pem; root {root};\n    \
         location /moved/ {{ return 302 /images/; }}\n    location /closed/ {{ return 403; }} }}\n}}\n"
    );
    fs::write(state.join("conf"), config).unwrap();
    let mut command = Command::new(program);
    command.arg("-c").arg(state.join("conf")).args(["-e", "stderr"]);
    let running = Running::start(command.stdout(Stdio::null()).stderr(Stdio::null()));
    wait_for(port);
    Some((running, port))
}

#[test]
fn a_golden_image_behind_nginx() {
    let shop = Workshop::new();
    let root = shop.path("www");
    fs::create_dir_all(root.join("images")).unwrap();
    let Some((mut server, port)) = nginx(&shop, &root) else { return };
    golden(&shop);
    fs::rename(shop.path("golden.vhdx"), root.join("images/golden image.vhdx")).unwrap();
    let url = format!("https://localhost:{port}/images/golden%20image.vhdx");
    let run = |line: &str, trusts: bool| {
        let words = crate::common::words(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut command = shop.command(&words);
        if trusts {
            command.env("SSL_CERT_FILE", shop.path("nginx/ca-cert.pem"));
        }
        let output = command.env("DISKWRIGHT_HTTP_TIMEOUT", "2").output().unwrap();
        let text = |bytes: &[u8]| flat(&String::from_utf8_lossy(bytes));
        (output.status.success(), text(&output.stdout) + &text(&output.stderr))
    };
    let (ok, said) = run(&format!("io '{url}' -r -c 'read -P 7 1M 8M' -c 'read -P 9 40M 64K'"), true);
    assert!(ok, "{said}");
    // Its certificate is nobody's that this machine trusts.
    let (ok, said) = run(&format!("info '{url}'"), false);
    assert!(!ok && said.contains("certificate"), "{said}");
    let (ok, said) = run(&format!("info 'https://localhost:{port}/closed/x.vhdx'"), true);
    assert!(!ok && said.contains("403 Forbidden"), "{said}");
    let (ok, said) = run(&format!("create child.vhdx --parent '{url}'"), true);
    assert!(ok, "{said}");
    let with = format!("--allow-parent-dir 'https://localhost:{port}/images'");
    let (ok, said) = run(&format!("io child.vhdx {with} -c 'read -P 7 1M 8M' -c 'write -P 4 0 64K' -c flush"), true);
    assert!(ok, "{said}");
    // The server goes: what is kept cannot be opened without it, and that is said.
    server.kill().unwrap();
    server.wait().unwrap();
    let (ok, said) = run(&format!("io child.vhdx {with} -c 'read -P 7 1M 8M'"), true);
    assert!(!ok && said.contains("did not send it within 2 s"), "{said}");
}

#[test]
fn a_golden_image_in_a_bucket() {
    let mut shop = Workshop::new();
    let Some(_server) = versitygw("a golden image in a bucket", &mut shop, &["golden"]) else { return };
    let variables = shop.variables.clone();
    golden(&shop);
    // Its own uploads, since a bucket needs an ETag for each object.
    for key in ["win/2022%20base.vhdx", "debian.vhdx"] {
        let mut upload = Command::new("curl");
        upload.args(["-sS", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "AKIATEST:very-secret"]);
        upload.args(["-H", "x-amz-content-sha256: UNSIGNED-PAYLOAD", "-T"]).arg(shop.path("golden.vhdx"));
        let done = upload.arg(format!("{}/golden/{key}", variables[0].1)).status().unwrap();
        assert!(done.success(), "{key}");
    }
    let url = "s3://golden/win/2022 base.vhdx";
    let run = |line: &str, changed: &[(&'static str, &str)]| {
        let words = crate::common::words(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut command = shop.command(&words);
        command.envs(variables.iter().map(|(name, value)| (*name, value.as_str())));
        for (name, value) in changed {
            match value.is_empty() {
                true => command.env_remove(name),
                false => command.env(name, value),
            };
        }
        let output = command.output().unwrap();
        let text = |bytes: &[u8]| flat(&String::from_utf8_lossy(bytes));
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(!said.contains("very-secret") && !said.contains("Signature="), "{said}");
        (output.status.success(), said)
    };
    let (ok, said) = run(&format!("io '{url}' -r -c 'read -P 7 1M 8M' -c 'read -P 9 40M 64K'"), &[]);
    assert!(ok, "{said}");
    let (ok, said) = run(&format!("create child.vhdx --parent '{url}'"), &[]);
    assert!(ok, "{said}");
    let (ok, said) = run("io child.vhdx --allow-parent-dir s3://golden/win -c 'read -P 7 1M 8M' -c 'write 0 64K'", &[]);
    assert!(ok, "{said}");
    let line = crate::readme::OF_A_BUCKET.strip_prefix("diskwright ").unwrap();
    let (ok, said) = run(line, &[]);
    assert!(ok, "{said}");
    let (ok, said) = run("info vm.vhdx --chain --allow-parent-dir s3://golden", &[]);
    assert!(ok && said.contains("s3://golden/debian.vhdx"), "{said}");
    // The credentials of a profile.
    let keys = [("AWS_ACCESS_KEY_ID", ""), ("AWS_SECRET_ACCESS_KEY", "")];
    fs::create_dir_all(shop.path("home/.aws")).unwrap();
    fs::write(
        shop.path("home/.aws/credentials"),
        "[lab]\naws_access_key_id = AKIATEST\naws_secret_access_key = very-secret\n",
    )
    .unwrap();
    let (ok, said) = run(&format!("info '{url}'"), &[keys[0], keys[1], ("AWS_PROFILE", "lab")]);
    assert!(ok, "{said}");
    for (changed, name, why) in [
        (vec![keys[0], keys[1], ("AWS_PROFILE", "none")], url, "no profile \"none\""),
        (vec![("AWS_SECRET_ACCESS_KEY", "wrong")], url, "SignatureDoesNotMatch"),
        (
            vec![("AWS_ACCESS_KEY_ID", "AKIANONE")],
            url,
            "cannot open it: the server has no such object (404 Not Found: XAdmin",
        ),
        (vec![], "s3://golden/none.vhdx", "the server has no such object"),
        (vec![], "s3://nobucket/x.vhdx", "the server has no such object"),
        (vec![("AWS_ENDPOINT_URL", "http://192.0.2.1:9")], url, "http:// is not encrypted"),
    ] {
        let (ok, said) = run(&format!("info '{name}'"), &changed);
        assert!(!ok && said.contains(why), "{changed:?} {name}: {said}");
    }
    // Nothing secret is on the disk.
    for file in fs::read_dir(shop.path(".cache")).unwrap().chain(fs::read_dir(shop.path(".")).unwrap()).flatten() {
        let bytes = fs::read(file.path()).unwrap_or_default();
        assert!(!bytes.windows(11).any(|window| window == b"very-secret"), "{}", file.path().display());
    }
}

#[test]
fn programs_share_the_cache_and_one_that_is_killed_stops_none() {
    let (shop, server) = (Workshop::new(), TestServer::start());
    server.put("golden.vhdx", golden(&shop), "\"1\"");
    server.set_latency(Duration::from_millis(40));
    let url = server.url("golden.vhdx");
    let start = |number: usize| {
        let to = format!("copy{number}.raw");
        Running::start(shop.command(&["convert", &url, &to]).stdout(Stdio::null()).stderr(Stdio::piped()))
    };
    let mut running: Vec<Running> = (0..4).map(start).collect();
    // Somewhere in the middle.
    let begun = Instant::now();
    while server.most_under_way() == 0 && begun.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(1));
    }
    thread::sleep(Duration::from_millis(60));
    let mut killed = running.remove(0);
    killed.kill().unwrap();
    killed.wait().unwrap();
    for one in running {
        let output = one.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let seen = server.take_seen();
    let ranges = seen.iter().filter_map(|seen| seen.range.clone()).filter(|range| *range != (0..16));
    let mut blocks: Vec<u64> = ranges.flat_map(|range| range.start >> 20..range.end.div_ceil(1 << 20)).collect();
    let all = blocks.len();
    blocks.sort_unstable();
    blocks.dedup();
    // What the killed one had under way is fetched by another one.
    assert!(all - blocks.len() <= 16, "{all} blocks were fetched, {} of them different", blocks.len());
    for number in 1..4 {
        shop.ok(&format!("compare copy{number}.raw golden.vhdx"));
    }
}
