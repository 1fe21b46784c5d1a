//! `diskwright diskspd`: takes DiskSpd's switches and prints DiskSpd's report, for scripts that
//! were written for it.
//!
//! Standard output holds the report and nothing else; notes, warnings and progress go to standard
//! error. DiskSpd overwrites its targets without asking. This command does not: files that `-c`
//! made may be written again, other data only with `--destroy-data`.

use super::lab::targets::TargetArgs;
use crate::{
    context::Context,
    describe::printable_lines,
    exit::{self, Failure, Outcome},
};
use clap::{ArgAction, Args, Command};
use diskwright_diskspd::{self as diskspd, Profile, ProfileCommand, ResultForm, SwitchError};
use diskwright_lab::output::{Kind, Output};
use diskwright_load::{job::Bytes, record::End, run::RunOptions};
use std::{
    fs::File,
    io::{Read, Write},
    path::{Path, PathBuf},
};

/// Longest XML profile that is read.
const PROFILE_MAX_BYTES: u64 = 1 << 20;

/// Arguments of `diskspd`.
#[derive(Debug, Args)]
#[command(
    disable_help_flag = true,
    after_help = "\
SWITCHES are DiskSpd's: one word with its value, and upper and lower case differ.
  -b<size>            block [64K]
  -o<n> -O<n>         requests of each thread and target [2]; of each thread
  -t<n> -F<n>         threads of each target [1]; of all
  -r[align] -rs<pct>  random; partly random
  -rd<pct|abs><...>   distribution of the random offsets
  -s[i][stride]       sequential; i: one stream for all threads
  -p                  each request in flight goes through the target by itself
                      (sequential only)
  -w<percent>         writes [0]
  -d<s> -W<s> -C<s>   duration, warm-up, cool-down
  -c<size>            make the files
  -f<size> -B<offset>[:length] -T<offset>
                      the part in use; distance from thread to thread
  -S[b|u|w|h] -h      caching
  -Z -Zr -Z<size>     zeros or random data to write
  -g<bytes/ms> -g<n>i limit of a thread
  -i<n> -j<ms>        bursts and pauses
  -L                  latencies
  -D[ms]              scatter of the IOPS
  -z[seed]            seed
  -a[g<n>,]<cpu>,...  bind threads to these processors in turns [all]
  -n                  do not bind threads
  -X<file>            XML profile; -d -W -C -z -R -v replace what it says, and
                      targets take the places of its templates *1, *2
  -R[p]<text|xml>     form of the results; -Rp prints the profile, runs nothing
-f<rst> -I -l -P -v -x are accepted and have no effect; -e -N -y -Sr -Sm are not supported.

Files that -c makes are filled with incompressible data first. Percentiles are shown only where ten requests or more lie beyond them.

EXIT CODES  0 done, 1 a request failed or the run could not be made, 2 used wrongly, 130 stopped

