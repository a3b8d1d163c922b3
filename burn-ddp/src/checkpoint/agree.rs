//! How all ranks learn what rank 0 has done or found.

use std::{
    io,
    path::PathBuf,
    slice, thread,
    time::{Duration, Instant},
};

use super::{Checkpoint, Checkpoints, disk::in_words};
use crate::{DdpError, ProcessGroup};

/// How long a rank looks for a checkpoint that rank 0 sees.
const SHOWN_WITHIN: Duration = Duration::from_secs(3);

impl Checkpoints {
    /// Runs `body` on rank 0. If it fails, all ranks return the error.
    pub(super) fn on_main(&self, body: impl FnOnce() -> io::Result<()>) -> Result<(), DdpError> {
        let problem = match self.group.is_main() {
            true => body().err().map(|error| in_words(&error)),
            false => None,
        };
        let problem = problem.unwrap_or_default();
        let problem = self.group.broadcast_bytes(problem.as_bytes(), 0)?;
        match problem.is_empty() {
            true => Ok(()),
            false => Err(self.failed(&problem)),
        }
    }

    /// Chooses a checkpoint on rank 0, for all ranks.
    pub(super) fn agree(
        &self,
        choose: impl FnOnce(Vec<Checkpoint>) -> Option<Checkpoint>,
    ) -> Result<Option<Checkpoint>, DdpError> {
        let mut text = Vec::new();
        self.on_main(|| {
            let chosen = choose(self.list()?);
            text = serde_json::to_vec(&chosen.as_ref().map(|it| (it, &it.folder)))?;
            Ok(())
        })?;
        let text = self.group.broadcast_bytes(&text, 0)?;
        let chosen: Option<(Checkpoint, PathBuf)> = serde_json::from_slice(&text)
            .map_err(|error| self.failed(error.to_string().as_bytes()))?;
        if let Some((_, folder)) = &chosen {
            seen_by_all(&self.group, slice::from_ref(folder))?;
        }
        Ok(chosen.map(|(checkpoint, folder)| Checkpoint {
            folder,
            ..checkpoint
        }))
    }

    pub(super) fn failed(&self, problem: &[u8]) -> DdpError {
        DdpError::Checkpoint {
            path: self.folder.clone(),
            problem: String::from_utf8_lossy(problem).into_owned(),
        }
    }
}

/// An error on all ranks, if some do not see a file or folder that rank 0 sees under one of these names.
pub(crate) fn seen_by_all(group: &ProcessGroup, names: &[PathBuf]) -> Result<(), DdpError> {
    let sees = || names.iter().any(|name| name.exists());
    // A network's file system may show what is new a little later.
    let start = Instant::now();
    while !sees() && start.elapsed() < SHOWN_WITHIN {
        thread::sleep(Duration::from_millis(50));
    }
    let seen = group.all_gather(&[u8::from(sees())])?;
    match seen.iter().position(|&seen| seen == 0) {
        None => Ok(()),
        Some(rank) => Err(DdpError::Checkpoint {
            path: names[0].clone(),
            problem: format!(
                "rank {rank} does not see it; keep checkpoints in a folder that the machines of all ranks share"
            ),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LocalGroup;

    /// As where each machine has a disk of its own under this name.
    #[test]
    fn what_one_rank_does_not_see_is_everyones_error() {
        let (shared, hidden) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (shared, hidden) = (shared.path().to_owned(), hidden.path().join("nowhere"));
        thread::scope(|scope| {
            let (shared, hidden) = (&shared, &hidden);
            for group in LocalGroup::new(2) {
                scope.spawn(move || {
                    seen_by_all(&group, &[hidden.clone(), shared.clone()]).unwrap();
                    let own = [shared, hidden][group.rank()].clone();
                    let error = seen_by_all(&group, &[own]).unwrap_err().to_string();
                    assert!(error.contains("rank 1 does not see it"), "{error}");
                });
            }
        });
    }
}
