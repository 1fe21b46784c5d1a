//! Servers that fail and lie.

use super::{BLOCK, Bench, all};
use crate::testing::Fault;
use diskwright_store::{FileSystem, OpenOptions};
use std::{path::Path, time::Duration};

/// How the reading of a block ends if the next answer has a fault.
fn read_with(fault: Fault) -> Result<(), String> {
    let (bench, bytes) = Bench::new(2 * BLOCK);
    let store = bench.open();
    bench.server.next([Some(fault)]);
    let mut buf = vec![0; 10_000];
    let result = store.read_at(&mut buf, 500);
    assert!(result.is_err() || buf == bytes[500..10_500], "wrong bytes were shown");
    result.map_err(|error| error.to_string())
}

#[test]
fn failures_that_pass_are_tried_again() {
    for fault in [
        Fault::Status(503, "<Error><Code>SlowDown</Code></Error>".into()),
        Fault::Status(500, String::new()),
        Fault::Status(429, String::new()),
        Fault::Half,
        Fault::Drip(100_000, Duration::from_millis(20)),
        Fault::Silence(Duration::from_millis(300)),
    ] {
        read_with(fault.clone()).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
    }
}

#[test]
fn answers_that_are_wrong_are_refused() {
    for (fault, why) in [
        (Fault::OtherRange, "bytes 0-1048575 were asked for"),
        (Fault::OtherEtag, "its ETag was \"one\", and is \"other\""),
        (Fault::OtherSize, "it had 2097152 bytes, and has 2097153"),
        (Fault::More, "1048576 bytes were asked for, and it sends 1048580"),
        (Fault::Gzip, "encoded"),
        (Fault::Whole, "ignores the header Range"),
        (Fault::Status(412, String::new()), "the object has changed"),
        (Fault::Status(416, String::new()), "the object has changed"),
        (Fault::Status(404, String::new()), "no such object"),
        (
            Fault::Status(403, "<Error><Code>AccessDenied</Code><Message>No.</Message></Error>".into()),
            "AccessDenied: No.",
        ),
        (Fault::Status(418, String::new()), "the server's answer is wrong"),
    ] {
        let error = read_with(fault.clone()).expect_err("it was taken");
        assert!(error.contains(why), "{fault:?}: {error}");
    }
}

#[test]
fn a_connection_that_is_cut_at_any_byte_changes_nothing() {
    let (bench, bytes) = Bench::new(300);
    // The head has about 200 bytes.
    for sent in 0..=520 {
        bench.server.put("disk", bytes.clone(), &format!("\"{sent}\""));
        bench.server.next([Some(Fault::Cut(sent)), None, Some(Fault::Cut(520 - sent))]);
        let store = bench.open();
        assert!(all(&*store) == bytes, "cut after {sent} bytes");
    }
}

#[test]
fn an_object_that_changes_is_an_error_and_never_a_mixture() {
    let (bench, bytes) = Bench::new(4 * BLOCK);
    let store = bench.open();
    let mut buf = [0; 4096];
    store.read_at(&mut buf, 0).unwrap();
    bench.server.put("disk", vec![9; 4 * BLOCK], "\"two\"");
    // What was fetched is still the old version.
    store.read_at(&mut buf, 8192).unwrap();
    assert_eq!(buf, bytes[8192..12_288]);
    let error = store.read_at(&mut buf, 2 * BLOCK as u64).unwrap_err();
    assert!(error.to_string().contains("has changed since it was opened"), "{error}");
    // A new open shows the new version only.
    let now = bench.open();
    assert!(all(&*now).iter().all(|&byte| byte == 9));
    // A smaller one.
    bench.server.put("disk", vec![5; BLOCK], "\"one\"");
    let error = store.read_at(&mut buf, 2 * BLOCK as u64).unwrap_err();
    assert!(error.to_string().contains("has changed"), "{error}");
}