EXAMPLES
  diskwright diskspd -r -w30 -d600 -W300 -b8K -t8 -o12 -h -L -Z1M \\
      -c64G /mnt/nvme/test.dat
  diskwright diskspd -b4K -r -o32 -t2 -d10 -Sh -L disk.vhdx
  diskwright diskspd -Xprofile.xml -Rxml
  diskwright diskspd --destroy-data -w100 -b512K -d60 -Sh -L /dev/sdb"
)]
pub struct DiskspdArgs {
    /// Overwrite the data of the targets.
    #[arg(long)]
    destroy_data: bool,
    /// Save the result as JSON, for `lab report` and `lab compare`.
    #[arg(long, value_name = "FILE.json")]
    save: Option<PathBuf>,
    /// Print help.
    #[arg(long, action = ArgAction::Help)]
    help: Option<bool>,
    /// Switches, then targets: virtual disks, raw files, block devices, null:.
    #[arg(value_name = "SWITCHES AND TARGETS", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Runs the job of the switches, and prints the report. `line` makes the command line whose help is
/// shown.
pub fn run(context: &mut Context, args: &DiskspdArgs, line: fn() -> Command) -> Outcome {
    carry_out(context, args, line).map_err(|failure| match failure {
        Failure::Sentence(sentence) => Failure::Sentence(diskspd::with_diskspds_switches(&sentence)),
        Failure::Usage(sentence) => Failure::Usage(diskspd::with_diskspds_switches(&sentence)),
        other => other,
    })
}

fn carry_out(context: &mut Context, args: &DiskspdArgs, line: fn() -> Command) -> Outcome {
    let mut own = OwnOptions { destroy_data: args.destroy_data, save: args.save.clone(), ..OwnOptions::default() };
    let words = own.take(&args.words)?;
    if own.help {
        let mut line = line();
        line.build();
        let help = line.find_subcommand_mut("diskspd").map(|command| command.render_long_help().to_string());
        context.out.write_all(help.unwrap_or_default().as_bytes())?;
        return Ok(exit::OK);
    }
    context.global.json |= own.json;
    context.global.quiet |= own.quiet;
    let profile = match profile(&words)? {
        Ok(profile) => profile,
        Err(error) => {
            context.warn_always(&format!("{error} (see diskwright diskspd --help)"));
            return Ok(exit::USAGE);
        }
    };
    if profile.profile_only && context.global.json {
        return Err(Failure::new("-Rp prints a profile as XML, which has no JSON form: leave out --json or -Rp"));
    }
    if profile.profile_only {
        context.out.write_all(diskspd::profile_xml(&profile).as_bytes())?;
        return Ok(exit::OK);
    }
    let (job, paths) = diskspd::job(&profile).map_err(|error| Failure::new(error.to_string()))?;
    for note in &profile.notes {
        context.warn(note);
    }
    let output = own.save.as_deref().map(|path| Output::check(path, Kind::Result)).transpose()?;
    let how = TargetArgs { create_size: created(&profile)?.map(Bytes), fill: false, destroy_data: own.destroy_data };
    let run = how.measure(context, &job, &paths, &RunOptions::default())?;
    // A result that cannot be saved is printed all the same.
    let saved = output.map_or(Ok(()), |output| output.save(&run));
    for warning in &run.head.warnings {
        context.warn(&diskspd::with_diskspds_switches(&warning.to_string()));
    }
    if context.global.json {
        context.print_measured(&run)?;
    } else {
        let text = match profile.form {
            ResultForm::Text => diskspd::report(&profile, &run),
            ResultForm::Xml => diskspd::results_xml(&profile, &run),
        };
        // DiskSpd's report has tabs, which are kept.
        let lines: Vec<String> = text.split('\t').map(printable_lines).collect();
        context.out.write_all(lines.join("\t").as_bytes())?;
    }
    saved?;
    Ok(match &run.head.end {
        End::Complete => exit::OK,
        End::Stopped => exit::STOPPED,
        End::Failed { first, errors } => {
            context.warn_always(&format!(
                "{errors} requests failed, and the figures are those of the others; the first: {first}"
            ));
            exit::FAILED
        }
    })
}

/// Our own options among DiskSpd's switches: clap takes every word behind the first switch as it
/// is.
#[derive(Debug, Default)]
struct OwnOptions {
    destroy_data: bool,
    save: Option<PathBuf>,
    help: bool,
    json: bool,
    quiet: bool,
}

impl OwnOptions {
    /// Takes our options out of `words`; returns the other words.
    fn take(&mut self, words: &[String]) -> Outcome<Vec<String>> {
        let mut rest = Vec::new();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match word.as_str() {
                "--destroy-data" => self.destroy_data = true,
                "--help" | "-?" => self.help = true,
                "--json" => self.json = true,
                "--quiet" => self.quiet = true,
                "--save" => {
                    let file = words.next().ok_or_else(|| Failure::new("--save needs the name of a file behind it"))?;
                    self.save = Some(file.into());
                }
                _ => rest.push(word.clone()),
            }
        }
        Ok(rest)
    }
}

/// The profile of the switches, or of the file behind `-X` with the switches beside it.
fn profile(words: &[String]) -> Outcome<Result<Profile, SwitchError>> {
    let command = match ProfileCommand::parse(words) {
        Ok(Some(command)) => command,
        Ok(None) => return Ok(diskspd::parse(words)),
        Err(error) => return Ok(Err(error)),
    };
    let path = Path::new(&command.file);
    let failed = |error| Failure::doing(format!("cannot read the profile {}", path.display()), error);
    let mut bytes = Vec::new();
    File::open(path).map_err(failed)?.take(PROFILE_MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > PROFILE_MAX_BYTES {
        return Err(Failure::new(format!("{} is not a profile: it is longer than 1 MiB", path.display())));
    }
    let profile = diskspd::xml_profile_text(&bytes)
        .and_then(|text| diskspd::read_xml_profile(&text, ""))
        .and_then(|profile| command.apply(profile))
        .map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
    Ok(Ok(profile))
}

/// Size of the files to create; all targets of a profile must have the same.
fn created(profile: &Profile) -> Outcome<Option<u64>> {
    let mut sizes = profile.time_spans.iter().flat_map(|span| &span.targets).map(|target| target.create_bytes);
    let first = sizes.next().flatten();
    if sizes.any(|size| size != first) {
        return Err(Failure::new(
            "the profile creates files of several sizes; create them first, or give all the same <FileSize>",
        ));
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::FromArgMatches;

    fn words(line: &[&str]) -> DiskspdArgs {
        let command = DiskspdArgs::augment_args(Command::new("diskspd").disable_help_flag(true));
        let found = command.try_get_matches_from(["diskspd"].iter().chain(line)).unwrap();
        DiskspdArgs::from_arg_matches(&found).unwrap()
    }

    #[test]
    fn switches_that_look_like_our_own_are_diskspds() {
        assert_eq!(words(&["-h", "-r", "x"]).words, ["-h", "-r", "x"]);
        assert_eq!(words(&["-W300", "-q", "x"]).words, ["-W300", "-q", "x"]);
        let args = words(&["--destroy-data", "-r", "x", "--save", "y.json"]);
        assert!(args.destroy_data);
        let mut own = OwnOptions::default();
        assert_eq!(own.take(&args.words).unwrap(), ["-r", "x"]);
        assert_eq!(own.save, Some("y.json".into()));
    }
}
