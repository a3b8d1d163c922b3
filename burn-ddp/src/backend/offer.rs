//! What each rank tells the others before tensors travel, and the backend that all ranks derive from it.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

use super::{Backend, NcclError, NcclVersion, version::SHARING};
use crate::DdpError;

/// A GPU of any rank, on this machine or another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gpu {
    /// Its CUDA ordinal in the rank's process.
    pub(crate) ordinal: usize,
    /// Its globally unique identity.
    pub(crate) uuid: [u8; 16],
}

impl Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU-")?;
        for (position, byte) in self.uuid.iter().enumerate() {
            // Groups of 4, 2, 2, 2 and 6 bytes, as nvidia-smi prints it.
            let dash = if matches!(position, 4 | 6 | 8 | 10) {
                "-"
            } else {
                ""
            };
            write!(f, "{dash}{byte:02x}")?;
        }
        write!(f, ", cuda:{} there", self.ordinal)
    }
}

/// What one rank asks for, and what it can do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Offer {
    pub(crate) asked: Backend,
    /// The rank's GPU and its NCCL version, or why it cannot use NCCL.
    pub(crate) nccl: Result<(Gpu, NcclVersion), NcclError>,
    /// Whether the rank's environment allows ranks to share a GPU.
    pub(crate) shares_gpus: bool,
}

/// The backend that all ranks use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    Nccl,
    /// By way of the host, and the reason.
    Host(String),
}

/// Chooses the backend. All ranks choose the same, because they all see the same offers. `number` is a member's number in the job.
pub(crate) fn choose(
    offers: &[Offer],
    number: impl Fn(usize) -> usize,
) -> Result<Choice, DdpError> {
    let asked = offers[0].asked;
    if let Some(member) = offers.iter().position(|offer| offer.asked != asked) {
        return Err(DdpError::InvalidArgument(format!(
            "rank {} asks for the backend `{}` and rank {} for `{asked}`; all ranks ask for the same",
            number(member),
            offers[member].asked,
            number(0)
        )));
    }
    match (asked, obstacle(offers, number)) {
        (Backend::Host, _) => Ok(Choice::Host("that is what was asked for".into())),
        (_, None) => Ok(Choice::Nccl),
        (Backend::Nccl, Some((rank, reason))) => Err(DdpError::Nccl { rank, reason }),
        (Backend::Auto, Some((rank, reason))) => Ok(Choice::Host(format!(
            "rank {rank} cannot use NCCL: {reason}"
        ))),
    }
}

