//! The plan of a fleet: groups of agents, each with its targets and its load, as TOML.
//!
//! ```toml
//! on-loss = "go-on"
//!
//! [[group]]
//! name = "database"
//! agents = ["db1=10.0.0.1:7407#3f2a...", "10.0.0.2:7407#91bc..."]
//! targets = ["data"]
//! profile = "vmfleet-sql"
//!
//! [[group]]
//! name = "backup"
//! expect = 2                         # agents that dial this controller
//! [group.job]                        # or a job, as in a profile
//! name = "backup"
//! ...
//! ```
//!
//! An agent's address may have a name before it. Others are called by their place.

use crate::{LabError, Result};
use diskwright_fleet::{
    address::{Address, Place},
    controller::{OnLoss, Wanted, Way},
};
use diskwright_load::{Job, job::Span, profiles};
use serde::Deserialize;
use std::{fs, path::Path};

/// A plan; see the module documentation.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Plan {
    /// What happens when an agent is lost: `stop` or `go-on`.
    #[serde(default)]
    pub on_loss: OnLoss,
    /// How long an agent may be silent before it counts as lost.
    #[serde(default)]
    pub lost_after: Option<Span>,
    /// Where agents that dial come in.
    #[serde(default)]
    pub listen: Option<String>,
    /// Whether working sets are filled first.
    #[serde(default)]
    pub fill: bool,
    /// The groups.
    #[serde(rename = "group", default)]
    pub groups: Vec<Group>,
}

/// Agents with the same load.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Group {
    /// Its name in results.
    pub name: String,
    /// Addresses of agents, as they print them; a name may stand before each: `db1=HOST:PORT#...`.
    #[serde(default)]
    pub agents: Vec<String>,
    /// Number of agents that dial.
    #[serde(default)]
    pub expect: u32,
    /// Names of targets. None: all that an agent allows.
    #[serde(default)]
    pub targets: Vec<String>,
    /// A built-in profile, or a file.
    #[serde(default)]
    pub profile: Option<String>,
    /// The load, instead of a profile.
    #[serde(default)]
    pub job: Option<Job>,
}

impl Plan {
    /// Reads a plan.
    ///
    /// # Errors
    /// [`LabError::File`]; [`LabError::BadOptions`] with the line that is wrong.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(LabError::file("read the plan", path))?;
        toml::from_str(&text).map_err(|error| LabError::BadOptions {
            what: format!("{} is not a plan of a fleet: {}", path.display(), error.to_string().trim_end()),
            hint: "correct it; the guide docs/fleet.md has an example".into(),
        })
    }

    /// The agents of all groups, with a name for each.
    ///
    /// # Errors
    /// [`LabError::BadOptions`]: an address is wrong, or two agents or groups have one name.
    pub fn wanted(&self) -> Result<Vec<Wanted>> {
        let mut all: Vec<Wanted> = Vec::new();
        for (number, group) in self.groups.iter().enumerate() {
            if self.groups[..number].iter().any(|other| other.name == group.name) {
                return bad(format!("two groups are called {:?}", group.name), "give each group a name of its own");
            }
            let wanted = |name: String, way: Way| Wanted {
                name,
                group: group.name.clone(),
                way,
                targets: group.targets.clone(),
            };
            for text in &group.agents {
                let (name, address) = named(text)?;
                all.push(wanted(name, Way::Dial(address)));
            }
            all.extend((1..=group.expect).map(|number| wanted(format!("{} {number}", group.name), Way::Await)));
        }
        for (number, agent) in all.iter().enumerate() {
            if all[..number].iter().any(|other| other.name == agent.name) {
                return bad(format!("two agents are called {:?}", agent.name), "put a name before each: NAME=ADDRESS");
            }
        }
        if all.is_empty() {
            return bad("the plan has no agent", "name at least one");
        }
        Ok(all)
    }

    /// Whether agents dial this controller.
    pub fn expects(&self) -> bool {
        self.groups.iter().any(|group| group.expect > 0)
    }

    /// Where agents that dial come in.
    ///
    /// # Errors
    /// [`LabError::BadOptions`]: the place is wrong.
    pub fn entrance(&self) -> Result<Place> {
        let place = self.listen.as_deref().unwrap_or("127.0.0.1:0");
        place.parse().or_else(|what| bad(format!("{place} is not a place to listen: {what}"), "write HOST:PORT"))
    }
}

impl Group {
    /// The job of the plan for this group; `None`: it names none.
    ///
    /// # Errors
    /// The profile cannot be read; both a profile and a job are given.
    pub fn job(&self) -> Result<Option<Job>> {
        match (&self.profile, &self.job) {
            (Some(_), Some(_)) => {
                bad(format!("group {:?} has a profile and a job", self.name), "leave one of them out")
            }
            (Some(profile), None) => Ok(Some(profiles::load(profile)?)),
            (None, job) => Ok(job.clone()),
        }
    }
}

/// The name and the address of an agent.
fn named(text: &str) -> Result<(String, Address)> {
    let (name, address) = match text.split_once('=') {
        Some((name, address)) if !name.contains(['#', '/', ':']) => (Some(name), address),
        _ => (None, text),
    };
    let address: Address = address.parse()?;
    Ok((name.map_or_else(|| address.place.to_string(), str::to_owned), address))
}

fn bad<T>(what: impl Into<String>, hint: &str) -> Result<T> {
    Err(LabError::BadOptions { what: what.into(), hint: hint.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Plan> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.toml");
        fs::write(&path, text).unwrap();
        Plan::read(&path)
    }

    #[test]
    fn a_plan_has_groups_with_agents_and_loads() {
        let digits = "0".repeat(64);
        let plan = read(&format!(
            "on-loss = \"go-on\"\nlost-after = \"20s\"\n\
             [[group]]\nname = \"sql\"\nagents = [\"db1=h:1#{digits}\", \"h:2#{digits}\"]\nprofile = \"vmfleet-sql\"\n\
             [[group]]\nname = \"rest\"\nexpect = 2\ntargets = [\"data\"]\n"
        ))
        .unwrap();
        let wanted = plan.wanted().unwrap();
        let names: Vec<&str> = wanted.iter().map(|agent| agent.name.as_str()).collect();
        assert_eq!(names, ["db1", "h:2", "rest 1", "rest 2"]);
        assert_eq!((wanted[0].group.as_str(), wanted[3].targets.as_slice()), ("sql", &["data".to_owned()][..]));
        assert_eq!(wanted[3].way, Way::Await);
        assert_eq!((plan.on_loss, plan.lost_after), (OnLoss::GoOn, Some(Span::from_secs(20))));
        assert!(plan.expects() && plan.groups[0].job().unwrap().is_some() && plan.groups[1].job().unwrap().is_none());
    }

    #[test]
    fn a_wrong_plan_is_refused_with_its_reason() {
        let digits = "0".repeat(64);
        for (text, why) in [
            ("colour = 1".to_owned(), "colour"),
            ("[[group]]\nagents = []".to_owned(), "name"),
            ("[[group]]\nname = \"a\"".to_owned(), "no agent"),
            ("[[group]]\nname = \"a\"\nagents = [\"h:1\"]".to_owned(), "fingerprint is missing"),
            (format!("[[group]]\nname = \"a\"\nagents = [\"h:1#{digits}\", \"h:1#{digits}\"]"), "two agents"),
            ("[[group]]\nname = \"a\"\n[[group]]\nname = \"a\"".to_owned(), "two groups"),
        ] {
            let error = read(&text).and_then(|plan| plan.wanted()).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
