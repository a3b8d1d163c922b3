//! The description of a call that every message carries, so that ranks notice when their calls differ.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};
use strum::VariantArray;

use crate::{ElementType, Flaw, ReduceOp};

/// Which collective (or point-to-point) operation was called.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, strum::Display, VariantArray,
)]
#[strum(serialize_all = "snake_case")]
#[allow(missing_docs)]
#[repr(u8)]
pub enum CallKind {
    Barrier = 0,
    Broadcast = 1,
    Reduce = 2,
    AllReduce = 3,
    AllGather = 4,
    ReduceScatter = 5,
    AllToAll = 6,
    #[strum(to_string = "send/recv")]
    Message = 7,
    Duplicate = 8,
    Subgroup = 9,
    Backend = 10,
    AllGatherUneven = 11,
}

/// One call of one rank, as its messages carry it and errors show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Call {
    /// The number of the call in its communicator, from 0.
    pub sequence: u64,
    /// The operation.
    pub kind: CallKind,
    /// The type of the elements.
    pub dtype: ElementType,
    /// How elements are combined (`Sum` for calls that combine nothing).
    pub op: ReduceOp,
    /// The number of elements; for a subgroup, the number of its ranks.
    pub len: u64,
    /// The root rank (0 for calls without one); for a subgroup, a checksum of its ranks. The highest bit is set
    /// while ranks exchange the shapes of their tensors.
    pub root: u32,
    /// Whether NCCL moves the elements, and the ranks only meet through the transport.
    pub by_nccl: bool,
    /// What is wrong with the arguments, if the other fields do not show it. A call with a flaw moves no data.
    pub flaw: Option<Flaw>,
}

/// The bit of `root` that is set while shapes travel instead of elements.
pub(crate) const ABOUT_SHAPES: u32 = 1 << 31;

impl Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let root = self.root & !ABOUT_SHAPES;
        write!(f, "{}", self.kind)?;
        if let Some(flaw) = self.flaw {
            return write!(f, " {flaw} #{}", self.sequence);
        }
        match self.kind {
            CallKind::Barrier | CallKind::Duplicate | CallKind::Backend => {}
            // The ranks' lengths differ.
            CallKind::AllGatherUneven => write!(f, "({})", self.dtype)?,
            CallKind::Subgroup => write!(f, "({} ranks, list {:08x})", self.len, self.root)?,
            CallKind::AllReduce | CallKind::ReduceScatter => {
                write!(f, "({}, {} x {})", self.op, self.dtype, self.len)?
            }
            CallKind::Reduce => write!(
                f,
                "({}, {} x {}, root {root})",
                self.op, self.dtype, self.len
            )?,
            CallKind::Broadcast => write!(f, "({} x {}, root {root})", self.dtype, self.len)?,
            _ => write!(f, "({} x {})", self.dtype, self.len)?,
        }
        if self.kind != CallKind::Subgroup && self.root != root {
            write!(f, " of tensors")?;
        }
        if self.by_nccl {
            write!(f, " by NCCL")?;
        }
        write!(f, " #{}", self.sequence)
    }
}

/// The size of an encoded [`Call`] in bytes.
pub(crate) const HEADER: usize = 32;
/// The version of the message layout.
pub(crate) const VERSION: u8 = 4;
const MAGIC: [u8; 4] = *b"BDDP";
/// The byte of the operator also holds the flaw, shifted left by `FLAW` bits (0: no flaw), and the bit `BY_NCCL`.
const FLAW: u8 = 3;
const BY_NCCL: u8 = 0x80;