#[test]
fn what_cannot_be_a_disk_is_refused_when_it_is_opened() {
    let (bench, _) = Bench::new(0);
    let files = bench.files();
    let open = |name: &str| {
        let path = if name.contains("://") { name.to_owned() } else { bench.server.url(name) };
        match files.open(Path::new(&path), &OpenOptions::default()) {
            Ok(store) => panic!("{name} was opened: {}", store.name().display()),
            Err(error) => error.to_string(),
        }
    };
    bench.server.put("weak", vec![1; 1000], "W/\"x\"");
    for (name, why) in [
        ("disk", "the object is empty"),
        ("nothing", "the server has no such object (404 Not Found)"),
        ("weak", "no strong ETag"),
        ("", "it names no object"),
        ("http://example.com/x", "http:// is not encrypted"),
        ("ftp://example.com/x", "expected s3://"),
    ] {
        let error = open(name);
        assert!(error.contains(why), "{name}: {error}");
    }
    bench.server.put("whole", vec![1; 1000], "\"x\"");
    bench.server.next([Some(Fault::Whole)]);
    let error = open("whole");
    assert!(error.contains("sends whole objects only"), "{error}");
    let options = OpenOptions { writable: true, ..OpenOptions::default() };
    let error = files.open(Path::new(&bench.server.url("whole")), &options).unwrap_err();
    assert!(error.to_string().contains("or make a child of it"), "{error}");
    // Nobody listens: an address that is wrong is soon said to be, whatever the timeout.
    let gone = crate::testing::TestServer::start().url("x");
    let settings = crate::Settings { timeout: Duration::from_secs(600), ..bench.settings() };
    let error = crate::ObjectFiles::new(Some(settings)).open(Path::new(&gone), &OpenOptions::default()).unwrap_err();
    assert!(error.to_string().contains("did not send it within 5 s"), "{error}");
}

#[test]
fn redirects_are_followed_where_nothing_is_given_away() {
    let (bench, bytes) = Bench::new(3000);
    let other = crate::testing::TestServer::start();
    other.put("there", bytes.clone(), "\"there\"");
    let files = bench.files();
    let open = |path: &str| files.open(Path::new(path), &OpenOptions::default());
    // Always, since each request is led on.
    bench.server.always(Some(Fault::Redirect(other.url("there"))));
    let store = open(&bench.server.url("disk")).unwrap();
    assert!(all(&*store) == bytes);
    let secret = format!("{}?sig=SECRET", bench.server.url("disk"));
    let error = crate::ObjectFiles::new(Some(bench.settings()))
        .open(Path::new(&secret), &OpenOptions::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("another host, which would be shown secrets") && !error.contains("SECRET"), "{error}");
    for (to, why) in [
        ("http://example.com/x", "without encryption"),
        ("ftp://127.0.0.1/x", "by another protocol"),
        ("", "without an address"),
    ] {
        bench.server.always(Some(Fault::Redirect(to.into())));
        let error = open(&bench.server.url("disk")).unwrap_err().to_string();
        assert!(error.contains(why) || to.is_empty() && error.contains("leads from one"), "{to}: {error}");
    }
    bench.server.always(Some(Fault::Redirect("/disk".into())));
    let error = open(&bench.server.url("disk")).unwrap_err().to_string();
    assert!(error.contains("leads from one address to the next"), "{error}");
}

#[test]
fn a_public_bucket_is_read_without_credentials_and_its_region_is_named() {
    let (bench, bytes) = Bench::new(3000);
    bench.server.put("golden/a b/disk", bytes.clone(), "\"one\"");
    let variables = [
        ("AWS_ENDPOINT_URL", format!("http://{}", bench.server.host())),
        ("AWS_SKIP_SIGNATURE", "true".into()),
        ("AWS_REGION", "us-east-1".into()),
    ];
    let aws = variables.map(|(name, value)| (name.to_owned(), value)).into_iter().collect();
    let files = crate::ObjectFiles::new(Some(crate::Settings { aws, ..bench.settings() }));
    let open = || files.open(Path::new("s3://golden/a b/disk"), &OpenOptions::default());
    bench.server.put("golden/a%20b/disk", bytes.clone(), "\"one\"");
    assert!(all(&*open().unwrap()) == bytes);
    assert!(
        bench.server.take_seen().iter().all(|seen| seen.path == "/golden/a%20b/disk" && seen.authorization.is_none())
    );
    bench.server.next([Some(Fault::Region("eu-central-1".into()))]);
    let error = open().unwrap_err().to_string();
    assert!(error.contains("set AWS_REGION=eu-central-1"), "{error}");
    // Without credentials, and where there can be no role.
    let aws = [("AWS_ENDPOINT_URL".to_owned(), format!("http://{}", bench.server.host()))].into_iter().collect();
    let settings = crate::Settings { aws, timeout: Duration::from_secs(1), ..bench.settings() };
    let error = crate::ObjectFiles::new(Some(settings))
        .open(Path::new("s3://golden/x"), &OpenOptions::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("AWS_SKIP_SIGNATURE=true") || error.contains("no credentials"), "{error}");
}

/// A server that is slow, but never silent, is not lost.
#[test]
fn a_slow_server_has_its_time() {
    let (bench, bytes) = Bench::new(3000);
    let settings = crate::Settings { timeout: Duration::from_secs(1), ..bench.settings() };
    let store = bench.open_with(&crate::ObjectFiles::new(Some(settings))).unwrap();
    bench.server.next([Some(Fault::Drip(1000, Duration::from_millis(700)))]);
    assert!(all(&*store) == bytes, "2.1 s with a timeout of 1 s");
}
