//! Profiles: job files in TOML, and the built-in profiles.
//!
//! ```text
//!   vhd-applications            all phases of a built-in profile  ─┐
//!   vhd-applications/oltp-db    one phase of it                    ├──▶ Job
//!   my-load.toml                a file of the user                ─┘
//! ```
//!
//! A profile is a [`Job`] in TOML. The text of the built-in profiles is in the folder of this file.
//! A comment at the top of each profile names the source of its figures. `diskwright lab profiles
//! NAME` prints the text, which a user can edit.

use crate::{LoadError, Result, job::Job};
use std::path::Path;

/// A built-in profile.
#[derive(Debug, Clone, Copy)]
pub struct Profile {
    /// Name of the profile and of its job.
    pub name: &'static str,
    /// The job as TOML, with comments.
    pub toml: &'static str,
}

macro_rules! built_in {
    ($($name:literal),* $(,)?) => {
        &[$(Profile { name: $name, toml: include_str!(concat!($name, ".toml")) }),*]
    };
}

/// All built-in profiles, in the order in which they are listed.
pub const BUILT_IN: &[Profile] = built_in![
    "vhd-applications",
    "vhd-monolithic",
    "vmfs-and-rdm",
    "sqlio",
    "hyper-v-oltp",
    "hyper-v-oltp-20",
    "storage-spaces",
    "vmfleet-general",
    "vmfleet-peak",
    "vmfleet-vdi",
    "vmfleet-sql",
];

impl Profile {
    /// The built-in profile of this name.
    pub fn find(name: &str) -> Option<&'static Self> {
        BUILT_IN.iter().find(|profile| profile.name == name)
    }

    /// The job of the profile.
    ///
    /// # Panics
    /// Never: a test parses all built-in profiles.
    pub fn job(&self) -> Job {
        Job::from_toml(self.toml).expect("the built-in profiles are jobs")
    }
}

/// Loads the job that `spec` names: a built-in profile, one phase of it
/// (`vhd-applications/oltp-db`), or a file. `./NAME` names a file that has the name of a profile.
///
/// # Errors
/// [`LoadError::Profile`] for a file that is not a valid job, with the line; for a phase that the
/// profile does not have; and for a name that is neither a profile nor a file. [`LoadError::File`]
/// when a file cannot be read.
pub fn load(spec: &str) -> Result<Job> {
    let (name, phase) = spec.split_once('/').map_or((spec, None), |(name, phase)| (name, Some(phase)));
    if let Some(profile) = Profile::find(name) {
        let job = profile.job();
        return match phase {
            None => Ok(job),
            Some(phase) => only(job, phase),
        };
    }
    let path = Path::new(spec);
    if !path.exists() {
        let names: Vec<&str> = BUILT_IN.iter().map(|profile| profile.name).collect();
        return Err(LoadError::Profile {
            profile: spec.to_owned(),
            what: format!(
                "neither a built-in profile nor a file has this name; the built-in profiles are {}",
                names.join(", ")
            ),
        });
    }
    let text = std::fs::read_to_string(path).map_err(|source| LoadError::File { path: path.to_owned(), source })?;
    Job::from_toml(&text)
        .map_err(|what| LoadError::Profile { profile: spec.to_owned(), what: what.trim_end().to_owned() })
}

