//! A rank that fails because of another rank notes for the launcher which one it blames. The launcher cannot go by the order
//! in which ranks end: the rank that fails first tells the others before it ends, so that they may end before it.

use std::{fs::File, io::Write, path::Path};

use crate::{DdpError, environment};

/// Notes which rank a fault names, for the launcher, if one started this process as rank `own`.
pub(crate) fn blame(own: usize, fault: &DdpError) {
    let environment = environment::process();
    let Some(folder) = environment.blame() else {
        return;
    };
    let is_own = environment.ranks().is_ok_and(|ranks| ranks.rank == own);
    let Some(culprit) = culprit(fault).filter(|culprit| is_own && *culprit != own) else {
        return;
    };
    // The first fault counts. Without a note, the launcher goes by the order in which ranks ended.
    if let Ok(mut note) = File::create_new(folder.join(own.to_string())) {
        let _ = write!(note, "{culprit}");
    }
}

/// The rank that a rank of this launcher has blamed.
pub(super) fn blamed_by(rank: usize, folder: &Path) -> Option<usize> {
    let note = std::fs::read_to_string(folder.join(rank.to_string()));
    note.ok()?.parse().ok()
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
