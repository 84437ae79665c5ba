//! The phases of a sandbox and the steps between them.
//!
//! ```text
//! Launching ──Ready──► Running ⇄ Paused      (Pause, Resume)
//!                      Running ⇄ Cutting     (BeginCut, EndCut)
//! any but Stopping and Failed ──Ended──► Failed
//! any but Stopping ──Stop──► Stopping
//! ```
//!
//! [`Phase::after`] is the only place that decides whether a step is allowed.

use forkd_api::SandboxState;

/// Where a sandbox is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Its VM starts; the agent has not answered yet.
    Launching,
    /// Its agent has answered.
    Running,
    /// It stands still on request.
    Paused,
    /// It is being cut.
    Cutting,
    /// It is being ended.
    Stopping,
    /// It could not be started, or ended by itself.
    Failed,
}

/// A transition of a sandbox between two states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The agent answered.
    Ready,
    /// A cut begins.
    BeginCut,
    /// A cut is over, well or badly.
    EndCut,
    /// It is to stand still.
    Pause,
    /// It is to go on.
    Resume,
    /// It is to end.
    Stop,
    /// The VM ended by itself, or could not be started.
    Ended,
}

impl Phase {
    /// Where a step leads; `None` if it cannot be taken from here.
    pub fn after(self, step: Step) -> Option<Self> {
        use Phase::{Cutting, Failed, Launching, Paused, Running, Stopping};
        Some(match (self, step) {
            (Launching, Step::Ready) | (Paused, Step::Resume) | (Cutting, Step::EndCut) => Running,
            (Running, Step::BeginCut) => Cutting,
            (Running, Step::Pause) => Paused,
            (Launching | Running | Paused | Cutting | Failed, Step::Stop) => Stopping,
            (Launching | Running | Paused | Cutting, Step::Ended) => Failed,
            _ => return None,
        })
    }

    /// The guest can be talked to.
    pub fn answers(self) -> bool {
        matches!(self, Self::Running | Self::Cutting)
    }

    /// The word that messages use for the state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Launching => "starting",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Cutting => "being cut",
            Self::Stopping => "being ended",
            Self::Failed => "failed",
        }
    }
}

impl From<Phase> for SandboxState {
    fn from(phase: Phase) -> Self {
        match phase {
            Phase::Launching => Self::Launching,
            Phase::Running => Self::Running,
            Phase::Paused => Self::Paused,
            Phase::Cutting => Self::Cutting,
            Phase::Stopping => Self::Stopping,
            Phase::Failed => Self::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STEPS: [Step; 7] = [
        Step::Ready,
        Step::BeginCut,
        Step::EndCut,
        Step::Pause,
        Step::Resume,
        Step::Stop,
        Step::Ended,
    ];

    proptest! {
        #[test]
        fn the_rules_hold_on_every_path(path in prop::collection::vec(0usize..7, 0..40)) {
            let mut phase = Phase::Launching;
            for step in path.into_iter().map(|at| STEPS[at]) {
                let Some(next) = phase.after(step) else { continue };
                // A sandbox that is being ended never comes back.
                prop_assert!(phase != Phase::Stopping);
                // A failed sandbox can only be removed.
                prop_assert!(phase != Phase::Failed || next == Phase::Stopping);
                // Nothing but an agent's answer, the end of a cut or a resume makes one run.
                if next == Phase::Running {
                    prop_assert!(matches!(step, Step::Ready | Step::EndCut | Step::Resume));
                }
                phase = next;
            }
        }
    }

    #[test]
    fn everything_can_be_stopped_once() {
        for phase in [
            Phase::Launching,
            Phase::Running,
            Phase::Paused,
            Phase::Cutting,
            Phase::Failed,
        ] {
            assert_eq!(phase.after(Step::Stop), Some(Phase::Stopping));
        }
        assert_eq!(Phase::Stopping.after(Step::Stop), None);
    }
}
