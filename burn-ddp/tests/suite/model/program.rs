//! Programs of calls that all ranks make.

use std::fmt::{self, Debug};

use burn_ddp::{ElementType, ReduceOp};
use proptest::prelude::*;

use super::values::{is_float, mix, typed};

pub(crate) const TYPES: [ElementType; 12] = [
    ElementType::F32,
    ElementType::BF16,
    ElementType::F16,
    ElementType::F64,
    ElementType::U8,
    ElementType::I8,
    ElementType::U16,
    ElementType::I16,
    ElementType::U32,
    ElementType::I32,
    ElementType::U64,
    ElementType::I64,
];

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Mean,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
];

/// What the ranks of a communicator do in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    Barrier,
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    AllGatherUneven,
    ReduceScatter,
    AllToAll,
    Any,
    Bytes,
    /// From the root to another rank.
    Message,
    /// Each to the next.
    Exchange,
    Duplicate,
    Subgroup,
    Drop,
}

const WHATS: [What; 15] = [
    What::Barrier,
    What::AllReduce,
    What::Reduce,
    What::Broadcast,
    What::AllGather,
    What::AllGatherUneven,
    What::ReduceScatter,
    What::AllToAll,
    What::Any,
    What::Bytes,
    What::Message,
    What::Exchange,
    What::Duplicate,
    What::Subgroup,
    What::Drop,
];

/// A number of elements.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Size {
    Few(usize),
    /// Where one algorithm takes over from another: so many bytes, divided by 1, the number of peers or of ranks, and
    /// an element less, none or one more.
    Near(usize, usize, usize),
}

impl Size {
    fn elements(self, size: usize, ranks: usize) -> usize {
        match self {
            Self::Few(len) => len,
            Self::Near(bytes, share, less) => {
                let share = [1, (ranks - 1).max(1), ranks][share];
                bytes / size / share + 1 - less
            }
        }
    }
}

fn size() -> impl Strategy<Value = Size> {
    let limits = prop::sample::select(vec![64 << 10, 128 << 10, 256 << 10, 512 << 10]);
    prop_oneof![
        9 => (0usize..20).prop_map(Size::Few),
        3 => (20usize..5000).prop_map(Size::Few),
        1 => (limits, 0usize..3, 0usize..3).prop_map(|(bytes, share, less)| Size::Near(bytes, share, less)),
    ]
}

/// In place of a number of steps: a call that is not waited for.
pub(crate) const NEVER: usize = 99;

/// A step of all ranks of a communicator.
#[derive(Clone)]
pub(crate) struct Step {
    /// The communicator, counted among those that there are.
    pub(crate) on: usize,
    pub(crate) what: What,
    pub(crate) dtype: ElementType,
    pub(crate) size: Size,
    pub(crate) op: ReduceOp,
    pub(crate) root: usize,
    /// How many tensors; 0 for a slice.
    pub(crate) tensors: usize,
    /// The second dimension of tensors.
    pub(crate) width: usize,
    /// Whether floats are any, rather than small whole numbers.
    pub(crate) any: bool,
    pub(crate) seed: u64,
    /// For each rank, after how many steps it waits for the call; `None` if it makes a synchronous one.
    pub(crate) waits: Vec<Option<usize>>,
    /// For each rank, how many milliseconds it sleeps before.
    pub(crate) pauses: Vec<u64>,
}

/// On one line, of many in a program.
impl Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let call = (
            self.what, self.dtype, self.size, self.op, self.root, self.seed,
        );
        let tensors = (self.tensors, self.width);
        let line = format!(
            "on {}: {call:?}, tensors {tensors:?}, any {}, waits {:?}, pauses {:?}",
            self.on, self.any, self.waits, self.pauses
        );
        f.write_str(&line)
    }
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let call = (
        0usize..8,
        prop::sample::select(&WHATS[..]),
        prop::sample::select(&TYPES[..]),
        size(),
        prop::sample::select(&OPS[..]),
        0usize..5,
    );
    let tensors = prop_oneof![2 => Just(0usize), 1 => Just(1), 1 => 2usize..4];
    let wait = prop_oneof![
        3 => Just(None),
        2 => (0usize..5).prop_map(Some),
        1 => Just(Some(NEVER)),
    ];
    let pause = prop_oneof![8 => Just(0u64), 1 => 1u64..5];
    let ways = (
        prop::collection::vec(wait, 5),
        prop::collection::vec(pause, 5),
    );
    (call, tensors, 1usize..4, any::<bool>(), any::<u64>(), ways).prop_map(
        |(call, tensors, width, any, seed, (waits, pauses))| {
            let (on, what, dtype, size, op, root) = call;
            let means = op == ReduceOp::Mean && !is_float(dtype);
            Step {
                on,
                what,
                dtype,
                size,
                op: if means { ReduceOp::Sum } else { op },
                root,
                tensors,
                width,
                any: any && is_float(dtype),
                seed,
                waits,
                pauses,
            }
        },
    )
}