/// The job with only the phase `phase`.
fn only(mut job: Job, phase: &str) -> Result<Job> {
    let names = job.phases.iter().map(|phase| phase.name.clone()).collect::<Vec<_>>().join(", ");
    job.phases.retain(|one| one.name == phase);
    if job.phases.is_empty() {
        let what = format!("there is no phase \"{phase}\"; the phases are {names}");
        return Err(LoadError::Profile { profile: job.name, what });
    }
    job.name = format!("{}/{phase}", job.name);
    Ok(job)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        job::{Blocks, Caching, Contents, Load, Rate},
        workload::paper_monolithic,
    };

    fn loads(name: &str) -> Vec<Load> {
        Profile::find(name).unwrap().job().phases.into_iter().flat_map(|phase| phase.loads).collect()
    }

    /// Block size in KiB, share of reads, share of random requests, threads, depth.
    fn shape(load: &Load) -> (u64, u32, u32, u32, u32) {
        let Blocks::One(block) = load.block else { panic!("a mix") };
        (block.0 / 1024, load.read_percent as u32, load.random_percent as u32, load.threads, load.queue_depth)
    }

    #[test]
    fn every_built_in_profile_is_a_valid_job_with_a_source() {
        for profile in BUILT_IN {
            let job = Job::from_toml(profile.toml).unwrap_or_else(|error| panic!("{}: {error}", profile.name));
            assert_eq!(job.name, profile.name);
            assert!(
                !job.description.is_empty() && profile.toml.starts_with("# "),
                "{} does not name its source",
                job.name
            );
            assert_eq!(Job::from_toml(&job.to_toml()).unwrap(), job, "{}", job.name);
        }
    }

    #[test]
    fn the_twelve_application_workloads_equal_the_papers_table() {
        let table = [
            (4, 95, 75),
            (8, 95, 75),
            (64, 95, 75),
            (1024, 100, 100),
            (64, 98, 0),
            (64, 0, 0),
            (64, 90, 0),
            (8, 0, 0),
            (8, 70, 100),
            (4, 67, 100),
            (8, 80, 80),
            (512, 100, 100),
        ];
        let found: Vec<_> = loads("vhd-applications").iter().map(shape).collect();
        assert_eq!(found, table.map(|(block, read, random)| (block, read, random, 1, 64)));
    }

    #[test]
    fn the_sixteen_monolithic_workloads_equal_those_of_the_study() {
        let study: Vec<_> = paper_monolithic(64)
            .iter()
            .map(|workload| {
                let (read, random) = (workload.read_percent as u32, workload.random_percent as u32);
                (u64::from(workload.block_bytes) / 1024, read, random, 1, workload.queue_depth)
            })
            .collect();
        assert_eq!(loads("vhd-monolithic").iter().map(shape).collect::<Vec<_>>(), study);
    }

    #[test]
    fn the_vmfs_paper_has_five_sizes_by_five_patterns_at_64_outstanding() {
        let mut wanted = Vec::new();
        for (read, random) in [(50, 100), (100, 100), (0, 100), (100, 0), (0, 0)] {
            wanted.extend([4, 8, 16, 32, 64].map(|block| (block, read, random, 1, 64)));
        }
        assert_eq!(loads("vmfs-and-rdm").iter().map(shape).collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn the_loads_of_the_other_papers_equal_their_descriptions() {
        let shapes = |name: &str| loads(name).iter().map(shape).collect::<Vec<_>>();
        assert_eq!(shapes("sqlio"), [(8, 0, 100, 1, 8), (8, 100, 100, 1, 8), (64, 0, 100, 1, 8), (64, 100, 100, 1, 8)]);
        assert_eq!(Profile::find("sqlio").unwrap().job().contents, Contents::Zero);
        assert_eq!(shapes("hyper-v-oltp"), [2, 4, 6].map(|depth| (8, 70, 100, 1, depth)));
        assert_eq!(shapes("hyper-v-oltp-20"), [2, 4, 6].map(|depth| (8, 70, 100, 20, depth)));
        assert_eq!(shapes("storage-spaces"), [(8, 70, 100, 8, 12), (512, 100, 0, 1, 30), (512, 0, 0, 1, 15)]);
    }

    #[test]
    fn the_vmfleet_profiles_equal_those_of_vmfleets_module() {
        for name in ["vmfleet-general", "vmfleet-peak", "vmfleet-vdi", "vmfleet-sql"] {
            assert_eq!(Profile::find(name).unwrap().job().cache, Caching::DirectWriteThrough, "{name}");
        }
        assert_eq!(
            loads("vmfleet-general").iter().map(shape).collect::<Vec<_>>(),
            [100, 90, 70].map(|read| (4, read, 100, 1, 32))
        );
        assert_eq!(loads("vmfleet-vdi").iter().map(shape).collect::<Vec<_>>(), [(32, 0, 20, 1, 8), (8, 100, 80, 1, 8)]);
        let sql = loads("vmfleet-sql");
        assert_eq!(sql.iter().map(shape).collect::<Vec<_>>(), [(8, 70, 100, 4, 32), (32, 0, 0, 1, 1)]);
        assert_eq!((sql[0].start.0, sql[0].rate), (5 << 30, Some(Rate::Iops { per_thread: 1500.0 })));
        assert_eq!((sql[1].working_set.0, sql[1].rate), (5 << 30, Some(Rate::Iops { per_thread: 300.0 })));
    }

    #[test]
    fn one_phase_of_a_profile_is_selected_by_its_name() {
        let job = load("vhd-applications/oltp-db").unwrap();
        assert_eq!((job.name.as_str(), job.phases.len()), ("vhd-applications/oltp-db", 1));
        assert_eq!(shape(&job.phases[0].loads[0]), (8, 70, 100, 1, 64));
        let error = load("vhd-applications/oltp").unwrap_err().to_string();
        assert!(error.contains("no phase \"oltp\"") && error.contains("oltp-db"), "{error}");
    }

    #[test]
    fn a_users_file_is_parsed_and_its_errors_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.toml");
        let spec = path.to_str().unwrap();
        let job = load("vmfleet-sql").unwrap();
        std::fs::write(&path, job.to_toml()).unwrap();
        assert_eq!(load(spec).unwrap(), job);
        std::fs::write(&path, job.to_toml().replace("queue_depth", "queue_dept")).unwrap();
        let error = load(spec).unwrap_err().to_string();
        assert!(error.contains("queue_dept") && error.contains("mine.toml"), "{error}");
        std::fs::write(&path, "name = 'x'\nphase = []\n").unwrap();
        assert!(load(spec).unwrap_err().to_string().contains("[[phase]]"));
        let error = load("nonsense").unwrap_err().to_string();
        assert!(error.contains("nonsense") && error.contains("vmfleet-sql"), "{error}");
        assert!(matches!(load(dir.path().to_str().unwrap()), Err(LoadError::File { .. })));
    }
}
