//! A rank that is stopped in the middle of something: the others name it when their time is over, and it learns
//! why when it goes on.

use std::{path::Path, time::Duration};

use burn_ddp::{Checkpoints, DdpError, ProcessGroup};
use nix::sys::signal::{Signal, raise};

use crate::suite::ranks::{FOLDER, Rank, meeting_place, player, spawn};

const RANKS: usize = 3;

/// Starts ranks of which `victim` stops itself, and checks how they end.
fn check(scenario: &str, victim: usize, folder: &Path) {
    let (_place, url) = meeting_place();
    let start = |rank| {
        spawn(
            player(scenario).env(FOLDER, folder),
            scenario,
            rank,
            RANKS,
            &url,
            3.0,
        )
    };
    let mut ranks: Vec<Rank> = (0..RANKS).map(start).collect();
    let stopped = ranks.remove(victim);
    for rank in ranks {
        let output = rank.fail(60);
        let named = format!("waiting for ranks [{victim}]");
        assert!(output.contains(&named), "{output}");
        assert!(output.contains("no sign of life"), "{output}");
    }
    stopped.signal(Signal::SIGCONT);
    let output = stopped.fail(60);
    assert!(output.contains("RESULT error"), "{output}");
}

/// Rank 0 stops while it writes its second checkpoint.
pub(crate) fn while_it_writes(group: &ProcessGroup) -> Result<(), DdpError> {
    let folder = std::env::var(FOLDER).unwrap();
    let checkpoints = Checkpoints::new(folder, group)?.timeout(Duration::from_secs(3));
    for step in 1..3 {
        checkpoints.save(step, None, |_| {
            if step == 2 {
                // Stops this thread before it goes on. `kill` may stop another one first.
                raise(Signal::SIGSTOP)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn in_a_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    check("stopped in a checkpoint", 0, folder.path());
    // Rank 0 may have brought the second to its end.
    let checkpoints = Checkpoints::new(folder.path(), &ProcessGroup::single()).unwrap();
    assert!(checkpoints.latest().unwrap().unwrap().step >= 1);
}

#[test]
fn in_an_overlapped_step() {
    let folder = tempfile::tempdir().unwrap();
    check("overlapped stopped", 1, folder.path());
}