impl Step {
    /// The number of rows that a rank passes; of one element each in a slice.
    pub(crate) fn rows(&self, rank: usize, ranks: usize) -> usize {
        let size = typed!(self.dtype, T => size_of::<T>());
        let rows = self.size.elements(size, ranks) / self.width();
        match self.what {
            What::ReduceScatter | What::AllToAll => rows.next_multiple_of(ranks),
            What::AllGatherUneven | What::Bytes => rows * ((rank + self.root) % 3) / 2,
            _ => rows,
        }
    }

    pub(crate) fn width(&self) -> usize {
        match self.tensors {
            0 => 1,
            _ => self.width,
        }
    }

    /// The two ranks of a message.
    pub(crate) fn ends(&self, ranks: usize) -> (usize, usize) {
        let from = self.root % ranks;
        let by = mix(self.seed) as usize % (ranks - 1) + 1;
        (from, (from + by) % ranks)
    }

    /// The members of a subgroup of so many ranks, in an order of their own.
    pub(crate) fn list(&self, ranks: usize) -> Vec<usize> {
        let mut list: Vec<usize> = (0..ranks).collect();
        list.sort_by_key(|rank| mix(self.seed ^ *rank as u64));
        list.truncate(1 + self.root % ranks);
        list
    }
}

/// What all ranks do.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) ranks: usize,
    /// The number of sockets between two ranks; 0 if they are threads that use none.
    pub(crate) sockets: usize,
    pub(crate) steps: Vec<Step>,
}

pub(crate) fn programs(ranks: std::ops::Range<usize>) -> impl Strategy<Value = Program> {
    let steps = prop::collection::vec(step(), 1..25);
    (ranks, 0usize..3, steps).prop_map(|(ranks, sockets, steps)| Program {
        ranks,
        sockets,
        steps,
    })
}

/// A step with its communicator.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    pub(crate) step: Step,
    /// The number of the communicator, counting all that were ever made.
    pub(crate) on: usize,
    /// Its members, as ranks of the job.
    pub(crate) members: Vec<usize>,
    /// The number and the members of the communicator that is made.
    pub(crate) made: Option<(usize, Vec<usize>)>,
}

impl Planned {
    pub(crate) fn place(&self, rank: usize) -> Option<usize> {
        self.members.iter().position(|member| *member == rank)
    }
}

/// The most communicators at a time.
pub(crate) const MOST: usize = 6;

impl Program {
    pub(crate) fn plan(&self) -> Vec<Planned> {
        let mut made = 1;
        let mut alive: Vec<(usize, Vec<usize>)> = vec![(0, (0..self.ranks).collect())];
        let mut plan = Vec::new();
        for step in &self.steps {
            let mut step = step.clone();
            let at = step.on % alive.len();
            let (on, members) = alive[at].clone();
            let new = match step.what {
                What::Duplicate if alive.len() < MOST => Some(members.clone()),
                What::Subgroup if alive.len() < MOST => {
                    let list = step.list(members.len()).into_iter();
                    Some(list.map(|member| members[member]).collect())
                }
                What::Drop if at > 0 => {
                    alive.remove(at);
                    None
                }
                What::Message | What::Exchange if members.len() > 1 => None,
                What::Duplicate | What::Subgroup | What::Drop | What::Message | What::Exchange => {
                    step.what = What::Barrier;
                    None
                }
                _ => None,
            };
            let new = new.map(|members| (made, members));
            if let Some(new) = &new {
                made += 1;
                alive.push(new.clone());
            }
            plan.push(Planned {
                step,
                on,
                members,
                made: new,
            });
        }
        plan
    }
}
