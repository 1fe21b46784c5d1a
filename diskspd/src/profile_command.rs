//! A command line with `-X`. As in DiskSpd, `-d -W -C -z -R -v` override the profile, and the
//! targets of the command line replace its templates (`*1` is the first target). Every other switch
//! is an error.

use super::{
    profile::Profile,
    profile_error::ProfileError,
    switches::{self, RunSwitches},
    values::SwitchError,
};

/// A command line with `-X`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ProfileCommand {
    /// Path of the profile.
    pub file: String,
    given: RunSwitches,
    targets: Vec<String>,
    command_line: String,
}

impl ProfileCommand {
    /// Parses a command line; `None` when it has no `-X`.
    ///
    /// # Errors
    /// [`SwitchError`]: `-X` without a file or more than once, a bad value, a switch that cannot be
    /// used with `-X`.
    pub fn parse(words: &[String]) -> Result<Option<Self>, SwitchError> {
        let words: Vec<String> = words.iter().map(|word| switches::plain_hyphen(word)).collect();
        let (switches, targets) = switches::split(&words)?;
        let mut files = switches.iter().filter_map(|switch| switch.strip_prefix("-X"));
        let Some(file) = files.next() else { return Ok(None) };
        if file.is_empty() {
            return Err(SwitchError::Together("-X needs the file of a profile: -Xprofile.xml".into()));
        }
        if files.next().is_some() {
            return Err(SwitchError::Together("-X was given more than once; a run has one profile".into()));
        }
        let mut given = RunSwitches::default();
        for switch in switches.iter().filter(|switch| !switch.starts_with("-X")) {
            if !given.read(switch)? {
                return Err(SwitchError::Together(format!(
                    "{switch} cannot be used with -X: only -d, -W, -C, -z, -R and -v can override a profile"
                )));
            }
        }
        Ok(Some(Self {
            file: file.to_owned(),
            given,
            targets: targets.to_vec(),
            command_line: switches::command_line(&words),
        }))
    }

    /// Applies the switches and targets of the command line to `profile`.
    ///
    /// # Errors
    /// [`ProfileError::Templates`]: a template without a target, or a target without a template.
    pub fn apply(&self, mut profile: Profile) -> Result<Profile, ProfileError> {
        profile.command_line.clone_from(&self.command_line);
        profile.verbose |= self.given.verbose;
        profile.profile_only = self.given.profile_only;
        profile.form = self.given.form.unwrap_or(profile.form);
        for span in &mut profile.time_spans {
            span.duration_s = self.given.duration_s.unwrap_or(span.duration_s);
            span.warm_up_s = self.given.warm_up_s.unwrap_or(span.warm_up_s);
            span.cool_down_s = self.given.cool_down_s.unwrap_or(span.cool_down_s);
            span.seed = self.given.seed.unwrap_or(span.seed);
        }
        let mut used = vec![false; self.targets.len()];
        for target in profile.time_spans.iter_mut().flat_map(|span| &mut span.targets) {
            let Some(number) = target.template() else { continue };
            match self.targets.get(number - 1) {
                Some(path) => {
                    target.path.clone_from(path);
                    used[number - 1] = true;
                }
                // As in DiskSpd, -Rp prints a profile with templates.
                None if self.targets.is_empty() && profile.profile_only => {}
                None => {
                    return Err(ProfileError::Templates(format!(
                        "the profile's target *{number} is a template, and the command line names {} targets; name target {number} after the switches",
                        self.targets.len()
                    )));
                }
            }
        }
        match used.iter().position(|used| !used) {
            None => Ok(profile),
            Some(unused) => Err(ProfileError::Templates(format!(
                "no target of the profile is the template *{}, so {} would not be used; omit it, or write <Path>*{}</Path> into the profile",
                unused + 1,
                self.targets[unused],
                unused + 1
            ))),
        }
    }
}
