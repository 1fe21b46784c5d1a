//! `diskwright lab profiles`: lists the built-in profiles, or prints one.

use crate::{
    context::Context,
    exit::{self, Outcome},
    json::Document,
    table::write_hanging,
};
use clap::Args;
use diskwright_load::profiles::{self, BUILT_IN, Profile};
use schemars::JsonSchema;
use serde::Serialize;
use std::io::Write;

/// Arguments of `lab profiles`.
#[derive(Debug, Args)]
#[command(after_help = "\
A profile is a job in TOML. Print one, change it, and run it. Every line can be changed; an unknown \
key is an error. NAME/PHASE is one phase of a profile.

EXAMPLES
  diskwright lab profiles
  diskwright lab profiles vhd-applications
  diskwright lab profiles vhd-applications/oltp-db > mine.toml
  diskwright lab run disk.vhdx --profile mine.toml")]
pub struct ProfilesArgs {
    /// Print the TOML of this profile: NAME, or NAME/PHASE. [default: list all]
    #[arg(value_name = "NAME")]
    name: Option<String>,
}

/// Output of `lab profiles --json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Listing {
    /// The built-in profiles.
    profiles: Vec<Listed>,
}

impl Document for Listing {
    const SCHEMA: &'static str = "diskwright.lab.profiles/1";
}

/// A built-in profile.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Listed {
    /// Name of the profile.
    name: &'static str,
    /// The workload that it imitates.
    description: String,
    /// Names of its phases.
    phases: Vec<String>,
}

/// Output of `lab profiles NAME --json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct OneProfile {
    /// The profile as a job; `lab run --profile` reads the same fields from TOML.
    profile: diskwright_load::job::Job,
}

impl Document for OneProfile {
    const SCHEMA: &'static str = "diskwright.lab.profile/1";
}

/// Lists the profiles, or prints one.
pub fn run(context: &mut Context, args: &ProfilesArgs) -> Outcome {
    match &args.name {
        Some(name) => print_one(context, name)?,
        None => list(context)?,
    }
    Ok(exit::OK)
}

fn print_one(context: &mut Context, name: &str) -> Outcome<()> {
    let job = profiles::load(name)?;
    if context.global.json {
        return context.print_json(&OneProfile { profile: job });
    }
    // The original text has comments with the sources of its figures.
    let text = Profile::find(name).map_or_else(|| job.to_toml(), |profile| profile.toml.to_owned());
    Ok(context.out.write_all(text.as_bytes())?)
}

fn list(context: &mut Context) -> Outcome<()> {
    let all: Vec<Listed> = BUILT_IN
        .iter()
        .map(|profile| {
            let job = profile.job();
            let phases = job.phases.into_iter().map(|phase| phase.name).collect();
            Listed { name: profile.name, description: job.description, phases }
        })
        .collect();
    if context.global.json {
        return context.print_json(&Listing { profiles: all });
    }
    let limit = context.style.limit();
    let width = all.iter().map(|one| one.name.len()).max().unwrap_or(0);
    write_hanging(&mut context.out, &format!("{:width$}  phases  ", "profile"), "description", limit)?;
    for Listed { name, description, phases } in &all {
        write_hanging(&mut context.out, &format!("{name:width$}  {:>6}  ", phases.len()), description, limit)?;
    }
    Ok(())
}