/// The number of the first rank that prevents the group from using NCCL, and the reason.
fn obstacle(offers: &[Offer], number: impl Fn(usize) -> usize) -> Option<(usize, NcclError)> {
    let mut usable = Vec::with_capacity(offers.len());
    for (member, offer) in offers.iter().enumerate() {
        match &offer.nccl {
            Ok(parts) => usable.push(parts),
            Err(reason) => return Some((number(member), reason.clone())),
        }
    }
    let expected = usable.first()?.1;
    for (member, (gpu, version)) in usable.iter().enumerate() {
        let rank = number(member);
        if *version != expected {
            let version = *version;
            return Some((rank, NcclError::OtherVersion { version, expected }));
        }
        let other = usable[..member]
            .iter()
            .position(|(other, _)| other.uuid == gpu.uuid);
        let sharing = offers.iter().all(|offer| offer.shares_gpus) && *version >= SHARING;
        if let Some(other) = other
            && !sharing
        {
            let (other, gpu) = (number(other), gpu.to_string());
            return Some((rank, NcclError::SharedGpu { other, gpu }));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In the whole group, members have the numbers of the job.
    fn own(member: usize) -> usize {
        member
    }

    fn offer(asked: Backend, uuid: u8, code: u32) -> Offer {
        let gpu = Gpu {
            ordinal: 0,
            uuid: [uuid; 16],
        };
        Offer {
            asked,
            nccl: Ok((gpu, NcclVersion::from_code(code))),
            shares_gpus: false,
        }
    }

    #[test]
    fn nccl_is_used_where_each_rank_has_a_gpu_of_its_own() {
        for asked in [Backend::Auto, Backend::Nccl] {
            let offers = [offer(asked, 1, 22_803), offer(asked, 2, 22_803)];
            assert_eq!(choose(&offers, own).unwrap(), Choice::Nccl);
        }
        let offers = [
            offer(Backend::Host, 1, 22_803),
            offer(Backend::Host, 2, 22_803),
        ];
        assert!(matches!(choose(&offers, own), Ok(Choice::Host(_))));
    }

    #[test]
    fn what_one_rank_lacks_keeps_all_from_it() {
        let reasons = [
            NcclError::NotCompiledIn,
            NcclError::NotOnCuda {
                device: "Flex".into(),
            },
            NcclError::NotFound {
                searched: vec!["libnccl.so.2".into()],
            },
        ];
        for reason in reasons {
            let offers = |asked| {
                let mut offers = [1, 2, 3].map(|uuid| offer(asked, uuid, 23_000));
                offers[1].nccl = Err(reason.clone());
                offers
            };
            let Ok(Choice::Host(why)) = choose(&offers(Backend::Auto), own) else {
                panic!("it falls back to the host");
            };
            assert!(
                why.contains("rank 1") && why.contains(&reason.to_string()),
                "{why}"
            );
            let error = choose(&offers(Backend::Nccl), own).unwrap_err();
            assert!(
                matches!(&error, DdpError::Nccl { rank: 1, reason: theirs } if *theirs == reason)
            );
            assert!(error.is_setup() && !error.is_fault());
        }
    }

    #[test]
    fn ranks_share_a_gpu_only_where_they_may() {
        let twice = |code, shares_gpus| {
            let mut offers = [1, 2, 1].map(|uuid| offer(Backend::Nccl, uuid, code));
            offers
                .iter_mut()
                .for_each(|offer| offer.shares_gpus = shares_gpus);
            choose(&offers, own)
        };
        for (code, shares_gpus) in [(23_000, false), (22_907, true), (22_907, false)] {
            let Err(DdpError::Nccl { rank: 2, reason }) = twice(code, shares_gpus) else {
                panic!("rank 2 shares rank 0's GPU");
            };
            let NcclError::SharedGpu { other: 0, gpu } = &reason else {
                panic!("{reason}");
            };
            assert_eq!(
                gpu,
                "GPU-01010101-0101-0101-0101-010101010101, cuda:0 there"
            );
            let text = reason.to_string();
            assert!(
                text.contains("NCCL_MULTI_RANK_GPU_ENABLE=1") && text.contains("2.30.0"),
                "{text}"
            );
        }
        assert_eq!(twice(23_000, true).unwrap(), Choice::Nccl);
    }

    #[test]
    fn versions_and_wishes_must_agree() {
        let mut offers = [1, 2].map(|uuid| offer(Backend::Nccl, uuid, 22_803));
        offers[1] = offer(Backend::Nccl, 2, 22_809);
        let text = choose(&offers, own).unwrap_err().to_string();
        assert!(
            text.contains("2.28.9") && text.contains("2.28.3") && text.contains("rank 1"),
            "{text}"
        );
        offers[1] = offer(Backend::Auto, 2, 22_803);
        let text = choose(&offers, own).unwrap_err().to_string();
        assert!(text.contains("`auto`") && text.contains("`nccl`"), "{text}");
    }

    /// Errors name ranks by their numbers in the job, of which a subgroup has some.
    #[test]
    fn members_of_a_subgroup_have_the_numbers_of_the_job() {
        let mut offers = [1, 1].map(|uuid| offer(Backend::Nccl, uuid, 22_803));
        let in_job = |member| [4, 7][member];
        let Err(DdpError::Nccl { rank: 7, reason }) = choose(&offers, in_job) else {
            panic!("they share a GPU");
        };
        assert!(
            matches!(reason, NcclError::SharedGpu { other: 4, .. }),
            "{reason}"
        );
        offers[1].asked = Backend::Auto;
        let text = choose(&offers, in_job).unwrap_err().to_string();
        assert!(
            text.contains("rank 7 asks") && text.contains("rank 4 for"),
            "{text}"
        );
    }
}
