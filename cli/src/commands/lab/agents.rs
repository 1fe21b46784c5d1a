//! Options of the commands that lead agents, and the key and certificate of agents and controllers.

use super::words;
use crate::exit::Outcome;
use clap::Args;
use diskwright_fleet::{
    controller::{FleetOptions, OnLoss},
    identity::Identity,
};
use diskwright_lab::fleet::{Agents, Group, Plan};
use diskwright_load::job::Span;
use std::{
    env,
    path::{Path, PathBuf},
    time::Duration,
};

/// How long an agent may be silent.
const LOST_AFTER: Duration = Duration::from_secs(10);

/// The agents that measure.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Agents")]
pub struct AgentsArgs {
    /// Agent, by the address that it prints (may be repeated). A name may stand before it.
    #[arg(long, value_name = "[NAME=]ADDRESS")]
    pub agent: Vec<String>,
    /// How long an agent may be silent before it counts as lost. [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = words::span)]
    pub lost_after: Option<Span>,
    /// File with the key and the certificate, made if missing. [default: in the user's state
    /// folder]
    #[arg(long, value_name = "FILE")]
    pub identity: Option<PathBuf>,
}

impl AgentsArgs {
    /// The key and the certificate of the controller.
    ///
    /// # Errors
    /// The file cannot be used.
    pub fn identity(&self) -> Outcome<Identity> {
        identity(self.identity.as_deref(), "controller")
    }

    /// Options of a fleet that stops when an agent is lost. `lost_after` is the time of a plan.
    ///
    /// # Errors
    /// As [`AgentsArgs::identity`].
    pub fn options(&self, lost_after: Option<Span>) -> Outcome<FleetOptions> {
        Ok(FleetOptions {
            identity: self.identity()?,
            lost_after: self.lost_after.or(lost_after).map_or(LOST_AFTER, Duration::from),
            on_loss: OnLoss::Stop,
            keep_going: false,
            labels: Vec::new(),
        })
    }

    /// The agents as a group of a plan, with these names of targets.
    pub fn group(&self, targets: &[String]) -> Group {
        Group { name: "agents".into(), agents: self.agent.clone(), targets: targets.to_vec(), ..Group::default() }
    }

    /// The agents of a study, with these names of targets; `None` if no agent is named.
    ///
    /// # Errors
    /// An address is wrong, or two agents have one name.
    pub fn of_study(&self, targets: &[String], fill: bool) -> Outcome<Option<Agents>> {
        if self.agent.is_empty() {
            return Ok(None);
        }
        let plan = Plan { groups: vec![self.group(targets)], ..Plan::default() };
        Ok(Some(Agents { wanted: plan.wanted()?, options: self.options(None)?, entrance: None, fill }))
    }
}

/// The key and the certificate of an agent or a controller.
///
/// # Errors
/// The file cannot be used.
pub fn identity(given: Option<&Path>, whose: &str) -> Outcome<Identity> {
    let below = |variable: &str, folders: &str| {
        let home = env::var_os(variable).filter(|home| Path::new(home).is_absolute())?;
        Some(Path::new(&home).join(folders).join(format!("{whose}.pem")))
    };
    let usual = || below("XDG_STATE_HOME", "diskwright").or_else(|| below("HOME", ".local/state/diskwright"));
    match given.map(Path::to_owned).or_else(usual) {
        Some(path) => Ok(Identity::kept_at(&path)?),
        None => Ok(Identity::temporary()?),
    }
}
