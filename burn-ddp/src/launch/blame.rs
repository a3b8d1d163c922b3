//! What a rank notes for its launcher, which learns no more of it than how it ended.
//!
//! A rank that fails because of another rank notes which one it blames. The launcher cannot go by the order in which ranks
//! end: the rank that fails first tells the others before it ends, so that they may end before it.
//!
//! A rank that has waited in vain for ranks to appear notes this too.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use crate::{DdpError, environment};

/// Notes which rank a fault names, for the launcher, if one started this process as rank `own`.
pub(crate) fn blame(own: usize, fault: &DdpError) {
    let Some(folder) = folder(own) else {
        return;
    };
    let Some(culprit) = culprit(fault).filter(|culprit| *culprit != own) else {
        return;
    };
    // The first fault counts. Without a note, the launcher goes by the order in which ranks ended.
    if let Ok(mut note) = File::create_new(folder.join(own.to_string())) {
        let _ = write!(note, "{culprit}");
    }
}

/// Notes whether ranks did not appear in time, for the launcher, if one started this process as rank `own`.
pub(crate) fn note_meeting<T>(own: usize, met: &Result<T, DdpError>) {
    let Some(folder) = folder(own) else {
        return;
    };
    let note = in_vain(own, &folder);
    // Without a note, the launcher starts the ranks again.
    let _ = match met {
        Err(DdpError::MissingRanks { .. } | DdpError::Connect { .. }) => fs::write(note, ""),
        // A program may try again.
        Ok(_) => fs::remove_file(note),
        Err(_) => Ok(()),
    };
}

/// The rank that a rank of this launcher has blamed.
pub(super) fn blamed_by(rank: usize, folder: &Path) -> Option<usize> {
    let note = fs::read_to_string(folder.join(rank.to_string()));
    note.ok()?.parse().ok()
}

/// Whether a rank of this launcher has waited in vain for ranks to appear.
pub(super) fn waited_in_vain(rank: usize, folder: &Path) -> bool {
    in_vain(rank, folder).exists()
}

fn in_vain(rank: usize, folder: &Path) -> PathBuf {
    folder.join(format!("{rank}-in-vain"))
}

/// The folder for the notes of this process, if a launcher started it as rank `own`.
fn folder(own: usize) -> Option<PathBuf> {
    let environment = environment::process();
    let is_own = environment.ranks().is_ok_and(|ranks| ranks.rank == own);
    environment.blame().filter(|_| is_own)
}

/// The rank that a fault names, if it names exactly one.
fn culprit(fault: &DdpError) -> Option<usize> {
    match fault {
        DdpError::RankDied { rank }
        | DdpError::RankLeft { rank, .. }
        | DdpError::Protocol { rank, .. }
        | DdpError::Aborted { rank, .. }
        | DdpError::NcclFailed { rank, .. } => Some(*rank),
        DdpError::Timeout { ranks, .. } => match ranks[..] {
            [rank] => Some(rank),
            _ => None,
        },
        _ => None,
    }
}