impl Call {
    /// Whether two ranks of one communicator have diverged if they are in these calls: both have the same number
    /// but are different calls. It is no difference that one still exchanges shapes and the other already elements.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let elements = |call: &Self| Self {
            root: call.root & !ABOUT_SHAPES,
            ..*call
        };
        self.sequence == other.sequence && elements(self) != elements(other)
    }

    /// Encodes the header that precedes each payload: magic, version, kind, dtype, operator (with flaw and NCCL
    /// bit), sequence, length, root, and the CRC-32 of all these; little-endian.
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = VERSION;
        bytes[5] = self.kind as u8;
        bytes[6] = self.dtype as u8;
        let flaw = self.flaw.map_or(0, |flaw| flaw as u8);
        let by_nccl = if self.by_nccl { BY_NCCL } else { 0 };
        bytes[7] = self.op as u8 | flaw << FLAW | by_nccl;
        bytes[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.root.to_le_bytes());
        let check = crc32fast::hash(&bytes[..28]);
        bytes[28..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Decodes a header, or describes why it is not valid.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Self, String> {
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        if bytes[..4] != MAGIC {
            return Err(format!("it starts with {:02x?}", &bytes[..4]));
        }
        if bytes[4] != VERSION {
            return Err(format!("its version is {}, expected {VERSION}", bytes[4]));
        }
        if word(28) != crc32fast::hash(&bytes[..28]) {
            return Err("its checksum is wrong".into());
        }
        let code = |what: &str, at: usize| format!("unknown {what} {}", bytes[at]);
        let flaw = (bytes[7] & !BY_NCCL) >> FLAW;
        Ok(Self {
            kind: *CallKind::VARIANTS
                .get(usize::from(bytes[5]))
                .ok_or_else(|| code("operation", 5))?,
            dtype: *ElementType::VARIANTS
                .get(usize::from(bytes[6]))
                .ok_or_else(|| code("element type", 6))?,
            op: *ReduceOp::VARIANTS
                .get(usize::from(bytes[7] & !(u8::MAX << FLAW)))
                .ok_or_else(|| code("operator", 7))?,
            sequence: long(8),
            len: long(16),
            root: word(24),
            by_nccl: bytes[7] & BY_NCCL != 0,
            flaw: match flaw {
                0 => None,
                flaw => Some(
                    *Flaw::VARIANTS
                        .get(usize::from(flaw) - 1)
                        .ok_or_else(|| code("flaw", 7))?,
                ),
            },
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn calls() -> impl Strategy<Value = Call> {
        (
            any::<u64>(),
            0..CallKind::VARIANTS.len(),
            0..ElementType::VARIANTS.len(),
            0..ReduceOp::VARIANTS.len(),
            any::<u64>(),
            any::<u32>(),
            any::<bool>(),
            0..=Flaw::VARIANTS.len(),
        )
            .prop_map(
                |(sequence, kind, dtype, op, len, root, by_nccl, flaw)| Call {
                    sequence,
                    kind: CallKind::VARIANTS[kind],
                    dtype: ElementType::VARIANTS[dtype],
                    op: ReduceOp::VARIANTS[op],
                    len,
                    root,
                    by_nccl,
                    flaw: flaw.checked_sub(1).map(|flaw| Flaw::VARIANTS[flaw]),
                },
            )
    }

    /// The first call of a communicator.
    pub(crate) fn barrier() -> Call {
        Call {
            sequence: 0,
            kind: CallKind::Barrier,
            dtype: ElementType::U8,
            op: ReduceOp::Sum,
            len: 0,
            root: 0,
            by_nccl: false,
            flaw: None,
        }
    }

    #[test]
    fn codes_are_positions() {
        for (code, kind) in CallKind::VARIANTS.iter().enumerate() {
            assert_eq!(*kind as usize, code);
        }
        for (code, dtype) in ElementType::VARIANTS.iter().enumerate() {
            assert_eq!(*dtype as usize, code);
        }
        for (code, op) in ReduceOp::VARIANTS.iter().enumerate() {
            assert_eq!(*op as usize, code);
        }
        for (position, flaw) in Flaw::VARIANTS.iter().enumerate() {
            assert_eq!(*flaw as usize, position + 1);
        }
    }

    #[test]
    fn calls_are_written_as_they_were_made() {
        let call = Call {
            sequence: 5,
            kind: CallKind::Broadcast,
            dtype: ElementType::BF16,
            len: 3,
            root: 1,
            ..barrier()
        };
        assert_eq!(call.to_string(), "broadcast(bf16 x 3, root 1) #5");
        let call = Call {
            by_nccl: true,
            ..call
        };
        assert_eq!(call.to_string(), "broadcast(bf16 x 3, root 1) by NCCL #5");
        let call = Call {
            root: ABOUT_SHAPES | 1,
            by_nccl: false,
            ..call
        };
        assert_eq!(
            call.to_string(),
            "broadcast(bf16 x 3, root 1) of tensors #5"
        );
        let call = Call {
            flaw: Some(Flaw::SeveralTypes),
            ..call
        };
        assert_eq!(call.to_string(), "broadcast of tensors of several types #5");
    }

    proptest! {
        #[test]
        fn headers_round_trip(call in calls()) {
            prop_assert_eq!(Call::decode(&call.encode()), Ok(call));
        }

        #[test]
        fn any_flipped_bit_is_noticed(call in calls(), bit in 0..HEADER * 8) {
            let mut bytes = call.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Call::decode(&bytes).is_err());
        }

        #[test]
        fn garbage_is_refused(bytes in any::<[u8; HEADER]>()) {
            prop_assert!(Call::decode(&bytes).is_err());
        }
    }
}
