//! Parses DiskSpd's switches. An unknown switch and a bad value are errors that name the switch.
//!
//! A switch and its value are one word (`-b8K`), and case matters. The words after the switches are
//! targets. Sizes take `K M G T` (powers of 1024) and `b` (blocks of `-b`, also when `-b` comes
//! later). A switch that only Windows supports is accepted with a note where the test is the same
//! without the switch, and is an error otherwise.

use super::{
    profile::{Order, Profile, ResultForm, Target, Throughput, TimeSpan, WriteContents},
    values::{Result, SwitchError, affinity, bad, number, positive, refuse, size, small, spots},
};
use diskwright_load::job::Caching;

/// Parses the words after `diskspd`. [`super::ProfileCommand`] parses a command line with `-X`.
///
/// # Errors
/// [`SwitchError`].
pub fn parse(words: &[String]) -> Result<Profile> {
    let words: Vec<String> = words.iter().map(|word| plain_hyphen(word)).collect();
    let (switches, paths) = split(&words)?;
    if paths.is_empty() {
        return Err(SwitchError::Together("there is no target; name at least one file, disk or block device".into()));
    }
    let mut reader = Reader::new(block_size(switches)?);
    for switch in switches {
        reader.read(switch)?;
    }
    let mut profile = reader.finish(paths)?;
    profile.command_line = command_line(&words);
    Ok(profile)
}

/// Splits words into switches and targets.
pub(super) fn split(words: &[String]) -> Result<(&[String], &[String])> {
    let first_target = words.iter().position(|word| !word.starts_with('-')).unwrap_or(words.len());
    let (switches, paths) = words.split_at(first_target);
    if let Some(late) = paths.iter().find(|word| word.starts_with('-') && word.len() > 1) {
        return Err(SwitchError::Together(format!("{late} comes after a target; put switches before the targets")));
    }
    if let Some(windows) = paths.iter().find(|path| is_windows_device(path)) {
        return Err(SwitchError::Together(format!(
            "{windows} is a Windows name of a disk; name a block device, as in /dev/sdb"
        )));
    }
    Ok((switches, paths))
}

/// The command line for the report.
pub(super) fn command_line(words: &[String]) -> String {
    std::iter::once("diskwright diskspd").chain(words.iter().map(String::as_str)).collect::<Vec<_>>().join(" ")
}

/// The values of the switches that can also be used with `-X`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct RunSwitches {
    pub(super) duration_s: Option<u64>,
    pub(super) warm_up_s: Option<u64>,
    pub(super) cool_down_s: Option<u64>,
    pub(super) seed: Option<u64>,
    pub(super) verbose: bool,
    pub(super) form: Option<ResultForm>,
    pub(super) profile_only: bool,
}

