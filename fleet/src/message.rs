//! What a controller asks and an agent answers.
//!
//! ```text
//!   controller                       agent
//!     hello ─────────────────────────▶ welcome: its machine, what it allows
//!     clock (16 times) ──────────────▶ when it came and went
//!     prepare ───────────────────────▶ done; its state is then: preparing, prepared
//!   ┌ arm (a phase of a job) ────────▶ done; arming, armed: queues are open, threads wait
//!   │ start at T of the agent ───────▶ done; running until the phase ends
//!   │ look (again and again) ────────▶ its state, figures, and the intervals since the last look
//!   └ take ──────────────────────────▶ the record of the phase
//!     forget ────────────────────────▶ done; the controller has it on its disk
//!     finish ────────────────────────▶ done; closing, idle
//! ```
//!
//! Only the controller asks, and each message has one answer. So a link is used by one thread on
//! each side, and there is no message that nobody waits for. A look waits at the agent until
//! something has changed.
//!
//! An agent carries out what it can do at any time: an order that does not fit its state is
//! refused. The identifier of the run is in every order, so an order of an earlier controller is
//! not taken for one of this run.

use diskwright_load::{
    Job,
    machine::{Machine, Versions},
    record::{End, IntervalRecord, PhaseRecord, Run, TargetRecord},
    run::SnapshotRecord,
    warning::Warning,
};
use serde::{Deserialize, Serialize};

/// The protocol and its version. Another version is refused.
pub const SCHEMA: &str = "diskwright.fleet/1";

/// What a controller asks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ask {
    /// The first message.
    Hello(Hello),
    /// Compare clocks.
    Clock {
        /// The controller's clock, nanoseconds.
        sent_ns: u64,
    },
    /// Open, check and fill targets.
    Prepare(Box<Task>),
    /// Open the queues of a phase.
    Arm(Box<Arm>),
    /// Start the phase that is armed.
    Start {
        /// The phase.
        at: At,
        /// When, by the agent's clock, nanoseconds.
        at_ns: u64,
    },
    /// Open the window of a phase that waits for the steady state.
    Window {
        /// The phase.
        at: At,
        /// When, from the start of the phase, nanoseconds.
        start_ns: u64,
    },
    /// Tell the state, as soon as it differs from what the controller knows.
    Look {
        /// The state that the controller knows; see [`State::number`].
        known: u64,
        /// Number of the first interval that it does not know.
        interval: u64,
        /// How long to wait for a change, milliseconds.
        wait_ms: u32,
    },
    /// Send the record of a phase.
    Take {
        /// The phase.
        at: At,
    },
    /// Forget the records of a run, because the controller has them on its disk.
    Forget {
        /// The run.
        run: String,
    },
    /// Stop the phase that is armed or running.
    Stop {
        /// The run.
        run: String,
    },
    /// Close the targets.
    Finish {
        /// The run.
        run: String,
    },
}

/// Who the controller is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hello {
    /// [`SCHEMA`].
    pub schema: String,
    /// Version of the program. Another one is refused: its figures might mean something else.
    pub version: String,
    /// The token that admits it.
    pub token: Option<String>,
    /// What tells the program from others with the same fingerprint: agents of one user on one
    /// machine.
    pub instance: String,
}

/// A phase of a cell of a run.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct At {
    /// Identifier of the run: unlike that of any other.
    pub run: String,
    /// Number of the job within the run: a sweep has several.
    pub cell: u64,
    /// Number of the phase within the job.
    pub phase: u32,
}

/// Targets to prepare.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Task {
    /// Identifier of the run.
    pub run: String,
    /// The names of the targets, as the agent tells them. None: all.
    pub targets: Vec<String>,
    /// The job for which they are prepared. Later jobs may write no other ranges.
    pub job: Job,
    /// Fill the working sets first.
    pub fill: bool,
}

/// A phase to arm.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arm {
    /// The phase.
    pub at: At,
    /// The job, with all its phases.
    pub job: Job,
    /// Go on when requests fail.
    pub keep_going: bool,
}

/// What an agent answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Answer {
    /// To [`Ask::Hello`].
    Welcome(Box<Welcome>),
    /// To [`Ask::Clock`].
    Clock {
        /// When the message came, by the agent's clock, nanoseconds.
        received_ns: u64,
        /// When the answer went.
        answered_ns: u64,
    },
    /// To [`Ask::Look`].
    State(Box<State>),
    /// To [`Ask::Take`].
    Measured(Box<Measured>),
    /// The order is carried out.
    Done,
    /// The start is too soon: it lies in the past.
    TooLate {
        /// The agent's clock, nanoseconds.
        now_ns: u64,
    },
    /// To [`Ask::Hello`]: another controller is served.
    Busy {
        /// Which one: a sentence.
        why: String,
    },
    /// The order is refused.
    Refused {
        /// Why: a sentence.
        why: String,
    },
}

/// Who the agent is, and what it allows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Welcome {
    /// [`SCHEMA`].
    pub schema: String,
    /// Version of the agent's program.
    pub versions: Versions,
    /// The agent's machine.
    pub machine: Machine,
    /// Boot identifier of the agent's machine: agents with the same one share a machine.
    pub boot_id: String,
    /// The targets that a controller may choose.
    pub targets: Vec<Allowed>,
    /// Identifier of a run that is not finished.
    pub run: Option<String>,
}

/// A target that an agent allows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Allowed {
    /// Name of the target for plans.
    pub name: String,
    /// Whether jobs may write the target.
    pub writable: bool,
}

/// The state of an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Grows with each change of the stage.
    pub number: u64,
    /// What the agent does.
    pub stage: Stage,
    /// The latest figures of the phase that runs.
    pub snapshot: Option<SnapshotRecord>,
    /// Number of the first of `intervals`.
    pub first_interval: u64,
    /// Intervals of the phase since the last look.
    pub intervals: Vec<IntervalRecord>,
}

/// What an agent does.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Stage {
    /// No run.
    Idle,
    /// The agent opens, checks and fills targets.
    Preparing {
        /// The current step and target.
        doing: String,
        /// Units that are done.
        done: u64,
        /// All units; 0 if unknown.
        total: u64,
    },
    /// The targets can be measured.
    Prepared {
        /// The targets, in the order of the task.
        targets: Vec<TargetRecord>,
        /// Reasons to doubt the figures of these targets.
        warnings: Vec<Warning>,
    },
    /// It opens the queues of a phase.
    Arming(At),
    /// The queues are open.
    Armed(At),
    /// The phase runs, or waits for its start.
    Running(At),
    /// The phase has ended, and its record can be taken.
    Measured(At),
    /// The agent closes its targets.
    Closing,
    /// An order could not be carried out; the targets are closed.
    Failed {
        /// Why: a sentence.
        why: String,
    },
}

/// A phase that was measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// The record of the phase.
    pub phase: PhaseRecord,
    /// Start of the phase by the agent's clock, nanoseconds.
    pub start_ns: u64,
    /// How the job has ended so far.
    pub end: End,
    /// The record of the job without its phases, if this was the last one.
    pub run: Option<Box<Run>>,
}
