//! Whom a rank blames for its end. It tells the launcher: the rank that failed first tells the others before it
//! ends, so that these may end before it.

use std::{fs::File, io::Write, path::Path};

use crate::{DdpError, environment};

/// Notes for the launcher, if one started this process as rank `own`, which rank a fault names.
pub(crate) fn blame(own: usize, fault: &DdpError) {
    let environment = environment::process();
    let Some(folder) = environment.blame() else {
        return;
    };
    let is_own = environment.ranks().is_ok_and(|ranks| ranks.rank == own);
    let Some(culprit) = culprit(fault).filter(|culprit| is_own && *culprit != own) else {
        return;
    };
    // The first fault counts. Without a note, the launcher goes by who ended first.
    if let Ok(mut note) = File::create_new(folder.join(own.to_string())) {
        let _ = write!(note, "{culprit}");
    }
}

/// Whom a rank of this launcher's has blamed.
pub(super) fn blamed_by(rank: usize, folder: &Path) -> Option<usize> {
    let note = std::fs::read_to_string(folder.join(rank.to_string()));
    note.ok()?.parse().ok()
}

/// The one rank that a fault names, if it names one.
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