impl RunSwitches {
    /// Parses a switch. Returns `false` when it is not one of these switches.
    pub(super) fn read(&mut self, switch: &str) -> Result<bool> {
        let mut letters = switch.chars();
        letters.next();
        let letter = letters.next();
        let value = letters.as_str();
        match letter {
            Some('d') => self.duration_s = Some(number(switch, value, 1, YEAR_S)?),
            Some('W') => self.warm_up_s = Some(number(switch, value, 0, YEAR_S)?),
            Some('C') => self.cool_down_s = Some(number(switch, value, 0, YEAR_S)?),
            Some('z') => {
                self.seed = Some(if value.is_empty() { time_seed() } else { number(switch, value, 0, u64::MAX)? });
            }
            Some('v') if value.is_empty() || value == "s" => self.verbose = true,
            Some('R') => self.results(switch, value)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn results(&mut self, switch: &str, value: &str) -> Result<()> {
        let form = value.strip_prefix('p').inspect(|_| self.profile_only = true).unwrap_or(value);
        self.form = match form {
            "text" => Some(ResultForm::Text),
            "xml" => Some(ResultForm::Xml),
            // The format of the profile.
            "" if self.profile_only => self.form,
            _ => return Err(bad(switch, format!("\"{form}\" is not a result format; use text or xml"))),
        };
        Ok(())
    }
}

/// Replaces a leading dash by a hyphen: word processors convert hyphens, also in the paper's text.
pub(super) fn plain_hyphen(word: &str) -> String {
    match word.chars().next() {
        Some(dash @ ('\u{2010}'..='\u{2015}' | '\u{2212}')) => format!("-{}", &word[dash.len_utf8()..]),
        _ => word.to_owned(),
    }
}

/// Whether a path is a Windows disk: `#1` or `F:`.
fn is_windows_device(path: &str) -> bool {
    let drive = path.len() == 2 && path.ends_with(':') && path.starts_with(|c: char| c.is_ascii_alphabetic());
    drive
        || path.strip_prefix('#').is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

/// The block size, which is parsed first because other sizes may be given in blocks.
fn block_size(switches: &[String]) -> Result<u64> {
    let Some(switch) = switches.iter().rfind(|switch| switch.starts_with("-b")) else { return Ok(64 << 10) };
    let bytes = size(switch, &switch[2..], None)?;
    if bytes == 0 { Err(bad(switch, "the block size is 0; give a size, as in -b8K")) } else { Ok(bytes) }
}

/// Longest time in seconds: a year.
const YEAR_S: u64 = 366 * 24 * 3600;

/// Collects the switches of a command line, on which all targets have the same settings.
struct Reader {
    span: TimeSpan,
    target: Target,
    given: RunSwitches,
    notes: Vec<String>,
    buffered: Option<bool>,
    write_through: bool,
    random: Option<Option<u64>>,
    random_percent: Option<f64>,
    stride: Option<u64>,
    interlocked: bool,
    part_bytes: Option<u64>,
    threads_given: bool,
}

impl Reader {
    fn new(block_bytes: u64) -> Self {
        Self {
            span: TimeSpan::default(),
            target: Target { block_bytes, ..Target::new("") },
            given: RunSwitches::default(),
            notes: Vec::new(),
            buffered: None,
            write_through: false,
            random: None,
            random_percent: None,
            stride: None,
            interlocked: false,
            part_bytes: None,
            threads_given: false,
        }
    }

    fn read(&mut self, switch: &str) -> Result<()> {
        if self.given.read(switch)? {
            return Ok(());
        }
        let mut letters = switch.chars();
        letters.next();
        let Some(letter) = letters.next() else { return Err(SwitchError::Unknown { switch: switch.into() }) };
        let value = letters.as_str();
        let block = Some(self.target.block_bytes);
        match letter {
            'a' => {
                self.span.affinity = affinity(switch, value)?;
            }
            'b' => {}
            'B' => {
                let (base, length) = value.split_once(':').map_or((value, None), |(base, length)| (base, Some(length)));
                self.target.base_bytes = size(switch, base, block)?;
                self.part_bytes = length.map(|length| size(switch, length, block)).transpose()?;
            }
            'c' => self.target.create_bytes = Some(positive(switch, size(switch, value, block)?)?),
            'D' => {
                self.span.iops_every_ms =
                    Some(if value.is_empty() { 1000 } else { number(switch, value, 10, 3_600_000)? })
            }
            'e' => {
                return refuse(switch, "it is for Event Tracing for Windows; use `perf trace` or `blktrace`");
            }
            'f' if value.starts_with(|c: char| c.is_ascii_digit()) => {
                self.target.max_bytes = positive(switch, size(switch, value, block)?)?;
            }
            'f' if !value.is_empty() && value.chars().all(|hint| "rst".contains(hint)) => {
                self.note(switch, "Linux has no such hints for opening a file");
            }
            'F' => self.span.threads_in_all = small(switch, value, 1, diskwright_load::job::THREADS_MAX)?,
            'g' => {
                let per_second = value.strip_suffix('i');
                let limit = number(switch, per_second.unwrap_or(value), 1, u64::MAX / 1000)?;
                self.target.throughput =
                    Some(if per_second.is_some() { Throughput::Iops(limit) } else { Throughput::BytesPerMs(limit) });
            }
            'h' if value.is_empty() => self.cache(switch, "h")?,
            'i' => self.target.burst = small(switch, value, 1, u32::MAX)?,
            'j' => self.target.think_ms = number(switch, value, 1, YEAR_S)?,
            'I' => {
                self.target.priority = small(switch, value, 1, 5)?;
                self.note(switch, "requests have no priority; use ionice");
            }
            // Buffers are always in huge pages.
            'l' if value.is_empty() => {}
            'L' if value.is_empty() => self.span.measure_latency = true,
            'n' if value.is_empty() => self.span.affinity_disabled = true,
            'N' => return refuse(switch, "it is for memory-mapped files; use -Sw for durable writes"),
            'o' => self.target.requests = small(switch, value, 1, diskwright_load::job::QUEUE_DEPTH_MAX)?,
            'O' => self.span.requests_in_all = small(switch, value, 1, diskwright_load::job::QUEUE_DEPTH_MAX)?,
            'p' if value.is_empty() => self.target.parallel = true,
            'P' => {
                if !value.is_empty() {
                    number(switch, value, 0, u64::MAX)?;
                }
                self.note(switch, "progress is shown by time, on standard error");
            }
            'r' => self.random(switch, value)?,
            's' => {
                let stride = value.strip_prefix('i');
                self.interlocked |= stride.is_some();
                let stride = stride.unwrap_or(value);
                if !stride.is_empty() {
                    self.stride = Some(positive(switch, size(switch, stride, block)?)?);
                }
            }
            'S' => self.cache(switch, value)?,
            't' => {
                self.target.threads = small(switch, value, 1, diskwright_load::job::THREADS_MAX)?;
                self.threads_given = true;
            }
            'T' => self.target.thread_stride_bytes = positive(switch, size(switch, value, block)?)?,
            'w' => self.target.write_percent = if value.is_empty() { 0 } else { small(switch, value, 0, 100)? },
            'x' if value.is_empty() => self.note(switch, "completions always come from io_uring"),
            'y' => return refuse(switch, "it is for Windows events; start and stop the program from a script"),
            'Z' => self.write_contents(switch, value)?,
            _ => return Err(SwitchError::Unknown { switch: switch.into() }),
        }
        Ok(())
    }

    fn note(&mut self, switch: &str, what: &str) {
        self.notes.push(format!("{switch} has no effect: {what}"));
    }

    fn random(&mut self, switch: &str, value: &str) -> Result<()> {
        if let Some(percent) = value.strip_prefix('s') {
            let percent: f64 = percent
                .parse()
                .ok()
                .filter(|percent| (0.0..=100.0).contains(percent))
                .ok_or_else(|| bad(switch, format!("\"{percent}\" is not a percentage from 0 to 100")))?;
            self.random_percent = Some(percent);
        } else if let Some(distribution) = value.strip_prefix('d') {
            self.target.spots = spots(switch, distribution)?;
        } else {
            let block = Some(self.target.block_bytes);
            let align =
                (!value.is_empty()).then(|| size(switch, value, block).and_then(|align| positive(switch, align)));
            self.random = Some(align.transpose()?);
        }
        Ok(())
    }

    /// Parses the letters of `-S`. Caching and write-through may each be set once.
    fn cache(&mut self, switch: &str, letters: &str) -> Result<()> {
        let twice = || {
            SwitchError::Together(format!("{switch} and an earlier switch both set the cache mode; give one of them"))
        };
        let letters = if letters.is_empty() { "u" } else { letters };
        for letter in letters.chars() {
            let (buffered, through) = match letter {
                'b' => (Some(true), false),
                'u' => (Some(false), false),
                'w' => (None, true),
                'h' => (Some(false), true),
                'r' => return refuse(switch, "Linux cannot disable only the cache of a remote file system; use -Su"),
                'm' => return refuse(switch, "files are not memory-mapped; use another -S"),
                _ => return Err(bad(switch, format!("\"{letter}\" is not a cache mode; use b, h, u or w"))),
            };
            if buffered.is_some() && self.buffered.is_some() || through && self.write_through {
                return Err(twice());
            }
            self.buffered = self.buffered.or(buffered);
            self.write_through |= through;
        }
        Ok(())
    }

    fn write_contents(&mut self, switch: &str, value: &str) -> Result<()> {
        self.target.contents = match value {
            "" => WriteContents::Zero,
            "r" => {
                self.span.random_write_data = true;
                WriteContents::Random { buffer_bytes: 0 }
            }
            _ if value.contains(',') => {
                return refuse(
                    switch,
                    "write buffers are not read from a file; use -Z1M for random data or -Z for zeros",
                );
            }
            _ => WriteContents::Random {
                buffer_bytes: positive(switch, size(switch, value, Some(self.target.block_bytes))?)?,
            },
        };
        Ok(())
    }

    fn finish(mut self, paths: &[String]) -> Result<Profile> {
        let together = |what: &str| Err(SwitchError::Together(what.to_owned()));
        if self.span.threads_in_all > 0 && self.threads_given {
            return together("-F and -t exclude each other: -F gives all threads, -t those of each target");
        }
        if self.span.requests_in_all > 0 && self.span.threads_in_all == 0 {
            return together("-O needs -F; use -o for the requests of each thread on its target");
        }
        if self.target.burst > 0 && self.target.think_ms == 0 {
            return together("-i needs -j, the pause between bursts");
        }
        if self.interlocked && self.target.thread_stride_bytes > 0 {
            return together("-si and -T exclude each other: interlocked threads share one stream");
        }
        if self.span.affinity_disabled && !self.span.affinity.is_empty() {
            return together("-n and -a exclude each other: -n disables affinity, -a sets it");
        }
        let random = self.random.is_some() || self.random_percent.is_some() || !self.target.spots.is_empty();
        if self.target.parallel {
            if random {
                return together("-p and -r exclude each other: -p needs sequential requests");
            }
            if self.interlocked {
                return together(
                    "-p and -si exclude each other: with -p each request has a stream, with -si all threads share one",
                );
            }
            if self.span.requests_in_all > 0 {
                return together("-p and -O exclude each other; use -o for the requests of each thread on its target");
            }
            if self.target.requests == 1 {
                self.notes.push("-p has no effect: each thread has one request in flight (-o1)".into());
            }
        }
        if random && (self.stride.is_some() || self.interlocked) {
            self.notes.push("-s has no effect: -r was also given".into());
        }
        self.target.order = if random {
            Order::Random { align_bytes: self.random.flatten(), percent: self.random_percent.unwrap_or(100.0) }
        } else {
            Order::Sequential { stride_bytes: self.stride, interlocked: self.interlocked }
        };
        if let Some(part) = self.part_bytes {
            let end = self
                .target
                .base_bytes
                .checked_add(part)
                .ok_or_else(|| bad("-B", "the sum of base and length is too large"))?;
            self.target.max_bytes = if self.target.max_bytes == 0 { end } else { end.min(self.target.max_bytes) };
        }
        self.target.cache = match (self.buffered.unwrap_or(true), self.write_through) {
            (true, false) => Caching::Cached,
            (true, true) => Caching::WriteThrough,
            (false, false) => Caching::Direct,
            (false, true) => Caching::DirectWriteThrough,
        };
        if self.target.write_percent > 0 && self.target.contents == WriteContents::Sequential {
            self.notes.push(
                "without -Z, incompressible bytes are written instead of DiskSpd's repeated bytes 0 to 255, which some devices compress".into(),
            );
        }
        self.span.duration_s = self.given.duration_s.unwrap_or(self.span.duration_s);
        self.span.warm_up_s = self.given.warm_up_s.unwrap_or(self.span.warm_up_s);
        self.span.cool_down_s = self.given.cool_down_s.unwrap_or(self.span.cool_down_s);
        self.span.seed = self.given.seed.unwrap_or(self.span.seed);
        self.span.targets = paths.iter().map(|path| Target { path: path.clone(), ..self.target.clone() }).collect();
        Ok(Profile {
            command_line: String::new(),
            verbose: self.given.verbose,
            // -Rp always prints XML.
            form: self.given.form.unwrap_or(if self.given.profile_only { ResultForm::Xml } else { ResultForm::Text }),
            profile_only: self.given.profile_only,
            time_spans: vec![self.span],
            notes: self.notes,
        })
    }
}

/// The seed for `-z` without a value, which differs from run to run.
fn time_seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(1, |since| since.as_millis() as u64 & 0xffff_ffff)
}
